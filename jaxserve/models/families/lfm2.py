"""LFM2: most layers have short convolutions, the others have attention with norms of queries and keys."""

from __future__ import annotations

from typing import Any

from jaxserve.config import ConfigError
from jaxserve.models.config import HFConfig
from jaxserve.models.families import Family
from jaxserve.models.families.llama import IGNORED, NAMES, read_attention, read_max_position, read_shared
from jaxserve.models.families.shared import named
from jaxserve.models.rope import read_rope
from jaxserve.models.spec import AttentionSpec, LayerSpec, MLPSpec, ModelConfig, NormSpec, QKNormSpec, ShortConvSpec

LAYER = "model.layers.{i}"
LFM2_NAMES = NAMES | named(
    norm="model.embedding_norm",
    attention_norm=f"{LAYER}.operator_norm",
    mlp_norm=f"{LAYER}.ffn_norm",
    o=f"{LAYER}.self_attn.out_proj",
    q_norm=f"{LAYER}.self_attn.q_layernorm",
    k_norm=f"{LAYER}.self_attn.k_layernorm",
    conv_in=f"{LAYER}.conv.in_proj",
    conv=f"{LAYER}.conv.conv",
    conv_out=f"{LAYER}.conv.out_proj",
    gate=f"{LAYER}.feed_forward.w1",
    up=f"{LAYER}.feed_forward.w3",
    down=f"{LAYER}.feed_forward.w2",
)
# The first configs have these; transformers does not read them.
UNREAD = (
    "block_dim", "block_mlp_init_scale", "block_norm_eps", "block_out_init_scale", "block_use_swiglu",
    "block_use_xavier_init", "conv_dim", "conv_dim_out", "conv_use_xavier_init", "num_heads", "use_pos_enc",
)  # fmt: skip


def _types(hf: HFConfig) -> list[str]:
    """The kind of each layer: by `layer_types`; without it the layers in `full_attn_idxs` have attention, or all."""
    count = hf.take("num_hidden_layers")
    types = hf.take("layer_types", None)
    hf.ignore("full_attn_idxs")
    if types is None:
        chosen = hf.take("full_attn_idxs", None)
        types = ["full_attention" if chosen is None or i in chosen else "conv" for i in range(count)]
    if unknown := set(types) - {"full_attention", "conv"}:
        raise ConfigError(f"{hf.source}: layer_types {sorted(unknown)} are not supported (only conv, full_attention)")
    if len(types) != count:
        raise ConfigError(f"layer_types has {len(types)} entries, num_hidden_layers is {count}")
    if "full_attention" not in types:
        raise ConfigError(f"{hf.source}: models without any layer of attention are not supported")
    return types


def read_lfm2(hf: HFConfig) -> tuple[list[AttentionSpec | ShortConvSpec], NormSpec, dict[str, Any]]:
    """What all models of LFM2 have: the attention or the convolution of each layer, the norm of all layers, and the
    fields of ModelConfig beside the layers."""
    hf.rename(tie_embedding="tie_word_embeddings")
    norm = NormSpec(eps=float(hf.take("norm_eps", 1e-5)))
    attention = read_attention(hf, kv_heads=8, qk_norm=QKNormSpec(norm=norm))
    conv = ShortConvSpec(
        channels=hf.take("hidden_size"), width=hf.take("conv_L_cache", 3), bias=bool(hf.take("conv_bias", False))
    )
    max_position = read_max_position(hf, 128000)
    ropes = {"default": read_rope(hf, max_position, theta=1e6)}
    shared = read_shared(hf, tied=True, norm=norm, max_position=max_position, ropes=ropes)
    return [attention if kind == "full_attention" else conv for kind in _types(hf)], norm, shared


def _inner_size(hf: HFConfig) -> int:
    hf.rename(block_ff_dim="intermediate_size")
    size = hf.take("intermediate_size", 12288)
    hf.ignore("block_ffn_dim_multiplier", "block_multiple_of")
    if not hf.take("block_auto_adjust_ff_dim", True):
        return size
    multiple = hf.take("block_multiple_of", 256)
    size = int(hf.take("block_ffn_dim_multiplier", 1.0) * int(2 * size / 3))
    return -(-size // multiple) * multiple


def _read(hf: HFConfig) -> ModelConfig:
    hf.ignore(*UNREAD)
    mlp = MLPSpec(size=_inner_size(hf))
    specs, norm, shared = read_lfm2(hf)
    layers = tuple(LayerSpec(attention=spec, mlp=mlp, norm=norm) for spec in specs)
    return ModelConfig(family="lfm2", layers=layers, **shared)


FAMILY = Family("lfm2", ("Lfm2ForCausalLM",), _read, LFM2_NAMES, IGNORED)
