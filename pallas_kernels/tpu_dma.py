"""Copies between a TPU's memories, checked against rules of the hardware that an interpreter does not know.

An array in HBM or VMEM is stored in tiles over its last two axes: lanes of 128 numbers, and rows of 4-byte words.
`word_rows` rows of a narrower type share a word. A copy moves whole words of whole tiles of lanes:

  last axis          offset and size are multiples of 128, or the whole axis is copied
  last but one       offset and size are multiples of `word_rows`, or the whole axis is copied
  others             any offset and size

Mosaic proves the sizes itself. For offsets unknown at compile time it believes `multiple_of`, and a wrong one moves
other bytes. So all kernels declare their offsets with `aligned`. It checks known offsets while tracing, and the others
while interpreting within `checking`.

Where a copy moves a part of a tile, Mosaic computes the address of each indexing in numbers of elements, in 32 bits
(libtpu 0.0.42 and 0.0.48). A cache is larger than that, so its page is chosen by an indexing of its own, whose address
is in tiles: `cache.at[page].at[:, :, rows]`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

LANES = 128
TILE_ROWS = 8  # words of 4 bytes in the direction of a tile's rows
TILE_BYTES = 32  # bytes of a tile in the direction of its rows, for all dtypes
MOST_ELEMENTS = 1 << 32  # of an array, where a copy moves a part of one of its tiles
# MiB of VMEM that a kernel may take, three quarters of all, by the kinds of devices that JAX lists.
VMEM_MIB = dict.fromkeys(("TPU v5 lite", "TPU v5e", "TPU v6 lite", "TPU v6e"), 96)
VMEM_MIB |= dict.fromkeys(("TPU v5", "TPU v5p", "TPU7x"), 48)
OTHER_VMEM_BYTES = 14 << 20
SMEM_BYTES = 1 << 20
SMEM_RESERVED = 64 << 10  # for the compiler's own use: spilled scalars, the grid's indices
SMEM_GRANULE = 512  # an array of scalars takes a multiple of this many bytes

_violations: ContextVar[list[str] | None] = ContextVar("violations", default=None)


class CopyError(ValueError):
    """A copy that the hardware would do wrong."""


def vmem_bytes(kind: str) -> int:
    """Bytes of VMEM that a kernel may take on a device of this kind."""
    return VMEM_MIB[kind] << 20 if kind in VMEM_MIB else OTHER_VMEM_BYTES


def word_rows(dtype: Any) -> int:
    """Rows of a tile that share a word of 4 bytes."""
    return max(1, 4 // jnp.dtype(dtype).itemsize)


def aligned(offset: Any, multiple: int) -> Any:
    """Declares that the offset is a multiple. Checks it here if it is known, otherwise while interpreting."""
    if isinstance(offset, int):
        if offset % multiple:
            raise CopyError(f"a copy begins at {offset}, which is no multiple of {multiple}")
        return offset
    if (found := _violations.get()) is not None:
        jax.debug.callback(partial(_note, found, multiple), offset)
    return pl.multiple_of(offset, multiple)


def _note(found: list[str], multiple: int, offset: Any) -> None:
    if int(offset) % multiple:
        found.append(f"a copy begins at {int(offset)}, which is no multiple of {multiple}")


@contextmanager
def checking() -> Iterator[None]:
    """Checks offsets of copies in functions that are traced and run within. Raises CopyError at the end."""
    found: list[str] = []
    token = _violations.set(found)
    try:
        yield
        jax.effects_barrier()
    finally:
        _violations.reset(token)
    if found:
        raise CopyError("; ".join(dict.fromkeys(found)))


def copy(source: Any, target: Any, semaphore: Any) -> Any:
    """An asynchronous copy between two references of one shape. Its sizes are checked."""
    if source.shape != target.shape or source.dtype != target.dtype:
        raise CopyError(f"a copy of {source.dtype}{source.shape} to {target.dtype}{target.shape}")
    for ref in (source, target):
        _check_sizes(ref)
    return pltpu.make_async_copy(source, target, semaphore)


def _check_sizes(ref: Any) -> None:
    whole = getattr(ref, "ref", ref).shape  # of the array that `ref` may be a part of
    for axis, multiple in ((-1, LANES), (-2, word_rows(ref.dtype))):
        if len(ref.shape) >= -axis and ref.shape[axis] != whole[axis] and ref.shape[axis] % multiple:
            raise CopyError(
                f"a copy takes {ref.shape[axis]} of {whole[axis]} along axis {axis}: no multiple of {multiple}"
            )
    if len(ref.shape) > 1 and ref.shape[-2] != whole[-2] and ref.shape[-2] % (TILE_BYTES // ref.dtype.itemsize):
        indexed = replace(ref, transforms=ref.transforms[:-1]).shape
        if math.prod(indexed) > MOST_ELEMENTS:
            raise CopyError(f"a copy of a part of a tile from or to {indexed}, which has more than 2^32 elements")


def block(array: Any, shape: Sequence[int | None], index: Callable[..., Any]) -> pl.BlockSpec:
    """Blocks of an array for Pallas's own pipeline. Each of the last two axes has whole tiles or the whole axis. None
    in the shape: a block has one element of this axis. Raises CopyError."""
    for axis, multiple in ((-1, LANES), (-2, TILE_ROWS)):
        size = shape[axis]
        if size is not None and size != array.shape[axis] and size % multiple:
            raise CopyError(f"a block takes {size} of {array.shape[axis]} along axis {axis}: no multiple of {multiple}")
    return pl.BlockSpec(tuple(shape), index)


def smem_bytes(*sizes: int) -> int:
    """Bytes of SMEM for arrays of these numbers of int32."""
    return sum(-(-4 * size // SMEM_GRANULE) * SMEM_GRANULE for size in sizes)
