"""GLM-4.1V, GLM-4.5V and GLM-4.6V, whose language models are GLM-4-0414 and GLM-4.5."""

from __future__ import annotations

from jaxserve.models.config import HFConfig
from jaxserve.models.families.glm import FAMILIES as GLM
from jaxserve.models.families.glm4_moe import FAMILIES as GLM4_MOE_FAMILIES
from jaxserve.models.families.qwen2_moe import STACKED
from jaxserve.models.families.within import Text, by_either, by_whole, family_within
from jaxserve.models.sources import Names
from jaxserve.models.spec import ModelConfig
from jaxserve.models.vision.glm import eyes_dense, eyes_mixture

GLM4 = GLM[1]
GLM4_MOE = GLM4_MOE_FAMILIES[0]
# Of both language models. transformers stacks the experts of GLM-4.6V.
BOTH = {**GLM4.names, **GLM4_MOE.names, **STACKED}
FUSED = "gate_up.weight"
# The values that transformers assumes for keys that a text_config does not have.
DENSE = {
    "vocab_size": 151552, "hidden_size": 4096, "intermediate_size": 13696, "num_hidden_layers": 40,
    "num_attention_heads": 32, "max_position_embeddings": 32768, "rms_norm_eps": 1e-5, "partial_rotary_factor": 1.0,
}  # fmt: skip
MIXTURE = {
    "vocab_size": 151424, "hidden_size": 4096, "intermediate_size": 10944, "num_hidden_layers": 46,
    "num_attention_heads": 96, "max_position_embeddings": 65536, "attention_bias": True, "moe_intermediate_size": 1408,
    "num_experts_per_tok": 8, "n_shared_experts": 1, "n_routed_experts": 128,
}  # fmt: skip


def _read_dense(hf: HFConfig) -> ModelConfig:
    head_dim = hf.take("hidden_size") // hf.take("num_attention_heads")
    hf.expect("head_dim", head_dim)
    hf.values |= {"head_dim": head_dim, "attention_bias": True}
    return GLM4.read_config(hf)


def _read_mixture(hf: HFConfig) -> ModelConfig:
    hf.values["use_qk_norm"] = False  # whatever the file says, as in transformers
    return GLM4_MOE.read_config(hf)


def _fused(config: ModelConfig) -> Names:
    """The one name that GLM-4-0414 has and that GLM-4.5 must not have."""
    return {FUSED: BOTH[FUSED]} if config.family == "glm4" else {}


FAMILIES = (
    family_within(
        "glm4v",
        "Glm4vForConditionalGeneration",
        {"glm4v_text": Text(_read_dense, DENSE)},
        GLM4.names,
        by_either,
        sees=eyes_dense,
    ),
    family_within(
        "glm4v_moe",
        "Glm4vMoeForConditionalGeneration",
        {"glm4v_moe_text": Text(_read_mixture, MIXTURE)},
        GLM4_MOE.names,
        by_either,
        more_layers=True,
        sees=eyes_mixture,
    ),
    family_within(
        "glm46v",
        "Glm46VForConditionalGeneration",
        {"glm4v_text": Text(_read_dense, DENSE), "glm4v_moe_text": Text(_read_mixture, MIXTURE)},
        {role: name for role, name in BOTH.items() if role != FUSED},
        by_whole,
        more_layers=True,
        variant=_fused,
        sees=eyes_dense,
    ),
)
