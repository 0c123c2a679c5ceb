"""Llama 2, 3, 3.1 and later dense models; also the names and keys that its many descendants share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jaxserve.config import ConfigError
from jaxserve.models.config import HFConfig, take_token_ids
from jaxserve.models.families import Family
from jaxserve.models.rope import read_rope
from jaxserve.models.spec import Activation, AttentionSpec, LayerSpec, MLPSpec, ModelConfig, NormSpec

NAMES = {
    "embed.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
    "attention_norm.weight": "model.layers.{i}.input_layernorm.weight",
    "mlp_norm.weight": "model.layers.{i}.post_attention_layernorm.weight",
    "q_norm.weight": "model.layers.{i}.self_attn.q_norm.weight",
    "k_norm.weight": "model.layers.{i}.self_attn.k_norm.weight",
    **{
        f"{role}.{kind}": f"model.layers.{{i}}.self_attn.{role}_proj.{kind}"
        for role in ("q", "k", "v", "o")
        for kind in ("weight", "bias")
    },
    **{
        f"{role}.{kind}": f"model.layers.{{i}}.mlp.{role}_proj.{kind}"
        for role in ("gate", "up", "down")
        for kind in ("weight", "bias")
    },
}
DEFAULT_WINDOW = 4096  # where a config that could have a window does not mention it, as in transformers
IGNORED = ("rotary_emb.inv_freq",)  # buffers that old checkpoints saved
ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}


def read_shared(hf: HFConfig, *, tied: bool = False, **given: Any) -> dict[str, Any]:
    """The fields of ModelConfig, but for the layers, that all descendants of Llama write alike, but for those `given`;
    `tied`: where the config does not say so."""
    max_position = given.get("max_position") or read_max_position(hf)
    fields = {
        "vocab_size": hf.take("vocab_size"),
        "hidden_size": hf.take("hidden_size"),
        "max_position": max_position,
        "tie_embeddings": bool(hf.take("tie_word_embeddings", tied)),
        "eos_token_ids": take_token_ids(hf.take("eos_token_id", None)),
        "dtype": hf.take("torch_dtype", None) or hf.take("dtype", None) or "float32",
        **given,
    }
    if "norm" not in given:
        fields["norm"] = read_norm(hf)
    if "ropes" not in given:
        fields["ropes"] = {"default": read_rope(hf, max_position)}
    return fields


def read_max_position(hf: HFConfig, default: int = 2048) -> int:
    max_position = hf.take("max_position_embeddings", None) or hf.take("max_sequence_length", default)
    hf.expect("max_sequence_length", max_position)  # what the first conversions of Llama wrote beside it
    return max_position


def read_norm(hf: HFConfig, default: float = 1e-6, **choices: Any) -> NormSpec:
    """The norm that a config's `rms_norm_eps` is for. `choices`: other fields."""
    return NormSpec(eps=float(hf.take("rms_norm_eps", default)), **choices)


def read_layer_norm(hf: HFConfig, key: str = "layer_norm_eps", **choices: Any) -> NormSpec:
    """A LayerNorm with a bias, unless `choices` say otherwise."""
    usual: dict[str, Any] = {"kind": "layer", "bias": True, "eps": float(hf.take(key, 1e-5))}
    return NormSpec(**usual | choices)


def read_attention(hf: HFConfig, *, head_dim: int | None = None, **choices: Any) -> AttentionSpec:
    """`head_dim`: where the config names none; None: hidden_size / num_attention_heads. `choices`: other fields."""
    heads = hf.take("num_attention_heads")
    return AttentionSpec(
        num_heads=heads,
        num_kv_heads=hf.take("num_key_value_heads", heads),
        head_dim=hf.take("head_dim", None) or head_dim or hf.take("hidden_size") // heads,
        **choices,
    )


def read_mlp(hf: HFConfig, **choices: Any) -> MLPSpec:
    """`choices`: fields that this family has beyond its size and activation."""
    if "activation" in choices:
        return MLPSpec(**{"size": choices.get("size") or hf.take("intermediate_size")} | choices)
    hf.expect("hidden_act", *ACTIVATIONS)
    hf.expect("activation", "swiglu")  # Falcon 3's word for the gate that all of these have
    activation = ACTIVATIONS[hf.take("hidden_act", "silu")]
    return MLPSpec(size=hf.take("intermediate_size"), activation=activation, **choices)


def alike(
    hf: HFConfig,
    attention: AttentionSpec,
    mlp: MLPSpec,
    windows: Sequence[int | None] | None = None,
    ropes: Sequence[str] | None = None,
    **choices: Any,
) -> tuple[LayerSpec, ...]:
    """The config's number of layers, which differ in nothing but their `windows` (see `read_windows`) and `ropes`.
    `choices`: other fields of LayerSpec."""
    count = hf.take("num_hidden_layers")
    windows, ropes = windows or [None] * count, ropes or [attention.rope] * count
    choices = choices if "norm" in choices else choices | {"norm": read_norm(hf)}
    return tuple(
        LayerSpec(attention=replace(attention, window=window, rope=rope), mlp=mlp, **choices)
        for window, rope in zip(windows, ropes, strict=True)
    )


def read_windows(hf: HFConfig, *, used: bool, first_layer: int = 0) -> list[int | None]:
    """The window of each layer: from `layer_types` where the config has that, else `sliding_window` for layers from
    `first_layer` on; None for a layer that sees everything, and for all layers unless windows are `used`."""
    num_layers = hf.take("num_hidden_layers")
    window = hf.take("sliding_window", None if "sliding_window" in hf.values else DEFAULT_WINDOW)
    types = hf.take("layer_types", None)
    if types is None:
        return [window if used and i >= first_layer else None for i in range(num_layers)]
    allowed = {"full_attention": None, "sliding_attention": window if used else None}
    if unknown := set(types) - set(allowed):
        raise ConfigError(f"{hf.source}: layer_types {sorted(unknown)} are not supported (only {sorted(allowed)})")
    if len(types) != num_layers:
        raise ConfigError(f"layer_types has {len(types)} entries, num_hidden_layers is {num_layers}")
    return [allowed[kind] for kind in types]


def _read(hf: HFConfig) -> ModelConfig:
    bias = bool(hf.take("attention_bias", False))
    attention = read_attention(hf, qkv_bias=bias, out_bias=bias)
    mlp = read_mlp(hf, bias=bool(hf.take("mlp_bias", False)))
    return ModelConfig(family="llama", layers=alike(hf, attention, mlp), **read_shared(hf))


# The second name is that of the first conversions, from before transformers had the model.
FAMILY = Family("llama", ("LlamaForCausalLM", "LLaMAForCausalLM"), _read, NAMES, IGNORED)
