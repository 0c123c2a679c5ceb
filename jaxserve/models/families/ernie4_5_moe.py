"""Ernie 4.5 with experts in some layers, beside shared experts. Softmax and a correction bias choose the experts."""

from __future__ import annotations

from jaxserve.models.config import HFConfig
from jaxserve.models.families import Family
from jaxserve.models.families.glm4_moe import SHARED
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
from jaxserve.models.spec import ExpertsSpec, LayerSpec, MLPSpec, ModelConfig
from jaxserve.pallas_kernels.expert_routing import Router

ERNIE_NAMES = NAMES | EXPERTS | SHARED | {"correction_row": f"{MLP}.moe_statics.e_score_correction_bias"}
THETA = 500000.0


def _read(hf: HFConfig) -> ModelConfig:
    hf.expect("use_bias", False)
    # Only training reads the first three. Layers that predict further tokens are not read.
    hf.ignore("moe_capacity", "moe_gate", "moe_use_aux_free", "num_nextn_predict_layers")
    hf.expect("moe_gate_act", "softmax")
    norm = read_norm(hf, 1e-5)
    dense = read_mlp(hf)
    top_k = hf.take("moe_k", None) or hf.take("num_experts_per_tok", 6)
    least = float(hf.take("moe_norm_min", 1e-12))
    router = Router(top_k=top_k, corrected=True, least_sum=least)
    size = hf.take("moe_intermediate_size")
    experts = ExpertsSpec(
        count=hf.take("moe_num_experts", None) or hf.take("num_experts", 64),
        router=router,
        shared_size=size * hf.take("moe_num_shared_experts", 2),
    )
    mixture = MLPSpec(size=size, activation=dense.activation, experts=experts)
    first, last, step = (hf.take(f"moe_layer_{key}", default) for key, default in _LAYERS.items())
    plain = uniform_layers(hf, read_attention(hf, kv_heads=4), dense, norm=norm)
    last = len(plain) - 1 if last == -1 else last
    layers = tuple(
        LayerSpec(attention=layer.attention, mlp=mixture, norm=norm)
        if first <= i <= last and (i + 1) % step == 0
        else layer
        for i, layer in enumerate(plain)
    )
    max_position = read_max_position(hf, 131072)
    rope = read_rope(hf, max_position, theta=THETA, interleaved=True)
    shared = read_shared(hf, tied=True, norm=norm, max_position=max_position, ropes={"default": rope})
    return ModelConfig(family="ernie4_5_moe", layers=layers, **shared)


_LAYERS = {"start_index": 1, "end_index": -1, "interval": 1}
# Layers that predict further tokens are not read.
_FURTHER = ("mtp_emb_norm.0.weight", "mtp_hidden_norm.0.weight", "mtp_linear_proj.0.weight")
FAMILY = Family("ernie4_5_moe", ("Ernie4_5_MoeForCausalLM",), _read, ERNIE_NAMES, (*IGNORED, *_FURTHER))
