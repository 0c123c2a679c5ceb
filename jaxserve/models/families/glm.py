"""GLM-4-9B (GlmForCausalLM): half of each head rotated, in pairs of neighbours; biases on queries, keys and values;
gate and up fused. GLM-4-0414 (Glm4ForCausalLM) also has norms after attention and MLP."""

from __future__ import annotations

from functools import partial

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
from jaxserve.models.families.shared import read_activation
from jaxserve.models.rope import read_rope
from jaxserve.models.spec import ModelConfig, Residual

GLM_NAMES = NAMES | {"gate_up.weight": "model.layers.{i}.mlp.gate_up_proj.weight"}
GLM4_NAMES = GLM_NAMES | {
    "attention_out_norm.weight": "model.layers.{i}.post_self_attn_layernorm.weight",
    "mlp_out_norm.weight": "model.layers.{i}.post_mlp_layernorm.weight",
}


def _read(family: str, residual: Residual, hf: HFConfig) -> ModelConfig:
    norm = read_norm(hf, 1.5625e-07)
    attention = read_attention(hf, head_dim=128, kv_heads=2, qkv_bias=bool(hf.take("attention_bias", True)))
    max_position = read_max_position(hf, 131072)
    rope = read_rope(hf, max_position, partial=0.5, head_dim=128, interleaved=True)
    mlp = read_mlp(hf, activation=read_activation(hf, "silu"))
    layers = uniform_layers(hf, attention, mlp, norm=norm, residual=residual)
    shared = read_shared(hf, norm=norm, max_position=max_position, ropes={"default": rope})
    return ModelConfig(family=family, layers=layers, **shared)


FAMILIES = (
    Family("glm", ("GlmForCausalLM",), partial(_read, "glm", "pre"), GLM_NAMES, IGNORED),
    Family("glm4", ("Glm4ForCausalLM",), partial(_read, "glm4", "sandwich"), GLM4_NAMES, IGNORED),
)
