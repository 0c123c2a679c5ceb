"""Cuts tensors that stack the weights of all experts into one tensor per expert: the same bytes under other names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TypeVar

from jaxserve.checkpoints.errors import CheckpointError
from jaxserve.checkpoints.safetensors import TensorInfo

T = TypeVar("T", bound=TensorInfo)
_PARTS = r"(?P<part>_blocks|_scales|)"  # ends of the names of a quantized weight's tensors (MXFP4)
MAX_EXPERTS = 4096


def stacked_name(name: str) -> str:
    """The name of the stack of an expert's tensor, whose name has "{e}": "experts.{e}.up" -> "experts.up"."""
    return name.replace("{e}.", "")


def unstacked(tensors: Mapping[str, T], names: Iterable[str], joined: int = 0) -> dict[str, T]:
    """The tensors by name, with each stack [experts, ...] of a name in `names` cut into tensors of one expert.

    `names` are names of an expert's tensors, with "{i}" for the layer and "{e}" for the expert. With `joined` a stack
    may also be [joined * rows, columns]: the rows of one of so many experts behind those of another. Raises
    CheckpointError for a stack of no experts, or of more than MAX_EXPERTS.
    """
    patterns = [_pattern(name) for name in names if "{e}." in name]
    made: dict[str, T] = {}
    for name, tensor in tensors.items():
        found = next((match for pattern, own in patterns if (match := _named(pattern, own, name))), None)
        if found is None:
            made[name] = tensor
            continue
        if joined and len(tensor.shape) == 2 and tensor.shape[0] % joined == 0:
            tensor = replace(tensor, shape=(joined, tensor.shape[0] // joined, *tensor.shape[1:]))
        if not tensor.shape or not 0 < tensor.shape[0] <= MAX_EXPERTS:
            raise CheckpointError(
                f"{tensor.path}: tensor {name!r} of shape {list(tensor.shape)} is no stack of experts"
            )
        for expert in range(tensor.shape[0]):
            own = found.replace("{e}", str(expert))
            made[own] = tensor.entry(expert, own)
    return made


def _pattern(name: str) -> tuple[re.Pattern[str], str]:
    escaped = re.escape(stacked_name(name)).replace(re.escape("{i}"), r"(?P<layer>\d+)")
    return re.compile(escaped + _PARTS), name


def _named(pattern: re.Pattern[str], name: str, given: str) -> str | None:
    """The name of an expert's tensor in the stack `given`, with "{e}"; None if `given` is no such stack."""
    match = pattern.fullmatch(given)
    return match and name.replace("{i}", match.groupdict().get("layer", "")) + match["part"]
