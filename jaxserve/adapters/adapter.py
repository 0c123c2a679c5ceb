"""LoRA adapters (Hu et al. 2021, arXiv:2106.09685) in the host's memory, in the form that the devices' stacks take."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxserve.adapters.reading import read_matrices
from jaxserve.checkpoints.errors import CheckpointError
from jaxserve.models.adapter_targets import AdapterTargets, Matrices
from jaxserve.models.changeable import Changeable, LowRank


@dataclass(frozen=True)
class Adapter:
    """An adapter, ready to be copied to a place of the devices' pool.

    Attributes:
      name: what requests call it.
      digest: hash of its content: the names, ranks and numbers of its matrices, scaled.
      rank: the highest rank of its matrices.
      matrices: path of a product in the decoder's parameters (`Target.path`) -> what the adapter adds to it.
    """

    name: str
    digest: bytes
    rank: int
    matrices: Mapping[str, Matrices]

    @property
    def nbytes(self) -> int:
        """Bytes in the host's memory."""
        return sum(array.nbytes for some in self.matrices.values() for array in some)


Read = Callable[[Path, Changeable], Mapping[str, LowRank]]


def load_adapter(
    path: Path,
    name: str,
    targets: AdapterTargets,
    max_rank: int,
    dtype: Any = jnp.float32,
    read: Read = read_matrices,
) -> Adapter:
    """Reads a folder in PEFT's layout, or a GGUF file. `targets` are those of the runner (`ModelRunner.targets`);
    `dtype` is that of matrices on the devices. `read`: how the files are read, see `read_matrices`.

    Raises CheckpointError for files that are damaged or do not fit the model, and ConfigError for adapters of a kind
    that is not supported, or of a higher rank than `max_rank`.
    """
    given = read(path, targets.changeable(max_rank))
    rank = max((len(a) for a, _ in given.values()), default=0)
    if not rank:
        raise CheckpointError(f"{path}: the adapter has no matrices")
    _check(path, given, dtype)
    matrices = {target.path: made for target in targets.targets if (made := target.joined(given)) is not None}
    return Adapter(name, _digest(given), rank, matrices)


def _check(path: Path, given: Mapping[str, LowRank], dtype: Any) -> None:
    """Infinite numbers in one adapter would make the results of others NaN, where products multiply by 0 the matrices
    of the adapters that a token has not."""
    most = float(jnp.finfo(dtype).max)
    for name, (a, b) in given.items():
        for matrix in (a, b):
            largest = np.abs(matrix).max(initial=0.0)
            if not np.isfinite(largest):
                raise CheckpointError(f"{path}: the matrices for {name} have numbers that are not finite")
            if largest > most:
                raise CheckpointError(
                    f"{path}: the matrices for {name} have numbers up to {largest:.3g}, and {np.dtype(dtype).name} "
                    f"ends at {most:.3g}: serve the model with --dtype bfloat16 or float32"
                )


def _digest(given: Mapping[str, LowRank]) -> bytes:
    made = hashlib.sha256()
    for name in sorted(given):
        for matrix in given[name]:
            made.update(f"{name} {matrix.shape} ".encode())
            made.update(np.ascontiguousarray(matrix).tobytes())
    return made.digest()
