"""HyperCLOVA X: Granite's multipliers, where logits are multiplied, and norms before and after attention and MLP."""

from __future__ import annotations

from dataclasses import replace

from jaxserve.models.config import HFConfig
from jaxserve.models.families import Family
from jaxserve.models.families.llama import IGNORED, NAMES, read_attention, read_mlp, read_shared, uniform_layers
from jaxserve.models.spec import ModelConfig

LAYER = "model.layers.{i}"
OUT_NORMS = {
    "attention_out_norm.weight": f"{LAYER}.post_norm1.weight",
    "mlp_out_norm.weight": f"{LAYER}.post_norm2.weight",
}


def _read(hf: HFConfig) -> ModelConfig:
    bias = bool(hf.take("attention_bias", False))
    attention = read_attention(hf, qkv_bias=bias, out_bias=bias)
    return ModelConfig(
        family="hyperclovax",
        layers=uniform_layers(
            hf,
            replace(attention, scale=hf.take("attention_multiplier", attention.softmax_scale)),
            read_mlp(hf, bias=bool(hf.take("mlp_bias", False))),
            residual="sandwich" if hf.take("use_post_norm", True) else "pre",
            residual_scale=hf.take("residual_multiplier", 1.0),
        ),
        embed_scale=hf.take("embedding_multiplier", 1.0),
        logit_scale=hf.take("logits_scaling", 1.0),
        **read_shared(hf),
    )


FAMILY = Family("hyperclovax", ("HyperCLOVAXForCausalLM",), _read, NAMES | OUT_NORMS, IGNORED)
