"""Mixtral: Mistral with a mixture of experts instead of each MLP."""

from jaxserve.models.config import HFConfig
from jaxserve.models.families import Family
from jaxserve.models.families.llama import (
    IGNORED,
    NAMES,
    read_attention,
    read_max_position,
    read_mlp,
    read_norm,
    read_shared,
    read_windows,
    uniform_layers,
)
from jaxserve.models.rope import read_rope
from jaxserve.models.spec import ExpertsSpec, ModelConfig
from jaxserve.pallas_kernels.expert_routing import Router

MOE = "model.layers.{i}.block_sparse_moe"
MIXTRAL_NAMES = NAMES | {
    "router.weight": f"{MOE}.gate.weight",
    "expert_gate.weight": f"{MOE}.experts.{{e}}.w1.weight",
    "expert_up.weight": f"{MOE}.experts.{{e}}.w3.weight",
    "expert_down.weight": f"{MOE}.experts.{{e}}.w2.weight",
}


def _read(hf: HFConfig) -> ModelConfig:
    router = Router(top_k=hf.take("num_experts_per_tok", 2))
    experts = ExpertsSpec(count=hf.take("num_local_experts", 8), router=router)
    hf.values.setdefault("sliding_window", None)
    windows = read_windows(hf, used=True)
    norm = read_norm(hf, 1e-5)
    layers = uniform_layers(hf, read_attention(hf, kv_heads=8), read_mlp(hf, experts=experts), windows, norm=norm)
    max_position = read_max_position(hf, 131072)
    ropes = {"default": read_rope(hf, max_position, theta=1e6)}
    shared = read_shared(hf, norm=norm, max_position=max_position, ropes=ropes)
    return ModelConfig(family="mixtral", layers=layers, **shared)


FAMILY = Family("mixtral", ("MixtralForCausalLM",), _read, MIXTRAL_NAMES, IGNORED)
