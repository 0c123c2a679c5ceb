"""Language models that are part of a model for text and images. Text is served; images are not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from jaxserve.config import ConfigError
from jaxserve.models.config import HFConfig, take_token_ids
from jaxserve.models.families import Family
from jaxserve.models.families.deepseek import FAMILIES as DEEPSEEK
from jaxserve.models.families.gemma2 import SANDWICH_NAMES
from jaxserve.models.families.gemma3 import read_gemma3
from jaxserve.models.families.llama import IGNORED
from jaxserve.models.families.llama4 import FAMILY as LLAMA4
from jaxserve.models.families.ministral import read_ministral3
from jaxserve.models.families.mistral import read_mistral
from jaxserve.models.families.mistral4 import MISTRAL4_NAMES, read_mistral4
from jaxserve.models.spec import ModelConfig

# The beginnings that names "model." and "lm_head." of the language model have in these files: first as transformers
# wrote them before version 5, then as version 5 writes them.
LAYOUTS = (
    {"model.": "language_model.model.", "lm_head.": "language_model.lm_head."},
    {"model.": "model.language_model."},
)
UNREAD = tuple(
    f"{start}{part}"
    for start in ("", "model.")
    for part in ("vision_tower.", "multi_modal_projector.", "vision_model.")
)
OF_IMAGES = (
    "vision_config", "projector_hidden_act", "vision_feature_layer", "multimodal_projector_bias", "spatial_merge_size",
    "mm_tokens_per_image", "image_token_index", "image_token_id", "boi_token_index", "eoi_token_index",
    "projection_hidden_size", "projection_layer_norm_eps", "video_token_id", "vision_start_token_id",
    "vision_end_token_id", "media_placeholder_token_id", "use_unified_vision_chunk", "video_placeholder",
    "ignore_index",
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
DEEPSEEK3 = DEEPSEEK[1]
Reader = Callable[[HFConfig], ModelConfig]


def _reader(readers: Mapping[str, Reader], usual: str, defaults: Mapping[str, Any], tied: bool) -> Reader:
    """A function that reads `text_config` with the reader for its model_type. Beside text_config a config has settings
    of images, which are ignored, and a few settings of the whole model."""

    def read(hf: HFConfig) -> ModelConfig:
        inner = hf.take("text_config", None) or {}
        if not isinstance(inner, dict):
            raise ConfigError(f"{hf.source}: text_config must be a JSON object, got {inner!r:.80}")
        hf.ignore(*OF_IMAGES)
        kind = inner.get("model_type", usual)
        if kind not in readers:
            raise ConfigError(
                f"{hf.source}: text_config.model_type={kind!r} is not supported (only {', '.join(readers)})"
            )
        # transformers 5 writes true for the whole of a Mistral 3 that has an output head, and false for its text.
        of_whole = hf.take("tie_word_embeddings", None)
        of_text = inner.get("tie_word_embeddings")
        ties = (of_whole, of_text) if of_text in (None, True) else (of_text,)
        whole = {"tie_word_embeddings": next((tie for tie in ties if tie is not None), tied)}
        for name in ("torch_dtype", "dtype"):
            if (dtype := hf.take(name, None)) is not None:
                whole[name] = dtype
        rope = {} if {"rope_theta", "rope_parameters"} & inner.keys() or kind != "mistral" else {"rope_theta": 1e9}
        assumed = {} if kind == "mistral4" else defaults  # it has its own
        text = HFConfig({**assumed, **rope, **inner, **whole}, f"{hf.source}: text_config")
        config = readers[kind](text)
        text.take("quantization_config", None)
        text.finish()
        ends = take_token_ids(hf.take("eos_token_id", None))
        return replace(config, eos_token_ids=tuple(dict.fromkeys(config.eos_token_ids + ends)))

    return read


FAMILIES = (
    Family(
        "gemma3 with images",
        ("Gemma3ForConditionalGeneration",),
        _reader({"gemma3_text": read_gemma3}, "gemma3_text", GEMMA3, tied=True),
        SANDWICH_NAMES,
        IGNORED,
        layouts=LAYOUTS,
        unread=UNREAD,
    ),
    Family(
        "mistral3 with images",
        ("Mistral3ForConditionalGeneration",),
        _reader(
            {"mistral": read_mistral, "ministral3": read_ministral3, "mistral4": read_mistral4},
            "mistral",
            MISTRAL,
            tied=False,
        ),
        MISTRAL4_NAMES,
        IGNORED,
        layouts=LAYOUTS,
        unread=UNREAD,
    ),
    Family(
        "llama4 with images",
        ("Llama4ForConditionalGeneration",),
        _reader({"llama4_text": LLAMA4.read_config}, "llama4_text", {}, tied=False),
        LLAMA4.names,
        LLAMA4.ignored,
        layouts=LAYOUTS,
        unread=UNREAD,
    ),
    Family(
        "kimi k2.5 with images",
        ("Kimi_K25ForConditionalGeneration", "KimiK25ForConditionalGeneration"),
        _reader(dict.fromkeys(("deepseek_v3", "kimi_k2"), DEEPSEEK3.read_config), "deepseek_v3", {}, tied=False),
        DEEPSEEK3.names,
        DEEPSEEK3.ignored,
        more_layers=True,
        layouts=LAYOUTS,
        unread=(*UNREAD, "mm_projector.", "model.mm_projector."),
    ),
)
