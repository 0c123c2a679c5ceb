"""Loads checkpoints into sharded device arrays, a few weights at a time.

A weight of the engine may consist of several tensors of the file, such as query, key and value. Host memory holds
THREADS weights, and READ_BYTES of the file for each. Quantized weights stay quantized.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np

from jaxserve.checkpoints.errors import CheckpointError
from jaxserve.checkpoints.formats import QuantReader
from jaxserve.checkpoints.int4 import PackedInt4
from jaxserve.checkpoints.mixed import mixed_array, widens
from jaxserve.checkpoints.progress import Progress
from jaxserve.checkpoints.quantized import StoredRows, common_form, dequantize
from jaxserve.checkpoints.safetensors import FLOATS, INTEGERS, TensorInfo
from jaxserve.pallas_kernels.types import MixedArray, QuantArray

log = logging.getLogger(__name__)

THREADS = min(4, os.cpu_count() or 1)  # NumPy and JAX release Python's lock while they copy
READ_BYTES = 2 * 2**20  # bytes read at a time, so few that they are still in the processor's cache when they are copied
ALIGNMENT = 64  # bytes; arrays with this alignment become JAX arrays on CPU without a copy
CACHE_SCALES = (".k_scale", ".v_scale", ".kv_scale", ".q_scale", "k_proj.output_scale", "v_proj.output_scale")


@dataclass(frozen=True)
class Piece:
    """A tensor of the file, or a part of one, and its place in a weight.

    Attributes:
      name: the tensor's name in the file.
      shape: the tensor's shape in the file, or the shape of its transpose.
      view: a function from the weight's host array to a writable view with the tensor's axes. If the view has more rows
        than the tensor, these stay zero.
      split: the shape to which the tensor is reshaped before it is copied to the view, with broadcasting; None: it is
        not reshaped.
      take: a function from the tensor's numbers to those of the piece, in the order of the view: a part of a fused
        tensor, or rows in another order. It may copy. None: all numbers.
        `view`, `split` and `take` must not depend on the number of columns, so that they also apply to scales.
      transposed: if the tensor holds floats, it is [in, out] in the file; None: unless its shape is [out, in]. A
        quantized tensor is never transposed.
      integers: whether the tensor holds integers in the place of floats.
    """

    name: str
    shape: tuple[int, ...]
    view: Callable[[np.ndarray], np.ndarray]
    split: tuple[int, ...] | None = None
    take: Callable[[np.ndarray], np.ndarray] | None = None
    transposed: bool | None = False
    integers: bool = False

    def is_transposed(self, shape: tuple[int, ...]) -> bool:
        """Whether floats of this shape in the file are [in, out]."""
        return shape != self.shape if self.transposed is None else self.transposed

    def is_stored_as(self, shape: tuple[int, ...]) -> bool:
        """Whether floats in the file may have this shape."""
        return shape == (self.shape[::-1] if self.is_transposed(shape) else self.shape)


@dataclass(frozen=True)
class Stack:
    """The pieces of a stack of weights [members, out, in]: for each member, those that make up its matrix [out, in].

    Members are read one after another, so that the stack is never whole on the host.
    """

    members: tuple[list[Piece], ...]

    def __iter__(self) -> Iterator[Piece]:
        return chain.from_iterable(self.members)


Pieces = list[Piece] | Stack
Host = np.ndarray | QuantArray | StoredRows | MixedArray
Placer = Callable[[str, Any, jax.sharding.Sharding], Any]
# (path, members on the host, each of which is read when it is asked for, shape and sharding of the plain stack) -> the
# stack on the devices.
StackPlacer = Callable[[str, Iterator[Host], jax.ShapeDtypeStruct], Any]


@runtime_checkable
class RowReader(Protocol):
    """A QuantReader that can return a weight's rows as the bytes in the file."""

    def type_of(self, weight: str) -> str | None: ...

    def read_bytes(self, weight: str, shape: tuple[int, ...]) -> np.ndarray: ...


