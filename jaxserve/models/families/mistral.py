"""Mistral: Llama with a sliding window on every layer, if the config sets one."""

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


def read_mistral(hf: HFConfig) -> ModelConfig:
    layers = uniform_layers(hf, read_attention(hf, kv_heads=8), read_mlp(hf), read_windows(hf, used=True))
    return ModelConfig(family="mistral", layers=layers, **read_shared(hf, longest=131072))


FAMILY = Family("mistral", ("MistralForCausalLM",), read_mistral, NAMES, IGNORED)
