"""A GGUF file's settings as a config.json, and the roles of its tensors, by the table `gguf_architectures`."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial

import numpy as np

from jaxserve.checkpoints.gguf import end_ids
from jaxserve.checkpoints.gguf_adapted import STREAM_PARTS
from jaxserve.checkpoints.gguf_keys import Keys, read_rope_scaling
from jaxserve.checkpoints.gguf_row import BARE_ROLES, EXPERT_PARTS, ROLES, SAME, TOP, Architecture
from jaxserve.checkpoints.gguf_settings import Config, resolve

# Settings that have no effect. The sections of a head turn by the same position where there is only text.
HARMLESS = (
    "vocab_size", "pooling_type", "tensor_data_layout", "rope.scaling.finetuned", "rope.dimension_sections",
    "n_deepstack_layers",
)  # fmt: skip


def names_of(row: Architecture, tensors: Collection[str]) -> dict[str, str]:
    """Role -> name of each tensor that a file of the architecture may have. "{i}" is the layer, "{e}" the expert, "{h}"
    the residual stream."""
    roles = {**ROLES, **row.roles}
    # Falcon 40B has two norms in parallel, of which the second is that of attention.
    if "blk.0.attn_norm_2.weight" in tensors:
        roles = roles | {"attn_norm": "mlp_norm"}
        del roles["ffn_norm"]
    else:
        roles.pop("attn_norm_2", None)
    names: dict[str, str] = {}
    for part, role in roles.items():
        if role == "qkv" and f"blk.0.{part}.weight" not in tensors:
            continue
        if role == "expert_gate_up" and not any(name.endswith(f".{part}.weight") for name in tensors):
            continue
        expert = "{e}." if part in EXPERT_PARTS else ""
        if role in BARE_ROLES:
            names[role] = f"blk.{{i}}.{part}.{BARE_ROLES[role]}"
        else:
            names |= {f"{role}.{kind}": f"blk.{{i}}.{part}.{expert}{kind}" for kind in ("weight", "bias")}
    for role, other in SAME.items() | row.same.items():
        names |= {f"{role}.{kind}": names[f"{other}.{kind}"] for kind in ("weight", "bias") if other in roles.values()}
    for part, role in {**TOP, **row.top}.items():
        stream = "{h}." if part in STREAM_PARTS else ""
        names |= {f"{role}.{kind}": f"{part}.{stream}{kind}" for kind in ("weight", "bias")}
    return names


def read_config(keys: Keys, row: Architecture) -> Config:
    """The settings of a file in the keys of config.json. Raises CheckpointError for what is not understood."""
    tensors = keys.file.tensors
    embedding = tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise keys.refuse("there is no matrix token_embd.weight")
    for key in row.varied:
        if isinstance(numbers := keys.left.get(key), np.ndarray):
            keys.left[key] = numbers[:1]
    config: Config = {
        "architectures": [resolve(row.name, keys, {})],
        "model_type": keys.architecture,
        "vocab_size": embedding.shape[0],
        "hidden_size": keys.size("embedding_length"),
        "num_hidden_layers": keys.size("block_count") - keys.count("nextn_predict_layers"),
        "max_position_embeddings": keys.size("context_length"),
        "tie_word_embeddings": "output.weight" not in tensors,
        "torch_dtype": _dtype({tensor.type.name for tensor in tensors.values() if len(tensor.shape) > 1}),
        "bos_token_id": keys.file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": end_ids(keys.file.metadata),
        "hidden_act": "silu",
    }
    config |= _read_norms(keys, row)
    if row.attends:
        config |= _read_attention(keys, row, config["hidden_size"])
    for key, setting in row.settings.items():
        value = resolve(setting, keys, config)
        if value is not None or key == "sliding_window":
            config[key] = value
        else:
            config.pop(key, None)
    config |= (row.positions or partial(_positions, row=row))(keys, config)
    keys.expect("attention.causal", True)
    for harmless in HARMLESS:
        keys.left.pop(harmless, None)
    keys.finish()
    return config


def _read_attention(keys: Keys, row: Architecture, hidden: int) -> Config:
    """The sizes of attention, and of the MLP behind it."""
    heads = keys.size("attention.head_count")
    found: Config = {
        "num_attention_heads": heads,
        "num_key_value_heads": keys.of_layers("attention.head_count_kv", heads),
    }
    if "feed_forward_length" in keys.left or not row.mixtures:
        found["intermediate_size"] = keys.of_layers("feed_forward_length")
    return found | (_latent_sizes if row.latent else _head_sizes)(keys, hidden // heads, row)


def _read_norms(keys: Keys, row: Architecture) -> Config:
    rms = "attention.layer_norm_rms_epsilon"
    layer = "attention.layer_norm_epsilon"
    if row.norm_key == "rms_norm_eps":
        return {row.norm_key: keys.real(rms)}
    found = keys.real(layer)
    keys.left.pop(rms, None)  # the converter writes `norm_eps` under both keys
    if not row.norm_key:  # OLMo 1: the value is fixed
        return {}
    return {row.norm_key: found}


def _head_sizes(keys: Keys, usual: int, row: Architecture) -> Config:
    head_dim = keys.size("attention.key_length", usual)
    if "v_head_dim" not in row.settings:
        keys.expect("attention.value_length", head_dim)
    return {"head_dim": head_dim}


def _latent_sizes(keys: Keys, usual: int, row: Architecture) -> Config:
    """The sizes of attention over latents. In newer files key_length and value_length are those of the latents, and
    keys with "mla" have those of heads."""
    rope = keys.size("rope.dimension_count")
    rank = keys.size("attention.kv_lora_rank")
    lengths = [keys.size("attention.key_length"), keys.size("attention.value_length", usual)]
    of_heads = [
        keys.size(f"attention.{name}_length_mla", plain) for name, plain in zip(("key", "value"), lengths, strict=True)
    ]
    if of_heads[0] <= rope:
        raise keys.refuse(f"{keys.architecture}.attention.key_length_mla={of_heads[0]} is not supported")
    q_rank = keys.count("attention.q_lora_rank") or None
    return {
        "kv_lora_rank": rank,
        "q_lora_rank": q_rank,
        "qk_nope_head_dim": of_heads[0] - rope,
        "qk_rope_head_dim": rope,
        "v_head_dim": of_heads[1],
    }


def _positions(keys: Keys, config: Config, row: Architecture) -> Config:
    """The rotary base and its stretching."""
    if not row.turns:
        for key in ("rope.dimension_count", "rope.freq_base"):
            keys.left.pop(key, None)
        return {}
    head_dim = config.get("qk_rope_head_dim") or config["head_dim"]
    if "partial_rotary_factor" not in config and not row.latent:
        keys.expect("rope.dimension_count", head_dim)
    turned = int(head_dim * config.get("partial_rotary_factor", 1.0))
    made: Config = {"rope_theta": keys.real("rope.freq_base", 10000.0)}
    scaling = read_rope_scaling(keys, config | made, turned)
    if "rope_local_base_freq" not in row.settings:  # newer files have the base of layers with windows, too
        keys.expect("rope.freq_base_swa", made["rope_theta"])
    added: Config = {}
    for key, setting in row.scaling.items():
        added[key] = resolve(setting, keys, config | made | added)
    if scaling:
        made["rope_scaling"] = scaling | (added if scaling["rope_type"] == "yarn" else {})
    return made


def _dtype(kinds: set[str]) -> str:
    """The model's original dtype; bfloat16, the most common one, where matrices are quantized."""
    return {frozenset(["F16"]): "float16", frozenset(["F32"]): "float32"}.get(frozenset(kinds), "bfloat16")