def on_devices(path: str, host: Any, sharding: jax.sharding.Sharding) -> Any:
    return jax.device_put(host, sharding)


def stack_on_devices(path: str, members: Iterator[Host], target: jax.ShapeDtypeStruct) -> Any:
    return jax.device_put(np.stack([np.asarray(member) for member in members]), target.sharding)


def load_weights(
    tensors: Mapping[str, TensorInfo],
    abstract: Mapping[str, jax.ShapeDtypeStruct],
    pieces: Mapping[str, Pieces],
    ignored: Callable[[str], bool] = lambda name: False,
    progress: bool = True,
    reader: QuantReader | None = None,
    place: Placer = on_devices,
    as_stored: Collection[str] = (),
    keep_mixed: bool = False,
    place_stack: StackPlacer = stack_on_devices,
) -> dict[str, Any]:
    """Loads every weight of `abstract` (path -> shape, dtype, sharding) from its pieces.

    Weights that `reader` knows stay quantized, see `read_weight`. `place` puts a weight onto the devices, given its
    path, the host array and the sharding of the plain weight; `place_stack` does so with a Stack. Raises
    CheckpointError for missing tensors, wrong shapes and unsupported dtypes. Unused tensors are logged, unless
    `ignored`.
    """
    check(tensors, pieces, ignored, reader)
    weights = {}
    sizes = {path: math.prod(a.shape) * a.dtype.itemsize for path, a in abstract.items()}

    def load(path: str) -> Any:
        target = abstract[path]
        some = pieces[path]
        if isinstance(some, Stack):
            one = member_of(target)
            members = (read_weight(member, tensors, one, reader, as_stored) for member in some.members)
            return jax.block_until_ready(place_stack(path, members, target))
        host = read_weight(some, tensors, target, reader, as_stored, keep_mixed)
        return jax.block_until_ready(place(path, host, target.sharding))  # then the host's copy can be freed

    bar = Progress("loading weights", sum(sizes.values()), shown=progress, in_bytes=True)
    # The devices of several hosts must get their programs in the same order on all of these.
    with bar, ThreadPoolExecutor(THREADS if jax.process_count() == 1 else 1) as pool:
        try:
            for path, weight in zip(abstract, pool.map(load, abstract), strict=True):
                weights[path] = weight
                bar.update(sizes[path])
        finally:
            pool.shutdown(cancel_futures=True)  # after an error the rest is not read
    return weights


def member_of(stack: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """Shape and dtype of a stack's member, and the sharding of the member's axes."""
    sharding = stack.sharding
    if isinstance(sharding, jax.sharding.NamedSharding):
        sharding = jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec(*sharding.spec[1:]))
    return jax.ShapeDtypeStruct(stack.shape[1:], stack.dtype, sharding=sharding)


def read_weight(
    pieces: list[Piece],
    tensors: Mapping[str, TensorInfo],
    target: jax.ShapeDtypeStruct,
    reader: QuantReader | None,
    as_stored: Collection[str] = (),
    keep_mixed: bool = False,
) -> Host:
    """One weight on the host.

    If the types of all pieces are in `as_stored`, the weight is the rows of the file. Otherwise, if all pieces are
    quantized and have a common form, it is a QuantArray. Pieces without a common form, or whose common form is wider
    than their own, stay apart in a MixedArray if `keep_mixed` is set. If none of this applies, the weight becomes
    floats. So does every weight that is no matrix [out, in], such as the halves of kv_b, [heads, out, in], in latent
    attention."""
    if reader is not None and len(target.shape) != 2:
        return _in_floats(pieces, [_value(piece, tensors, reader) for piece in pieces], target)
    stored = [isinstance(reader, RowReader) and reader.type_of(piece.name) in as_stored for piece in pieces]
    if isinstance(reader, RowReader) and all(stored):
        return _rows(pieces, reader, target.shape)
    if reader is None or not any(reader.parts(piece.name) for piece in pieces):
        host = _zeros(target.shape, target.dtype)
        for piece in pieces:
            _fill(host, piece, tensors[piece.name])
        return host
    if isinstance(reader, RowReader) and keep_mixed and any(stored):
        some = [
            _rows_of(piece, reader) if kept else _value(piece, tensors, reader)
            for piece, kept in zip(pieces, stored, strict=True)
        ]
        if (mixed := _mixed_of(pieces, some, target)) is not None:
            return mixed
    values = [_value(piece, tensors, reader) for piece in pieces]
    parts = [value for value in values if isinstance(value, QuantArray)]
    simple = pieces[0].split is None and pieces[0].take is None and pieces[0].shape == target.shape
    if len(pieces) == len(parts) == 1 and simple:
        return parts[0]
    alike = common_form(parts) if len(parts) == len(values) else None
    differ = bool(parts) and (alike is None or widens(parts, alike))
    if keep_mixed and differ and (mixed := _mixed_of(pieces, values, target)) is not None:
        return mixed
    if alike is not None:
        return _join(pieces, alike, target.shape)
    if parts:
        log.warning("%s: kept as %s, since its parts are quantized differently", pieces[0].name, target.dtype.name)
    return _in_floats(pieces, values, target)


