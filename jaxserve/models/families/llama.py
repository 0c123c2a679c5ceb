"""Llama 2, 3, 3.1 and later dense models; also the names and keys that its many descendants share."""

from __future__ import annotations

from typing import Any

from jaxserve.config import ConfigError
from jaxserve.models.config import HFConfig, ModelConfig, take_token_ids
from jaxserve.models.families import Family
from jaxserve.models.rope import read_rope

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
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}


def read_shared(hf: HFConfig) -> dict[str, Any]:
    """The fields that all descendants of Llama write alike."""
    heads, hidden = hf.take("num_attention_heads"), hf.take("hidden_size")
    head_dim = hf.take("head_dim", None) or hidden // heads
    max_position = hf.take("max_position_embeddings", None) or hf.take("max_sequence_length", 2048)
    hf.expect("max_sequence_length", max_position)  # what the first conversions of Llama wrote beside it
    hf.expect("hidden_act", *ACTIVATIONS)
    hf.expect("activation", "swiglu")  # Falcon 3's word for the gate that all of these have
    return {
        "vocab_size": hf.take("vocab_size"),
        "hidden_size": hidden,
        "num_layers": hf.take("num_hidden_layers"),
        "num_heads": heads,
        "num_kv_heads": hf.take("num_key_value_heads", heads),
        "head_dim": head_dim,
        "intermediate_size": hf.take("intermediate_size"),
        "norm_eps": float(hf.take("rms_norm_eps", 1e-6)),
        "rope": read_rope(hf, max_position),
        "max_position": max_position,
        "activation": ACTIVATIONS[hf.take("hidden_act", "silu")],
        "tie_embeddings": bool(hf.take("tie_word_embeddings", False)),
        "eos_token_ids": take_token_ids(hf.take("eos_token_id", None)),
        "dtype": hf.take("torch_dtype", None) or hf.take("dtype", None) or "float32",
    }


def read_windows(hf: HFConfig, num_layers: int, *, used: bool, first_layer: int = 0) -> tuple[int | None, ...]:
    """Per-layer windows from `layer_types` where given, else from `sliding_window` for layers from `first_layer` on."""
    window = hf.take("sliding_window", None if "sliding_window" in hf.values else DEFAULT_WINDOW)
    types = hf.take("layer_types", None)
    if types is not None:
        allowed = {"full_attention": None, "sliding_attention": window if used else None}
        if unknown := set(types) - set(allowed):
            raise ConfigError(f"{hf.source}: layer_types {sorted(unknown)} are not supported (only {sorted(allowed)})")
        windows = tuple(allowed[kind] for kind in types)
    else:
        windows = tuple(window if used and i >= first_layer else None for i in range(num_layers))
    return windows if any(windows) else ()


def _read(hf: HFConfig) -> ModelConfig:
    shared = read_shared(hf)
    bias = bool(hf.take("attention_bias", False))
    return ModelConfig(family="llama", **shared, qkv_bias=bias, o_bias=bias, mlp_bias=bool(hf.take("mlp_bias", False)))


# The second name is that of the first conversions, from before transformers had the model.
FAMILY = Family("llama", ("LlamaForCausalLM", "LLaMAForCausalLM"), _read, NAMES, IGNORED)
