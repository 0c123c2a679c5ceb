"""Idefics3 and SmolVLM, whose language models are Llama."""

from __future__ import annotations

from dataclasses import replace

from jaxserve.models.config import HFConfig
from jaxserve.models.families import Family
from jaxserve.models.families.llama import FAMILY as LLAMA
from jaxserve.models.families.within import Text, by_whole, family_within
from jaxserve.models.spec import ModelConfig
from jaxserve.models.vision.idefics3 import eyes

# The values that transformers assumes for keys that a text_config does not have.
DEFAULTS = {
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32,
}  # fmt: skip
# Of models that were made with the same code; transformers does not read them.
UNREAD = ("perceiver_config", "pixel_shuffle_factor", "qk_layer_norms", "use_resampler", "rope_interleaved")

# Beside the text_config; that and the settings of the processor count.
UNREAD_OF_WHOLE = ("vocab_size", "_pad_token_id", "image_seq_len", "use_reentrant_checkpoints")


def _read(hf: HFConfig) -> ModelConfig:
    hf.ignore(*UNREAD)
    return LLAMA.read_config(hf)


TEXTS = {"llama": Text(_read, DEFAULTS, DEFAULTS | {"rms_norm_eps": 1e-5})}
LAYOUTS = ({"model.": "model.text_model."},)


def _within(name: str, architecture: str) -> Family:
    family = family_within(name, architecture, TEXTS, LLAMA.names, by_whole, layouts=LAYOUTS, sees=eyes)

    def read(hf: HFConfig) -> ModelConfig:
        hf.ignore(*UNREAD_OF_WHOLE)
        return family.read_config(hf)

    return replace(family, read_config=read)


FAMILIES = (
    _within("idefics3", "Idefics3ForConditionalGeneration"),
    _within("smolvlm", "SmolVLMForConditionalGeneration"),
)
