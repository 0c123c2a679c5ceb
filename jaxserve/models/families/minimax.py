"""MiniMax-01: lightning attention in most layers, attention in the others, Mixtral's experts in all. What a layer adds
to is the result of its norms, not the stream before them.

A cached step of transformers takes its position from the first layer's cache. Where that layer has lightning attention,
transformers counts positions from 0 again, unless they are given. In the published inference code positions go on, and
only the first `rotary_dim` channels of a head are rotated; both holds here.
"""

from __future__ import annotations

from dataclasses import replace

from jaxserve.models.config import HFConfig
from jaxserve.models.families import Family
from jaxserve.models.families.llama import (
    IGNORED,
    read_attention,
    read_max_position,
    read_mlp,
    read_norm,
    read_shared,
)
from jaxserve.models.families.mixtral import MIXTRAL_NAMES
from jaxserve.models.families.qwen3_next import read_recurrent
from jaxserve.models.families.shared import named, read_activation
from jaxserve.models.rope import read_rope
from jaxserve.models.spec import ExpertsSpec, LayerSpec, LightningSpec, ModelConfig, NormSpec
from jaxserve.pallas_kernels.expert_routing import Router

ATTENTION = "model.layers.{i}.self_attn"
NAMES = MIXTRAL_NAMES | named(
    lightning_qkv=f"{ATTENTION}.qkv_proj",
    lightning_norm=f"{ATTENTION}.norm",
    lightning_gate=f"{ATTENTION}.output_gate",
    lightning_out=f"{ATTENTION}.out_proj",
)
BUFFERS = ("slope_rate", "query_decay", "key_decay", "diagonal_decay")  # follow from the config


def _shares(hf: HFConfig, part: str) -> tuple[float, float]:
    return float(hf.take(f"{part}_alpha_factor", 1)), float(hf.take(f"{part}_beta_factor", 1))


def _read(hf: HFConfig) -> ModelConfig:
    hf.ignore("block_size")  # of the blocks in which transformers computes prompts
    experts = ExpertsSpec(count=hf.take("num_local_experts", 8), router=Router(top_k=hf.take("num_experts_per_tok", 2)))
    activation = read_activation(hf, "silu")
    norm = read_norm(hf, 1e-5)
    attention = read_attention(hf, kv_heads=8, window=hf.take("sliding_window", None))
    full = LayerSpec(
        attention=attention,
        mlp=read_mlp(hf, activation=activation, experts=experts),
        norm=norm,
        residual="normed",
        shares=(_shares(hf, "full_attn"), _shares(hf, "mlp")),
    )
    count = hf.take("num_hidden_layers")
    shares = _shares(hf, "linear_attn"), _shares(hf, "mlp")

    def layer(i: int, is_lightning: bool) -> LayerSpec:
        factor = 1 - i / (count - 1 + 1e-5) + 1e-5
        net = LightningSpec(
            heads=attention.num_heads, dim=attention.head_dim, factor=factor, activation=activation, norm=NormSpec()
        )
        return replace(full, attention=net, shares=shares) if is_lightning else full

    if not hf.take("layer_types", None):
        hf.values["layer_types"] = (["full_attention", "linear_attention"] * count)[:count]
    layers = tuple(layer(i, is_lightning) for i, is_lightning in enumerate(read_recurrent(hf)))
    max_position = read_max_position(hf, 131072)
    rope = read_rope(hf, max_position, theta=1e6)
    turned = hf.take("rotary_dim", None)
    ropes = {"default": rope if turned is None else replace(rope, rotary_dim=turned)}
    shared = read_shared(hf, norm=norm, max_position=max_position, ropes=ropes)
    return ModelConfig(family="minimax", layers=layers, **shared)


FAMILY = Family("minimax", ("MiniMaxForCausalLM",), _read, NAMES, (*IGNORED, *BUFFERS))
