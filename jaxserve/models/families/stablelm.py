"""StableLM 2 and 3B: Llama with LayerNorms, and part of each head rotated. Larger models norm each head by itself, and
have attention and MLP in parallel."""

from __future__ import annotations

from jaxserve.models.config import HFConfig
from jaxserve.models.families import Family
from jaxserve.models.families.llama import (
    IGNORED,
    NAMES,
    read_attention,
    read_layer_norm,
    read_max_position,
    read_mlp,
    read_shared,
    uniform_layers,
)
from jaxserve.models.families.shared import named, read_activation
from jaxserve.models.rope import read_rope
from jaxserve.models.spec import ModelConfig, QKNormSpec, Residual

LAYER = "model.layers.{i}"
STABLELM_NAMES = NAMES | named(
    attention_norm=f"{LAYER}.input_layernorm",
    mlp_norm=f"{LAYER}.post_attention_layernorm",
    q_norm=f"{LAYER}.self_attn.q_layernorm.norms.{{h}}",
    k_norm=f"{LAYER}.self_attn.k_layernorm.norms.{{h}}",
    norm="model.norm",
)


def _read(hf: HFConfig) -> ModelConfig:
    hf.rename(rope_pct="partial_rotary_factor", norm_eps="layer_norm_eps")
    norm = read_layer_norm(hf)
    of_heads = QKNormSpec(norm=read_layer_norm(hf, bias=False), over="each_head")
    qk_norm = of_heads if hf.take("qk_layernorm", False) else None
    attention = read_attention(hf, qkv_bias=bool(hf.take("use_qkv_bias", False)), qk_norm=qk_norm)
    residual: Residual = "parallel" if hf.take("use_parallel_residual", False) else "pre"
    mlp = read_mlp(hf, activation=read_activation(hf, "silu"))
    max_position = read_max_position(hf, 4096)
    rope = read_rope(hf, max_position, partial=0.25)
    layers = uniform_layers(hf, attention, mlp, norm=norm, residual=residual)
    shared = read_shared(hf, norm=norm, max_position=max_position, ropes={"default": rope})
    return ModelConfig(family="stablelm", layers=layers, **shared)


ARCHITECTURES = ("StableLmForCausalLM", "StableLMEpochForCausalLM")
FAMILY = Family("stablelm", ARCHITECTURES, _read, STABLELM_NAMES, IGNORED)
