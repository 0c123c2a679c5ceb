"""Qwen3-MoE: Qwen3 with experts in all or some layers."""

from jaxserve.models.config import HFConfig
from jaxserve.models.families import Family
from jaxserve.models.families.llama import (
    IGNORED,
    NAMES,
    read_attention,
    read_mlp,
    read_norm,
    read_shared,
    read_windows,
    uniform_layers,
)
from jaxserve.models.families.qwen2_moe import EXPERTS, read_experts, with_experts
from jaxserve.models.spec import ModelConfig, QKNormSpec


def _read(hf: HFConfig) -> ModelConfig:
    bias = bool(hf.take("attention_bias", False))
    qk_norm = QKNormSpec(norm=read_norm(hf))
    attention = read_attention(hf, kv_heads=4, qk_norm=qk_norm, qkv_bias=bias, out_bias=bias)
    hf.ignore("max_window_layers")  # only the dense models read it
    windows = read_windows(hf, used=bool(hf.take("use_sliding_window", False)))
    layers = uniform_layers(hf, attention, read_mlp(hf), windows)
    layers = with_experts(hf, layers, read_experts(hf))
    return ModelConfig(family="qwen3_moe", layers=layers, **read_shared(hf, longest=32768))


FAMILY = Family("qwen3_moe", ("Qwen3MoeForCausalLM",), _read, NAMES | EXPERTS, IGNORED)
