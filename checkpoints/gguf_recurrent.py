"""The tensors of gated delta nets (Qwen3-Next) in GGUF files, in the form of Hugging Face's checkpoints.

llama.cpp's converter splits `in_proj_qkvz` into queries, keys and values of all heads (attn_qkv) and gates (attn_gate),
stores -exp(A_log), and leaves out an axis of the convolution (https://github.com/ggml-org/llama.cpp,
`conversion/qwen.py`). Older files have in_proj_qkvz as it is (ssm_in).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from jaxserve.checkpoints.errors import CheckpointError
from jaxserve.checkpoints.gguf_tensor import ComputedTensor, GGUFTensor


def as_in_checkpoints(tensors: dict[str, GGUFTensor], config: dict[str, Any]) -> dict[str, GGUFTensor]:
    """The tensors of a file under its own names, with those of the delta nets as Hugging Face's checkpoints have them:
    ssm_in, ssm_conv1d and ssm_a. Raises CheckpointError for tensors of other shapes."""
    made = dict(tensors)
    for layer, kind in enumerate(config["layer_types"]):
        if kind != "linear_attention":
            continue
        at = f"blk.{layer}"
        if (rates := made.pop(f"{at}.ssm_a", None)) is not None:
            name = f"{at}.ssm_a.weight"
            made[name] = ComputedTensor.of(name, rates.shape, (rates,), lambda values: np.log(-values))
        if (conv := made.get(f"{at}.ssm_conv1d.weight")) is not None and len(conv.shape) == 2:
            made[conv.name] = replace(conv, shape=(conv.shape[0], 1, conv.shape[1]))
        qkv, gates = (made.pop(f"{at}.{part}.weight", None) for part in ("attn_qkv", "attn_gate"))
        if qkv is not None and gates is not None:
            made[f"{at}.ssm_in.weight"] = _joined(f"{at}.ssm_in.weight", qkv, gates, config)
    return made


def _joined(name: str, qkv: GGUFTensor, gates: GGUFTensor, config: dict[str, Any]) -> GGUFTensor:
    heads = config["linear_num_key_heads"]
    key = config["linear_key_head_dim"]
    values = config["linear_num_value_heads"] // heads * config["linear_value_head_dim"]  # of a key head
    if (qkv.shape[0], gates.shape[0]) != (heads * (2 * key + values), heads * values):
        raise CheckpointError(
            f"{qkv.path}: {qkv.name} {list(qkv.shape)} and {gates.name} {list(gates.shape)} do not fit"
        )
    sizes = (key, key, values, values)
    rows = np.split(np.arange(heads * sum(sizes)), heads * np.cumsum(sizes)[:-1])
    order = np.concatenate([some.reshape(heads, -1) for some in rows], axis=1).reshape(-1)

    def join(*both: np.ndarray) -> np.ndarray:
        return np.concatenate(both)[order]

    return ComputedTensor.of(name, (len(order), qkv.shape[1]), (qkv, gates), join)
