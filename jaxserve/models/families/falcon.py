"""Falcon: LayerNorms, attention and MLP in parallel on one norm (7B, 11B) or on two norms (40B, 180B), and a fused
projection of queries, keys and values. Falcon 3 is read as Llama."""

from __future__ import annotations

from jaxserve.models.config import HFConfig
from jaxserve.models.families import Family
from jaxserve.models.families.llama import (
    IGNORED,
    read_attention,
    read_layer_norm,
    read_max_position,
    read_mlp,
    read_shared,
    uniform_layers,
)
from jaxserve.models.families.shared import named, read_activation
from jaxserve.models.rope import read_rope
from jaxserve.models.sources import Names
from jaxserve.models.spec import ModelConfig, Residual

LAYER = "transformer.h.{i}"
NAMES = {"embed.weight": "transformer.word_embeddings.weight", "head.weight": "lm_head.weight"} | named(
    attention_norm=f"{LAYER}.input_layernorm",
    mlp_norm=f"{LAYER}.post_attention_layernorm",
    qkv_grouped=f"{LAYER}.self_attention.query_key_value",
    o=f"{LAYER}.self_attention.dense",
    up=f"{LAYER}.mlp.dense_h_to_4h",
    down=f"{LAYER}.mlp.dense_4h_to_h",
    norm="transformer.ln_f",
)


def _variant(config: ModelConfig) -> Names:
    if config.layers[0].residual != "parallel_two_norms":
        return {}
    return named(attention_norm=f"{LAYER}.ln_attn", mlp_norm=f"{LAYER}.ln_mlp")


def _read(hf: HFConfig) -> ModelConfig:
    hf.rename(
        n_embed="hidden_size", n_layer="num_hidden_layers", n_head="num_attention_heads", n_head_kv="num_kv_heads"
    )
    hf.rename(num_kv_heads="num_key_value_heads", ffn_hidden_size="intermediate_size", activation="hidden_act")
    hf.ignore("ff_factor")  # ffn_hidden_size says the same
    hf.expect("alibi", False)
    hf.expect("apply_residual_connection_post_layernorm", False)
    new = hf.take("new_decoder_architecture", False)
    parallel = hf.take("parallel_attn", True)
    several = hf.take("multi_query", True)
    heads = hf.take("num_attention_heads")
    hidden = hf.take("hidden_size")
    own = hf.take("num_key_value_heads", heads)
    hf.values["num_key_value_heads"] = own if new else 1 if several else heads
    norms = hf.take("num_ln_in_parallel_attn", 2 if new else 1)
    residual: Residual = "pre"
    if new or parallel:
        residual = "parallel_two_norms" if new and norms == 2 else "parallel"
    norm = read_layer_norm(hf, "layer_norm_epsilon")
    bias = bool(hf.take("bias", False))
    size = hf.take("intermediate_size", None) or 4 * hidden
    mlp = read_mlp(hf, size=size, gated=False, bias=bias, activation=read_activation(hf, "gelu"))
    return ModelConfig(
        family="falcon",
        layers=uniform_layers(hf, read_attention(hf, qkv_bias=bias, out_bias=bias), mlp, norm=norm, residual=residual),
        **read_shared(hf, tied=True, norm=norm, ropes={"default": read_rope(hf, read_max_position(hf))}),
    )


FAMILY = Family("falcon", ("FalconForCausalLM", "RWForCausalLM"), _read, NAMES, IGNORED, variant=_variant)
