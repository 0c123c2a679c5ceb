"""GPT-NeoX and Pythia: LayerNorms, biases, part of each head rotated, attention and MLP in parallel on two norms."""

from __future__ import annotations

from jaxserve.models.config import HFConfig
from jaxserve.models.families import Family
from jaxserve.models.families.llama import (
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

LAYER = "gpt_neox.layers.{i}"
NAMES = {"embed.weight": "gpt_neox.embed_in.weight", "head.weight": "embed_out.weight"} | named(
    attention_norm=f"{LAYER}.input_layernorm",
    mlp_norm=f"{LAYER}.post_attention_layernorm",
    qkv_grouped=f"{LAYER}.attention.query_key_value",
    o=f"{LAYER}.attention.dense",
    up=f"{LAYER}.mlp.dense_h_to_4h",
    down=f"{LAYER}.mlp.dense_4h_to_h",
    norm="gpt_neox.final_layer_norm",
)


def _read(hf: HFConfig) -> ModelConfig:
    hf.rename(rotary_pct="partial_rotary_factor", rotary_emb_base="rope_theta")
    max_position = read_max_position(hf)
    bias = bool(hf.take("attention_bias", True))
    norm = read_layer_norm(hf)
    mlp = read_mlp(hf, gated=False, bias=True, activation=read_activation(hf, "gelu"))
    residual = "parallel_two_norms" if hf.take("use_parallel_residual", True) else "pre"
    return ModelConfig(
        family="gpt_neox",
        layers=uniform_layers(hf, read_attention(hf, qkv_bias=bias, out_bias=bias), mlp, norm=norm, residual=residual),
        **read_shared(hf, norm=norm, ropes={"default": read_rope(hf, max_position, partial=0.25)}),
    )


IGNORED = ("rotary_emb.inv_freq", ".attention.bias", ".attention.masked_bias")
FAMILY = Family("gpt_neox", ("GPTNeoXForCausalLM",), _read, NAMES, IGNORED)
