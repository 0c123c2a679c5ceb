"""The tensors of recurrent layers in GGUF files, in the form of Hugging Face's checkpoints.

llama.cpp's converter (https://github.com/ggml-org/llama.cpp, `conversion/`) stores -exp(A_log), leaves out an axis of
convolutions, and changes the order and the shapes of some tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
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


def _log_rates(rates: GGUFTensor, shape: tuple[int, ...] | None = None) -> GGUFTensor:
    """A_log, from its negative exponentials; without `shape` it has one axis."""
    made = shape or (math.prod(rates.shape),)
    return ComputedTensor.of(rates.name, made, (rates,), lambda values: np.log(-values).reshape(made))


def _flat(tensor: GGUFTensor) -> GGUFTensor:
    return replace(tensor, shape=(math.prod(tensor.shape),))


def _convolution(tensor: GGUFTensor) -> GGUFTensor:
    """A convolution's weight [channels, 1, width], which files have with fewer or more axes of 1."""
    *channels, width = tensor.shape
    return replace(tensor, shape=(math.prod(channels), 1, width))


def _changed(tensors: Tensors, changes: Mapping[str, Callable[[GGUFTensor], GGUFTensor]]) -> Tensors:
    """The tensors, with changes of those whose names within a layer are given."""

    def change(tensor: GGUFTensor) -> GGUFTensor:
        part = tensor.name.split(".", 2)[-1].removesuffix(".weight")
        return changes[part](tensor) if part in changes and tensor.name.endswith(".weight") else tensor

    return {name: change(tensor) for name, tensor in tensors.items()}


def of_qwen3_next(tensors: Tensors, config: Config, metadata: Mapping[str, Any]) -> Tensors:
    """`in_proj_qkvz` is split into queries, keys and values of all heads (attn_qkv) and gates (attn_gate). Older files
    have it as it is (ssm_in)."""
    made = dict(tensors)
    for at in _delta_layers(config):
        if (rates := made.get(f"{at}.ssm_a.weight")) is not None:
            made[rates.name] = _log_rates(rates)
        if (conv := made.get(f"{at}.ssm_conv1d.weight")) is not None:
            made[conv.name] = _convolution(conv)
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
        "ssm_beta.weight": place, "ssm_alpha.weight": place, "ssm_dt.bias": place, "ssm_a.weight": place,
    }  # fmt: skip
    for at in _delta_layers(config):
        for part, order in orders.items() if heads != key_heads else ():
            if (tensor := made.get(f"{at}.{part}")) is not None:
                _check_size(tensor, 0, len(order))
                made[tensor.name] = replace(tensor, order=order)
        if heads != key_heads and (out := made.get(f"{at}.ssm_out.weight")) is not None:
            _check_size(out, 1, len(of_values))
            made[out.name] = replace(out, columns=np.argsort(of_values).astype(np.int32))
        if (rates := made.get(f"{at}.ssm_a.weight")) is not None:
            made[rates.name] = _log_rates(rates)
        if (conv := made.get(f"{at}.ssm_conv1d.weight")) is not None:
            made[conv.name] = _convolution(conv)
    return made


def _check_size(tensor: GGUFTensor, axis: int, size: int) -> None:
    if tensor.shape[axis : axis + 1] != (size,):
        raise CheckpointError(f"{tensor.path}: {tensor.name} {list(tensor.shape)} does not fit, it should have {size}")


def of_mamba(tensors: Tensors, config: Config, metadata: Mapping[str, Any]) -> Tensors:
    return _changed(tensors, {"ssm_a": lambda rates: _log_rates(rates, rates.shape), "ssm_conv1d": _convolution})


def of_mamba2(tensors: Tensors, config: Config, metadata: Mapping[str, Any]) -> Tensors:
    """A and D are columns, and the norm has a row for each group."""
    return _changed(tensors, {"ssm_a": _log_rates, "ssm_d": _flat, "ssm_norm": _flat, "ssm_conv1d": _convolution})


def of_lfm2(tensors: Tensors, config: Config, metadata: Mapping[str, Any]) -> Tensors:
    return _changed(tensors, {"shortconv.conv": _convolution})


def of_kimi_linear(tensors: Tensors, config: Config, metadata: Mapping[str, Any]) -> Tensors:
    changes: dict[str, Callable[[GGUFTensor], GGUFTensor]] = {f"ssm_conv1d_{part}": _convolution for part in "qkv"}
    return _changed(tensors, changes | {"ssm_a": _log_rates})
