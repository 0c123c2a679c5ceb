"""Laguna: attention with gates of its results by softplus, with other numbers of heads in some layers, and windows;
behind the first layer experts with a sigmoid router and a correction bias, beside a shared one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jaxserve.config import ConfigError
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
from jaxserve.models.families.shared import read_ropes, read_sliding, windows_of
from jaxserve.models.spec import AttentionSpec, ExpertsSpec, LayerSpec, MLPSpec, ModelConfig, QKNormSpec
from jaxserve.pallas_kernels.expert_routing import Router

LAGUNA_NAMES = (
    NAMES
    | EXPERTS
    | {
        "out_gate.weight": "model.layers.{i}.self_attn.g_proj.weight",
        "correction": f"{MLP}.experts.e_score_correction_bias",
        **{f"shared_{role}.weight": f"{MLP}.shared_expert.{role}_proj.weight" for role in ("gate", "up", "down")},
    }
)
ROPES: dict[str, Any] = {  # assumed if the config has no rope_parameters
    "full_attention": {"rope_type": "default", "rope_theta": 500000.0, "partial_rotary_factor": 0.5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}


def with_heads(layers: Sequence[LayerSpec], heads: Sequence[int]) -> tuple[LayerSpec, ...]:
    """The layers with these numbers of query heads."""

    def changed(layer: LayerSpec, count: int) -> LayerSpec:
        assert isinstance(layer.attention, AttentionSpec)
        return replace(layer, attention=replace(layer.attention, num_heads=count))

    return tuple(changed(layer, count) for layer, count in zip(layers, heads, strict=True))


def _mixture(hf: HFConfig, dense: MLPSpec) -> MLPSpec:
    hf.expect("moe_apply_router_weight_on_input", False)
    router = Router(
        top_k=hf.take("num_experts_per_tok", 8),
        score="sigmoid",
        softcap=hf.take("moe_router_logit_softcapping", 0.0) or None,
        scale=float(hf.take("moe_routed_scaling_factor", 1.0)),
        corrected=True,
    )
    shared = hf.take("shared_expert_intermediate_size", 512)
    experts = ExpertsSpec(count=hf.take("num_experts", 256), router=router, shared_size=shared)
    return MLPSpec(size=hf.take("moe_intermediate_size", 512), activation=dense.activation, experts=experts)


def _read(hf: HFConfig) -> ModelConfig:
    hf.expect("gating", True, "per-head", "per-element")
    norm = read_norm(hf)
    bias = bool(hf.take("attention_bias", False))
    attention = read_attention(
        hf,
        head_dim=128,
        kv_heads=8,
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=QKNormSpec(norm=norm),
        out_gate="softplus",
        gate_per_head=hf.take("gating", True) != "per-element",
    )
    sliding = read_sliding(hf, 1) if hf.take("layer_types", None) else [False] * hf.take("num_hidden_layers")
    windows = windows_of(sliding, hf.take("sliding_window", 512))
    mlp = read_mlp(hf)
    ropes = ["sliding" if slides else "full" for slides in sliding]
    plain = uniform_layers(hf, attention, mlp, windows, ropes, norm=norm)
    heads = hf.take("num_attention_heads_per_layer", None) or [attention.num_heads] * len(plain)
    if len(heads) != len(plain):
        raise ConfigError(f"num_attention_heads_per_layer has {len(heads)} entries, num_hidden_layers is {len(plain)}")
    layers = with_mixture(with_heads(plain, heads), _mixture(hf, mlp), read_dense(hf, 1))
    max_position = read_max_position(hf, 131072)
    hf.expect("rope_theta")
    hf.expect("partial_rotary_factor")
    hf.values.setdefault("rope_parameters", ROPES)
    shared = read_shared(
        hf, norm=norm, max_position=max_position, ropes=read_ropes(hf, max_position, head_dim=128, partial=1.0)
    )
    return ModelConfig(family="laguna", layers=layers, **shared)


FAMILY = Family("laguna", ("LagunaForCausalLM",), _read, LAGUNA_NAMES, IGNORED)
