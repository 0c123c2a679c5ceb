"""Language models that are part of a model for text and images."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

from jaxserve.config import ConfigError
from jaxserve.models.config import HFConfig, take_token_ids
from jaxserve.models.families import Family
from jaxserve.models.families.aria import ARIA_NAMES, read_aria
from jaxserve.models.families.cohere import read_compass
from jaxserve.models.families.deepseek import FAMILIES as DEEPSEEK
from jaxserve.models.families.gemma2 import SANDWICH_NAMES
from jaxserve.models.families.gemma3 import read_gemma3
from jaxserve.models.families.gemma3n import GEMMA3N_NAMES, read_gemma3n
from jaxserve.models.families.gemma4 import GEMMA4_NAMES, read_gemma4, read_unified
from jaxserve.models.families.llama import FAMILY as LLAMA
from jaxserve.models.families.llama import IGNORED, NAMES
from jaxserve.models.families.llama4 import FAMILY as LLAMA4
from jaxserve.models.families.ministral import read_ministral3
from jaxserve.models.families.mistral import read_mistral
from jaxserve.models.families.mistral4 import MISTRAL4_NAMES, read_mistral4
from jaxserve.models.families.qwen2 import FAMILY as QWEN2_FAMILY
from jaxserve.models.families.qwen3 import FAMILY as QWEN3
from jaxserve.models.sources import Names
from jaxserve.models.spec import ModelConfig
from jaxserve.models.vision import moonvit
from jaxserve.models.vision.gemma import eyes_gemma3, eyes_gemma4, eyes_unified
from jaxserve.models.vision.llama4 import eyes_llama4
from jaxserve.models.vision.llava import eyes_onevision
from jaxserve.models.vision.pixtral import eyes_lighton, eyes_llava, eyes_mistral3

log = logging.getLogger(__name__)

# The beginnings that names "model." and "lm_head." of the language model have in these files: first as transformers
# wrote them before version 5, then as version 5 writes them.
LAYOUTS = (
    {"model.": "language_model.model.", "lm_head.": "language_model.lm_head."},
    {"model.": "model.language_model."},
)
OF_ENCODERS = (
    "vision_tower.", "multi_modal_projector.", "vision_model.", "visual.", "mm_projector.", "vit_large_projector.",
    "vision_embedder.", "embed_vision.", "audio_tower.", "embed_audio.", "vision_encoder.", "vision_projection.",
    "image_newline", "connector.",
)  # fmt: skip
# Layers that predict further tokens, encoders of images, and what brings their results to the text.
UNREAD = (
    "mtp.",
    *("mtp_dspark.", "patch_merger.", "pre_mm_projector_norm.", "vision_language_adapter."),
    *(f"{start}{part}" for start in ("", "model.") for part in OF_ENCODERS),
)
OF_IMAGES = (
    "vision_config", "projector_hidden_act", "vision_feature_layer", "multimodal_projector_bias", "spatial_merge_size",
    "mm_tokens_per_image", "image_token_index", "image_token_id", "boi_token_index", "eoi_token_index",
    "projection_hidden_size", "projection_layer_norm_eps", "video_token_id", "vision_start_token_id",
    "vision_end_token_id", "image_start_token_id", "image_end_token_id", "video_start_token_id", "video_end_token_id",
    "image_seq_length", "downsample_ratio", "vision_feature_select_strategy", "media_placeholder_token_id",
    "use_unified_vision_chunk", "video_placeholder", "ignore_index", "vision_soft_tokens_per_image", "boi_token_id",
    "eoi_token_id", "audio_config", "audio_token_id", "boa_token_id", "eoa_token_id", "eoa_token_index",
    "audio_soft_tokens_per_image", "projector_bias", "understand_projector_stride",
    "projector_patch_to_query_dict", "max_value_projector_patch_to_query_dict",
    "image_token_len", "patch_token_len", "im_start_token", "im_end_token", "im_patch_token", "video_token_index",
    "image_grid_pinpoints", "vision_aspect_ratio", "use_image_newline_parameter", "spatial_pool_mode",
    "spatial_pool_stride", "video_seq_length", "projector_layernorm_eps", "scale_factor", "downsample_factor",
    "alignment_intermediate_size", "adapter_layer_norm_eps", "projector_hidden_size", "projector_use_layernorm",
    "merged_hidden_size",
)  # fmt: skip
# The values that transformers assumes for keys that a text_config does not have.
GEMMA3 = {
    "vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
}  # fmt: skip
LLAMA1 = {
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "max_position_embeddings": 2048,
}  # fmt: skip
MISTRAL = {
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "max_position_embeddings": 131072, "sliding_window": 4096,
}  # fmt: skip
MINISTRAL = {
    "vocab_size": 131072, "hidden_size": 5120, "intermediate_size": 32768, "num_hidden_layers": 40,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5, "sliding_window": None,
}  # fmt: skip
LIGHTON = {
    "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960,
    "rope_theta": 1e6,
}  # fmt: skip
# The same where there is no text_config.
MISTRAL_SMALL = MINISTRAL | {"rope_theta": 1e9}
QWEN2 = {
    "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 32,
}  # fmt: skip
ARIA = {
    "vocab_size": 32000, "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
}  # fmt: skip
DEEPSEEK3 = DEEPSEEK[1]
Reader = Callable[[HFConfig], ModelConfig]
# From tie_word_embeddings of the whole and of its text to whether the output head is the embedding.
Ties = Callable[[bool | None, bool | None], bool]
# From the config of the whole, its vision_config, and the language model to the model that also sees.
Eyes = Callable[[HFConfig, HFConfig, ModelConfig], ModelConfig]


class Text(NamedTuple):
    """How a text_config is read: its reader, the values for keys that it does not have, and those for a model without a
    text_config; None: they are the same."""

    read: Reader
    defaults: Mapping[str, Any] = MappingProxyType({})
    absent: Mapping[str, Any] | None = None


def by_whole(whole: bool | None, text: bool | None) -> bool:
    return bool(whole)


def by_whole_or_tied(whole: bool | None, text: bool | None) -> bool:
    return whole is not False


def by_either(whole: bool | None, text: bool | None) -> bool:
    return bool(whole or text)


def by_text(tied: bool) -> Ties:
    """transformers 5 writes true for the whole of a Mistral 3 that has an output head, and false for its text. Without
    either they are `tied`."""

    def ties(whole: bool | None, text: bool | None) -> bool:
        given = (whole, text) if text in (None, True) else (text,)
        return next((tie for tie in given if tie is not None), tied)

    return ties


def family_within(
    name: str,
    architecture: str | tuple[str, ...],
    texts: Mapping[str, Text],
    names: Names,
    ties: Ties,
    *,
    flat: bool = False,
    more_layers: bool = False,
    variant: Callable[[ModelConfig], Names] = lambda config: {},
    layouts: tuple[Mapping[str, str], ...] = LAYOUTS,
    sees: Eyes | None = None,
) -> Family:
    """The family "`name` with images".

    Args:
      architecture: or several, under which files have the same model.
      texts: by the model_type of the text_config; the first is usual.
      ties: see `Ties`.
      more_layers, variant, layouts: see `Family`.
      flat: some files have no text_config. Their settings of the text are beside those of the whole.
      sees: how pictures are read; None: they are not.
    """
    known = (architecture,) if isinstance(architecture, str) else architecture
    read = _reader(texts, ties, flat)
    if sees is not None:
        read = _with_eyes(read, sees)
    return Family(
        f"{name} with images", known, read, names, IGNORED, more_layers, variant, layouts=layouts, unread=UNREAD
    )


def _with_eyes(read: Reader, sees: Eyes) -> Reader:
    """`read`, then what the config says of pictures. Where that is not understood, the model reads text only."""

    def both(hf: HFConfig) -> ModelConfig:
        given = hf.values.get("vision_config")
        if not isinstance(given, dict) or not hf.sees:
            return read(hf)
        text = read(hf)
        vision = HFConfig(given, f"{hf.source}: vision_config")
        try:
            config = sees(hf, vision, text)
            vision.finish()
        except (ConfigError, ArithmeticError, TypeError) as error:  # a number may be zero, or no number
            log.warning("pictures are not read: %s", error)
            return text
        return config

    return both


def _reader(texts: Mapping[str, Text], ties: Ties, flat: bool) -> Reader:
    """A function that reads `text_config`. Beside it a config has settings of images, which are ignored, and a few
    settings of the whole model."""
    usual = next(iter(texts))

    def read(hf: HFConfig) -> ModelConfig:
        source = f"{hf.source}: text_config"
        inner = hf.take("text_config", None) or {}
        if not isinstance(inner, dict):
            raise ConfigError(f"{hf.source}: text_config must be a JSON object, got {inner!r:.80}")
        hf.ignore(*OF_IMAGES)
        if flat and not inner:
            source = hf.source
            inner = {key: x for key, x in hf.values.items() if key not in (*OF_IMAGES, "model_type")}
            hf.ignore(*inner)
        kind = inner.get("model_type", usual)
        if not isinstance(kind, str) or kind not in texts:
            raise ConfigError(
                f"{hf.source}: text_config.model_type={kind!r} is not supported (only {', '.join(texts)})"
            )
        tied = ties(hf.take("tie_word_embeddings", None), inner.get("tie_word_embeddings"))
        whole: dict[str, Any] = {"tie_word_embeddings": tied}
        for name in ("torch_dtype", "dtype"):
            if (dtype := hf.take(name, None)) is not None:
                whole[name] = dtype
        own = texts[kind]
        defaults = own.defaults if inner or own.absent is None else own.absent
        text = HFConfig({**defaults, **inner, **whole}, source)
        config = own.read(text)
        text.take("quantization_config", None)
        text.finish()
        ends = take_token_ids(hf.take("eos_token_id", None))
        return replace(config, eos_token_ids=tuple(dict.fromkeys(config.eos_token_ids + ends)))

    return read


FAMILIES = (
    family_within(
        "gemma3",
        "Gemma3ForConditionalGeneration",
        {"gemma3_text": Text(read_gemma3, GEMMA3)},
        SANDWICH_NAMES,
        by_text(True),
        sees=eyes_gemma3,
    ),
    family_within(
        "gemma4",
        "Gemma4ForConditionalGeneration",
        {"gemma4_text": Text(read_gemma4)},
        GEMMA4_NAMES,
        by_whole_or_tied,
        sees=eyes_gemma4,
    ),
    family_within(
        "gemma4_unified",
        "Gemma4UnifiedForConditionalGeneration",
        {"gemma4_unified_text": Text(read_unified)},
        GEMMA4_NAMES,
        by_whole_or_tied,
        sees=eyes_unified,
    ),
    family_within(
        "gemma3n",
        "Gemma3nForConditionalGeneration",
        {"gemma3n_text": Text(read_gemma3n)},
        GEMMA3N_NAMES,
        by_whole_or_tied,
    ),
    family_within(
        "mistral3",
        "Mistral3ForConditionalGeneration",
        {
            "mistral": Text(read_mistral, MISTRAL, MISTRAL_SMALL),
            "ministral3": Text(read_ministral3, MINISTRAL),
            "mistral4": Text(read_mistral4),
        },
        MISTRAL4_NAMES,
        by_text(False),
        sees=eyes_mistral3,
    ),
    family_within(
        "llava",
        "LlavaForConditionalGeneration",
        {
            "llama": Text(LLAMA.read_config, LLAMA1),
            "mistral": Text(read_mistral, MISTRAL),
            "qwen2": Text(QWEN2_FAMILY.read_config, QWEN2),
        },
        QWEN2_FAMILY.names,
        by_either,
        sees=eyes_llava,
    ),
    family_within(
        "lighton_ocr",
        ("LightOnOcrForConditionalGeneration", "LightOnOCRForConditionalGeneration"),
        {"qwen3": Text(QWEN3.read_config, LIGHTON, LIGHTON)},
        QWEN3.names,
        by_whole_or_tied,
        sees=eyes_lighton,
    ),
    family_within(
        "llama4",
        "Llama4ForConditionalGeneration",
        {"llama4_text": Text(LLAMA4.read_config)},
        LLAMA4.names,
        by_text(False),
        sees=eyes_llama4,
    ),
    family_within(
        "llava onevision",
        "LlavaOnevisionForConditionalGeneration",
        {"qwen2": Text(QWEN2_FAMILY.read_config, QWEN2)},
        QWEN2_FAMILY.names,
        by_either,
        sees=eyes_onevision,
    ),
    family_within(
        "aria",
        "AriaForConditionalGeneration",
        {"aria_text": Text(read_aria, ARIA)},
        ARIA_NAMES,
        by_whole,
    ),
    family_within(
        "cohere compass",
        "CohereCompassForConditionalGeneration",
        {"cohere_compass_text": Text(read_compass)},
        NAMES,
        by_whole,
    ),
    family_within(
        "kimi k2.5",
        ("Kimi_K25ForConditionalGeneration", "KimiK25ForConditionalGeneration"),
        dict.fromkeys(("deepseek_v3", "kimi_k2"), Text(DEEPSEEK3.read_config)),
        DEEPSEEK3.names,
        by_text(False),
        more_layers=True,
        sees=moonvit.eyes,
    ),
)
