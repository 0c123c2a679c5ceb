"""Qwen3.5: Qwen3-Next, with the projections of its gated delta nets in other tensors. All layers are dense, or all have
experts, whose weights the router always divides by their sum."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from jaxserve.models.config import HFConfig
from jaxserve.models.families import Family
from jaxserve.models.families.llama import IGNORED, read_mlp
from jaxserve.models.families.qwen2_moe import STACKED, read_experts
from jaxserve.models.families.qwen3_next import DELTA, HYBRID_NAMES, MTP, of_mtp, read_hybrid
from jaxserve.models.families.within import LAYOUTS, UNREAD, Text, by_whole, family_within
from jaxserve.models.spec import MLPSpec, ModelConfig
from jaxserve.models.vision.qwen import eyes_3_5

QWEN3_5_NAMES = (
    HYBRID_NAMES
    | STACKED
    | {f"delta_{part}.weight": f"{DELTA}.in_proj_{part}.weight" for part in ("qkv", "z", "b", "a")}
)
QWEN3_5_MTP = MTP | of_mtp(STACKED)
# Settings that have no effect.
UNUSED = ("mamba_ssm_dtype", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings")


def _read_dense(hf: HFConfig) -> ModelConfig:
    return ModelConfig(family="qwen3_5", **_fields(hf, read_mlp(hf), kv_heads=4))


def _read_mixture(hf: HFConfig) -> ModelConfig:
    hf.values["norm_topk_prob"] = True  # whatever the file says, as in transformers
    hf.ignore("mlp_only_layers", "decoder_sparse_step")
    mixture = read_experts(hf, shared_size=hf.take("shared_expert_intermediate_size"), shared_gate=True)
    return ModelConfig(family="qwen3_5_moe", **_fields(hf, mixture, kv_heads=2))


def _fields(hf: HFConfig, mlp: MLPSpec, kv_heads: int) -> dict[str, Any]:
    hf.ignore(*UNUSED)
    hf.expect("attn_output_gate", True)
    return read_hybrid(hf, mlp, kv_heads)


def _family(name: str, architecture: str, read: Callable[[HFConfig], ModelConfig]) -> Family:
    """The text alone. Its files may have the names of a model that sees."""
    return Family(
        name,
        (architecture,),
        read,
        QWEN3_5_NAMES,
        IGNORED,
        layouts=LAYOUTS,
        unread=UNREAD,
        mtp=QWEN3_5_MTP,
        mtp_normed=True,
    )


def _within(name: str, architecture: str, text: Text) -> Family:
    family = family_within(name, architecture, {f"{name}_text": text}, QWEN3_5_NAMES, by_whole, sees=eyes_3_5)
    return replace(family, mtp=QWEN3_5_MTP, mtp_normed=True)


# The values that transformers assumes for keys that a text_config does not have.
DENSE = {
    "vocab_size": 248320, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 32,
    "num_attention_heads": 16,
}  # fmt: skip
MIXTURE = {
    "vocab_size": 248320, "hidden_size": 2048, "num_hidden_layers": 40, "num_attention_heads": 16, "num_experts": 256,
    "num_experts_per_tok": 8, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
}  # fmt: skip
FAMILIES = (
    _family("qwen3_5", "Qwen3_5ForCausalLM", _read_dense),
    _family("qwen3_5_moe", "Qwen3_5MoeForCausalLM", _read_mixture),
    _within("qwen3_5", "Qwen3_5ForConditionalGeneration", Text(_read_dense, DENSE)),
    _within("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration", Text(_read_mixture, MIXTURE)),
)
