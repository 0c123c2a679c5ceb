"""Bamba: most layers have Mamba-2, the others have attention of which half of each head is rotated."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any

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
from jaxserve.models.families.shared import named
from jaxserve.models.rope import read_rope
from jaxserve.models.spec import Activation, AttentionSpec, LayerSpec, Mamba2Spec, ModelConfig, NormSpec

LAYER = "model.layers.{i}"


def mamba_names(module: str) -> dict[str, str]:
    """Role -> name of the tensors of a layer's Mamba-2 module."""
    parts = {"a_log": "A_log", "d": "D", "dt_bias": "dt_bias"}
    return named(
        mamba_in=f"{module}.in_proj",
        mamba_conv=f"{module}.conv1d",
        mamba_norm=f"{module}.norm",
        mamba_out=f"{module}.out_proj",
    ) | {f"mamba_{role}": f"{module}.{name}" for role, name in parts.items()}


BAMBA_NAMES = (
    NAMES
    | mamba_names(f"{LAYER}.mamba")
    | named(
        norm="model.final_layernorm",
        mlp_norm=f"{LAYER}.pre_ff_layernorm",
        gate=f"{LAYER}.feed_forward.gate_proj",
        up=f"{LAYER}.feed_forward.up_proj",
        down=f"{LAYER}.feed_forward.down_proj",
    )
)


def read_mamba(
    hf: HFConfig, norm: NormSpec | None, activation: Activation, width: int | None = None, **choices: Any
) -> Mamba2Spec:
    """Mamba-2 as the settings mamba_* describe it. All heads together have `width` channels; None: mamba_expand times
    the hidden size. `choices` are fields of Mamba2Spec that differ from Bamba's."""
    # The size of the chunks in which transformers computes prompts; its limits of steps hold for prompts only.
    hf.ignore("mamba_chunk_size")
    hf.expect("time_step_limit", [0.0, inf], [0.0, {"__float__": "Infinity"}])
    heads = hf.take("mamba_n_heads", 128)
    expanded = width is None
    width = hf.take("mamba_expand", 2) * hf.take("hidden_size") if width is None else width
    given = hf.take("mamba_d_head", "auto")
    head_dim = width // heads if given == "auto" else given
    if heads * head_dim != width:
        raise ConfigError(
            f"{hf.source}: mamba_n_heads={heads} heads of mamba_d_head={given} are not "
            f"{'mamba_expand times hidden_size' if expanded else 'mamba_d_ssm'}, {width}"
        )
    bias = bool(hf.take("mamba_proj_bias", False))
    usual: dict[str, Any] = {"out_bias": bias}
    return Mamba2Spec(
        heads=heads,
        head_dim=head_dim,
        groups=hf.take("mamba_n_groups", 1),
        state_dim=hf.take("mamba_d_state", 256),
        conv_width=hf.take("mamba_d_conv", 4),
        conv_bias=bool(hf.take("mamba_conv_bias", True)),
        bias=bias,
        activation=activation,
        norm=norm,
        **usual | choices,
    )


def mixed(
    kinds: Sequence[str], attention: AttentionSpec, mamba: Mamba2Spec, source: str
) -> list[AttentionSpec | Mamba2Spec]:
    """The attention or the Mamba-2 of each layer, by its kind in the words of transformers 5 or of older configs."""
    of_kind: dict[str, AttentionSpec | Mamba2Spec] = {
        "full_attention": attention, "attention": attention, "linear_attention": mamba, "mamba": mamba,
    }  # fmt: skip
    if unknown := set(kinds) - of_kind.keys():
        raise ConfigError(f"{source}: layer_types {sorted(unknown)} are not supported (only {sorted(of_kind)})")
    found = [of_kind[kind] for kind in kinds]
    if attention not in found:
        raise ConfigError(f"{source}: models without any layer of attention are not supported")
    return found


def _read(hf: HFConfig) -> ModelConfig:
    # The first is for training, and the second chooses which logits transformers' generate computes.
    hf.ignore("z_loss_coefficient", "num_logits_to_keep", "attn_rotary_emb")
    norm = read_norm(hf, 1e-5)
    bias = bool(hf.take("attention_bias", False))
    attention = read_attention(hf, kv_heads=8, qkv_bias=bias, out_bias=bias)
    mlp = read_mlp(hf, bias=bool(hf.take("mlp_bias", False)))
    count = hf.take("num_hidden_layers")
    chosen = hf.take("attn_layer_indices", None) or []
    kinds = ["attention" if i in chosen else "mamba" for i in range(count)]
    specs = mixed(kinds, attention, read_mamba(hf, norm, mlp.activation), hf.source)
    max_position = read_max_position(hf, 262144)
    ropes = {"default": read_rope(hf, max_position, partial=0.5)}
    layers = tuple(LayerSpec(attention=spec, mlp=mlp, norm=norm) for spec in specs)
    return ModelConfig(
        family="bamba", layers=layers, **read_shared(hf, norm=norm, max_position=max_position, ropes=ropes)
    )


FAMILY = Family("bamba", ("BambaForCausalLM",), _read, BAMBA_NAMES, IGNORED)
