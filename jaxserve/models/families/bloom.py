"""BLOOM: biases by distance in the place of positions, a norm of embeddings, and a fused projection of queries, keys
and values."""

from __future__ import annotations

import math

from jaxserve.models.config import HFConfig
from jaxserve.models.families import Family
from jaxserve.models.families.llama import (
    IGNORED,
    read_attention,
    read_layer_norm,
    read_mlp,
    read_shared,
    uniform_layers,
)
from jaxserve.models.families.shared import named
from jaxserve.models.rope import DISTANCES
from jaxserve.models.spec import ModelConfig

LAYER = "transformer.h.{i}"
NAMES = {"embed.weight": "transformer.word_embeddings.weight", "head.weight": "lm_head.weight"} | named(
    embed_norm="transformer.word_embeddings_layernorm",
    attention_norm=f"{LAYER}.input_layernorm",
    mlp_norm=f"{LAYER}.post_attention_layernorm",
    qkv_grouped=f"{LAYER}.self_attention.query_key_value",
    o=f"{LAYER}.self_attention.dense",
    up=f"{LAYER}.mlp.dense_h_to_4h",
    down=f"{LAYER}.mlp.dense_4h_to_h",
    norm="transformer.ln_f",
)
# Of training, and of how transformers and Megatron compute.
UNREAD = (
    "attention_softmax_in_fp32", "bias_dropout_fusion", "masked_softmax_fusion", "n_inner", "offset_alibi",
    "skip_bias_add", "skip_bias_add_qkv", "slow_but_exact",
)  # fmt: skip


def slopes(heads: int) -> tuple[float, ...]:
    """The slopes of biases by distance. Where the heads are no power of two, those beyond the power below get slopes
    that lie between the others."""
    power = 2 ** math.floor(math.log2(heads))
    steps = [8 * (i + 1) / power for i in range(power)]
    between = [4 * (2 * i + 1) / power for i in range(heads - power)]
    return tuple(2.0**-step for step in steps + between)


def _read(hf: HFConfig) -> ModelConfig:
    hf.rename(n_layer="num_hidden_layers", n_head="num_attention_heads", n_embed="hidden_size")
    hf.ignore(*UNREAD)
    hf.expect("apply_residual_connection_post_layernorm", False)
    norm = read_layer_norm(hf, "layer_norm_epsilon")
    heads = hf.take("num_attention_heads")
    attention = read_attention(hf, qkv_bias=True, out_bias=True, alibi=slopes(heads))
    size = 4 * hf.take("hidden_size")
    mlp = read_mlp(hf, size=size, gated=False, bias=True, activation="gelu_tanh")
    longest = hf.take("seq_length", 2048)  # of training; biases by distance have no limit
    shared = read_shared(hf, tied=True, norm=norm, max_position=longest, ropes={"default": DISTANCES})
    layers = uniform_layers(hf, attention, mlp, norm=norm)
    return ModelConfig(family="bloom", layers=layers, embed_norm=norm, **shared)


FAMILY = Family("bloom", ("BloomForCausalLM",), _read, NAMES, IGNORED, layouts=({"transformer.": ""},))
