"""GLM-4.5: dense layers, then experts with DeepSeek-V3's router beside shared experts; half of each head is rotated.
Solar Open: the same with experts in all layers, and whole heads rotated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jaxserve.models.config import HFConfig
from jaxserve.models.families import Family
from jaxserve.models.families.deepseek import MTP, read_router
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
from jaxserve.models.families.shared import read_activation
from jaxserve.models.rope import read_rope
from jaxserve.models.spec import Activation, ExpertsSpec, LayerSpec, MLPSpec, ModelConfig, QKNormSpec

SHARED = {f"shared_{role}.weight": f"{MLP}.shared_experts.{role}_proj.weight" for role in ("gate", "up", "down")}
DEEPSEEK_MOE_NAMES = EXPERTS | SHARED | {"correction": f"{MLP}.gate.e_score_correction_bias"}


def read_deepseek_experts(hf: HFConfig, activation: Activation, **choices: Any) -> MLPSpec:
    """The mixture that DeepSeek-V3's keys describe. `choices` are further arguments of `read_router`."""
    router = read_router(hf, **choices)
    size = hf.take("moe_intermediate_size")
    shared = size * (hf.take("n_shared_experts", None) or 0)
    experts = ExpertsSpec(count=hf.take("n_routed_experts"), router=router, shared_size=shared)
    return MLPSpec(size=size, activation=activation, experts=experts)


def with_mixture(layers: tuple[LayerSpec, ...], mixture: MLPSpec, dense: Sequence[bool]) -> tuple[LayerSpec, ...]:
    """The layers, with the mixture in those that are not `dense`."""
    return tuple(
        layer if is_dense else replace(layer, mlp=mixture) for layer, is_dense in zip(layers, dense, strict=True)
    )


def dense_first(hf: HFConfig, default: int) -> list[bool]:
    """For each layer, whether it is one of the first `first_k_dense_replace`."""
    first = hf.take("first_k_dense_replace", default)
    return [i < first for i in range(hf.take("num_hidden_layers"))]


def _read(hf: HFConfig) -> ModelConfig:
    norm = read_norm(hf, 1e-5)
    qk_norm = QKNormSpec(norm=norm) if hf.take("use_qk_norm", False) else None
    attention = read_attention(hf, kv_heads=8, qk_norm=qk_norm, qkv_bias=bool(hf.take("attention_bias", False)))
    dense = read_mlp(hf)
    plain = uniform_layers(hf, attention, dense, norm=norm)
    layers = with_mixture(plain, read_deepseek_experts(hf, dense.activation), dense_first(hf, 1))
    max_position = read_max_position(hf, 131072)
    rope = read_rope(hf, max_position, partial=0.5)
    hf.ignore("num_nextn_predict_layers")  # layers that predict further tokens are not read
    shared = read_shared(hf, norm=norm, max_position=max_position, ropes={"default": rope})
    return ModelConfig(family="glm4_moe", layers=layers, **shared)


def _read_solar(hf: HFConfig) -> ModelConfig:
    hf.values.setdefault("n_shared_experts", 1)
    hf.expect("first_k_dense_replace", 0)
    hf.expect("use_qk_norm", False)
    hf.ignore("intermediate_size")  # of dense layers, of which there are none
    norm = read_norm(hf, 1e-5)
    bias = bool(hf.take("attention_bias", False))
    attention = read_attention(hf, head_dim=128, kv_heads=8, qkv_bias=bias)
    mixture = read_deepseek_experts(hf, read_activation(hf, "silu"), top_k=8)
    max_position = read_max_position(hf, 131072)
    rope = read_rope(hf, max_position, theta=1e6)
    return ModelConfig(
        family="solar_open",
        layers=uniform_layers(hf, attention, mixture, norm=norm),
        **read_shared(hf, norm=norm, max_position=max_position, ropes={"default": rope}),
    )


FAMILIES = (
    Family("glm4_moe", ("Glm4MoeForCausalLM",), _read, NAMES | DEEPSEEK_MOE_NAMES, IGNORED, more_layers=True, mtp=MTP),
    Family("solar_open", ("SolarOpenForCausalLM",), _read_solar, NAMES | DEEPSEEK_MOE_NAMES, IGNORED),
)
