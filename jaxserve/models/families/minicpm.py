"""MiniCPM 1, 2 and 4, dense: Llama with scaled embeddings, results of layers, and logits (arXiv:2404.06395)."""

from __future__ import annotations

from jaxserve.models.config import HFConfig
from jaxserve.models.families import Family
from jaxserve.models.families.llama import (
    IGNORED,
    NAMES,
    read_attention,
    read_mlp,
    read_norm,
    read_shared,
    uniform_layers,
)
from jaxserve.models.spec import ModelConfig


def _read(hf: HFConfig) -> ModelConfig:
    hf.expect("sparse_config")  # sparse attention for long prompts is not built
    hf.ignore("mup_denominator")  # for training only
    norm = read_norm(hf)
    bias = bool(hf.take("attention_bias", False))
    depth = hf.take("scale_depth", 1.0) / hf.take("num_hidden_layers") ** 0.5
    attention = read_attention(hf, qkv_bias=bias, out_bias=bias)
    return ModelConfig(
        family="minicpm",
        layers=uniform_layers(hf, attention, read_mlp(hf), norm=norm, residual_scale=depth),
        embed_scale=hf.take("scale_emb", 1.0),
        logit_scale=hf.take("dim_model_base", hf.take("hidden_size")) / hf.take("hidden_size"),
        **read_shared(hf, tied=True, norm=norm),
    )


FAMILY = Family("minicpm", ("MiniCPMForCausalLM",), _read, NAMES, IGNORED)
