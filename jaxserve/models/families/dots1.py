"""dots.llm1: Qwen3's attention, and DeepSeek-V3's experts beside shared ones behind the first layers."""

from __future__ import annotations

from jaxserve.models.config import HFConfig
from jaxserve.models.families import Family
from jaxserve.models.families.glm4_moe import DEEPSEEK_MOE_NAMES, dense_first, read_deepseek_experts, with_mixture
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
from jaxserve.models.spec import ModelConfig, QKNormSpec


def _read(hf: HFConfig) -> ModelConfig:
    hf.expect("moe_layer_freq", 1)
    bias = bool(hf.take("attention_bias", False))
    norm = read_norm(hf)
    attention = read_attention(hf, kv_heads=32, qk_norm=QKNormSpec(norm=norm), qkv_bias=bias, out_bias=bias)
    dense = read_mlp(hf)
    hf.ignore("max_window_layers")  # beside layer_types
    first = 0 if hf.take("layer_types", None) else hf.take("max_window_layers", 62)
    windows = read_windows(hf, used=True, first_layer=first)
    plain = uniform_layers(hf, attention, dense, windows, norm=norm)
    mixture = read_deepseek_experts(hf, dense.activation, normalized=False)
    layers = with_mixture(plain, mixture, dense_first(hf, 0))
    return ModelConfig(family="dots1", layers=layers, **read_shared(hf, norm=norm))


FAMILY = Family("dots1", ("Dots1ForCausalLM",), _read, NAMES | DEEPSEEK_MOE_NAMES, IGNORED)
