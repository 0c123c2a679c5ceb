"""gpt-oss: experts with biases and a clamped gate, sinks, and a window on every other layer."""

from __future__ import annotations

from jaxserve.models.config import HFConfig
from jaxserve.models.families import Family
from jaxserve.models.families.llama import (
    IGNORED,
    NAMES,
    read_attention,
    read_max_position,
    read_norm,
    read_shared,
    uniform_layers,
)
from jaxserve.models.families.shared import read_sliding, windows_of
from jaxserve.models.rope import read_rope
from jaxserve.models.spec import ExpertsSpec, MLPSpec, ModelConfig
from jaxserve.pallas_kernels.expert_routing import Router
from jaxserve.pallas_kernels.ops import CLAMPED_ALPHA

MLP = "model.layers.{i}.mlp"
GPT_OSS_NAMES = NAMES | {
    "sinks": "model.layers.{i}.self_attn.sinks",
    "router.weight": f"{MLP}.router.weight",
    "router.bias": f"{MLP}.router.bias",
    "expert_gate_up.weight": f"{MLP}.experts.{{e}}.gate_up_proj",
    "expert_gate_up.bias": f"{MLP}.experts.{{e}}.gate_up_proj_bias",
    "expert_gate_up.rows": "in turns",
    "expert_gate_up.floats": "transposed",
    "expert_fused_down.weight": f"{MLP}.experts.{{e}}.down_proj",
    "expert_fused_down.bias": f"{MLP}.experts.{{e}}.down_proj_bias",
}
THETA = 150000.0
YARN = {  # assumed if the config has no rope_scaling
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def _read(hf: HFConfig) -> ModelConfig:
    hf.expect("swiglu_alpha", CLAMPED_ALPHA)
    # The activation is fixed, and rope_scaling says the same as initial_context_length.
    hf.ignore("hidden_act", "initial_context_length")
    top_k = hf.take("num_experts_per_tok", None) or hf.take("experts_per_token", 4)
    hf.expect("experts_per_token", top_k)
    bias = bool(hf.take("attention_bias", True))
    attention = read_attention(hf, head_dim=64, kv_heads=8, qkv_bias=bias, out_bias=bias, sinks=True)
    limit = float(hf.take("swiglu_limit", 7.0))
    experts = ExpertsSpec(count=hf.take("num_local_experts", 128), router=Router(top_k=top_k), router_bias=True)
    mlp = MLPSpec(size=hf.take("intermediate_size"), bias=True, limit=limit, experts=experts)
    windows = windows_of(read_sliding(hf, 2), hf.take("sliding_window", 128))
    norm = read_norm(hf, 1e-5)
    max_position = read_max_position(hf, 131072)
    rope = read_rope(hf, max_position, theta=THETA, absent=YARN)
    shared = read_shared(hf, norm=norm, max_position=max_position, ropes={"default": rope})
    return ModelConfig(family="gpt_oss", layers=uniform_layers(hf, attention, mlp, windows, norm=norm), **shared)


FAMILY = Family("gpt_oss", ("GptOssForCausalLM",), _read, GPT_OSS_NAMES, IGNORED)
