"""Doge: Llama with norms of queries and keys, biases of cached tokens by their values (`models.value_bias`), and
learned numbers for each channel of what layers are added to.

Sequences longer than keep_window_size see the tokens with the largest biases, of equal ones the first. transformers
takes any of the equal ones, and its answers with and without a cache differ there.

With `is_moe`, the experts of a prompt's token depend on the tokens behind it in transformers, and such files are
refused.
"""

from __future__ import annotations

from dataclasses import replace

from jaxserve.config import ConfigError
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
from jaxserve.models.spec import LargestChoiceSpec, ModelConfig, QKNormSpec

LAYER = "model.layers.{i}"
DOGE_NAMES = NAMES | {
    "value_bias.weight": f"{LAYER}.self_attn.dt_proj.weight",
    "value_bias.bias": f"{LAYER}.self_attn.dt_proj.bias",
    "value_rate": f"{LAYER}.self_attn.A",
    "attention_skip": f"{LAYER}.input_residual",
    "mlp_skip": f"{LAYER}.post_attention_residual",
}
OF_EXPERTS = ("num_experts", "num_experts_per_tok", "norm_topk_prob", "output_router_logits", "router_aux_loss_coef")


def _read(hf: HFConfig) -> ModelConfig:
    if hf.take("is_moe", False):
        raise ConfigError(
            f"{hf.source}: is_moe is not supported: a token's experts would depend on the tokens behind it"
        )
    hf.ignore(*OF_EXPERTS, "hidden_dropout")
    bias = bool(hf.take("attention_bias", False))
    norm = QKNormSpec(norm=read_norm(hf))
    attention = read_attention(hf, qk_norm=norm, qkv_bias=bias, out_bias=bias, value_bias=True)
    window = hf.take("sliding_window", None)
    kept = LargestChoiceSpec(dim=attention.num_kv_heads, count=hf.take("keep_window_size", 2048))
    if window is None or window > kept.count:
        attention = replace(attention, blocks=kept)
    if window is not None and attention.blocks is not None:
        raise ConfigError(
            f"{hf.source}: sliding_window={window} is not supported beside keep_window_size={kept.count}, unless it is "
            "at most as large"
        )
    mlp = read_mlp(hf, bias=bool(hf.take("mlp_bias", False)))
    windows = [window] * hf.take("num_hidden_layers")
    layers = uniform_layers(hf, attention, mlp, windows, residual="weighed_skip")
    return ModelConfig(family="doge", layers=layers, **read_shared(hf))


FAMILY = Family("doge", ("DogeForCausalLM",), _read, DOGE_NAMES, IGNORED)
