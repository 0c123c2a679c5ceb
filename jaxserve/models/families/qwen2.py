"""Qwen2 and Qwen2.5: Llama with biases on queries, keys and values. If windows are used, layers from
`max_window_layers` on have one."""

from jaxserve.models.config import HFConfig
from jaxserve.models.families import Family
from jaxserve.models.families.llama import (
    IGNORED,
    NAMES,
    read_attention,
    read_mlp,
    read_shared,
    read_windows,
    uniform_layers,
)
from jaxserve.models.spec import ModelConfig


def read_qwen_windows(hf: HFConfig) -> list[int | None]:
    used = bool(hf.take("use_sliding_window", False))
    hf.ignore("max_window_layers")
    first = 0 if hf.take("layer_types", None) else hf.take("max_window_layers", 28)
    return read_windows(hf, used=used, first_layer=first)


def _read(hf: HFConfig) -> ModelConfig:
    layers = uniform_layers(hf, read_attention(hf, qkv_bias=True), read_mlp(hf), read_qwen_windows(hf))
    return ModelConfig(family="qwen2", layers=layers, **read_shared(hf, longest=32768))


FAMILY = Family("qwen2", ("Qwen2ForCausalLM",), _read, NAMES, IGNORED)
