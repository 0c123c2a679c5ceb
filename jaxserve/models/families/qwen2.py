"""Qwen2 and Qwen2.5: Llama with biases on query, key and value; windows, where used, from a given layer on."""

from jaxserve.models.config import HFConfig, ModelConfig
from jaxserve.models.families import Family
from jaxserve.models.families.llama import IGNORED, NAMES, read_shared, read_windows


def read_qwen_windows(hf: HFConfig, num_layers: int) -> tuple[int | None, ...]:
    used = bool(hf.take("use_sliding_window", False))
    first = hf.take("max_window_layers", 28)
    return read_windows(hf, num_layers, used=used, first_layer=first)


def _read(hf: HFConfig) -> ModelConfig:
    shared = read_shared(hf)
    windows = read_qwen_windows(hf, shared["num_layers"])
    return ModelConfig(family="qwen2", **shared, qkv_bias=True, windows=windows)


FAMILY = Family("qwen2", ("Qwen2ForCausalLM",), _read, NAMES, IGNORED)
