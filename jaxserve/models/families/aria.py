"""The language model of Aria: Llama with experts in all layers, beside shared ones."""

from __future__ import annotations

from jaxserve.models.config import HFConfig
from jaxserve.models.families import Family
from jaxserve.models.families.glm4_moe import SHARED
from jaxserve.models.families.llama import IGNORED, NAMES, read_attention, read_mlp, read_shared, uniform_layers
from jaxserve.models.families.qwen2_moe import MLP
from jaxserve.models.spec import ExpertsSpec, ModelConfig
from jaxserve.pallas_kernels.expert_routing import Router

ARIA_NAMES = NAMES | SHARED | {
    "router.weight": f"{MLP}.router.weight",
    "expert_gate_up.weight": f"{MLP}.experts.{{e}}.fc1.weight",
    "expert_fused_down.weight": f"{MLP}.experts.{{e}}.fc2.weight",
    "expert_gate_up.floats": "transposed",
}  # fmt: skip


def read_aria(hf: HFConfig) -> ModelConfig:
    hf.expect("hidden_act", "silu")  # of shared experts; the others have it whatever the config says
    hf.expect("mlp_bias", False)
    hf.values.setdefault("intermediate_size", 4096)
    size = hf.take("intermediate_size")
    hf.expect("moe_intermediate_size", size)
    router = Router(top_k=hf.take("moe_topk", 2))
    shared = size * hf.take("moe_num_shared_experts", 2)
    experts = ExpertsSpec(count=hf.take("moe_num_experts", 8), router=router, shared_size=shared)
    bias = bool(hf.take("attention_bias", False))
    layers = uniform_layers(hf, read_attention(hf, qkv_bias=bias, out_bias=bias), read_mlp(hf, experts=experts))
    return ModelConfig(family="aria", layers=layers, **read_shared(hf))


FAMILY = Family("aria", ("AriaTextForCausalLM",), read_aria, ARIA_NAMES, IGNORED)
