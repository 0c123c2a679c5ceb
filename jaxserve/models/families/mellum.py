"""Mellum 2: Qwen3-MoE with windows on some layers, which have another rotary base."""

from __future__ import annotations

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
from jaxserve.models.families.qwen2_moe import EXPERTS, read_experts
from jaxserve.models.families.shared import read_ropes, read_sliding, windows_of
from jaxserve.models.spec import ModelConfig, QKNormSpec


def _read(hf: HFConfig) -> ModelConfig:
    # Layers that predict further tokens are not read.
    hf.ignore("num_mtp_layers", "num_nextn_predict_layers", "mtp_layer_types", "mtp_mlp_layer_types")
    for key, usual in (("num_experts_per_tok", 8), ("moe_intermediate_size", 896), ("norm_topk_prob", True)):
        hf.values.setdefault(key, usual)
    if "num_local_experts" not in hf.values:
        hf.values.setdefault("num_experts", 64)
    norm = read_norm(hf)
    bias = bool(hf.take("attention_bias", False))
    qk_norm = QKNormSpec(norm=norm)
    attention = read_attention(hf, head_dim=128, kv_heads=4, qk_norm=qk_norm, qkv_bias=bias, out_bias=bias)
    sliding = read_sliding(hf, 1) if hf.take("layer_types", None) else [False] * hf.take("num_hidden_layers")
    windows = windows_of(sliding, hf.take("sliding_window", None if "sliding_window" in hf.values else 1024))
    ropes = ["sliding" if slides else "full" for slides in sliding]
    plain = uniform_layers(hf, attention, read_mlp(hf), windows, ropes, norm=norm)
    max_position = read_max_position(hf, 131072)
    for key in ("rope_theta", "rope_scaling"):
        hf.expect(key)
    return ModelConfig(
        family="mellum",
        layers=with_mixture(plain, read_experts(hf), read_dense(hf, 0)),
        **read_shared(
            hf,
            norm=norm,
            max_position=max_position,
            ropes=read_ropes(hf, max_position, theta=5e5, local_theta=1e4),
        ),
    )


FAMILY = Family("mellum", ("MellumForCausalLM",), _read, NAMES | EXPERTS, IGNORED, unread=("mtp.",))
