"""Gemma 3, text: Gemma 2 with norms of queries and keys instead of caps. Five of six layers have a window, and a rotary
base of their own."""

from __future__ import annotations

from dataclasses import replace

from jaxserve.models.config import HFConfig
from jaxserve.models.families import Family
from jaxserve.models.families.gemma import read_gemma_mlp
from jaxserve.models.families.gemma2 import SANDWICH_NAMES, read_cap
from jaxserve.models.families.llama import (
    IGNORED,
    read_attention,
    read_max_position,
    read_norm,
    read_shared,
    uniform_layers,
)
from jaxserve.models.families.shared import read_ropes, read_sliding, windows_of
from jaxserve.models.spec import ModelConfig, QKNormSpec


def read_gemma3(hf: HFConfig) -> ModelConfig:
    hf.expect("use_bidirectional_attention", False)
    bias = bool(hf.take("attention_bias", False))
    max_position = read_max_position(hf, 131072)
    norm = read_norm(hf, offset=1.0)
    window = hf.take("sliding_window", 4096)
    sliding = read_sliding(hf, 6)
    attention = read_attention(
        hf,
        head_dim=256,
        kv_heads=4,
        scale=hf.take("query_pre_attn_scalar", 256) ** -0.5,
        softcap=read_cap(hf, "attn_logit_softcapping", None),
        qk_norm=QKNormSpec(norm=norm),
        qkv_bias=bias,
        out_bias=bias,
    )
    windows = windows_of(sliding, window)
    ropes = ["sliding" if slides else "full" for slides in sliding]
    # Here max_position_embeddings is the length after stretching. In older models with linear scaling it is before.
    of_kinds = {
        name: replace(rope, original_max_position=int(max_position / rope.factor))
        for name, rope in read_ropes(hf, max_position, theta=1e6, local_theta=1e4).items()
    }
    return ModelConfig(
        family="gemma3",
        layers=uniform_layers(hf, attention, read_gemma_mlp(hf), windows, ropes, norm=norm, residual="sandwich"),
        embed_scale=hf.take("hidden_size") ** 0.5,
        logit_softcap=read_cap(hf, "final_logit_softcapping", None),
        **read_shared(hf, tied=True, norm=norm, max_position=max_position, ropes=of_kinds),
    )


FAMILY = Family("gemma3", ("Gemma3ForCausalLM",), read_gemma3, SANDWICH_NAMES, IGNORED)
