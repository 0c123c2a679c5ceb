"""The language models of Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3-VL-MoE, which are Qwen2, Qwen3 and Qwen3-MoE."""

from __future__ import annotations

from jaxserve.models.config import HFConfig
from jaxserve.models.families.qwen2 import FAMILY as QWEN2
from jaxserve.models.families.qwen2_moe import STACKED
from jaxserve.models.families.qwen3 import FAMILY as QWEN3
from jaxserve.models.families.qwen3_moe import FAMILY as QWEN3_MOE
from jaxserve.models.families.within import Text, by_either, by_whole, family_within
from jaxserve.models.spec import ModelConfig
from jaxserve.models.vision.qwen import eyes_2, eyes_2_5, eyes_3

# The values that transformers assumes for keys that a text_config does not have.
VL_2 = {
    "vocab_size": 152064, "hidden_size": 8192, "intermediate_size": 29568, "num_hidden_layers": 80,
    "num_attention_heads": 64, "num_key_value_heads": 8, "max_window_layers": 80, "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
}  # fmt: skip
VL_3 = {
    "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 32, "max_position_embeddings": 128000, "rope_theta": 5e5,
}  # fmt: skip
VL_3_MOE = {
    "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24,
    "num_attention_heads": 16, "num_key_value_heads": 16, "max_position_embeddings": 128000, "rope_theta": 5e5,
    "num_experts_per_tok": 4, "moe_intermediate_size": 1408,
}  # fmt: skip


def _read_2(hf: HFConfig) -> ModelConfig:
    hf.expect("head_dim", hf.take("hidden_size") // hf.take("num_attention_heads"))
    return QWEN2.read_config(hf)


def _read_3_moe(hf: HFConfig) -> ModelConfig:
    hf.values["norm_topk_prob"] = True  # whatever the file says, as in transformers
    hf.values.setdefault("num_experts", hf.take("num_local_experts", 60))
    return QWEN3_MOE.read_config(hf)


FAMILIES = (
    family_within(
        "qwen2_vl",
        "Qwen2VLForConditionalGeneration",
        {"qwen2_vl_text": Text(_read_2, VL_2)},
        QWEN2.names,
        by_either,
        flat=True,
        sees=eyes_2,
    ),
    family_within(
        "qwen2_5_vl",
        "Qwen2_5_VLForConditionalGeneration",
        {"qwen2_5_vl_text": Text(_read_2, VL_2)},
        QWEN2.names,
        by_either,
        flat=True,
        sees=eyes_2_5,
    ),
    family_within(
        "qwen3_vl",
        "Qwen3VLForConditionalGeneration",
        {"qwen3_vl_text": Text(QWEN3.read_config, VL_3)},
        QWEN3.names,
        by_whole,
        sees=eyes_3,
    ),
    family_within(
        "qwen3_vl_moe",
        "Qwen3VLMoeForConditionalGeneration",
        {"qwen3_vl_moe_text": Text(_read_3_moe, VL_3_MOE)},
        {**QWEN3_MOE.names, **STACKED, "expert_gate_up.floats": "either"},  # transposed in published files
        by_whole,
        sees=eyes_3,
    ),
)
