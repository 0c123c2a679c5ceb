"""Arrays of a running program in place of a checkpoint's files, such as the parameters of a trainer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.checkpoints.errors import CheckpointError
from jaxserve.checkpoints.safetensors import TensorInfo
from jaxserve.checkpoints.stacks import unstacked


@dataclass(frozen=True)
class GivenTensor(TensorInfo):
    """An array under the name of a checkpoint's tensor. It is brought to the host when it is read.

    `source` is the name under which `arrays` has it; `start` counts bytes from its beginning.
    """

    source: str = ""
    arrays: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def _numbers(self, dtype: np.dtype, count: int, offset: int) -> np.ndarray:
        numbers = np.ascontiguousarray(self.arrays[self.source]).reshape(-1)
        first = (self.start + offset) // dtype.itemsize
        if numbers.dtype != self.dtype or len(numbers) < first + count:
            raise CheckpointError(f"the array {self.source!r} has changed its shape or dtype while it was read")
        return numbers[first : first + count]


def given_tensors(arrays: Mapping[str, Any], names: Iterable[str], joined: int = 0) -> dict[str, GivenTensor]:
    """NumPy's or JAX's arrays by the names of a checkpoint's tensors, as tensors that `load_weights` reads. Stacks of
    experts are cut as `stacks.unstacked` says, which has the other arguments. Raises CheckpointError for what is no
    array."""
    made = {}
    for name, array in arrays.items():
        if not hasattr(array, "shape") or not hasattr(array, "dtype"):
            raise CheckpointError(f"{name!r} must be an array, got {type(array).__name__}")
        shape = tuple(array.shape)
        made[name] = GivenTensor(name, Path("arrays"), np.dtype(array.dtype), shape, 0, name, arrays)
    return unstacked(made, names, joined)
