"""LFM2-MoE: LFM2 with experts in all layers but the first few."""

from __future__ import annotations

from jaxserve.models.config import HFConfig
from jaxserve.models.families import Family
from jaxserve.models.families.lfm2 import LAYER, LFM2_NAMES, read_lfm2
from jaxserve.models.families.llama import IGNORED
from jaxserve.models.spec import ExpertsSpec, LayerSpec, MLPSpec, ModelConfig
from jaxserve.pallas_kernels.expert_routing import Router

EXPERT = f"{LAYER}.feed_forward.experts.{{e}}"
NAMES = LFM2_NAMES | {
    "router.weight": f"{LAYER}.feed_forward.gate.weight",
    "correction": f"{LAYER}.feed_forward.expert_bias",
    "expert_gate.weight": f"{EXPERT}.w1.weight",
    "expert_up.weight": f"{EXPERT}.w3.weight",
    "expert_down.weight": f"{EXPERT}.w2.weight",
}


def _read(hf: HFConfig) -> ModelConfig:
    router = Router(
        top_k=hf.take("num_experts_per_tok", 4),
        score="sigmoid",
        normalized=bool(hf.take("norm_topk_prob", True)),
        sum_offset=1e-6,
        scale=float(hf.take("routed_scaling_factor", 1.0)),
        corrected=bool(hf.take("use_expert_bias", True)),
    )
    experts = ExpertsSpec(count=hf.take("num_experts", 32), router=router)
    mixture = MLPSpec(size=hf.take("moe_intermediate_size", 1792), experts=experts)
    dense = MLPSpec(size=hf.take("intermediate_size", 7168))
    first = hf.take("num_dense_layers", 2)
    specs, norm, shared = read_lfm2(hf)
    layers = tuple(
        LayerSpec(attention=spec, mlp=dense if i < first else mixture, norm=norm) for i, spec in enumerate(specs)
    )
    return ModelConfig(family="lfm2_moe", layers=layers, **shared)


FAMILY = Family("lfm2_moe", ("Lfm2MoeForCausalLM",), _read, NAMES, IGNORED)
