"""Qwen3 (dense): Llama with norms of each head's query and key, an explicit head_dim, and no biases by default."""

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
from jaxserve.models.families.qwen2 import read_qwen_windows
from jaxserve.models.spec import ModelConfig, QKNormSpec


def _read(hf: HFConfig) -> ModelConfig:
    bias = bool(hf.take("attention_bias", False))
    attention = read_attention(hf, head_dim=128, qk_norm=QKNormSpec(norm=read_norm(hf)), qkv_bias=bias, out_bias=bias)
    layers = uniform_layers(hf, attention, read_mlp(hf), read_qwen_windows(hf))
    return ModelConfig(family="qwen3", layers=layers, **read_shared(hf, longest=32768))


FAMILY = Family("qwen3", ("Qwen3ForCausalLM",), _read, NAMES, IGNORED)
