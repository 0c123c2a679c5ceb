"""Nemotron 4 and Minitron: LayerNorms that multiply by 1 + w, an MLP of squared ReLUs without a gate, half of each head
rotated. Jais 2: usual LayerNorms, the same MLP, whole heads rotated."""

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
from jaxserve.models.spec import ModelConfig

LAYER = "model.layers.{i}"
NEMOTRON_NAMES = NAMES | named(
    attention_norm=f"{LAYER}.input_layernorm", mlp_norm=f"{LAYER}.post_attention_layernorm", norm="model.norm"
)


def _read(hf: HFConfig) -> ModelConfig:
    hf.rename(rope_percent="partial_rotary_factor")
    hf.expect("kv_channels", hf.take("head_dim", None) or hf.take("kv_channels", None))
    norm = read_layer_norm(hf, "norm_eps", offset=1.0)
    bias = bool(hf.take("attention_bias", False))
    attention = read_attention(hf, head_dim=hf.take("kv_channels", None), qkv_bias=bias, out_bias=bias)
    activation = read_activation(hf, "relu2")
    mlp = read_mlp(hf, gated=False, bias=bool(hf.take("mlp_bias", False)), activation=activation)
    max_position = read_max_position(hf, 4096)
    rope = read_rope(hf, max_position, partial=0.5)
    layers = uniform_layers(hf, attention, mlp, norm=norm)
    shared = read_shared(hf, norm=norm, max_position=max_position, ropes={"default": rope})
    return ModelConfig(family="nemotron", layers=layers, **shared)


def _read_jais2(hf: HFConfig) -> ModelConfig:
    norm = read_layer_norm(hf)
    bias = bool(hf.take("attention_bias", True))
    attention = read_attention(hf, qkv_bias=bias, out_bias=bias)
    mlp = read_mlp(hf, gated=False, bias=bool(hf.take("mlp_bias", True)), activation=read_activation(hf, "relu2"))
    layers = uniform_layers(hf, attention, mlp, norm=norm)
    return ModelConfig(family="jais2", layers=layers, **read_shared(hf, longest=8192, norm=norm))


FAMILIES = (
    Family("nemotron", ("NemotronForCausalLM",), _read, NEMOTRON_NAMES, IGNORED),
    Family("jais2", ("Jais2ForCausalLM",), _read_jais2, NEMOTRON_NAMES, IGNORED),
)
