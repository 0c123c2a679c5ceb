"""Hunyuan 3: Qwen3's attention; behind the first layer experts with a sigmoid router and a correction bias, beside
shared ones."""

from __future__ import annotations

from jaxserve.models.config import HFConfig
from jaxserve.models.families import Family
from jaxserve.models.families.deepseek import read_dense
from jaxserve.models.families.glm4_moe import with_mixture
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
from jaxserve.models.spec import ExpertsSpec, MLPSpec, ModelConfig, QKNormSpec
from jaxserve.pallas_kernels.expert_routing import Router

HY_NAMES = (
    NAMES
    | EXPERTS
    | {
        "router.weight": f"{MLP}.router.gate.weight",
        "correction": f"{MLP}.expert_bias",
        **{f"shared_{role}.weight": f"{MLP}.shared_mlp.{role}_proj.weight" for role in ("gate", "up", "down")},
    }
)


def _read(hf: HFConfig) -> ModelConfig:
    hf.expect("mlp_bias", False)
    hf.ignore("enable_moe_fp32_combine")  # a matter of rounding
    bias = bool(hf.take("attention_bias", False))
    norm = read_norm(hf, 1e-5)
    qk_norm = QKNormSpec(norm=norm)
    attention = read_attention(hf, head_dim=128, kv_heads=8, qk_norm=qk_norm, qkv_bias=bias, out_bias=bias)
    dense = read_mlp(hf)
    scale = float(hf.take("router_scaling_factor", 2.826))
    router = Router(top_k=hf.take("num_experts_per_tok", 8), score="sigmoid", corrected=True, scale=scale)
    size = hf.take("moe_intermediate_size", 1536)
    shared_size = size * hf.take("num_shared_experts", 1)
    experts = ExpertsSpec(count=hf.take("num_experts", 192), router=router, shared_size=shared_size)
    mixture = MLPSpec(size=size, activation=dense.activation, experts=experts)
    layers = with_mixture(uniform_layers(hf, attention, dense, norm=norm), mixture, read_dense(hf, 1))
    max_position = read_max_position(hf, 131072)
    rope = read_rope(hf, max_position, theta=11158840.0)
    shared = read_shared(hf, norm=norm, max_position=max_position, ropes={"default": rope})
    return ModelConfig(family="hy_v3", layers=layers, **shared)


# A layer behind the last one predicts further tokens; it is not read.
FAMILY = Family("hy_v3", ("HYV3ForCausalLM",), _read, HY_NAMES, IGNORED, more_layers=True)
