"""Mistral: Llama with a sliding window on every layer, where the config sets one."""

from jaxserve.models.config import HFConfig, ModelConfig
from jaxserve.models.families import Family
from jaxserve.models.families.llama import IGNORED, NAMES, read_shared, read_windows


def _read(hf: HFConfig) -> ModelConfig:
    shared = read_shared(hf)
    return ModelConfig(family="mistral", **shared, windows=read_windows(hf, shared["num_layers"], used=True))


FAMILY = Family("mistral", ("MistralForCausalLM",), _read, NAMES, IGNORED)
