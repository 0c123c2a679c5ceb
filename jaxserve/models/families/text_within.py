"""Language models within models that see or hear, of whose pictures and sounds nothing is read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jaxserve.config import ConfigError
from jaxserve.models.config import HFConfig
from jaxserve.models.families import Family
from jaxserve.models.families.cohere import FAMILIES as COHERE
from jaxserve.models.families.exaone4 import FAMILIES as EXAONE4
from jaxserve.models.families.glm import FAMILIES as GLM
from jaxserve.models.families.granite import FAMILY as GRANITE
from jaxserve.models.families.llama import FAMILY as LLAMA
from jaxserve.models.families.mistral import read_mistral
from jaxserve.models.families.qwen2 import FAMILY as QWEN2_FAMILY
from jaxserve.models.families.qwen2_moe import STACKED
from jaxserve.models.families.qwen3_5 import FAMILIES as QWEN3_5
from jaxserve.models.families.qwen3_moe import FAMILY as QWEN3_MOE
from jaxserve.models.families.within import (
    LLAMA1,
    MISTRAL,
    QWEN2,
    Reader,
    Text,
    by_either,
    by_whole,
    by_whole_or_tied,
    family_within,
)
from jaxserve.models.spec import ModelConfig

# Settings of pictures and sounds that other models that see do not have.
OF_OTHERS = (
    "visual_indicator_token_ids", "downsample_rate", "deepstack_layer_map", "spatial_vision_layer",
    "spatial_target_layers", "qformer_config", "projector_dropout", "insert_layer_id", "drop_vision_last_layer",
    "downsample_mode", "merge_kernel_size", "merger_times", "position_id_per_seconds", "seconds_per_chunk",
    "audio_start_token_id", "audio_end_token_id", "user_token_id", "audio_token_index", "hidden_size", "vocab_size",
    "image_size", "patch_size", "vision_token_id",
)  # fmt: skip
# Of models that also speak.
OF_SPEECH = (
    "talker_config", "token2wav_config", "code2wav_config", "enable_audio_output", "enable_talker", "im_start_token_id",
    "im_end_token_id", "tts_pad_token_id", "tts_bos_token_id", "tts_eos_token_id", "tts_text_bos_token_id",
    "tts_text_eos_token_id", "tts_text_pad_token_id", "system_token_id", "user_token_id", "assistant_token_id",
)  # fmt: skip
SPEAKING = ("talker.", "token2wav.", "code2wav.")
# The values that transformers assumes for keys that a text_config does not have.
COHERE2 = {
    "vocab_size": 256000, "hidden_size": 8192, "intermediate_size": 22528, "num_hidden_layers": 40,
    "num_attention_heads": 64,
}  # fmt: skip
EXAONE = {
    "vocab_size": 102400, "hidden_size": 4096, "intermediate_size": 16384, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 32,
}  # fmt: skip
GLM_OCR = {
    "vocab_size": 59392, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 16,
    "num_attention_heads": 16, "num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
    "partial_rotary_factor": 1.0,
}  # fmt: skip
PADDLE = {
    "vocab_size": 103424, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 18,
    "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 131072,
    "rope_theta": 5e5, "rms_norm_eps": 1e-5,
}  # fmt: skip
OMNI_2 = {
    "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
    "num_attention_heads": 28, "num_key_value_heads": 4, "max_window_layers": 28, "sliding_window": 32768,
    "max_position_embeddings": 32768, "rope_theta": 1e6,
}  # fmt: skip
OMNI_3 = {
    "vocab_size": 3584, "hidden_size": 2048, "intermediate_size": 18944, "num_hidden_layers": 28,
    "num_attention_heads": 28, "num_key_value_heads": 4, "max_position_embeddings": 32768, "rope_theta": 1e6,
    "num_experts_per_tok": 8, "num_experts": 128, "moe_intermediate_size": 768, "norm_topk_prob": True,
}  # fmt: skip
VOXTRAL = {
    "vocab_size": 131072, "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 30,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
    "rope_theta": 1e8, "head_dim": 128,
}  # fmt: skip


def _text(name: str, architecture: str | tuple[str, ...], *given: Any, **choices: Any) -> Family:
    """As `family_within`, with the further settings of pictures and sounds."""
    family = family_within(name, architecture, *given, **choices)

    def read(hf: HFConfig) -> ModelConfig:
        hf.ignore(*OF_OTHERS)
        return family.read_config(hf)

    return replace(family, read_config=read, unread=(*family.unread, *(f"model.{part}" for part in MORE), *MORE))


MORE = (
    "visual_embeddings_table.",
    "visual_indicator_table.",
    "layerwise_projectors.",
    "spatial_projectors.",
    "merger.",
    "mlp_AR.",
)


def _speaking(family: Family) -> Family:
    """The family, also in files of a model that speaks, whose text is that of its `thinker`."""

    def read(hf: HFConfig) -> ModelConfig:
        if (thinker := hf.take("thinker_config", None)) is None:
            return family.read_config(hf)
        if not isinstance(thinker, dict):
            raise ConfigError(f"{hf.source}: thinker_config must be a JSON object, got {thinker!r:.80}")
        hf.ignore(*OF_SPEECH)
        of_whole = {key: hf.take(key, None) for key in ("dtype", "torch_dtype", "eos_token_id")}
        given = {key: value for key, value in of_whole.items() if value is not None}
        inner = HFConfig({**thinker, **given}, f"{hf.source}: thinker_config")
        config = family.read_config(inner)
        inner.finish()
        return config

    begin = {"model.": "thinker.model.", "lm_head.": "thinker.lm_head."}
    inside = tuple(f"thinker.{part}" for part in family.unread)
    return replace(
        family, read_config=read, layouts=(*family.layouts, begin), unread=(*family.unread, *inside, *SPEAKING)
    )


def _read_glm_ocr(hf: HFConfig) -> ModelConfig:
    hf.values["attention_bias"] = False  # whatever the file says, as in transformers
    hf.values.setdefault("head_dim", hf.take("hidden_size") // hf.take("num_attention_heads"))
    return _without_next(GLM[1].read_config)(hf)


def _without_next(read: Reader) -> Reader:
    """Reads a model whose layers that predict further tokens are not read."""

    def without(hf: HFConfig) -> ModelConfig:
        hf.ignore("num_nextn_predict_layers")
        return read(hf)

    return without


def _read_omni_3(hf: HFConfig) -> ModelConfig:
    hf.expect("use_qk_norm", True)
    for key in ("rope_scaling", "rope_parameters"):
        if isinstance(given := hf.values.get(key), dict):  # as mrope_interleaved, which newer files have
            hf.values[key] = {name: value for name, value in given.items() if name != "interleaved"}
    return QWEN3_MOE.read_config(hf)


def _read_paddle(hf: HFConfig) -> ModelConfig:
    hf.values["attention_bias"] = hf.values["mlp_bias"] = bool(hf.take("use_bias", False))
    return LLAMA.read_config(hf)


FAMILIES = (
    _text("aya vision", "AyaVisionForConditionalGeneration", {"cohere2": Text(COHERE[1].read_config, COHERE2)},
          COHERE[1].names, by_whole_or_tied),
    _text("cohere2 vision", "Cohere2VisionForConditionalGeneration", {"cohere2": Text(COHERE[1].read_config, COHERE2)},
          COHERE[1].names, by_whole_or_tied),
    _text(
        "llava next",
        "LlavaNextForConditionalGeneration",
        {
            "llama": Text(LLAMA.read_config, LLAMA1),
            "mistral": Text(read_mistral, MISTRAL),
            "qwen2": Text(QWEN2_FAMILY.read_config, QWEN2),
        },
        QWEN2_FAMILY.names,
        by_either,
    ),
    _text(
        "exaone4.5",
        "Exaone4_5_ForConditionalGeneration",
        dict.fromkeys(("exaone4", "exaone4_5_text"), Text(_without_next(EXAONE4[0].read_config), EXAONE)),
        EXAONE4[0].names,
        by_whole,
    ),
    _text("ovis2", "Ovis2ForConditionalGeneration", {"qwen2": Text(QWEN2_FAMILY.read_config, QWEN2)},
          QWEN2_FAMILY.names, by_whole_or_tied),
    _text("granite4 vision", "Granite4VisionForConditionalGeneration",
          dict.fromkeys(("granite4_vision_text", "granite"), Text(GRANITE.read_config, LLAMA1)),
          GRANITE.names, by_whole),
    _text("glm ocr", "GlmOcrForConditionalGeneration", {"glm_ocr_text": Text(_read_glm_ocr, GLM_OCR)},
          GLM[1].names, by_either, more_layers=True),
    _text("paddleocr vl", "PaddleOCRVLForConditionalGeneration", {"paddleocr_vl_text": Text(_read_paddle, PADDLE)},
          LLAMA.names, by_whole_or_tied, flat=True),
    _text("minicpm v4.6", "MiniCPMV4_6ForConditionalGeneration", {"qwen3_5_text": Text(QWEN3_5[0].read_config)},
          QWEN3_5[0].names, by_whole),
    _text("voxtral", "VoxtralForConditionalGeneration", {"llama": Text(LLAMA.read_config, VOXTRAL)},
          LLAMA.names, by_either),
    _text("qwen2 audio", "Qwen2AudioForConditionalGeneration", {"qwen2": Text(QWEN2_FAMILY.read_config, QWEN2)},
          QWEN2_FAMILY.names, by_either),
    _speaking(
        _text(
            "qwen2.5 omni",
            ("Qwen2_5OmniThinkerForConditionalGeneration", "Qwen2_5OmniForConditionalGeneration", "Qwen2_5OmniModel"),
            {"qwen2_5_omni_text": Text(QWEN2_FAMILY.read_config, OMNI_2)},
            QWEN2_FAMILY.names,
            by_whole,
        )
    ),
    _speaking(
        _text(
            "qwen3 omni",
            ("Qwen3OmniMoeThinkerForConditionalGeneration", "Qwen3OmniMoeForConditionalGeneration"),
            {"qwen3_omni_moe_text": Text(_read_omni_3, OMNI_3)},
            {**QWEN3_MOE.names, **STACKED},
            by_whole,
        )
    ),
)  # fmt: skip
