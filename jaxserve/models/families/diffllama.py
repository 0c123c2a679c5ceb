"""DiffLlama: Llama with differential attention (`models.differential`)."""

from __future__ import annotations

import math
from dataclasses import replace

from jaxserve.config import ConfigError
from jaxserve.models.config import HFConfig
from jaxserve.models.differential import LAMBDAS
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
from jaxserve.models.rope import read_rope
from jaxserve.models.spec import LayerSpec, ModelConfig

DIFF_NAMES = NAMES | {role: f"model.layers.{{i}}.self_attn.{role}" for role in LAMBDAS}


def _read(hf: HFConfig) -> ModelConfig:
    hf.ignore("lambda_std_dev")  # of random weights
    bias = bool(hf.take("attention_bias", False))
    attention = read_attention(hf, qkv_bias=bias, out_bias=bias)
    dim = attention.head_dim
    if attention.num_kv_heads % 2:
        raise ConfigError(f"{hf.source}: num_key_value_heads={attention.num_kv_heads} must be even")
    max_position = read_max_position(hf)
    rope = read_rope(hf, max_position)
    if rope.scaling == "proportional":
        raise ConfigError(f"{hf.source}: rope scaling 'proportional' is not supported for this architecture")
    norm = read_norm(hf, 1e-5)
    mlp = read_mlp(hf)
    wide = replace(attention, head_dim=2 * dim, scale=dim**-0.5)

    def layer(i: int) -> LayerSpec:
        start = 0.8 - 0.6 * math.exp(-0.3 * i)
        return LayerSpec(attention=replace(wide, difference=(start, norm.eps)), mlp=mlp, norm=norm)

    layers = tuple(map(layer, range(hf.take("num_hidden_layers"))))
    ropes = {"default": replace(rope, rotary_dim=dim)}
    return ModelConfig(
        family="diffllama", layers=layers, **read_shared(hf, norm=norm, max_position=max_position, ropes=ropes)
    )


FAMILY = Family("diffllama", ("DiffLlamaForCausalLM",), _read, DIFF_NAMES, IGNORED)
