"""The tensors of recurrent layers in GGUF files, in the form of Hugging Face's checkpoints.

llama.cpp's converter (https://github.com/ggml-org/llama.cpp, `conversion/`) stores -exp(A_log), leaves out an axis of
convolutions, and changes the order and the shapes of some tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from jaxserve.checkpoints.errors import CheckpointError
from jaxserve.checkpoints.gguf_tensor import ComputedTensor, GGUFTensor

Tensors = dict[str, GGUFTensor]
Config = Mapping[str, Any]


def _delta_layers(config: Config) -> list[str]:
    """The beginnings of the names of the tensors of gated delta nets."""
    return [f"blk.{i}" for i, kind in enumerate(config["layer_types"]) if kind == "linear_attention"]


def _log_rates(rates: GGUFTensor, name: str) -> GGUFTensor:
    """A_log, from its negative exponentials."""
    count = int(np.prod(rates.shape))
    return ComputedTensor.of(name, (count,), (rates,), lambda values: np.log(-values).reshape(count))


def _with_axis(conv: GGUFTensor) -> GGUFTensor:
    """A convolution's weight [channels, 1, width], which the file has as [channels, width]."""
    return replace(conv, shape=(conv.shape[0], 1, conv.shape[1])) if len(conv.shape) == 2 else conv


def of_qwen3_next(tensors: Tensors, config: Config, metadata: Mapping[str, Any]) -> Tensors:
    """`in_proj_qkvz` is split into queries, keys and values of all heads (attn_qkv) and gates (attn_gate). Older files
    have it as it is (ssm_in)."""
    made = dict(tensors)
    for at in _delta_layers(config):
        if (rates := made.pop(f"{at}.ssm_a", None)) is not None:
            made[f"{at}.ssm_a.weight"] = _log_rates(rates, f"{at}.ssm_a.weight")
        if (conv := made.get(f"{at}.ssm_conv1d.weight")) is not None:
            made[conv.name] = _with_axis(conv)
        qkv, gates = (made.pop(f"{at}.{part}.weight", None) for part in ("attn_qkv", "attn_gate"))
        if qkv is not None and gates is not None:
            made[f"{at}.ssm_in.weight"] = _joined(f"{at}.ssm_in.weight", qkv, gates, config)
    return made


def _joined(name: str, qkv: GGUFTensor, gates: GGUFTensor, config: Config) -> GGUFTensor:
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


def of_qwen3_5(tensors: Tensors, config: Config, metadata: Mapping[str, Any]) -> Tensors:
    """Value heads stand in turns: the first of each key head, then the second of each, and so on. Checkpoints have
    those of a key head beside each other."""
    made = dict(tensors)
    key_heads = config["linear_num_key_heads"]
    heads = config["linear_num_value_heads"]
    dim = config["linear_value_head_dim"]
    keys = 2 * key_heads * config["linear_key_head_dim"]  # rows of queries and keys
    place = np.arange(heads).reshape(-1, key_heads).T.reshape(-1)
    of_values = (place[:, None] * dim + np.arange(dim)).reshape(-1)
    behind_keys = np.concatenate([np.arange(keys), keys + of_values])
    orders = {
        "attn_qkv.weight": behind_keys, "ssm_conv1d.weight": behind_keys, "attn_gate.weight": of_values,
        "ssm_beta.weight": place, "ssm_alpha.weight": place, "ssm_dt.bias": place, "ssm_a": place,
    }  # fmt: skip
    for at in _delta_layers(config):
        for part, order in orders.items() if heads != key_heads else ():
            if (tensor := made.get(f"{at}.{part}")) is not None:
                _check_size(tensor, 0, len(order))
                made[tensor.name] = replace(tensor, order=order)
        if heads != key_heads and (out := made.get(f"{at}.ssm_out.weight")) is not None:
            _check_size(out, 1, len(of_values))
            made[out.name] = replace(out, columns=np.argsort(of_values).astype(np.int32))
        if (rates := made.pop(f"{at}.ssm_a", None)) is not None:
            made[f"{at}.ssm_a.weight"] = _log_rates(rates, f"{at}.ssm_a.weight")
        if (conv := made.get(f"{at}.ssm_conv1d.weight")) is not None:
            made[conv.name] = _with_axis(conv)
    return made


def _check_size(tensor: GGUFTensor, axis: int, size: int) -> None:
    if tensor.shape[axis : axis + 1] != (size,):
        raise CheckpointError(f"{tensor.path}: {tensor.name} {list(tensor.shape)} does not fit, it should have {size}")


def of_mamba2(tensors: Tensors, config: Config, metadata: Mapping[str, Any]) -> Tensors:
    """A and D are columns, and the norm has a row for each group."""
    made = {}
    for name, tensor in tensors.items():
        if name.endswith(".ssm_a"):
            made[f"{name}.weight"] = _log_rates(tensor, f"{name}.weight")
        elif name.endswith(".ssm_d"):
            made[f"{name}.weight"] = replace(tensor, name=f"{name}.weight", shape=(int(np.prod(tensor.shape)),))
        elif name.endswith(".ssm_norm.weight"):
            made[name] = replace(tensor, shape=(int(np.prod(tensor.shape)),))
        else:
            made[name] = _with_axis(tensor) if name.endswith(".ssm_conv1d.weight") else tensor
    return made


def of_lfm2(tensors: Tensors, config: Config, metadata: Mapping[str, Any]) -> Tensors:
    return {
        name: _with_axis(tensor) if name.endswith(".shortconv.conv.weight") else tensor
        for name, tensor in tensors.items()
    }
