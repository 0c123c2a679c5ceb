"""Persimmon: LayerNorms, biases, squared ReLUs, LayerNorms of queries and keys, and half of each head rotated."""

from __future__ import annotations

from jaxserve.models.config import HFConfig
from jaxserve.models.families import Family
from jaxserve.models.families.llama import (
    IGNORED,
    read_attention,
    read_layer_norm,
    read_max_position,
    read_mlp,
    read_shared,
    uniform_layers,
)
from jaxserve.models.families.shared import named, read_activation
from jaxserve.models.rope import read_rope
from jaxserve.models.spec import ModelConfig, QKNormSpec

LAYER = "model.layers.{i}"
PERSIMMON_NAMES = {"embed.weight": "model.embed_tokens.weight", "head.weight": "lm_head.weight"} | named(
    attention_norm=f"{LAYER}.input_layernorm",
    mlp_norm=f"{LAYER}.post_attention_layernorm",
    qkv_grouped=f"{LAYER}.self_attn.query_key_value",
    o=f"{LAYER}.self_attn.dense",
    q_norm=f"{LAYER}.self_attn.q_layernorm",
    k_norm=f"{LAYER}.self_attn.k_layernorm",
    up=f"{LAYER}.mlp.dense_h_to_4h",
    down=f"{LAYER}.mlp.dense_4h_to_h",
    norm="model.final_layernorm",
)


def _read(hf: HFConfig) -> ModelConfig:
    norm = read_layer_norm(hf)
    qk_norm = QKNormSpec(norm=norm) if hf.take("qk_layernorm", True) else None
    hf.ignore("num_key_value_heads")  # each head has keys and values of its own
    hf.values.pop("num_key_value_heads", None)
    attention = read_attention(hf, qkv_bias=True, out_bias=True, qk_norm=qk_norm)
    mlp = read_mlp(hf, gated=False, bias=True, activation=read_activation(hf, "relu2"))
    max_position = read_max_position(hf, 16384)
    rope = read_rope(hf, max_position, partial=0.5)
    return ModelConfig(
        family="persimmon",
        layers=uniform_layers(hf, attention, mlp, norm=norm),
        **read_shared(hf, norm=norm, max_position=max_position, ropes={"default": rope}),
    )


FAMILY = Family("persimmon", ("PersimmonForCausalLM",), _read, PERSIMMON_NAMES, IGNORED)
