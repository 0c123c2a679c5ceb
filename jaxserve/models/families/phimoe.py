"""Phi-3.5-MoE: experts that sparsemixer chooses, LayerNorms, and a bias of the output head."""

from __future__ import annotations

from typing import Any

from jaxserve.config import ConfigError
from jaxserve.models.config import HFConfig
from jaxserve.models.families import Family
from jaxserve.models.families.llama import (
    IGNORED,
    read_attention,
    read_layer_norm,
    read_max_position,
    read_mlp,
    read_shared,
    uniform_layers,
)
from jaxserve.models.families.mixtral import MIXTRAL_NAMES
from jaxserve.models.families.shared import named
from jaxserve.models.rope import read_rope, rope_settings
from jaxserve.models.spec import ExpertsSpec, ModelConfig
from jaxserve.pallas_kernels.expert_routing import Router

LAYER = "model.layers.{i}"
NAMES = MIXTRAL_NAMES | named(
    norm="model.norm",
    head="lm_head",
    attention_norm=f"{LAYER}.input_layernorm",
    mlp_norm=f"{LAYER}.post_attention_layernorm",
)


def _read_rotary(hf: HFConfig) -> dict[str, Any]:
    """The settings of the rotation. This model's files name the factors of cosines and sines for short and for long
    sequences."""
    scaling = rope_settings(hf)
    short = scaling.pop("short_mscale", None)
    long = scaling.pop("long_mscale", None)
    if short != long:
        raise ConfigError(f"{hf.source}: short_mscale={short} and long_mscale={long} must be the same")
    return scaling if short is None else scaling | {"attention_factor": short}


def _read(hf: HFConfig) -> ModelConfig:
    hf.expect("num_experts_per_tok", 2)
    bias = bool(hf.take("attention_bias", False))
    norm = read_layer_norm(hf, "rms_norm_eps")
    router = Router(top_k=2, score="sparsemixer", jitter=hf.take("router_jitter_noise", 0.01))
    mixture = read_mlp(hf, experts=ExpertsSpec(count=hf.take("num_local_experts", 16), router=router))
    windows = [hf.take("sliding_window", None)] * hf.take("num_hidden_layers")
    attention = read_attention(hf, kv_heads=8, qkv_bias=bias, out_bias=bias)
    max_position = read_max_position(hf, 131072)
    rope = read_rope(hf, max_position, parameters=_read_rotary(hf), theta=1e6)
    return ModelConfig(
        family="phimoe",
        layers=uniform_layers(hf, attention, mixture, windows, norm=norm),
        head_bias=bool(hf.take("lm_head_bias", False)),
        **read_shared(hf, norm=norm, max_position=max_position, ropes={"default": rope}),
    )


FAMILY = Family("phimoe", ("PhimoeForCausalLM", "PhiMoEForCausalLM"), _read, NAMES, IGNORED)