def _in_floats(
    pieces: list[Piece], values: Sequence[np.ndarray | QuantArray], target: jax.ShapeDtypeStruct
) -> np.ndarray:
    """The weight as floats, on the host."""
    host = np.zeros(target.shape, target.dtype)
    for piece, value in zip(pieces, values, strict=True):
        put_piece(host, piece, dequantize(value) if isinstance(value, QuantArray) else value)
    return host


def _mixed_of(
    pieces: list[Piece], values: Sequence[np.ndarray | QuantArray | StoredRows], target: jax.ShapeDtypeStruct
) -> MixedArray | None:
    """The weight made of pieces with different forms; None if some row of the weight is in none of them."""
    floats = [value.astype(target.dtype) if isinstance(value, np.ndarray) else value for value in values]
    return mixed_array(floats, row_sources(pieces, [value.shape[0] for value in values], target.shape[0]))


def row_sources(pieces: list[Piece], sizes: Sequence[int], out: int) -> np.ndarray:
    """int64 [out]: for each row of a weight, the index of its row in the concatenated pieces, which have `sizes` rows;
    -1 for a row that is in no piece."""
    source = np.full((out, 1), -1, np.int64)
    first = 0
    for piece, size in zip(pieces, sizes, strict=True):
        put_piece(source, piece, np.arange(first, first + size)[:, None])
        first += size
    return source[:, 0]


def _rows_of(piece: Piece, reader: RowReader) -> StoredRows:
    data = reader.read_bytes(piece.name, piece.shape)
    return StoredRows([(str(reader.type_of(piece.name)), data)], np.arange(len(data)), piece.shape[1])


def _rows(pieces: list[Piece], reader: RowReader, shape: tuple[int, ...]) -> StoredRows:
    parts = [part for piece in pieces for part in _rows_of(piece, reader).parts]
    return StoredRows(parts, row_sources(pieces, [len(data) for _, data in parts], shape[0]), shape[1])


def _value(piece: Piece, tensors: Mapping[str, TensorInfo], reader: QuantReader) -> np.ndarray | QuantArray:
    if not reader.parts(piece.name):
        floats = tensors[piece.name].read()
        return floats.T if piece.is_transposed(floats.shape) else floats
    assert len(piece.shape) == 2, f"{piece.name} is no matrix"
    value = reader.read(piece.name, (piece.shape[0], piece.shape[1]))
    assert value.shape == piece.shape, (piece.name, value.shape)
    return value


