"""Qwen4-Exp: layers as those of Qwen3.5's mixtures around several residual streams, whose channels are gated
(`models.gated_streams`). Attention sees blocks of tokens that are chosen by the means of their keys. Some layers add
embeddings of hashed n-grams (`models.ngrams`).

Pictures are not read: the keys of blocks would turn by the places of tokens in pictures of earlier steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jaxserve.config import ConfigError
from jaxserve.models.config import HFConfig, take_token_ids
from jaxserve.models.families import Family
from jaxserve.models.families.llama import IGNORED
from jaxserve.models.families.qwen2_moe import read_experts
from jaxserve.models.families.qwen3_5 import QWEN3_5_NAMES, UNUSED
from jaxserve.models.families.qwen3_next import read_hybrid
from jaxserve.models.families.within import LAYOUTS, UNREAD, Text, by_whole, family_within
from jaxserve.models.rope import rotary_dim
from jaxserve.models.spec import (
    AttentionSpec,
    GatedDeltaSpec,
    GatedStreamsSpec,
    LayerSpec,
    ModelConfig,
    NgramSpec,
    PooledChoiceSpec,
    RopeConfig,
)

LAYER = "model.layers.{i}"
INDEXER = f"{LAYER}.self_attn.indexer"
NGRAMS = f"{LAYER}.ple"
STREAMS = {
    "attention_gated": f"{LAYER}.attn_hyper_connection",
    "mlp_gated": f"{LAYER}.mlp_hyper_connection",
    "head_gated": "model.hyper_connection_mixer",
}
OF_STREAMS = {
    "norm": "hc_norm", "down": "input_mix_weight_down", "up": "input_mix_weight_up", "shares": "block_inject_weight",
}  # fmt: skip
QWEN4_NAMES = QWEN3_5_NAMES | {
    "index_qk.weight": f"{INDEXER}.index_qk_proj.weight",
    "index_q_norm.weight": f"{INDEXER}.q_layernorm.weight",
    "index_k_norm.weight": f"{INDEXER}.k_layernorm.weight",
    "ngram_table.weight": f"{NGRAMS}.ple_embedding.ngram_embedding.shard_{{h}}.weight",
    "ngram_conv.weight": f"{NGRAMS}.conv1d.weight",
    **{f"ngram_{role}.weight": f"{NGRAMS}.{role}_proj.weight" for role in ("key", "value")},
    **{f"ngram_{role}_norm.weight": f"{NGRAMS}.norm_{role}.weight" for role in ("key", "query", "conv")},
    **{f"{start}_{role}.weight": f"{place}.{name}.weight" for start, place in STREAMS.items()
       for role, name in OF_STREAMS.items()},
}  # fmt: skip
# Numbers that follow from the config.
BUFFERS = (*IGNORED, "layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets")
BLOCKS = "blocks"  # the rotary embedding of blocks' keys


def _read(hf: HFConfig) -> ModelConfig:
    hf.ignore(*UNUSED, "number_of_conv_states", "split_ngram_parts")  # files show how many parts there are
    hf.expect("attn_output_gate", True)
    hf.values.setdefault("norm_topk_prob", True)
    types = hf.take("layer_types", None) or []
    hf.values["layer_types"] = ["full_attention" if kind == "indexed_attention" else kind for kind in types]
    mixture = read_experts(hf, shared_size=hf.take("shared_expert_intermediate_size"), shared_gate=True)
    fields = read_hybrid(hf, mixture, kv_heads=2, partial=1.0)
    layers: Sequence[LayerSpec] = fields.pop("layers")
    rope: RopeConfig = fields["ropes"]["default"]
    streams = GatedStreamsSpec(count=hf.take("hc_count", 4), rank=hf.take("hc_lowrank", 320))
    ngrams = _read_ngrams(hf)
    recurrent = {i for i, layer in enumerate(layers) if isinstance(layer.attention, GatedDeltaSpec)}
    if wrong := sorted(layer + 1 for layer in ngrams.keys() - recurrent):
        raise ConfigError(f"{hf.source}: ple_layer_ids {wrong} are no layers of linear attention, which they must be")
    kept = next(iter(ngrams.values())).kept(streams.count * hf.take("hidden_size")) if ngrams else None
    hf.expect("output_gate_type", "silu", "sigmoid")
    gate = hf.take("output_gate_type", None) or mixture.activation
    if gate not in ("silu", "sigmoid"):
        raise ConfigError(f"{hf.source}: hidden_act={gate!r} needs an output_gate_type, silu or sigmoid")

    def with_streams(i: int, layer: LayerSpec) -> LayerSpec:
        attention: Any = layer.attention
        if isinstance(attention, AttentionSpec):
            attention = replace(attention, blocks=_read_choice(hf, attention, rope))
        else:
            attention = replace(attention, gate=gate, ngrams=kept)
        return replace(layer, attention=attention, residual="gated_streams", gated=streams, ngrams=ngrams.get(i))

    layers = tuple(with_streams(i, layer) for i, layer in enumerate(layers))
    size = hf.take("indexer_compress_ratio")
    fields |= {"norm": None, "ropes": {"default": rope, BLOCKS: replace(rope, stride=size)}}
    return ModelConfig(family="qwen4_exp", layers=layers, **fields)


def _read_choice(hf: HFConfig, attention: AttentionSpec, rope: RopeConfig) -> PooledChoiceSpec:
    hf.expect("indexer_kv_heads", 1)
    assert attention.qk_norm is not None
    size, budget = hf.take("indexer_compress_ratio"), hf.take("indexer_budget")
    if budget % size:
        raise ConfigError(f"{hf.source}: indexer_budget={budget} is no multiple of indexer_compress_ratio={size}")
    return PooledChoiceSpec(
        heads=hf.take("indexer_n_heads"),
        dim=hf.take("indexer_head_dim"),
        turned=rotary_dim(rope, attention.head_dim),
        size=size,
        count=budget // size,
        norm=attention.qk_norm.norm,
        rope=BLOCKS,
    )


def _read_ngrams(hf: HFConfig) -> dict[int, NgramSpec]:
    """By the number of a layer, counted from 0, what it adds for n-grams."""
    sizes = {
        "longest": hf.take("ngram_size", 3),
        "heads": hf.take("heads_per_ngram", 8),
        "dim": hf.take("ple_embed_dim", None) or hf.take("hidden_size"),
        "base": hf.take("ngram_vocab_size_base", 20_000_000),
        "divisor": hf.take("make_ngram_vocab_size_divisible_by", 128),
        "seed": hf.take("seed", 1234),
        "vocab": hf.take("vocab_size"),
        "width": hf.take("ple_conv_kernel_size", 4),
    }
    layers = sorted(set(hf.take("ple_layer_ids", None) or []))
    ends = take_token_ids(hf.take("eos_token_id", None))
    if layers and not ends:
        raise ConfigError(f"{hf.source}: ple_layer_ids need an eos_token_id, which n-grams do not reach across")
    return {layer - 1: NgramSpec(index=index, end=ends[0], **sizes) for index, layer in enumerate(layers)}


# The values that transformers assumes for keys that a text_config does not have.
DEFAULTS = {
    "vocab_size": 248320, "hidden_size": 2048, "num_hidden_layers": 40, "num_attention_heads": 16, "num_experts": 512,
    "num_experts_per_tok": 10, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
}  # fmt: skip
FAMILIES = (
    Family("qwen4_exp", ("Qwen4ExpForCausalLM",), _read, QWEN4_NAMES, BUFFERS, layouts=LAYOUTS, unread=UNREAD),
    replace(
        family_within(
            "qwen4_exp",
            "Qwen4ExpForConditionalGeneration",
            {"qwen4_exp_text": Text(_read, DEFAULTS)},
            QWEN4_NAMES,
            by_whole,
        ),
        ignored=BUFFERS,
    ),
)
