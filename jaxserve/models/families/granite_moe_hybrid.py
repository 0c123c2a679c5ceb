"""Granite 4: Granite with Mamba-2 in most layers, a shared MLP in all, and experts beside it in most models."""

from __future__ import annotations

from dataclasses import replace

from jaxserve.config import ConfigError
from jaxserve.models.config import HFConfig
from jaxserve.models.families import Family
from jaxserve.models.families.bamba import mamba_names, mixed, read_mamba
from jaxserve.models.families.granite import read_granite
from jaxserve.models.families.granite_moe import GRANITE_MOE_NAMES
from jaxserve.models.families.llama import IGNORED
from jaxserve.models.rope import UNTURNED
from jaxserve.models.spec import AttentionSpec, ExpertsSpec, MLPSpec, ModelConfig
from jaxserve.pallas_kernels.expert_routing import Router

SHARED = "model.layers.{i}.shared_mlp"
NAMES = (
    GRANITE_MOE_NAMES
    | mamba_names("model.layers.{i}.mamba")
    | {
        "gate_up.weight": f"{SHARED}.input_linear.weight",
        "down.weight": f"{SHARED}.output_linear.weight",
        "shared_gate_up.weight": f"{SHARED}.input_linear.weight",
        "shared_down.weight": f"{SHARED}.output_linear.weight",
    }
)


def _mlp(hf: HFConfig, plain: MLPSpec) -> MLPSpec:
    """The MLP of all layers. `plain` has the size of an expert."""
    shared = hf.take("shared_intermediate_size", 1024)
    hf.ignore("num_experts_per_tok")
    count = hf.take("num_local_experts", 8)
    if count == 0:
        return replace(plain, size=shared)
    router = Router(top_k=hf.take("num_experts_per_tok", 2))
    return replace(plain, experts=ExpertsSpec(count=count, router=router, shared_size=shared))


def _read(hf: HFConfig) -> ModelConfig:
    hf.ignore("init_method", "normalization_function")  # transformers does not read them
    hf.rename(layers_block_type="layer_types")
    plain = read_granite(hf, "granite_moe_hybrid")
    kinds = hf.take("layer_types", None) or ["mamba"] * plain.num_layers
    if len(kinds) != plain.num_layers:
        raise ConfigError(f"layer_types has {len(kinds)} entries, num_hidden_layers is {plain.num_layers}")
    layer = plain.layers[0]
    assert isinstance(layer.attention, AttentionSpec)
    assert layer.mlp is not None
    specs = mixed(kinds, layer.attention, read_mamba(hf, layer.norm, layer.mlp.activation), hf.source)
    mlp = _mlp(hf, layer.mlp)
    ropes = plain.ropes if hf.take("position_embedding_type", None) == "rope" else {"default": UNTURNED}
    return replace(plain, layers=tuple(replace(layer, attention=spec, mlp=mlp) for spec in specs), ropes=ropes)


FAMILY = Family("granite_moe_hybrid", ("GraniteMoeHybridForCausalLM",), _read, NAMES, IGNORED)
