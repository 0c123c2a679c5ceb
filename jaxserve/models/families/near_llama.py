"""Families that differ from Llama in one thing each. ERNIE 4.5 and Helium rotate pairs of neighbouring channels.
Arcee's MLP squares ReLUs and has no gate. CWM has a window on three of four layers."""

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
from jaxserve.models.families.shared import KINDS, read_activation, read_sliding, windows_of
from jaxserve.models.rope import read_rope
from jaxserve.models.spec import ModelConfig

CWM_ROPE = {  # assumed if the config has no rope_scaling
    "rope_type": "llama3",
    "rope_theta": 1e6,
    "factor": 16.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
}


def _read_ernie(hf: HFConfig) -> ModelConfig:
    hf.expect("compression_ratio", 1.0)
    norm = read_norm(hf, 1e-5)
    bias = bool(hf.take("use_bias", False))
    max_position = read_max_position(hf, 131072)
    rope = read_rope(hf, max_position, theta=500000.0, interleaved=True)
    attention = read_attention(hf, head_dim=128, kv_heads=2, qkv_bias=bias, out_bias=bias)
    layers = uniform_layers(hf, attention, read_mlp(hf, bias=bias), norm=norm)
    shared = read_shared(hf, tied=True, norm=norm, max_position=max_position, ropes={"default": rope})
    return ModelConfig(family="ernie4_5", layers=layers, **shared)


def _read_helium(hf: HFConfig) -> ModelConfig:
    norm = read_norm(hf, 1e-8)
    max_position = read_max_position(hf, 4096)
    rope = read_rope(hf, max_position, theta=100000.0, interleaved=True)
    attention = read_attention(hf, head_dim=128, qkv_bias=bool(hf.take("attention_bias", False)))
    layers = uniform_layers(hf, attention, read_mlp(hf, bias=bool(hf.take("mlp_bias", False))), norm=norm)
    shared = read_shared(hf, norm=norm, max_position=max_position, ropes={"default": rope})
    return ModelConfig(family="helium", layers=layers, **shared)


def _read_arcee(hf: HFConfig) -> ModelConfig:
    norm = read_norm(hf, 1e-5)
    bias = bool(hf.take("attention_bias", False))
    activation = read_activation(hf, "relu2")
    mlp = read_mlp(hf, gated=False, bias=bool(hf.take("mlp_bias", False)), activation=activation)
    layers = uniform_layers(hf, read_attention(hf, qkv_bias=bias, out_bias=bias), mlp, norm=norm)
    return ModelConfig(family="arcee", layers=layers, **read_shared(hf, longest=4096, norm=norm))


def _read_cwm(hf: HFConfig) -> ModelConfig:
    norm = read_norm(hf, 1e-5)
    count = hf.take("num_hidden_layers")
    hf.values.setdefault("layer_types", [KINDS[i % 4 > 0] for i in range(count)])
    windows = windows_of(read_sliding(hf, 4), hf.take("sliding_window", 8192))
    mlp = read_mlp(hf, bias=bool(hf.take("mlp_bias", False)))
    layers = uniform_layers(hf, read_attention(hf, head_dim=128, kv_heads=8), mlp, windows, norm=norm)
    max_position = read_max_position(hf, 131072)
    rope = read_rope(hf, max_position, absent=CWM_ROPE, theta=1e6)
    shared = read_shared(hf, norm=norm, max_position=max_position, ropes={"default": rope})
    return ModelConfig(family="cwm", layers=layers, **shared)


FAMILIES = (
    Family("ernie4_5", ("Ernie4_5ForCausalLM", "Ernie4_5_ForCausalLM"), _read_ernie, NAMES, IGNORED),
    Family("helium", ("HeliumForCausalLM",), _read_helium, NAMES, IGNORED),
    Family("arcee", ("ArceeForCausalLM",), _read_arcee, NAMES, IGNORED),
    Family("cwm", ("CwmForCausalLM",), _read_cwm, NAMES, IGNORED),
)
