"""Language models that are part of a model for text and images. Text is served; images are not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from jaxserve.config import ConfigError
from jaxserve.models.config import HFConfig, take_token_ids
from jaxserve.models.families import Family
from jaxserve.models.families.gemma2 import SANDWICH_NAMES
from jaxserve.models.families.gemma3 import read_gemma3
from jaxserve.models.families.llama import IGNORED, NAMES
from jaxserve.models.families.llama4 import FAMILY as LLAMA4
from jaxserve.models.families.ministral import read_ministral3
from jaxserve.models.families.mistral import read_mistral
from jaxserve.models.families.qwen3_5 import FAMILIES as QWEN3_5_FAMILIES
from jaxserve.models.sources import Names
from jaxserve.models.spec import ModelConfig

# The beginnings that names "model." and "lm_head." of the language model have in these files: first as transformers
# wrote them before version 5, then as version 5 writes them.
LAYOUTS = (
    {"model.": "language_model.model.", "lm_head.": "language_model.lm_head."},
    {"model.": "model.language_model."},
)
UNREAD = (
    "mtp.",
    *(
        f"{start}{part}"
        for start in ("", "model.")
        for part in ("vision_tower.", "multi_modal_projector.", "vision_model.", "visual.")
    ),
)
OF_IMAGES = (
    "vision_config", "projector_hidden_act", "vision_feature_layer", "multimodal_projector_bias", "spatial_merge_size",
    "mm_tokens_per_image", "image_token_index", "image_token_id", "boi_token_index", "eoi_token_index",
    "video_token_id", "vision_start_token_id", "vision_end_token_id",
)  # fmt: skip
# The values that transformers assumes for keys that a text_config does not have.
GEMMA3 = {
    "vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
}  # fmt: skip
MISTRAL = {
    "vocab_size": 131072, "hidden_size": 5120, "intermediate_size": 32768, "num_hidden_layers": 40,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5, "sliding_window": None,
}  # fmt: skip
QWEN3_5 = {
    "vocab_size": 248320, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 32,
    "num_attention_heads": 16,
}  # fmt: skip
QWEN3_5_MOE = {
    "vocab_size": 248320, "hidden_size": 2048, "num_hidden_layers": 40, "num_attention_heads": 16, "num_experts": 256,
    "num_experts_per_tok": 8, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
}  # fmt: skip
Reader = Callable[[HFConfig], ModelConfig]
# From tie_word_embeddings of the whole and of its text to whether the output head is the embedding.
Ties = Callable[[bool | None, bool | None], bool]


def _by_text(tied: bool) -> Ties:
    """transformers 5 writes true for the whole of a Mistral 3 that has an output head, and false for its text. Without
    either they are `tied`."""

    def ties(whole: bool | None, text: bool | None) -> bool:
        given = (whole, text) if text in (None, True) else (text,)
        return next((tie for tie in given if tie is not None), tied)

    return ties


def _by_whole(whole: bool | None, text: bool | None) -> bool:
    return bool(whole)


def _reader(readers: Mapping[str, Reader], defaults: Mapping[str, Any], ties: Ties) -> Reader:
    """A function that reads `text_config` with the reader for its model_type, by default the first. Beside text_config
    a config has settings of images, which are ignored, and a few settings of the whole model."""

    def read(hf: HFConfig) -> ModelConfig:
        inner = hf.take("text_config", None) or {}
        if not isinstance(inner, dict):
            raise ConfigError(f"{hf.source}: text_config must be a JSON object, got {inner!r:.80}")
        hf.ignore(*OF_IMAGES)
        kind = inner.get("model_type", next(iter(readers)))
        if kind not in readers:
            raise ConfigError(
                f"{hf.source}: text_config.model_type={kind!r} is not supported (only {', '.join(readers)})"
            )
        tied = ties(hf.take("tie_word_embeddings", None), inner.get("tie_word_embeddings"))
        whole: dict[str, Any] = {"tie_word_embeddings": tied}
        for name in ("torch_dtype", "dtype"):
            if (dtype := hf.take(name, None)) is not None:
                whole[name] = dtype
        rope = {} if {"rope_theta", "rope_parameters"} & inner.keys() or kind != "mistral" else {"rope_theta": 1e9}
        text = HFConfig({**defaults, **rope, **inner, **whole}, f"{hf.source}: text_config")
        config = readers[kind](text)
        text.take("quantization_config", None)
        text.finish()
        ends = take_token_ids(hf.take("eos_token_id", None))
        return replace(config, eos_token_ids=tuple(dict.fromkeys(config.eos_token_ids + ends)))

    return read


def _family(
    name: str,
    architecture: str,
    readers: Mapping[str, Reader],
    names: Names,
    ties: Ties,
    defaults: Mapping[str, Any] = MappingProxyType({}),
) -> Family:
    """The family "`name` with images". `readers` are by the model_type of the text."""
    read = _reader(readers, defaults, ties)
    return Family(f"{name} with images", (architecture,), read, names, IGNORED, layouts=LAYOUTS, unread=UNREAD)


_DENSE, _MIXTURE = QWEN3_5_FAMILIES
FAMILIES = (
    _family(
        "gemma3", "Gemma3ForConditionalGeneration", {"gemma3_text": read_gemma3}, SANDWICH_NAMES, _by_text(True), GEMMA3
    ),
    _family(
        "mistral3",
        "Mistral3ForConditionalGeneration",
        {"mistral": read_mistral, "ministral3": read_ministral3},
        NAMES,
        _by_text(False),
        MISTRAL,
    ),
    _family(
        "llama4", "Llama4ForConditionalGeneration", {"llama4_text": LLAMA4.read_config}, LLAMA4.names, _by_text(False)
    ),
    _family(
        "qwen3_5",
        "Qwen3_5ForConditionalGeneration",
        {"qwen3_5_text": _DENSE.read_config},
        _DENSE.names,
        _by_whole,
        QWEN3_5,
    ),
    _family(
        "qwen3_5_moe",
        "Qwen3_5MoeForConditionalGeneration",
        {"qwen3_5_moe_text": _MIXTURE.read_config},
        _MIXTURE.names,
        _by_whole,
        QWEN3_5_MOE,
    ),
)
