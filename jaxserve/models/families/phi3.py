"""Phi-3, Phi-3.5 and Phi-4: Llama with fused projections, LongRoPE and a window. The smallest Phi-4 rotates only a part
of each head."""

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
from jaxserve.models.rope import read_rope
from jaxserve.models.spec import ModelConfig

FUSED_NAMES = NAMES | {
    "qkv.weight": "model.layers.{i}.self_attn.qkv_proj.weight",
    "gate_up.weight": "model.layers.{i}.mlp.gate_up_proj.weight",
}


def _read(hf: HFConfig) -> ModelConfig:
    max_position = read_max_position(hf, 4096)
    window = hf.take("sliding_window", None)
    if window is not None and window >= max_position:
        window = None
    for key, only in (("full_attn_mod", 1), ("interpolate_factor", 1)):  # transformers does not read them either
        hf.expect(key, only)
    for key in ("attention_bias", "mlp_bias", "lm_head_bias"):
        hf.expect(key, False)
    norm = read_norm(hf, 1e-5)
    windows = [window] * hf.take("num_hidden_layers")
    layers = uniform_layers(hf, read_attention(hf), read_mlp(hf), windows, norm=norm)
    rope = read_rope(hf, max_position, partial=1.0)
    shared = read_shared(hf, norm=norm, max_position=max_position, ropes={"default": rope})
    return ModelConfig(family="phi3", layers=layers, **shared)


def _read_multimodal(hf: HFConfig) -> ModelConfig:
    """The language model of Phi-4 multimodal, without what its adapters for pictures and for speech add."""
    hf.ignore("vision_config", "audio_config")
    sizes = {"max_position_embeddings": 131072, "original_max_position_embeddings": 4096, "num_key_value_heads": 8}
    for key, value in (sizes | {"eos_token_id": [199999, 200020]}).items():
        hf.values.setdefault(key, value)
    return replace(_read(hf), family="phi4_multimodal")


FAMILIES = (
    Family("phi3", ("Phi3ForCausalLM",), _read, FUSED_NAMES, IGNORED),
    Family(
        "phi4_multimodal",
        ("Phi4MultimodalForCausalLM",),
        _read_multimodal,
        FUSED_NAMES,
        IGNORED,
        unread=("model.embed_tokens_extend.",),
    ),
)
