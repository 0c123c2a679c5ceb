"""OLMo 1: Llama with LayerNorms without scale and bias. OLMo 2: norms after attention and MLP; a norm over all queries
of a token, and one over all its keys. OLMo 3: windows on three of four layers; only the fourth stretches positions."""

from __future__ import annotations

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
from jaxserve.models.families.shared import read_activation, read_ropes, read_sliding, windows_of
from jaxserve.models.spec import AttentionSpec, ModelConfig, NormSpec, QKNormSpec

POST_NAMES = NAMES | {
    "attention_out_norm.weight": "model.layers.{i}.post_attention_layernorm.weight",
    "mlp_out_norm.weight": "model.layers.{i}.post_feedforward_layernorm.weight",
}


def _read_first(hf: HFConfig) -> ModelConfig:
    bias = bool(hf.take("attention_bias", False))
    norm = NormSpec(kind="layer", eps=1e-5, scale=False)
    attention = read_attention(hf, clip=hf.take("clip_qkv", None), qkv_bias=bias, out_bias=bias)
    mlp = read_mlp(hf, activation=read_activation(hf, "silu"))
    return ModelConfig(
        family="olmo", layers=uniform_layers(hf, attention, mlp, norm=norm), **read_shared(hf, norm=norm)
    )


def _attention(hf: HFConfig) -> AttentionSpec:
    bias = bool(hf.take("attention_bias", False))
    return read_attention(hf, qk_norm=QKNormSpec(norm=read_norm(hf, 1e-5), over="width"), qkv_bias=bias, out_bias=bias)


def _read_second(hf: HFConfig) -> ModelConfig:
    norm = read_norm(hf, 1e-5)
    mlp = read_mlp(hf, activation=read_activation(hf, "silu"))
    layers = uniform_layers(hf, _attention(hf), mlp, norm=norm, residual="post")
    return ModelConfig(family="olmo2", layers=layers, **read_shared(hf, norm=norm))


def _read_third(hf: HFConfig) -> ModelConfig:
    norm = read_norm(hf, 1e-5)
    mlp = read_mlp(hf, activation=read_activation(hf, "silu"))
    sliding = read_sliding(hf, 4)
    windows = windows_of(sliding, hf.take("sliding_window", 4096))
    ropes = ["sliding" if slides else "full" for slides in sliding]
    layers = uniform_layers(hf, _attention(hf), mlp, windows, ropes, norm=norm, residual="post")
    of_kinds = read_ropes(hf, read_max_position(hf), theta=500000.0)
    return ModelConfig(family="olmo3", layers=layers, **read_shared(hf, norm=norm, ropes=of_kinds))


FAMILIES = (
    Family("olmo", ("OlmoForCausalLM",), _read_first, NAMES, IGNORED),
    Family("olmo2", ("Olmo2ForCausalLM",), _read_second, POST_NAMES, IGNORED),
    Family("olmo3", ("Olmo3ForCausalLM",), _read_third, POST_NAMES, IGNORED),
)
