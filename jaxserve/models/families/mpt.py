"""MPT: biases by distance in the place of positions, LayerNorms without biases, and no biases elsewhere. transformers
always reads it so, whatever `no_bias`, `learned_pos_emb`, `expansion_ratio` and `logit_scale` say."""

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
from jaxserve.models.rope import DISTANCES
from jaxserve.models.spec import ModelConfig

LAYER = "transformer.blocks.{i}"
NAMES = {
    "embed.weight": "transformer.wte.weight",
    "norm.weight": "transformer.norm_f.weight",
    "head.weight": "lm_head.weight",
    "attention_norm.weight": f"{LAYER}.norm_1.weight",
    "mlp_norm.weight": f"{LAYER}.norm_2.weight",
    "qkv.weight": f"{LAYER}.attn.Wqkv.weight",
    "o.weight": f"{LAYER}.attn.out_proj.weight",
    "up.weight": f"{LAYER}.ffn.up_proj.weight",
    "down.weight": f"{LAYER}.ffn.down_proj.weight",
}
# Of training, and what transformers does not read.
UNREAD = (
    "embedding_fraction", "expansion_ratio", "ffn_config", "fc_type", "init_config", "init_device", "learned_pos_emb",
    "logit_scale", "no_bias", "norm_type", "tokenizer_name", "use_pad_tok_in_ffn", "verbose",
)  # fmt: skip


def slopes(heads: int) -> tuple[float, ...]:
    """The slopes of biases by distance. Where the heads are no power of two, they are every other one of the next power
    of two, and then those between."""
    power = 2 ** math.ceil(math.log2(heads))
    found = [2.0 ** -(8 * (i + 1) / power) for i in range(power)]
    return tuple(found if power == heads else (found[1::2] + found[::2])[:heads])


def _read(hf: HFConfig) -> ModelConfig:
    hf.rename(
        d_model="hidden_size", n_heads="num_attention_heads", n_layers="num_hidden_layers",
        max_seq_len="max_position_embeddings",
    )  # fmt: skip
    hf.ignore(*UNREAD)
    inner = HFConfig(hf.take("attn_config", {}), f"{hf.source}: attn_config")
    inner.ignore("attn_impl", "attn_pdrop", "attn_uses_sequence_id")
    inner.expect("alibi", True)
    inner.expect("alibi_bias_max", 8)  # transformers computes with this, whatever the file says
    inner.expect("attn_type", "multihead_attention")
    inner.expect("prefix_lm", False)
    inner.expect("qk_ln", False)
    attention = read_attention(
        hf,
        scale=inner.take("softmax_scale", None),
        clip=inner.take("clip_qkv", None),
        alibi=slopes(hf.take("num_attention_heads")),
    )
    inner.finish()
    norm = read_layer_norm(hf, "layer_norm_epsilon", bias=False)
    mlp = read_mlp(hf, size=4 * hf.take("hidden_size"), gated=False, activation="gelu")
    shared = read_shared(hf, tied=True, norm=norm, ropes={"default": DISTANCES})
    return ModelConfig(family="mpt", layers=uniform_layers(hf, attention, mlp, norm=norm), **shared)


FAMILY = Family("mpt", ("MptForCausalLM", "MPTForCausalLM"), _read, NAMES, IGNORED)
