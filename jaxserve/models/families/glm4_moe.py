"""GLM-4.5: dense layers, then experts with DeepSeek-V3's router beside shared experts; half of each head is rotated."""

from __future__ import annotations

from typing import Any

from jaxserve.models.config import HFConfig
from jaxserve.models.families import Family
from jaxserve.models.families.deepseek import MTP
from jaxserve.models.families.llama import (
    IGNORED,
    NAMES,
    read_attention,
    read_max_position,
    read_mlp,
    read_norm,
    read_shared,
    uniform_layers,
)
from jaxserve.models.families.qwen2_moe import EXPERTS, MLP
from jaxserve.models.rope import read_rope
from jaxserve.models.spec import ExpertsSpec, LayerSpec, MLPSpec, ModelConfig, QKNormSpec
from jaxserve.pallas_kernels.expert_routing import Router

SHARED = {f"shared_{role}.weight": f"{MLP}.shared_experts.{role}_proj.weight" for role in ("gate", "up", "down")}
DEEPSEEK_MOE_NAMES = EXPERTS | SHARED | {"correction": f"{MLP}.gate.e_score_correction_bias"}


def read_deepseek_experts(hf: HFConfig, dense: MLPSpec, **choices: Any) -> MLPSpec:
    """The mixture that DeepSeek-V3's keys describe. `choices` are fields of the Router that differ from V3's."""
    usual: dict[str, Any] = {
        "score": "sigmoid",
        "corrected": True,
        "group_score": "top2",
        "normalized": bool(hf.take("norm_topk_prob", True)),
        "scale": float(hf.take("routed_scaling_factor", 1.0)),
        "groups": hf.take("n_group", 1),
        "top_groups": hf.take("topk_group", 1),
    }
    router = Router(top_k=hf.take("num_experts_per_tok"), **usual | choices)
    size = hf.take("moe_intermediate_size")
    shared = size * (hf.take("n_shared_experts", None) or 0)
    experts = ExpertsSpec(count=hf.take("n_routed_experts"), router=router, shared_size=shared)
    return MLPSpec(size=size, activation=dense.activation, experts=experts)


def _read(hf: HFConfig) -> ModelConfig:
    norm = read_norm(hf, 1e-5)
    qk_norm = QKNormSpec(norm=norm) if hf.take("use_qk_norm", False) else None
    attention = read_attention(hf, kv_heads=8, qk_norm=qk_norm, qkv_bias=bool(hf.take("attention_bias", False)))
    dense = read_mlp(hf)
    first = hf.take("first_k_dense_replace", 1)
    mixture = read_deepseek_experts(hf, dense)
    layers = tuple(
        LayerSpec(attention=layer.attention, mlp=dense if i < first else mixture, norm=norm)
        for i, layer in enumerate(uniform_layers(hf, attention, dense, norm=norm))
    )
    max_position = read_max_position(hf, 131072)
    rope = read_rope(hf, max_position, partial=0.5)
    hf.ignore("num_nextn_predict_layers")  # layers that predict further tokens are not read
    shared = read_shared(hf, norm=norm, max_position=max_position, ropes={"default": rope})
    return ModelConfig(family="glm4_moe", layers=layers, **shared)


FAMILY = Family(
    "glm4_moe", ("Glm4MoeForCausalLM",), _read, NAMES | DEEPSEEK_MOE_NAMES, IGNORED, more_layers=True, mtp=MTP
)
