"""Granite 3: Llama with multipliers of embeddings, attention scores, the results of layers, and logits."""

from __future__ import annotations

from jaxserve.models.config import HFConfig
from jaxserve.models.families import Family
from jaxserve.models.families.llama import IGNORED, NAMES, read_attention, read_mlp, read_shared, uniform_layers
from jaxserve.models.spec import ModelConfig


def read_granite(hf: HFConfig, family: str = "granite") -> ModelConfig:
    bias = bool(hf.take("attention_bias", False))
    scale = hf.take("attention_multiplier", 1.0)
    attention = read_attention(hf, scale=scale, qkv_bias=bias, out_bias=bias)
    mlp = read_mlp(hf, bias=bool(hf.take("mlp_bias", False)))
    return ModelConfig(
        family=family,
        layers=uniform_layers(hf, attention, mlp, residual_scale=hf.take("residual_multiplier", 1.0)),
        embed_scale=hf.take("embedding_multiplier", 1.0),
        logit_scale=1.0 / hf.take("logits_scaling", 1.0),
        **read_shared(hf),
    )


FAMILY = Family("granite", ("GraniteForCausalLM",), read_granite, NAMES, IGNORED)
