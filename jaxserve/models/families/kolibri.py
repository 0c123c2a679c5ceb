"""Kolibri: norms before and after attention and experts, norms of queries and keys, and a window and rotary positions
on four of five layers. Its router compares logits, to which a correction bias is added; weights are their sigmoids."""

from __future__ import annotations

from jaxserve.models.config import HFConfig
from jaxserve.models.families import Family
from jaxserve.models.families.glm4_moe import DEEPSEEK_MOE_NAMES
from jaxserve.models.families.llama import (
    IGNORED,
    NAMES,
    read_attention,
    read_max_position,
    read_norm,
    read_shared,
    uniform_layers,
)
from jaxserve.models.families.shared import read_activation, read_sliding, windows_of
from jaxserve.models.rope import UNTURNED, read_rope
from jaxserve.models.spec import ExpertsSpec, MLPSpec, ModelConfig, QKNormSpec
from jaxserve.pallas_kernels.expert_routing import Router

LAYER = "model.layers.{i}"
KOLIBRI_NAMES = NAMES | DEEPSEEK_MOE_NAMES | {
    "correction": f"{LAYER}.moe.router.expert_bias",
    "attention_out_norm.weight": f"{LAYER}.post_attn_norm.weight",
    "mlp_out_norm.weight": f"{LAYER}.post_ffn_norm.weight",
}  # fmt: skip


def _read(hf: HFConfig) -> ModelConfig:
    hf.rename(num_local_experts="num_experts")
    norm = read_norm(hf)
    router = Router(
        top_k=hf.take("num_experts_per_tok", 6),
        score="sigmoid",
        normalized=bool(hf.take("norm_topk_prob", False)),
        corrected=True,
        by_logits=True,
    )
    shared_size = hf.take("shared_expert_intermediate_size", 512)
    experts = ExpertsSpec(count=hf.take("num_experts", 384), router=router, shared_size=shared_size)
    size = hf.take("moe_intermediate_size", 512)
    mixture = MLPSpec(size=size, activation=read_activation(hf, "silu"), experts=experts)
    window = hf.take("sliding_window", None if "sliding_window" in hf.values else 513)
    sliding = read_sliding(hf, 5)
    layers = uniform_layers(
        hf,
        read_attention(hf, head_dim=128, kv_heads=4, qk_norm=QKNormSpec(norm=norm)),
        mixture,
        windows_of(sliding, window),
        ["default" if slides or window is None else "none" for slides in sliding],
        norm=norm,
        residual="sandwich",
    )
    max_position = read_max_position(hf, 262144)
    ropes = {"default": read_rope(hf, max_position), "none": UNTURNED}
    shared = read_shared(hf, norm=norm, max_position=max_position, ropes=ropes)
    return ModelConfig(family="kolibri", layers=layers, **shared)


FAMILY = Family("kolibri", ("Kolibri1ForCausalLM",), _read, KOLIBRI_NAMES, IGNORED)
