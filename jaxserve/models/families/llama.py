"""Llama 2, 3, 3.1 and later dense models. Also the names and keys that the many families derived from Llama share."""

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
DEFAULT_WINDOW = 4096  # the window of configs that do not mention `sliding_window`, as in transformers
IGNORED = ("rotary_emb.inv_freq",)  # buffers that old checkpoints saved
ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}


def read_shared(hf: HFConfig, *, tied: bool = False, longest: int = 2048, **given: Any) -> dict[str, Any]:
    """The fields of ModelConfig, except layers, that all families derived from Llama read in the same way. Fields in
    `given` are taken as they are. `tied` and `longest` are the defaults for tied embeddings and max_position."""
    max_position = given.get("max_position") or read_max_position(hf, longest)
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
    hf.expect("max_sequence_length", max_position)  # the first conversions of Llama wrote both
    return max_position


def read_norm(hf: HFConfig, default: float = 1e-6, **choices: Any) -> NormSpec:
    """The RMS norm with the config's `rms_norm_eps`. `choices` are other fields of NormSpec."""
    return NormSpec(eps=float(hf.take("rms_norm_eps", default)), **choices)


def read_layer_norm(hf: HFConfig, key: str = "layer_norm_eps", **choices: Any) -> NormSpec:
    """A LayerNorm whose epsilon is under `key`. It has a bias unless `choices`, fields of NormSpec, say otherwise."""
    usual: dict[str, Any] = {"kind": "layer", "bias": True, "eps": float(hf.take(key, 1e-5))}
    return NormSpec(**usual | choices)


def read_attention(
    hf: HFConfig, *, head_dim: int | None = None, kv_heads: int | None = None, **choices: Any
) -> AttentionSpec:
    """Reads attention. `head_dim` is the default for configs without the key; None: hidden_size / num_attention_heads.
    `kv_heads` is the default of num_key_value_heads; None, and null in the config, mean num_attention_heads. `choices`
    are other fields of AttentionSpec."""
    heads = hf.take("num_attention_heads")
    default = heads if kv_heads is None or "num_key_value_heads" in hf.values else kv_heads
    return AttentionSpec(
        num_heads=heads,
        num_kv_heads=hf.take("num_key_value_heads", default),
        head_dim=hf.take("head_dim", None) or head_dim or hf.take("hidden_size") // heads,
        **choices,
    )


def read_mlp(hf: HFConfig, **choices: Any) -> MLPSpec:
    """Reads a gated MLP. `choices` are fields of MLPSpec beside size and activation."""
    if "activation" in choices:
        return MLPSpec(**{"size": choices.get("size") or hf.take("intermediate_size")} | choices)
    hf.expect("hidden_act", *ACTIVATIONS)
    hf.expect("activation", "swiglu")  # Falcon 3's name for this gate
    activation = ACTIVATIONS[hf.take("hidden_act", "silu")]
    return MLPSpec(size=hf.take("intermediate_size"), activation=activation, **choices)


def uniform_layers(
    hf: HFConfig,
    attention: AttentionSpec,
    mlp: MLPSpec,
    windows: Sequence[int | None] | None = None,
    ropes: Sequence[str] | None = None,
    **choices: Any,
) -> tuple[LayerSpec, ...]:
    """As many layers as the config says, which differ in their `windows` (see `read_windows`) and `ropes` only.
    `choices` are other fields of LayerSpec."""
    count = hf.take("num_hidden_layers")
    windows = windows or [None] * count
    ropes = ropes or [attention.rope] * count
    choices = choices if "norm" in choices else choices | {"norm": read_norm(hf)}
    return tuple(
        LayerSpec(attention=replace(attention, window=window, rope=rope), mlp=mlp, **choices)
        for window, rope in zip(windows, ropes, strict=True)
    )


def read_windows(hf: HFConfig, *, used: bool, first_layer: int = 0) -> list[int | None]:
    """The window of each layer; None for a layer that sees all tokens. Without `used`, no layer has a window.

    `layer_types` says which layers have one. Without this key, layers from `first_layer` on have one.
    """
    num_layers = hf.take("num_hidden_layers")
    types = hf.take("layer_types", None)
    window = None
    hf.ignore("sliding_window")  # transformers writes 0 where windows are not used
    if used and (types is None or "sliding_attention" in types):
        window = hf.take("sliding_window", None if "sliding_window" in hf.values else DEFAULT_WINDOW)
    if types is None:
        return [window if i >= first_layer else None for i in range(num_layers)]
    allowed = {"full_attention": None, "sliding_attention": window}
    if unknown := set(types) - set(allowed):
        raise ConfigError(f"{hf.source}: layer_types {sorted(unknown)} are not supported (only {sorted(allowed)})")
    if len(types) != num_layers:
        raise ConfigError(f"layer_types has {len(types)} entries, num_hidden_layers is {num_layers}")
    return [allowed[kind] for kind in types]


def _read(hf: HFConfig) -> ModelConfig:
    bias = bool(hf.take("attention_bias", False))
    attention = read_attention(hf, qkv_bias=bias, out_bias=bias)
    mlp = read_mlp(hf, bias=bool(hf.take("mlp_bias", False)))
    return ModelConfig(family="llama", layers=uniform_layers(hf, attention, mlp), **read_shared(hf))


# The first conversions, made before transformers had the model, use the second name.
FAMILY = Family("llama", ("LlamaForCausalLM", "LLaMAForCausalLM"), _read, NAMES, IGNORED)
