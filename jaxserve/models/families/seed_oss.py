"""Seed-OSS: Llama with biases on queries, keys and values, and optional biases elsewhere."""

from __future__ import annotations

from jaxserve.models.config import HFConfig
from jaxserve.models.families import Family
from jaxserve.models.families.llama import IGNORED, NAMES, read_attention, read_mlp, read_shared, uniform_layers
from jaxserve.models.spec import ModelConfig


def _read(hf: HFConfig) -> ModelConfig:
    bias = bool(hf.take("attention_bias", True))
    out_bias = bool(hf.take("attention_out_bias", False))
    attention = read_attention(hf, head_dim=128, kv_heads=8, qkv_bias=bias, out_bias=out_bias)
    layers = uniform_layers(hf, attention, read_mlp(hf, bias=bool(hf.take("mlp_bias", False))))
    return ModelConfig(family="seed_oss", layers=layers, **read_shared(hf, longest=524288))


FAMILY = Family("seed_oss", ("SeedOssForCausalLM",), _read, NAMES, IGNORED)
