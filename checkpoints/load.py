"""Files to sharded device arrays, one weight at a time.

A weight of ours may be made of several tensors of the file (query, key and value, say), each transposed into its place.
Host memory holds one weight and READ_BYTES of file at a time.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import jax
import numpy as np
from tqdm import tqdm

from checkpoints.errors import CheckpointError
from checkpoints.safetensors import TensorInfo

log = logging.getLogger(__name__)

READ_BYTES = 64 * 2**20
FLOATS = ("float64", "float32", "float16", "bfloat16")


@dataclass(frozen=True)
class Piece:
    """A tensor of the file and where it goes.

    `shape` must be the tensor's in the file. `view` gives, of the host array of our weight, a writable view whose axes
    line up with the tensor's own; the view may have more rows, which stay zero. With `split` the tensor is reshaped to
    it first, read at once, and broadcast where the view is larger.
    """

    name: str
    shape: tuple[int, ...]
    view: Callable[[np.ndarray], np.ndarray]
    split: tuple[int, ...] | None = None


def load_weights(
    tensors: Mapping[str, TensorInfo],
    abstract: Mapping[str, jax.ShapeDtypeStruct],
    pieces: Mapping[str, list[Piece]],
    ignored: Callable[[str], bool] = lambda name: False,
    progress: bool = True,
) -> dict[str, jax.Array]:
    """Loads every weight of `abstract` (path -> shape, dtype, sharding) from its pieces.

    Raises CheckpointError for missing tensors, wrong shapes and types that are no plain floats. Tensors that nothing
    uses are logged, unless `ignored`.
    """
    check(tensors, pieces, ignored)
    weights = {}
    total = sum(math.prod(a.shape) * a.dtype.itemsize for a in abstract.values())
    with tqdm(total=total, unit="B", unit_scale=True, desc="loading weights", disable=not progress) as bar:
        for path, target in abstract.items():
            host = np.zeros(target.shape, target.dtype)
            for piece in pieces[path]:
                _fill(host, piece, tensors[piece.name])
            weights[path] = jax.device_put(host, target.sharding)
            weights[path].block_until_ready()  # so that one host copy lives at a time
            bar.update(host.nbytes)
            del host
    return weights


def check(tensors: Mapping[str, TensorInfo], pieces: Mapping[str, list[Piece]], ignored: Callable[[str], bool]) -> None:
    """Compares what the model needs with what the files have, before anything is read."""
    needed = {piece.name: piece for some in pieces.values() for piece in some}
    if missing := [name for name in needed if name not in tensors]:
        raise CheckpointError(f"the checkpoint lacks {_listed(missing)}, which its config.json asks for")
    for name, piece in needed.items():
        tensor = tensors[name]
        if tensor.shape != piece.shape:
            raise CheckpointError(
                f"{tensor.path.name}: tensor {name!r} has shape {list(tensor.shape)}, "
                f"but config.json asks for {list(piece.shape)}"
            )
        if tensor.dtype.name not in FLOATS:
            raise CheckpointError(
                f"{tensor.path.name}: tensor {name!r} has dtype {tensor.dtype.name}, not a plain float"
            )
    if unused := [name for name in tensors if name not in needed and not ignored(name)]:
        log.warning("unused tensors in the checkpoint: %s", _listed(unused))


def _listed(names: Iterable[str], most: int = 8) -> str:
    names = sorted(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{len(names)} tensor(s): {', '.join(names[:most])}{more}"


def _fill(host: np.ndarray, piece: Piece, tensor: TensorInfo) -> None:
    view = piece.view(host)
    assert np.shares_memory(view, host), f"the place of {piece.name} in {host.shape} is a copy, not a view"
    if piece.split is not None:
        view[...] = tensor.read().reshape(piece.split)
        return
    for first, rows in tensor.read_rows(READ_BYTES):
        view[first : first + len(rows)] = rows
