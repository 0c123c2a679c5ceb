"""Llama 4's text model: experts whose inputs are weighted, beside a shared expert; some layers have no positions.

In layers with positions, a token sees the earlier tokens of its own chunk of `attention_chunk_size`.
"""

from __future__ import annotations

from dataclasses import replace

from jaxserve.config import ConfigError
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
    uniform_layers,
)
from jaxserve.models.rope import UNTURNED, read_rope
from jaxserve.models.spec import (
    AttentionSpec,
    ExpertsSpec,
    MLPSpec,
    ModelConfig,
    NormSpec,
    QKNormSpec,
    QueryScale,
)
from jaxserve.pallas_kernels.expert_routing import Router

MLP = "model.layers.{i}.feed_forward"
ROLES = ("gate", "up", "down")
LLAMA4_NAMES = NAMES | {
    **{f"{role}.weight": f"{MLP}.{role}_proj.weight" for role in ROLES},
    "router.weight": f"{MLP}.router.weight",
    **{f"shared_{role}.weight": f"{MLP}.shared_expert.{role}_proj.weight" for role in ROLES},
    "expert_gate_up.weight": f"{MLP}.experts.{{e}}.gate_up_proj",
    "expert_gate_up.floats": "transposed",
    "expert_fused_down.weight": f"{MLP}.experts.{{e}}.down_proj",
    # Quantized files have one tensor per expert and role.
    **{f"expert_{role}.weight": f"{MLP}.experts.{{e}}.{role}_proj.weight" for role in ROLES},
}
THETA = 500000.0


def _read(hf: HFConfig) -> ModelConfig:
    count = hf.take("num_hidden_layers")
    norm = read_norm(hf, 1e-5)
    turning = _turning(hf, count)
    max_position = read_max_position(hf, 131072)
    chunk = hf.take("attention_chunk_size", 8192 if "attention_chunk_size" not in hf.values else None)
    plain = read_mlp(hf)
    size = plain.size
    router = Router(top_k=hf.take("num_experts_per_tok", 1), score="sigmoid", normalized=False, weighs_inputs=True)
    experts = ExpertsSpec(count=hf.take("num_local_experts", 16), router=router, shared_size=size)
    mixture = replace(plain, experts=experts)
    dense = MLPSpec(size=hf.take("intermediate_size_mlp", 16384), activation=plain.activation)
    mixed = _mixed(hf, count)
    bias = bool(hf.take("attention_bias", False))
    attention = read_attention(hf, head_dim=128, kv_heads=8, qkv_bias=bias, out_bias=bias)
    qk_norm = QKNormSpec(norm=NormSpec(eps=norm.eps, scale=False), after_rope=True)
    turned = replace(attention, qk_norm=qk_norm if hf.take("use_qk_norm", True) else None)

    def attention_of(turns: bool) -> AttentionSpec:
        return replace(turned, rope="default", chunk=chunk) if turns else replace(attention, rope="none")

    layers = tuple(
        replace(layer, attention=attention_of(turning[i]), mlp=mixture if i in mixed else dense)
        for i, layer in enumerate(uniform_layers(hf, attention, plain, norm=norm))
    )
    ropes = {"default": read_rope(hf, read_max_position(hf, 131072), theta=THETA, interleaved=True)}
    ropes["none"] = replace(UNTURNED, query_scale=_query_scale(hf))
    shared = read_shared(hf, norm=norm, max_position=max_position, ropes=ropes)
    return ModelConfig(family="llama4", layers=layers, **shared)


def _turning(hf: HFConfig, count: int) -> list[bool]:
    """For each layer, whether it has rotary positions."""
    given = hf.take("no_rope_layers", None)
    hf.ignore("no_rope_layer_interval")
    if given:
        found = [bool(turns) for turns in given]
    else:
        interval = hf.take("no_rope_layer_interval", 4)
        found = [(i + 1) % interval != 0 for i in range(count)]
    types = hf.take("layer_types", None)
    if len(found) < count or (
        types and types != ["chunked_attention" if t else "full_attention" for t in found[:count]]
    ):
        raise ConfigError(f"{hf.source}: layer_types, no_rope_layers and {count} layers do not fit each other")
    return found[:count]


def _mixed(hf: HFConfig, count: int) -> set[int]:
    """The indices of the layers that have experts."""
    given = hf.take("moe_layers", None)
    hf.ignore("interleave_moe_layer_step")
    if given is not None:
        return set(given)
    step = hf.take("interleave_moe_layer_step", 1)
    return set(range(step - 1, count, step))


def _query_scale(hf: HFConfig) -> QueryScale | None:
    """The scale of queries in the layers without positions."""
    slope = hf.take("attn_scale", 0.1)
    period = hf.take("floor_scale", 8192)
    used = bool(hf.take("attn_temperature_tuning", True))
    return QueryScale(slope=float(slope), period=float(period), shift=1) if used else None


FAMILY = Family("llama4", ("Llama4ForCausalLM",), _read, LLAMA4_NAMES, IGNORED)
