"""Copies between global and shared memory on Hopper GPUs, checked against the rules of its copy engine (TMA).

Neither interpreters nor the compiler check these rules. An offset at which the hardware cannot begin gives zeros
instead of data, without an error. All Mosaic GPU kernels here copy through `fetch` and `store`, which check while the
kernel is traced, both for compiling and for interpreting:

  offsets   With tiles of (8, swizzle) in shared memory, the engine sees an array [rows, columns] as [rows / 8,
            columns / swizzle, 8, swizzle], where row i is (i // 8, i % 8). If a copy begins at a row i that is not a
            multiple of eight, the last i % 8 rows of each eight lie outside and arrive as zeros
            (`TileTransform.transform_index` in JAX's launch_context.py; jax-ml/jax issue 34102). So offsets in tiled
            dimensions must be multiples of the tile. For a computed offset, `Span.multiple` declares a factor.
  boxes     at most 256 elements in each dimension and five dimensions; the innermost a multiple of 16 bytes, and as
            wide as the swizzle (CUDA driver API, cuTensorMapEncodeTiled)
  strides   of the array, multiples of 16 bytes
  addresses in shared memory, multiples of 128 bytes, or of eight rows of the swizzle
  bounds    within both arrays

An `Interpreter` also checks computed offsets while the kernel runs, against their `multiple` and the array's size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxserve.pallas_kernels import gpu_assembler

gpu_assembler.prefer()

MOST = 256  # elements of a box in one dimension
MOST_DIMENSIONS = 5  # of a box
ALIGNMENT = 128  # bytes of an address in shared memory


class RuleError(ValueError):
    """A copy that the hardware cannot do, or would do wrong."""


@dataclass(frozen=True)
class Span:
    """Elements start to start + size of a dimension. A computed start is a multiple of `multiple`."""

    start: Any  # int, or int32 scalar
    size: int
    multiple: int = 1

    @property
    def known(self) -> bool:
        return isinstance(self.start, int)

    def begins_at(self, tile: int) -> bool:
        return (self.start if self.known else self.multiple) % tile == 0


Index = Sequence[Any]  # by dimension: a Span, or one element (int or int32 scalar) without the dimension


@dataclass(frozen=True)
class _Window:
    """A part of an array: a span of each dimension, and the dimensions that stay."""

    name: str
    shape: tuple[int, ...]
    spans: tuple[Span, ...]
    kept: tuple[int, ...]

    @staticmethod
    def of(name: str, ref: Any, index: Index) -> _Window:
        shape = tuple(ref.shape)
        if len(index) > len(shape):
            raise RuleError(f"{name}: {len(index)} indices for an array of shape {shape}")
        entries = [*index, *(Span(0, size) for size in shape[len(index) :])]
        kept = tuple(i for i, entry in enumerate(entries) if isinstance(entry, Span))
        spans = tuple(entry if isinstance(entry, Span) else Span(entry, 1) for entry in entries)
        for span, size in zip(spans, shape, strict=True):
            if span.known and not 0 <= span.start <= size - span.size:
                raise RuleError(f"{name}: {span.start} to {span.start + span.size} of {size} is out of bounds")
        return _Window(name, shape, spans, kept)

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(self.spans[i].size for i in self.kept)

    def at(self, starts: Iterator[Any]) -> tuple[Any, ...]:
        """Returns the index of the array, with computed starts taken from `starts`."""
        chosen = [span.start if span.known else next(starts) for span in self.spans]
        return tuple(pl.ds(s, self.spans[i].size) if i in self.kept else s for i, s in enumerate(chosen))


def fetch(
    source: Any,
    window: Index,
    target: Any,
    place: Index,
    barrier: Any,
    *,
    interpret: Any = None,
    shared_by: str | None = None,
) -> None:
    """Copies source[window] in global memory to target[place] in shared memory. Completion arrives on `barrier`.

    shared_by: axis of a cluster whose programs all do this copy. Each reads a part and sends it to all of them.
    """
    source, target = _checked(source, window, target, place, interpret)
    plgpu.copy_gmem_to_smem(source, target, barrier, collective_axes=shared_by)


def store(source: Any, place: Index, target: Any, window: Index, *, interpret: Any = None) -> None:
    """Copies source[place] in shared memory to target[window] in global memory."""
    target, source = _checked(target, window, source, place, interpret)
    plgpu.copy_smem_to_gmem(source, target)


def _checked(outer: Any, window: Index, inner: Any, place: Index, interpret: Any) -> tuple[Any, Any]:
    """Returns outer.at[window] and inner.at[place]. Raises RuleError."""
    if outer.dtype != inner.dtype:
        raise RuleError(f"a copy does not convert {outer.dtype} and {inner.dtype} into each other")
    windows = _Window.of("global memory", outer, window), _Window.of("shared memory", inner, place)
    if windows[0].sizes != windows[1].sizes:
        raise RuleError(f"{windows[0].sizes} elements of global memory, but {windows[1].sizes} of shared memory")
    bits, (tiling, swizzle) = jax.dtypes.itemsize_bits(outer.dtype), _layout(inner)
    _check_box(windows[0], tiling, swizzle, bits)
    _check_address(windows[1], tiling, swizzle, bits)
    starts = iter(_watched(windows, interpret))
    return outer.at[windows[0].at(starts)], inner.at[windows[1].at(starts)]


def _layout(ref: Any) -> tuple[tuple[int, ...], int]:
    """Tile, and swizzle in bytes, of an array in shared memory; () and 0 where it has none."""
    tiling: tuple[int, ...] = ()
    swizzle = 0
    for transform in getattr(ref, "transforms", ()):
        if hasattr(transform, "indices"):
            raise RuleError("an array in shared memory is given as a whole, and the part of it as an index")
        tiling = getattr(transform, "tiling", tiling)
        swizzle = getattr(transform, "swizzle", swizzle)
    return tiling, swizzle


def _check_box(window: _Window, tiling: tuple[int, ...], swizzle: int, bits: int) -> None:
    """Checks the array in global memory, and the part of it that is copied."""
    shape = window.shape
    kept = window.kept
    if not kept or kept[-1] != len(shape) - 1:
        raise RuleError(f"the last dimension of {shape} must be a span")
    for i in range(len(shape) - 1):
        if math.prod(shape[i + 1 :]) * bits % 128:
            raise RuleError(f"the stride of dimension {i} of {shape} with {bits} bits is no multiple of 16 bytes")
    box = [window.spans[i].size for i in kept]
    outer = [shape[i] for i in kept]
    if tiling:
        if len(kept) < len(tiling):
            raise RuleError(f"a copy of {box} into shared memory in tiles of {tiling}")
        for i, tile in zip(kept[-len(tiling) :], tiling, strict=True):
            _check_tiled(f"dimension {i} of global memory", window.spans[i], shape[i], tile)
        box = _tiled(box, tiling)
        outer = _tiled(outer, tiling)
    if max(box) > MOST:
        raise RuleError(f"a box of {box} has more than {MOST} elements in a dimension")
    dropped = any(size > 1 for i, size in enumerate(shape) if i not in kept)  # JAX merges all of them into one
    if sum(size > 1 for size in outer) + dropped > MOST_DIMENSIONS:
        raise RuleError(f"a box of {box} of an array of shape {shape} has more than {MOST_DIMENSIONS} dimensions")
    if box[-1] * bits % 128 or (swizzle and box[-1] * bits != swizzle * 8):
        wanted = f"{swizzle} bytes, its swizzle" if swizzle else "a multiple of 16 bytes"
        raise RuleError(f"the innermost dimension of a box of {box} with {bits} bits is not {wanted}")


def _tiled(sizes: list[int], tiling: tuple[int, ...]) -> list[int]:
    tiles = [size // tile for size, tile in zip(sizes[-len(tiling) :], tiling, strict=True)]
    return [*sizes[: -len(tiling)], *tiles, *tiling]


def _check_tiled(name: str, span: Span, size: int, tile: int) -> None:
    if size % tile or span.size % tile:
        raise RuleError(f"{name}: {span.size} of {size} elements are not whole tiles of {tile}")
    if not span.begins_at(tile):
        what = (
            f"offset {span.start}" if span.known else f"a computed offset, known to be a multiple of {span.multiple},"
        )
        raise RuleError(f"{name}: {what} is no multiple of its tile of {tile}: rows would arrive as zeros")


def _check_address(window: _Window, tiling: tuple[int, ...], swizzle: int, bits: int) -> None:
    """Checks the part of an array in shared memory: it must be contiguous, and its address aligned."""
    alignment = 8 * swizzle if swizzle else ALIGNMENT
    tiles = dict(zip(range(len(window.shape) - len(tiling), len(window.shape)), tiling, strict=True))
    whole = True  # whether all inner dimensions are taken entirely
    for i in reversed(range(len(window.shape))):
        span = window.spans[i]
        size = window.shape[i]
        if tiles.get(i):
            _check_tiled(f"dimension {i} of shared memory", span, size, tiles[i])
        if span.size > 1 and not whole:
            raise RuleError(f"{window.sizes} of {window.shape} in shared memory is not one piece")
        whole = whole and span.size == size
        stride = math.prod(window.shape[i + 1 :]) * bits // 8  # in bytes; of tiles, the stride of their rows
        begins = (span.start if span.known else span.multiple) * stride
        if i not in tiles or i == min(tiles):
            if begins % alignment:
                raise RuleError(f"offset {begins} in shared memory is no multiple of {alignment} bytes")
        elif not whole:
            raise RuleError(f"columns of {window.shape} in shared memory are cut")


def _watched(windows: Sequence[_Window], interpret: Any) -> Sequence[Any]:
    """The computed starts of all spans. With an Interpreter they are checked while the kernel runs."""
    pairs = [(window, i) for window in windows for i, span in enumerate(window.spans) if not span.known]
    starts = [window.spans[i].start for window, i in pairs]
    if not starts or not isinstance(getattr(interpret, "violations", None), list):
        return starts
    rules = [(f"{w.name}, dimension {i} of {w.shape}", w.spans[i], w.shape[i]) for w, i in pairs]
    watch = partial(_watch, interpret.violations, [(name, s.size, s.multiple, size) for name, s, size in rules])
    shapes = [jax.ShapeDtypeStruct((), jnp.int32) for _ in starts]
    return jax.pure_callback(watch, shapes, *(jnp.asarray(start, jnp.int32) for start in starts))


def _watch(violations: list[str], rules: Sequence[tuple[str, int, int, int]], *starts: Any) -> list[np.int32]:
    """Notes violations and returns corrected starts. An exception here would leave other threads waiting for ever."""
    lawful = []
    for (name, count, multiple, size), start in zip(rules, map(int, starts), strict=True):
        if start % multiple:
            violations.append(f"{name}: offset {start} is no multiple of {multiple}")
        if not 0 <= start <= size - count:
            violations.append(f"{name}: {start} to {start + count} is out of bounds")
        lawful.append(np.int32(min(max(start, 0), size - count) // multiple * multiple))
    return lawful


_Parameters: Any = getattr(plgpu, "InterpretGPUParams", None)  # from JAX 0.11 on

if _Parameters is not None:

    @dataclass(frozen=True, kw_only=True, eq=False)
    class Interpreter(_Parameters):
        """JAX's interpreter of Mosaic GPU kernels. It also records computed offsets that break the rules."""

        violations: list[str] = field(default_factory=list)

        def __eq__(self, other: object) -> bool:  # a traced kernel writes to its own instance's list
            return self is other

        def __hash__(self) -> int:
            return id(self)


@contextmanager
def interpreter(*, detect_races: bool = False) -> Iterator[Any]:
    """Yields an Interpreter for the kernels' `interpret`. At the end it raises RuleError for recorded violations."""
    one = Interpreter(detect_races=detect_races)
    yield one
    if one.violations:
        raise RuleError("\n".join(dict.fromkeys(one.violations)))
