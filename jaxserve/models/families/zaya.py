"""ZAYA: attention behind convolutions and a router with a memory of layers (`models.affine`), one expert for each
token, or none."""

from __future__ import annotations

from dataclasses import replace

from jaxserve.config import ConfigError
from jaxserve.models.config import HFConfig
from jaxserve.models.families import Family
from jaxserve.models.families.llama import IGNORED, NAMES, read_attention, read_max_position, read_norm, read_shared
from jaxserve.models.families.qwen2_moe import MLP, STACKED
from jaxserve.models.families.shared import read_activation
from jaxserve.models.rope import read_rope
from jaxserve.models.spec import (
    AffineSpec,
    BesideSpec,
    ExpertsSpec,
    LayerSpec,
    MLPSpec,
    ModelConfig,
    RopeConfig,
    ShortConvSpec,
)
from jaxserve.pallas_kernels.expert_routing import Router

LAYER = "model.layers.{i}"
PROJECTION = f"{LAYER}.self_attn.qkv_proj"
ROUTER = f"{MLP}.gate"
OWN = {
    **{f"{role}.weight": f"{PROJECTION}.{role}_proj.weight" for role in "qk"},
    "v_now.weight": f"{PROJECTION}.v_proj_current.weight",
    "v_later.weight": f"{PROJECTION}.v_proj_delayed.weight",
    **{f"conv.{kind}": f"{PROJECTION}.conv_qk_depthwise.{kind}" for kind in ("weight", "bias")},
    **{f"mix.{kind}": f"{PROJECTION}.conv_qk_grouped.{kind}" for kind in ("weight", "bias")},
    "key_scale": f"{LAYER}.self_attn.qk_norm.temp",
    "input_scale": "model.input_hidden_states_scale",
    "input_bias": "model.input_hidden_states_bias",
    **{
        f"{part}_{ours}_{kind}": f"{LAYER}.post_{part}_residual_scale.{theirs}_{kind}"
        for part in ("attention", "mlp")
        for ours, theirs in (("result", "hidden_states"), ("stream", "residual"))
        for kind in ("scale", "bias")
    },
    "router.weight": f"{ROUTER}.router_mlp.out_proj.weight",
    "router_norm.weight": f"{ROUTER}.router_mlp.norm.weight",
    **{
        f"router_{ours}.{kind}": f"{ROUTER}.{theirs}.{kind}"
        for ours, theirs in (("down", "down_proj"), ("first", "router_mlp.fc1"), ("second", "router_mlp.fc2"))
        for kind in ("weight", "bias")
    },
    "correction": f"{ROUTER}.balancing_biases",
    "carried_scale": f"{ROUTER}.router_states_scale",
}
OF_LLAMA = ("embed.weight", "norm.weight", "head.weight", "attention_norm.weight", "mlp_norm.weight", "o.weight")
KINDS = {"hybrid": 5e6, "hybrid_sliding": 1e4}  # kinds of layers, and the default bases of their rotary embeddings


def _ropes(hf: HFConfig, max_position: int, kinds: set[str], head_dim: int) -> dict[str, RopeConfig]:
    nested = hf.take("rope_parameters", None) or {}
    usual = {"partial_rotary_factor": 0.5}
    of_kinds = {kind: nested.get(kind) or {"rope_theta": KINDS[kind], **usual} for kind in kinds}
    return {
        kind: read_rope(hf, max_position, parameters=own, theta=KINDS[kind], partial=1.0, head_dim=head_dim)
        for kind, own in of_kinds.items()
    }


def _read(hf: HFConfig) -> ModelConfig:
    hf.expect("attention_bias", False)
    hf.expect("num_experts_per_tok", 1)
    count = hf.take("num_hidden_layers")
    kinds = hf.take("layer_types", None) or ["hybrid"] * count
    if unknown := set(kinds) - set(KINDS):
        raise ConfigError(f"{hf.source}: layer_types {sorted(unknown)} are not supported (only {sorted(KINDS)})")
    if len(kinds) != count:
        raise ConfigError(f"{hf.source}: layer_types has {len(kinds)} entries, num_hidden_layers is {count}")
    window = hf.take("sliding_window", None)
    if "hybrid_sliding" in kinds and window is None:
        raise ConfigError(f"{hf.source} has no 'sliding_window', which layers of the kind 'hybrid_sliding' need")
    norm = read_norm(hf, 1e-5)
    widths = hf.take("cca_time0", 2), hf.take("cca_time1", 2)
    plain = read_attention(hf, head_dim=128, kv_heads=2)
    if plain.num_kv_heads * plain.head_dim % 2:
        raise ConfigError(f"{hf.source}: num_key_value_heads times head_dim must be even")
    channels = (plain.num_heads + plain.num_kv_heads) * plain.head_dim
    affine = AffineSpec(widths=widths, carried=False)
    held = ShortConvSpec(channels=widths[1] * channels + plain.num_kv_heads * plain.head_dim // 2, width=affine.width)
    size = hf.take("router_hidden_size", 256)
    if size > hf.take("hidden_size"):
        raise ConfigError(f"{hf.source}: router_hidden_size={size} must not be above hidden_size")
    router = Router(top_k=1, normalized=False, corrected=True)
    mlp = MLPSpec(
        size=hf.take("moe_intermediate_size", 2048),
        activation=read_activation(hf, "silu"),
        experts=ExpertsSpec(count=hf.take("num_experts", 16), router=router, skips=1, router_size=size),
    )

    def layer(i: int, kind: str) -> LayerSpec:
        attention = read_attention(
            hf, head_dim=128, kv_heads=2, rope=kind, window=window if kind == "hybrid_sliding" else None
        )
        own = replace(affine, carried=i > 0)
        beside = BesideSpec(recurrent=held)
        return LayerSpec(attention=attention, mlp=mlp, norm=norm, residual="affine", affine=own, beside=beside)

    max_position = read_max_position(hf, 131072)
    ropes = _ropes(hf, max_position, set(kinds), plain.head_dim)
    shared = read_shared(hf, tied=True, norm=norm, max_position=max_position, ropes=ropes)
    if (bias := bool(hf.take("lm_head_bias", False))) and shared["tie_embeddings"]:
        raise ConfigError(f"{hf.source}: lm_head_bias=True is not supported beside tie_word_embeddings=True")
    layers = tuple(layer(i, kind) for i, kind in enumerate(kinds))
    return ModelConfig(family="zaya", layers=layers, head_bias=bias, **shared)


ZAYA_NAMES = {role: NAMES[role] for role in OF_LLAMA} | STACKED | OWN | {"head.bias": "lm_head.bias"}
FAMILY = Family("zaya", ("ZayaForCausalLM",), _read, ZAYA_NAMES, IGNORED)
