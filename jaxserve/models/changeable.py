"""What adapters may change of a model, as plain data for the process that reads adapters. Imports no JAX."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from jaxserve.checkpoints.errors import CheckpointError
from jaxserve.checkpoints.files import shown
from jaxserve.config import ConfigError

LowRank = tuple[np.ndarray, np.ndarray]  # A [rank, in], and B [out, rank] with the scaling


class ExpertWeights(msgspec.Struct, frozen=True):
    """A weight [out, in] of each expert of a layer. members: for each expert, the names of the tensors that make it up,
    from the first row to the last."""

    shape: tuple[int, int]
    members: list[list[str]]


class Changeable(msgspec.Struct, frozen=True):
    """The weights of a model that adapters may change.

    Attributes:
      shapes: name of a tensor -> its shape [out, in].
      modules: name of a module -> name of its weight; also without the first part of the module's name, because models
        with images have the same modules below another one.
      experts: layer -> gate and up of its experts, then down.
      roles: role -> name of the decoder's tensors; see `jaxserve.models.weights`.
      head_dim: see `ModelConfig`.
      max_rank: the highest rank of matrices.
    """

    shapes: dict[str, tuple[int, int]]
    modules: dict[str, str]
    experts: dict[int, tuple[ExpertWeights, ExpertWeights]]
    roles: dict[str, str]
    head_dim: int
    max_rank: int

    def weight_of(self, module: str) -> str | None:
        """The name of the weight of a module, whose own name may have further parts in front. None: it has none that
        adapters may change."""
        while module not in self.modules and "." in module:
            module = module.partition(".")[2]
        return self.modules.get(module)

    @property
    def most_tensors(self) -> int:
        """How many tensors an adapter's file may have: two for each weight, and copies of the model's own."""
        return 4 * len(self.shapes) + 16

    @property
    def most_bytes(self) -> int:
        """Of the largest adapter, in float32."""
        return 4 * self.max_rank * sum(out + inputs for out, inputs in self.shapes.values())

    def check(self, path: Path, name: str, a: Sequence[int], b: Sequence[int]) -> None:
        """Raises CheckpointError or ConfigError unless matrices of these shapes fit a weight. Nothing is read before
        that, so that memory is taken only for what the model can use."""
        out, inputs = self.shapes[name]
        rank = a[0] if len(a) else 0
        if rank > self.max_rank:
            raise ConfigError(
                f"{path}: the adapter has rank {rank}, and at most {self.max_rank} is served: raise --max-lora-rank"
            )
        if (tuple(a[1:]), tuple(b)) != ((inputs,), (out, rank)):
            raise CheckpointError(
                f"{path}: A {list(a)} and B {list(b)} do not fit {name} [{out}, {inputs}] of the model, "
                f"which needs [rank, {inputs}] and [{out}, rank]"
            )
        if rank == 0:
            raise CheckpointError(f"{path}: the matrices for {shown(name)} are empty: they have rank 0")
