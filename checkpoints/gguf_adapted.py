"""Further tensors of GGUF files, beside those of recurrent layers, in the form of Hugging Face's checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.checkpoints.errors import CheckpointError
from jaxserve.checkpoints.gguf_recurrent import Config, Tensors
from jaxserve.checkpoints.gguf_tensor import ComputedTensor

XIELU_NUMBERS = {"alpha_p": (1,), "alpha_n": (1,), "beta": (), "eps": ()}
STREAM_PARTS = ("altup_proj", "altup_unembd_proj")  # stacks of a matrix for each residual stream but one


def of_apertus(tensors: Tensors, config: Config, metadata: Mapping[str, Any]) -> Tensors:
    """The activation's learned numbers are settings, with one for each layer."""
    path = next(iter(tensors.values())).path
    made = dict(tensors)
    for name, shape in XIELU_NUMBERS.items():
        numbers = metadata.get(f"xielu.{name}")
        if not isinstance(numbers, np.ndarray) or len(numbers) != config["num_hidden_layers"]:
            raise CheckpointError(f"{path}: xielu.{name} must have a number for each layer, got {numbers!r:.80}")
        for layer, number in enumerate(numbers):
            own = f"blk.{layer}.xielu_{name}.weight"
            made[own] = _number(own, path, number, shape)
    return made


def _number(name: str, path: Path, number: Any, shape: tuple[int, ...]) -> ComputedTensor:
    return ComputedTensor.of(name, shape, (), lambda: np.full(shape, number, np.float32), path)


def of_glm4v(tensors: Tensors, config: Config, metadata: Mapping[str, Any]) -> Tensors:
    """In files of a model that sees, the channels of a head that turn have the first of each pair, then the second
    ones. Checkpoints have the two of a pair beside each other."""
    if "glm4.rope.dimension_sections" not in metadata:
        return tensors
    dim = config["head_dim"]
    turned = int(dim * config["partial_rotary_factor"])
    in_head = np.concatenate([np.arange(turned).reshape(2, -1).T.ravel(), np.arange(turned, dim)])
    made = {}
    for name, tensor in tensors.items():
        if name.endswith((".attn_q.weight", ".attn_k.weight", ".attn_q.bias", ".attn_k.bias")):
            heads = np.arange(0, tensor.shape[0], dim)
            tensor = replace(tensor, order=(heads[:, None] + in_head).ravel())
        made[name] = tensor
    return made


def of_gemma3n(tensors: Tensors, config: Config, metadata: Mapping[str, Any]) -> Tensors:
    """The matrices of all residual streams but one are a stack in the file."""
    made = dict(tensors)
    count = config["altup_num_inputs"] - 1
    for part in STREAM_PARTS:
        stack = made.pop(f"{part}.weight", None)
        if stack is None:
            continue
        if len(stack.shape) != 3 or stack.shape[0] != count:
            raise CheckpointError(f"{stack.path}: {stack.name} {list(stack.shape)} is no stack of {count} matrices")
        for i in range(count):
            own = f"{part}.{i}.weight"
            made[own] = stack.entry(i, own)
    return made
