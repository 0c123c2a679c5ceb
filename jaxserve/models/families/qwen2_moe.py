"""Qwen2-MoE: Qwen2 with experts in all or some layers, beside a shared MLP that has a sigmoid gate."""

from dataclasses import replace
from typing import Any

from jaxserve.models.config import HFConfig
from jaxserve.models.families import Family
from jaxserve.models.families.llama import (
    IGNORED,
    NAMES,
    read_attention,
    read_mlp,
    read_shared,
    read_windows,
    uniform_layers,
)
from jaxserve.models.families.shared import read_activation
from jaxserve.models.spec import ExpertsSpec, LayerSpec, MLPSpec, ModelConfig
from jaxserve.pallas_kernels.expert_routing import Router

MLP = "model.layers.{i}.mlp"
EXPERTS = {
    "router.weight": f"{MLP}.gate.weight",
    **{f"expert_{role}.weight": f"{MLP}.experts.{{e}}.{role}_proj.weight" for role in ("gate", "up", "down")},
}
# As transformers 5 keeps experts, and as some files have them: one stack for gates and ups, and one for downs.
STACKED = {
    "expert_gate_up.weight": f"{MLP}.experts.{{e}}.gate_up_proj",
    "expert_fused_down.weight": f"{MLP}.experts.{{e}}.down_proj",
}
QWEN2_MOE_NAMES = (
    NAMES
    | EXPERTS
    | {
        "shared_expert_gate.weight": f"{MLP}.shared_expert_gate.weight",
        **{f"shared_{role}.weight": f"{MLP}.shared_expert.{role}_proj.weight" for role in ("gate", "up", "down")},
    }
)


def read_experts(hf: HFConfig, **choices: Any) -> MLPSpec:
    """The mixture that Qwen's configs describe. `choices` are further fields of ExpertsSpec."""
    normalized = bool(hf.take("norm_topk_prob", False))
    router = Router(top_k=hf.take("num_experts_per_tok"), normalized=normalized)
    # transformers 5 writes the number of Qwen3-MoE's experts as num_local_experts.
    written = hf.take("num_local_experts", None)
    count = hf.take("num_experts") if written is None else hf.take("num_experts", written)
    experts = ExpertsSpec(count=count, router=router, **choices)
    return MLPSpec(size=hf.take("moe_intermediate_size"), activation=read_activation(hf, "silu"), experts=experts)


def with_experts(hf: HFConfig, layers: tuple[LayerSpec, ...], mixture: MLPSpec) -> tuple[LayerSpec, ...]:
    """The layers, with the mixture in every `decoder_sparse_step`-th layer, except those in `mlp_only_layers`."""
    step = hf.take("decoder_sparse_step", 1)
    dense = set(hf.take("mlp_only_layers", None) or [])
    return tuple(
        replace(layer, mlp=mixture) if i not in dense and (i + 1) % step == 0 else layer
        for i, layer in enumerate(layers)
    )


def _read_windows(hf: HFConfig) -> list[int | None]:
    """The window of each layer. If windows are used, every other layer before `max_window_layers` has one, beginning
    with the first."""
    windows = read_windows(hf, used=bool(hf.take("use_sliding_window", False)))
    hf.ignore("max_window_layers")
    if hf.take("layer_types", None) is not None:
        return windows
    end = hf.take("max_window_layers", 28)
    return [window if i % 2 == 0 and i < end else None for i, window in enumerate(windows)]


def _read(hf: HFConfig) -> ModelConfig:
    attention = read_attention(hf, qkv_bias=bool(hf.take("qkv_bias", True)))
    layers = uniform_layers(hf, attention, read_mlp(hf), _read_windows(hf))
    mixture = read_experts(hf, shared_size=hf.take("shared_expert_intermediate_size"), shared_gate=True)
    layers = with_experts(hf, layers, mixture)
    return ModelConfig(family="qwen2_moe", layers=layers, **read_shared(hf, longest=32768))


FAMILY = Family("qwen2_moe", ("Qwen2MoeForCausalLM",), _read, QWEN2_MOE_NAMES, IGNORED)
