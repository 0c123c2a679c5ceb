"""Copies between a TPU's memories, by rules that the hardware has and an interpreter does not.

An array in HBM or VMEM lies in tiles over its last two axes: lanes of 128 numbers, and rows of words of 4 bytes, so
that `word_rows` rows of a narrower type share a word. A copy moves whole words of whole tiles of lanes:

  last axis          offset and size are multiples of 128, or the whole axis is copied
  last but one       offset and size are multiples of `word_rows`, or the whole axis is copied
  others             anything

Mosaic proves the sizes itself and believes `multiple_of` for offsets that it does not know; one that is wrong moves
other bytes than meant. All kernels therefore name their offsets by `aligned`, which checks known ones while tracing,
and the others while interpreted within `checking`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

LANES = 128
TILE_ROWS = 8  # of words of 4 bytes
TILE_BYTES = 32  # of a tile in the direction of its rows, whatever the dtype
SMEM_BYTES = 1 << 20
SMEM_RESERVED = 64 << 10  # for what the compiler keeps there itself: spilled scalars, the grid's own indices
SMEM_GRANULE = 512  # an array of scalars takes a multiple of so many bytes

_violations: ContextVar[list[str] | None] = ContextVar("violations", default=None)


class CopyError(ValueError):
    """A copy that the hardware would do wrong."""


def word_rows(dtype: Any) -> int:
    """Rows of a tile that share words of 4 bytes."""
    return max(1, 4 // jnp.dtype(dtype).itemsize)


def aligned(offset: Any, multiple: int) -> Any:
    """The offset, known to be a multiple: checked here, or, where only the device knows it, while interpreted."""
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
    """Offsets of copies in functions that are traced and run within are checked; raises CopyError at the end."""
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
    """An asynchronous copy between two references of one shape; sizes are checked, see above."""
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


def block(array: Any, shape: Sequence[int | None], index: Callable[..., Any]) -> pl.BlockSpec:
    """Blocks of an array that Pallas's own pipeline copies: along each of the last two axes whole tiles or the whole
    axis. None in the shape is an axis of which a block has one element. Raises CopyError."""
    for axis, multiple in ((-1, LANES), (-2, TILE_ROWS)):
        size = shape[axis]
        if size is not None and size != array.shape[axis] and size % multiple:
            raise CopyError(f"a block takes {size} of {array.shape[axis]} along axis {axis}: no multiple of {multiple}")
    return pl.BlockSpec(tuple(shape), index)


def smem_bytes(*sizes: int) -> int:
    """What arrays of so many int32 each take of SMEM."""
    return sum(-(-4 * size // SMEM_GRANULE) * SMEM_GRANULE for size in sizes)
