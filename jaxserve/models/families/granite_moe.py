"""Granite-MoE: Granite 3 with experts, whose weights are stacked in the files. GraniteMoeShared has a shared MLP beside
them."""

from __future__ import annotations

from dataclasses import replace

from jaxserve.models.config import HFConfig
from jaxserve.models.families import Family
from jaxserve.models.families.granite import read_granite
from jaxserve.models.families.llama import IGNORED, NAMES
from jaxserve.models.spec import ExpertsSpec, ModelConfig
from jaxserve.pallas_kernels.expert_routing import Router

MOE = "model.layers.{i}.block_sparse_moe"
GRANITE_MOE_NAMES = NAMES | {
    "router.weight": f"{MOE}.router.layer.weight",
    "expert_gate_up.weight": f"{MOE}.{{e}}.input_linear.weight",
    "expert_fused_down.weight": f"{MOE}.{{e}}.output_linear.weight",
}
SHARED = {
    "shared_gate_up.weight": "model.layers.{i}.shared_mlp.input_linear.weight",
    "shared_down.weight": "model.layers.{i}.shared_mlp.output_linear.weight",
}


def read_mixture(hf: HFConfig, family: str = "granite_moe", shared: int = 0) -> ModelConfig:
    """A model with experts in all layers, beside a shared MLP of this inner size; 0: there is none."""
    dense = read_granite(hf, family)
    router = Router(top_k=hf.take("num_experts_per_tok", 2))
    experts = ExpertsSpec(count=hf.take("num_local_experts", 8), router=router, shared_size=shared)
    (mlp,) = set(dense.mlps)
    return replace(dense, layers=tuple(replace(layer, mlp=replace(mlp, experts=experts)) for layer in dense.layers))


def _read_shared(hf: HFConfig) -> ModelConfig:
    return read_mixture(hf, "granite_moe_shared", hf.take("shared_intermediate_size", 0))


FAMILIES = (
    Family("granite_moe", ("GraniteMoeForCausalLM",), read_mixture, GRANITE_MOE_NAMES, IGNORED),
    Family("granite_moe_shared", ("GraniteMoeSharedForCausalLM",), _read_shared, GRANITE_MOE_NAMES | SHARED, IGNORED),
)
