"""Qwen3.5: Qwen3-Next, with the projections of its gated delta nets in other tensors. All layers are dense, or all have
experts, whose weights the router always divides by their sum."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxserve.models.config import HFConfig
from jaxserve.models.families import Family
from jaxserve.models.families.llama import IGNORED, read_mlp
from jaxserve.models.families.qwen2_moe import STACKED, read_experts
from jaxserve.models.families.qwen3_next import DELTA, HYBRID_NAMES, read_hybrid
from jaxserve.models.spec import MLPSpec, ModelConfig

QWEN3_5_NAMES = (
    HYBRID_NAMES
    | STACKED
    | {f"delta_{part}.weight": f"{DELTA}.in_proj_{part}.weight" for part in ("qkv", "z", "b", "a")}
)
# Published models also see, and files that transformers writes for their text keep the names of the whole.
LAYOUTS = ({"model.": "model.language_model."},)
UNREAD = ("mtp.", "model.visual.")  # layers that predict further tokens, and the encoder of images
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
    return Family(name, (architecture,), read, QWEN3_5_NAMES, IGNORED, layouts=LAYOUTS, unread=UNREAD)


FAMILIES = (
    _family("qwen3_5", "Qwen3_5ForCausalLM", _read_dense),
    _family("qwen3_5_moe", "Qwen3_5MoeForCausalLM", _read_mixture),
)
