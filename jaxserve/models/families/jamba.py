"""Jamba: most layers have Mamba, with norms within, the others attention without positions. Every second layer has
experts, in most models."""

from __future__ import annotations

from jaxserve.config import ConfigError
from jaxserve.models.config import HFConfig
from jaxserve.models.families import Family
from jaxserve.models.families.llama import (
    IGNORED,
    NAMES,
    read_attention,
    read_max_position,
    read_mlp,
    read_norm,
    read_shared,
)
from jaxserve.models.families.mamba import rank_of, scan_names
from jaxserve.models.families.shared import named, read_activation
from jaxserve.models.rope import UNTURNED
from jaxserve.models.spec import ExpertsSpec, LayerSpec, MambaSpec, MLPSpec, ModelConfig
from jaxserve.pallas_kernels.expert_routing import Router

LAYER = "model.layers.{i}"
MAMBA = f"{LAYER}.mamba"
MLP = f"{LAYER}.feed_forward"
PARTS = ("gate", "up", "down")
OWN_NAMES = (
    NAMES
    | scan_names(MAMBA)
    | named(
        norm="model.final_layernorm",
        mlp_norm=f"{LAYER}.pre_ff_layernorm",
        router=f"{MLP}.router",
        **{part: f"{MLP}.{part}_proj" for part in PARTS},
        **{f"expert_{part}": f"{MLP}.experts.{{e}}.{part}_proj" for part in PARTS},
        **{f"mamba_{part}_norm": f"{MAMBA}.{part}_layernorm" for part in ("dt", "b", "c")},
    )
)


def _chosen(hf: HFConfig, name: str, period: int, offset: int) -> list[bool]:
    """Whether each layer is one of every `period`, beginning with the layer `offset`; these are defaults."""
    period = hf.take(f"{name}_layer_period", period)
    offset = hf.take(f"{name}_layer_offset", offset)
    if offset >= period:
        raise ConfigError(f"{hf.source}: {name}_layer_offset={offset} must be below {name}_layer_period={period}")
    return [i % period == offset for i in range(hf.take("num_hidden_layers"))]


def _read(hf: HFConfig) -> ModelConfig:
    hf.rename(num_local_experts="num_experts")
    hf.ignore("use_mamba_kernels", "use_mambapy", "use_associative_scan", "layer_types", "layers_block_type",
              "layers_num_experts", "num_logits_to_keep", "mamba_inner_layernorms", "sliding_window")  # fmt: skip
    norm = read_norm(hf)
    activation = read_activation(hf, "silu")
    mamba = MambaSpec(
        channels=hf.take("mamba_expand", 2) * hf.take("hidden_size"),
        state_dim=hf.take("mamba_d_state", 16),
        rank=rank_of(hf, "mamba_dt_rank"),
        conv_width=hf.take("mamba_d_conv", 4),
        conv_bias=bool(hf.take("mamba_conv_bias", True)),
        bias=bool(hf.take("mamba_proj_bias", False)),
        activation=activation,
        norm=norm,
    )
    attention = read_attention(hf, kv_heads=8)
    dense = read_mlp(hf, activation=activation)
    count = hf.take("num_experts", 16)
    hf.ignore("num_experts_per_tok")
    mixture = dense
    if count > 1:
        router = Router(top_k=hf.take("num_experts_per_tok", 2), normalized=False)
        mixture = MLPSpec(size=dense.size, activation=activation, experts=ExpertsSpec(count=count, router=router))
    layers = tuple(
        LayerSpec(attention=attention if attends else mamba, mlp=mixture if mixes else dense, norm=norm)
        for attends, mixes in zip(_chosen(hf, "attn", 8, 4), _chosen(hf, "expert", 2, 1), strict=True)
    )
    shared = read_shared(hf, norm=norm, max_position=read_max_position(hf, 262144), ropes={"default": UNTURNED})
    return ModelConfig(family="jamba", layers=layers, **shared)


FAMILY = Family("jamba", ("JambaForCausalLM",), _read, OWN_NAMES, IGNORED)
