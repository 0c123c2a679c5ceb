"""Gemma 1: Llama with norms that multiply by 1 + w, embeddings times the square root of their size, and a GELU gate."""

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
from jaxserve.models.spec import MLPSpec, ModelConfig


def read_gemma_mlp(hf: HFConfig) -> MLPSpec:
    """Reads the MLP. Files that say "gelu" mean the approximation by tanh, with which all Gemmas were trained."""
    for key in ("hidden_act", "hidden_activation"):
        hf.expect(key, "gelu", "gelu_pytorch_tanh", "gelu_new")
    return read_mlp(hf, activation="gelu_tanh")


def _read(hf: HFConfig) -> ModelConfig:
    hf.expect("use_bidirectional_attention", False)
    bias = bool(hf.take("attention_bias", False))
    norm = read_norm(hf, offset=1.0)
    attention = read_attention(hf, head_dim=256, qkv_bias=bias, out_bias=bias)
    layers = uniform_layers(hf, attention, read_gemma_mlp(hf), norm=norm)
    shared = read_shared(hf, tied=True, longest=8192, norm=norm)
    return ModelConfig(family="gemma", layers=layers, embed_scale=hf.take("hidden_size") ** 0.5, **shared)


FAMILY = Family("gemma", ("GemmaForCausalLM",), _read, NAMES, IGNORED)