def _join(pieces: list[Piece], parts: list[QuantArray], shape: tuple[int, ...]) -> QuantArray:
    """A weight [out, in] made of quantized pieces in a common form, whose blocks have one row."""

    def placed(name: str) -> Any:
        values = [getattr(part, name) for part in parts]
        if values[0] is None:
            return None
        if all(isinstance(value, PackedInt4) for value in values):
            return PackedInt4(in_place([value.data for value in values]), values[0].dtype)
        return in_place([np.asarray(value) for value in values])

    def in_place(values: list[np.ndarray]) -> np.ndarray:
        host = _zeros((shape[0], values[0].shape[1]), values[0].dtype)
        for piece, value in zip(pieces, values, strict=True):
            put_piece(host, piece, value)
        return host

    arrays = {name: placed(name) for name in ("codes", "scale", "zero", "bias", "gain")}
    return replace(parts[0], **arrays)


def check(
    tensors: Mapping[str, TensorInfo],
    pieces: Mapping[str, Pieces],
    ignored: Callable[[str], bool],
    reader: QuantReader | None = None,
) -> None:
    """Checks the tensors' names, shapes and dtypes against the model's needs before anything is read."""
    needed = {piece.name: piece for some in pieces.values() for piece in some}
    parts = {name: reader.parts(name) for name in needed} if reader else {}
    quantized = {part for some in parts.values() for part in some}
    needed = {name: piece for name, piece in needed.items() if not parts.get(name)}
    if missing := [name for name in needed if name not in tensors]:
        raise CheckpointError(f"the checkpoint lacks {_listed(missing)}, which its config.json asks for")
    for name, piece in needed.items():
        tensor = tensors[name]
        if not piece.is_stored_as(tensor.shape):
            raise CheckpointError(
                f"{tensor.path.name}: tensor {name!r} has shape {list(tensor.shape)}, "
                f"but config.json asks for {list(piece.shape[::-1] if piece.transposed else piece.shape)}"
            )
        if tensor.dtype.name not in (INTEGERS if piece.integers else FLOATS):
            wanted = "an integer" if piece.integers else "a plain float"
            raise CheckpointError(f"{tensor.path.name}: tensor {name!r} has dtype {tensor.dtype.name}, not {wanted}")
    unused = [name for name in tensors if name not in needed and name not in quantized and not ignored(name)]
    if scales := [name for name in unused if name.endswith(CACHE_SCALES)]:
        unused = [name for name in unused if name not in set(scales)]
        log.warning(
            "%s, made for a KV cache in fp8 with fixed scales, are not used: with --kv-cache-dtype fp8 each head of "
            "each token gets a scale of its own, which is finer",
            _listed(scales, 2),
        )
    if unused:
        log.warning("unused tensors in the checkpoint: %s", _listed(unused))


def _listed(names: Iterable[str], most: int = 8) -> str:
    names = sorted(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{len(names)} tensor(s): {', '.join(names[:most])}{more}"


def _fill(host: np.ndarray, piece: Piece, tensor: TensorInfo) -> None:
    if piece.take is not None:
        put_piece(host, piece, tensor.read())
        return
    if piece.is_transposed(tensor.shape):
        put_piece(host, piece, tensor.read().T)
        return
    view = _view(host, piece)
    split = piece.split
    per_entry = 1 if split is None else tensor.shape[0] // split[0]  # rows of the tensor
    for first, rows in tensor.read_rows(READ_BYTES, per_entry):
        entries = rows if split is None else rows.reshape(len(rows) // per_entry, *split[1:])
        view[first // per_entry : first // per_entry + len(entries)] = entries


def _zeros(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    size = math.prod(shape) * dtype.itemsize
    raw = np.zeros(size + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)


def put_piece(host: np.ndarray, piece: Piece, value: np.ndarray) -> None:
    """Copies a tensor's numbers to their place in a weight's host array. `value` may have any number of columns."""
    view = _view(host, piece)
    value = value if piece.take is None else piece.take(value)
    if piece.split is not None:
        view[...] = value.reshape(piece.split)
    else:
        view[: len(value)] = value


def _view(host: np.ndarray, piece: Piece) -> np.ndarray:
    view = piece.view(host)
    assert np.shares_memory(view, host), f"the place of {piece.name} in {host.shape} is a copy, not a view"
    return view
