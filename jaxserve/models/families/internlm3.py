"""InternLM3: Llama with other names for the biases in its config."""

from __future__ import annotations

from jaxserve.models.config import HFConfig
from jaxserve.models.families import Family
from jaxserve.models.families.llama import (
    IGNORED,
    NAMES,
    read_attention,
    read_mlp,
    read_norm,
    read_shared,
    uniform_layers,
)
from jaxserve.models.spec import ModelConfig


def _read(hf: HFConfig) -> ModelConfig:
    hf.rename(qkv_bias="attention_bias", bias="mlp_bias")
    norm = read_norm(hf, 1e-5)
    bias = bool(hf.take("mlp_bias", False))
    attention = read_attention(hf, head_dim=128, qkv_bias=bool(hf.take("attention_bias", False)), out_bias=bias)
    layers = uniform_layers(hf, attention, read_mlp(hf, bias=bias), norm=norm)
    return ModelConfig(family="internlm3", layers=layers, **read_shared(hf, norm=norm))


FAMILY = Family("internlm3", ("InternLM3ForCausalLM",), _read, NAMES, IGNORED)
