"""Qwen3 (dense): norms on each head's query and key, explicit head_dim, no biases by default."""

from jaxserve.models.config import HFConfig, ModelConfig
from jaxserve.models.families import Family
from jaxserve.models.families.llama import IGNORED, NAMES, read_shared
from jaxserve.models.families.qwen2 import read_qwen_windows


def _read(hf: HFConfig) -> ModelConfig:
    shared = read_shared(hf) | {"head_dim": hf.take("head_dim", 128)}
    bias = bool(hf.take("attention_bias", False))
    windows = read_qwen_windows(hf, shared["num_layers"])
    return ModelConfig(family="qwen3", **shared, qk_norm=True, qkv_bias=bias, o_bias=bias, windows=windows)


FAMILY = Family("qwen3", ("Qwen3ForCausalLM",), _read, NAMES, IGNORED)
