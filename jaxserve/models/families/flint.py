"""Flint: Qwen3-MoE with sinks, windows and rotary positions on most layers, and neither on the others; experts with a
sigmoid router beside a shared one."""

from __future__ import annotations

from dataclasses import replace

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
from jaxserve.models.families.qwen2_moe import QWEN2_MOE_NAMES, read_experts, with_experts
from jaxserve.models.families.shared import KINDS, read_sliding, windows_of
from jaxserve.models.rope import UNTURNED, read_rope
from jaxserve.models.spec import MLPSpec, ModelConfig, QKNormSpec

FLINT_NAMES = QWEN2_MOE_NAMES | NAMES | {"sinks": "model.layers.{i}.self_attn.softmax_offset"}


def _mixture(hf: HFConfig) -> MLPSpec:
    for key, usual in (("num_experts", 256), ("num_experts_per_tok", 6), ("moe_intermediate_size", 512)):
        hf.values.setdefault(key, usual)
    hf.values.setdefault("norm_topk_prob", True)
    mixture = read_experts(hf, shared_size=hf.take("shared_expert_intermediate_size", 1024))
    assert mixture.experts is not None
    router = replace(mixture.experts.router, score="sigmoid")
    return replace(mixture, experts=replace(mixture.experts, router=router))


def _read(hf: HFConfig) -> ModelConfig:
    hf.values.setdefault("mlp_only_layers", [0, 1])
    norm = read_norm(hf)
    bias = bool(hf.take("attention_bias", False))
    attention = read_attention(
        hf, head_dim=128, kv_heads=4, qk_norm=QKNormSpec(norm=norm), qkv_bias=bias, out_bias=bias, sinks=True
    )
    last = hf.take("num_hidden_layers") - 1
    if hf.take("layer_types", None) is None:
        hf.values["layer_types"] = [KINDS[i > 1 and i % 4 != 1 and i != last] for i in range(last + 1)]
    sliding = read_sliding(hf, 4)
    windows = windows_of(sliding, hf.take("sliding_window", 513))
    ropes = ["turned" if slides else "none" for slides in sliding]
    plain = uniform_layers(hf, attention, read_mlp(hf), windows, ropes, norm=norm)
    max_position = read_max_position(hf, 262144)
    turned = {"turned": read_rope(hf, max_position), "none": UNTURNED}
    return ModelConfig(
        family="flint",
        layers=with_experts(hf, plain, _mixture(hf)),
        **read_shared(hf, norm=norm, max_position=max_position, ropes=turned),
    )


FAMILY = Family("flint", ("FlintForCausalLM",), _read, FLINT_NAMES, IGNORED)
