"""Lara Mini: two of five layers are gated delta nets, two have windows and rotary positions, and one sees all tokens
without positions. All have experts beside a shared one."""

from __future__ import annotations

from dataclasses import replace

from jaxserve.config import ConfigError
from jaxserve.models.config import HFConfig
from jaxserve.models.families import Family
from jaxserve.models.families.llama import IGNORED, read_attention, read_max_position, read_norm, read_shared
from jaxserve.models.families.qwen2_moe import STACKED, read_experts
from jaxserve.models.families.qwen3_next import DELTA, HYBRID_NAMES
from jaxserve.models.rope import UNTURNED, read_rope
from jaxserve.models.spec import AttentionSpec, GatedDeltaSpec, LayerSpec, ModelConfig, QKNormSpec

LARA_NAMES = (
    HYBRID_NAMES
    | STACKED
    | {
        "delta_in.weight": f"{DELTA}.in_proj.weight",
        "delta_norm.weight": f"{DELTA}.out_norm.weight",
    }
)
TYPES = ("linear_attention", "sliding_attention", "linear_attention", "full_attention", "sliding_attention")


def _kinds(hf: HFConfig) -> list[str]:
    """The kind of each layer."""
    count = hf.take("num_hidden_layers")
    kinds = hf.take("layer_types", None) or [TYPES[i % len(TYPES)] for i in range(count)]
    if len(kinds) != count or set(kinds) - set(TYPES):
        raise ConfigError(f"{hf.source}: layer_types must be {count} of {sorted(set(TYPES))}, got {kinds!r:.80}")
    return list(kinds)


def _read(hf: HFConfig) -> ModelConfig:
    for key, usual in (("num_experts_per_tok", 4), ("norm_topk_prob", True), ("moe_intermediate_size", 512)):
        hf.values.setdefault(key, usual)
    if "num_local_experts" not in hf.values:
        hf.values.setdefault("num_experts", 128)
    norm = read_norm(hf)
    bias = bool(hf.take("attention_bias", False))
    mixture = read_experts(hf, shared_size=hf.take("shared_expert_intermediate_size", 512))
    attention = read_attention(
        hf, head_dim=128, kv_heads=4, qk_norm=QKNormSpec(norm=norm), qkv_bias=bias, out_bias=bias, rope="none"
    )
    delta = GatedDeltaSpec(
        key_heads=hf.take("linear_num_key_heads", 8),
        value_heads=hf.take("linear_num_value_heads", 16),
        key_dim=hf.take("linear_key_head_dim", 128),
        value_dim=hf.take("linear_value_head_dim", 128),
        conv_width=hf.take("linear_conv_kernel_dim", 4),
        activation=mixture.activation,
        norm=norm,
    )
    of_kind: dict[str, AttentionSpec | GatedDeltaSpec] = {
        "linear_attention": delta,
        "full_attention": attention,
        "sliding_attention": replace(attention, window=hf.take("sliding_window", 512), rope="turned"),
    }
    layers = tuple(LayerSpec(attention=of_kind[kind], mlp=mixture, norm=norm) for kind in _kinds(hf))
    max_position = read_max_position(hf, 131072)
    ropes = {"turned": read_rope(hf, max_position), "none": UNTURNED}
    shared = read_shared(hf, tied=True, norm=norm, max_position=max_position, ropes=ropes)
    return ModelConfig(family="lara", layers=layers, **shared)


FAMILY = Family("lara", ("LaraMiniForCausalLM",), _read, LARA_NAMES, IGNORED)
