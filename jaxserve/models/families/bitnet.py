"""BitNet: Llama with a norm before each projection that ends attention and MLP, and a squared ReLU as its gate."""

from __future__ import annotations

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
    uniform_layers,
)
from jaxserve.models.families.shared import read_activation
from jaxserve.models.rope import read_rope
from jaxserve.models.spec import ModelConfig

BITNET_NAMES = NAMES | {
    "out_norm.weight": "model.layers.{i}.self_attn.attn_sub_norm.weight",
    "inner_norm.weight": "model.layers.{i}.mlp.ffn_sub_norm.weight",
}


def _read(hf: HFConfig) -> ModelConfig:
    bias = bool(hf.take("attention_bias", False))
    norm = read_norm(hf, 1e-5)
    attention = read_attention(hf, kv_heads=5, qkv_bias=bias, out_bias=bias, out_norm=norm)
    mlp = read_mlp(hf, activation=read_activation(hf, "relu2"), inner_eps=norm.eps)
    max_position = read_max_position(hf, 2048)
    rope = read_rope(hf, max_position, theta=500000.0)
    shared = read_shared(hf, norm=norm, max_position=max_position, ropes={"default": rope})
    return ModelConfig(family="bitnet", layers=uniform_layers(hf, attention, mlp, norm=norm), **shared)


FAMILY = Family("bitnet", ("BitNetForCausalLM",), _read, BITNET_NAMES, IGNORED)
