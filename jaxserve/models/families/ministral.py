"""Ministral 8B: Mistral with a window on some layers. Ministral 3: YaRN, and a scale of queries that grows with the
position."""

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
    read_windows,
    uniform_layers,
)
from jaxserve.models.rope import read_rope, rope_settings
from jaxserve.models.spec import ModelConfig, QueryScale


def _read(hf: HFConfig) -> ModelConfig:
    layers = uniform_layers(hf, read_attention(hf, kv_heads=8), read_mlp(hf), read_windows(hf, used=True))
    return ModelConfig(family="ministral", layers=layers, **read_shared(hf, longest=131072))


DEFAULT = {
    "rope_type": "yarn",
    "rope_theta": 1000000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def read_ministral3(hf: HFConfig) -> ModelConfig:
    max_position = read_max_position(hf, 262144)
    parameters = rope_settings(hf) or dict(DEFAULT)
    if parameters.get("max_position_embeddings") == max_position:
        del parameters["max_position_embeddings"]
    slope = parameters.pop("llama_4_scaling_beta", None)
    period = parameters.get("original_max_position_embeddings") or max_position
    scale = QueryScale(slope=slope, period=period) if slope else None
    rope = read_rope(hf, max_position, parameters=parameters, query_scale=scale)
    norm = read_norm(hf, 1e-5)
    window = hf.take("sliding_window", None)
    hf.ignore("layer_types")
    windows = [window] * hf.take("num_hidden_layers")
    layers = uniform_layers(hf, read_attention(hf, head_dim=128, kv_heads=8), read_mlp(hf), windows, norm=norm)
    return ModelConfig(
        family="ministral3",
        layers=layers,
        **read_shared(hf, norm=norm, max_position=max_position, ropes={"default": rope}),
    )


FAMILIES = (
    Family("ministral", ("MinistralForCausalLM",), _read, NAMES, IGNORED),
    Family("ministral3", ("Ministral3ForCausalLM",), read_ministral3, NAMES, IGNORED),
)
