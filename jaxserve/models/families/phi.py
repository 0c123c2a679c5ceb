"""Phi-1, Phi-1.5 and Phi-2: LayerNorms, biases everywhere, attention and MLP in parallel on one norm, part of each head
rotated."""

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
NAMES = {"embed.weight": "model.embed_tokens.weight"} | named(
    attention_norm=f"{LAYER}.input_layernorm",
    **{role: f"{LAYER}.self_attn.{role}_proj" for role in "qkv"},
    o=f"{LAYER}.self_attn.dense",
    q_norm=f"{LAYER}.self_attn.q_layernorm",
    k_norm=f"{LAYER}.self_attn.k_layernorm",
    up=f"{LAYER}.mlp.fc1",
    down=f"{LAYER}.mlp.fc2",
    norm="model.final_layernorm",
    head="lm_head",
)


def _read(hf: HFConfig) -> ModelConfig:
    norm = read_layer_norm(hf)
    qk_norm = QKNormSpec(norm=norm) if hf.take("qk_layernorm", False) else None
    attention = read_attention(hf, qkv_bias=True, out_bias=True, qk_norm=qk_norm)
    mlp = read_mlp(hf, gated=False, bias=True, activation=read_activation(hf, "gelu_new"))
    rope = read_rope(hf, read_max_position(hf), partial=0.5)
    return ModelConfig(
        family="phi",
        layers=uniform_layers(hf, attention, mlp, norm=norm, residual="parallel"),
        head_bias=True,
        **read_shared(hf, norm=norm, ropes={"default": rope}),
    )


FAMILY = Family("phi", ("PhiForCausalLM",), _read, NAMES, IGNORED)
