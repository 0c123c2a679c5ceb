"""Gemma 2: Gemma with norms before and after attention and MLP, soft caps, and a window on every second layer.
VaultGemma: the same without the norms behind attention and MLP."""

from __future__ import annotations

from functools import partial

from jaxserve.models.config import HFConfig
from jaxserve.models.families import Family
from jaxserve.models.families.gemma import read_gemma_mlp
from jaxserve.models.families.llama import IGNORED, NAMES, read_attention, read_norm, read_shared, uniform_layers
from jaxserve.models.families.shared import read_sliding, windows_of
from jaxserve.models.spec import ModelConfig, Residual

SANDWICH_NAMES = NAMES | {
    "attention_out_norm.weight": "model.layers.{i}.post_attention_layernorm.weight",
    "mlp_norm.weight": "model.layers.{i}.pre_feedforward_layernorm.weight",
    "mlp_out_norm.weight": "model.layers.{i}.post_feedforward_layernorm.weight",
}


def read_cap(hf: HFConfig, key: str, default: float | None) -> float | None:
    """A soft cap; null in the config turns it off, and a missing key means the default."""
    return hf.take(key, None if key in hf.values else default)


def _read(hf: HFConfig, family: str = "gemma2", residual: Residual = "sandwich") -> ModelConfig:
    hf.expect("use_bidirectional_attention", False)
    bias = bool(hf.take("attention_bias", False))
    norm = read_norm(hf, offset=1.0)
    window = hf.take("sliding_window", 4096)
    attention = read_attention(
        hf,
        head_dim=256,
        kv_heads=4,
        scale=hf.take("query_pre_attn_scalar", 256) ** -0.5,
        softcap=read_cap(hf, "attn_logit_softcapping", 50.0),
        qkv_bias=bias,
        out_bias=bias,
    )
    hf.expect("sliding_window_size", window)
    windows = windows_of(read_sliding(hf, 2), window)
    return ModelConfig(
        family=family,
        layers=uniform_layers(hf, attention, read_gemma_mlp(hf), windows, norm=norm, residual=residual),
        embed_scale=hf.take("hidden_size") ** 0.5,
        logit_softcap=read_cap(hf, "final_logit_softcapping", 30.0),
        **read_shared(hf, tied=True, longest=8192, norm=norm),
    )


FAMILIES = (
    Family("gemma2", ("Gemma2ForCausalLM",), _read, SANDWICH_NAMES, IGNORED),
    Family(
        "vaultgemma",
        ("VaultGemmaForCausalLM",),
        partial(_read, family="vaultgemma", residual="pre"),
        NAMES | {"mlp_norm.weight": SANDWICH_NAMES["mlp_norm.weight"]},
        IGNORED,
    ),
)
