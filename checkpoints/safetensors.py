"""Reads safetensors files; every length and offset is checked before it is used.

Format: https://huggingface.co/docs/safetensors: 8 bytes little-endian header length, a JSON header of
name -> {dtype, shape, data_offsets}, then the tensors' bytes back to back: they tile the rest of the file, without
holes or overlaps.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from json.decoder import scanstring  # type: ignore[attr-defined]  # typeshed does not have it
from pathlib import Path
from typing import Self

import ml_dtypes
import msgspec
import numpy as np

from jaxserve.checkpoints.errors import CheckpointError
from jaxserve.checkpoints.files import open_regular, read_bytes, shown

MAX_HEADER_BYTES = 25_000_000  # 150,000 tensors, and twice as many with short names
MAX_TENSORS = 1_000_000  # of all files of a folder
MAX_INDEX_BYTES = 2**26
MAX_NAME = 512  # characters
MAX_METADATA = 2**16  # entries, which are not read
MAX_DIMENSIONS = 8
FLOATS = ("float64", "float32", "float16", "bfloat16")
INTEGERS = ("int64", "int32")
MAX_ELEMENTS = 2**56
DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "C64": np.dtype(np.complex64),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}

_SPACES = re.compile(r"[ \t\n\r]*")
_COLON = re.compile(r"[ \t\n\r]*:[ \t\n\r]*")
_OPENING = re.compile(r"\{[ \t\n\r]*")
_AFTER_VALUE = re.compile(r"[ \t\n\r]*(?:,[ \t\n\r]*|\})")
_NO_METADATA = re.compile(r"null|\{[ \t\n\r]*\}")
_ENTRY = re.compile(r"[ \t\n\r]*:[ \t\n\r]*(\{[^{}]{0,4096}\})")  # without objects inside


@dataclass(frozen=True)
class TensorInfo:
    """A tensor and its place in a file; `start` is in bytes from the file's beginning."""

    name: str
    path: Path
    dtype: np.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def rows_at_once(self) -> int:
        """Rows can only be read in multiples of this number."""
        return 1

    def entry(self, index: int, name: str) -> Self:
        """The tensor that is an entry of the leading axis, under a name of its own."""
        return replace(self, name=name, shape=self.shape[1:], start=self.start + index * (self.nbytes // self.shape[0]))

    def read(self) -> np.ndarray:
        """The whole tensor, in the file's dtype."""
        parts = [rows for _, rows in self.read_rows(max(self.nbytes, 1))]
        return parts[0] if parts else np.empty(self.shape, self.dtype)

    def read_rows(self, max_bytes: int, multiple: int = 1) -> Iterator[tuple[int, np.ndarray]]:
        """Yields (index of the first row, rows), at most `max_bytes` at a time if possible. The number of rows is a
        multiple of `rows_at_once` and of `multiple`, which must divide the tensor's rows."""
        if not self.shape:
            yield 0, self._read(0, 1).reshape(())
            return
        row = math.prod(self.shape[1:])
        if row == 0 or self.shape[0] == 0:
            return
        least = math.lcm(self.rows_at_once, multiple)
        step = max(least, max_bytes // (row * self.dtype.itemsize) // least * least)
        for first in range(0, self.shape[0], step):
            count = min(step, self.shape[0] - first)
            yield first, self._read(first * row, count * row).reshape(count, *self.shape[1:])

    def _read(self, first: int, count: int) -> np.ndarray:
        """`count` numbers from number `first` on; whole rows, if the tensor has rows."""
        return self._numbers(self.dtype, count, first * self.dtype.itemsize)

    def _numbers(self, dtype: np.dtype, count: int, offset: int) -> np.ndarray:
        """`count` numbers of the file, `offset` bytes after the tensor's start."""
        return read_numbers(self.path, self.name, dtype, count, self.start + offset)


def read_numbers(path: Path, name: str, dtype: np.dtype, count: int, first: int) -> np.ndarray:
    """`count` numbers of the tensor `name` from byte `first` on. Memory is taken only for bytes that the file has."""
    try:
        with open_regular(path) as file:
            whole = first + count * dtype.itemsize <= os.fstat(file.fileno()).st_size
            data = np.fromfile(file, dtype, count, offset=first) if whole else np.empty(0, dtype)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None
    if data.size != count:
        raise CheckpointError(f"{path} ends inside tensor {shown(name)}: it is truncated")
    return data


def read_header(path: Path, most: int = MAX_TENSORS) -> dict[str, TensorInfo]:
    """The tensors of one file. Raises CheckpointError for a damaged file, and for more than `most` tensors.

    The time is proportional to the header's length, and the header is not decoded at once: Python's JSON decoder would
    hold the interpreter's lock meanwhile, and memory of a hundred times the length.
    """
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > size - 8:
                raise CheckpointError(
                    f"{path} is not a complete safetensors file: its header claims {length} bytes, the file has {size}"
                )
            if length > MAX_HEADER_BYTES:
                raise CheckpointError(f"{path}: the header has {length} bytes, and at most {MAX_HEADER_BYTES} are read")
            raw = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    tensors: dict[str, TensorInfo] = {}
    try:
        for name, entry in _entries(path, raw.decode()):
            if name in tensors:
                raise ValueError(f"{shown(name)} stands there twice")
            if len(tensors) >= most:
                raise CheckpointError(f"{path} has more than {most} tensors")
            tensors[name] = _tensor(path, name, _object(entry), 8 + length, size)
    except CheckpointError:
        raise
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: the safetensors header is not valid JSON: {error}") from None
    _check_tiling(path, tensors, 8 + length, size)
    return tensors


def _entries(path: Path, text: str) -> Iterator[tuple[str, str]]:
    """(name of a tensor, its entry as JSON) for each entry of a header. Raises ValueError for what is not JSON."""
    at = _end(_SPACES, text, 0)
    if not text.startswith("{", at):
        raise CheckpointError(f"{path}: the safetensors header must be a JSON object")
    at = _end(_SPACES, text, at + 1)
    closed = text.startswith("}", at)
    at += closed
    while not closed:
        name, at = _string(text, at)
        if name == "__metadata__":
            at = _end_of_metadata(text, at)
        else:
            if (entry := _ENTRY.match(text, at)) is None:
                raise ValueError(f"or tensor {shown(name)} has no dtype, shape and data_offsets")
            yield name, entry[1]
            at = entry.end()
        at, closed = _after_value(text, at)
    if text[at:].strip(" \t\n\r"):
        raise ValueError(f"it goes on behind its end, at character {at}")


def _end(pattern: re.Pattern[str], text: str, at: int) -> int:
    """The end of what must stand at a place. Raises ValueError if it does not."""
    if (match := pattern.match(text, at)) is None:
        raise ValueError(f"unexpected text at character {at}")
    return match.end()


def _string(text: str, at: int) -> tuple[str, int]:
    """A string of a header, and its end."""
    if not text.startswith('"', at):
        raise ValueError(f"a string was expected at character {at}")
    return scanstring(text, at + 1, True)


def _after_value(text: str, at: int) -> tuple[int, bool]:
    """The end of the comma or bracket behind a value of an object, and whether the object ends there."""
    end = _end(_AFTER_VALUE, text, at)
    return end, text[at:end].strip(" \t\n\r") == "}"


def _end_of_metadata(text: str, at: int) -> int:
    """Where the metadata end, an object of strings that is not kept."""
    at = _end(_COLON, text, at)
    if (empty := _NO_METADATA.match(text, at)) is not None:
        return empty.end()
    at = _end(_OPENING, text, at)
    for _ in range(MAX_METADATA):
        _, at = _string(text, at)
        _, at = _string(text, _end(_COLON, text, at))
        at, closed = _after_value(text, at)
        if closed:
            return at
    raise ValueError(f"__metadata__ has more than {MAX_METADATA} entries")


def _object(entry: str) -> object:
    return json.loads(entry, object_pairs_hook=_without_duplicates)


def _without_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    made: dict[str, object] = {}
    for name, value in pairs:
        if name in made:
            raise ValueError(f"{shown(name)} stands there twice")
        made[name] = value
    return made


def _check_tiling(path: Path, tensors: dict[str, TensorInfo], begin: int, size: int) -> None:
    """Checks that each byte from `begin` on belongs to exactly one tensor."""
    at = begin
    before = "the header"
    for tensor in sorted(tensors.values(), key=lambda t: (t.start, t.nbytes)):
        if tensor.start != at:
            what = "overlaps" if tensor.start < at else "leaves a hole after"
            raise CheckpointError(f"{path}: tensor {shown(tensor.name)} {what} {before}")
        at = tensor.start + tensor.nbytes
        before = shown(tensor.name)
    if at != size:
        raise CheckpointError(f"{path}: {size - at} bytes after {before} belong to no tensor")


def _tensor(path: Path, name: str, entry: object, base: int, size: int) -> TensorInfo:
    def refuse(why: str) -> CheckpointError:
        return CheckpointError(f"{path}: tensor {shown(name)} {why}")

    if len(name) > MAX_NAME:
        raise refuse(f"has a name of more than {MAX_NAME} characters")
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise refuse("has no dtype, shape and data_offsets")
    dtype = entry["dtype"]
    shape = entry["shape"]
    offsets = entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise refuse(f"has dtype {shown(dtype)}; supported are {', '.join(DTYPES)}")
    if not _is_sizes(shape) or len(shape) > MAX_DIMENSIONS or math.prod(x for x in shape if x) > MAX_ELEMENTS:
        raise refuse(f"has an invalid shape {shown(shape)}")
    if not _is_sizes(offsets) or len(offsets) != 2:
        raise refuse(f"has invalid data_offsets {shown(offsets)}")
    begin, end = offsets
    needed = math.prod(shape) * DTYPES[dtype].itemsize
    if end - begin != needed:
        raise refuse(f"has shape {shape} of {dtype}, which takes {needed} bytes, but its offsets span {end - begin}")
    if base + end > size:
        raise refuse(f"ends at byte {base + end}, but the file has {size}: it is truncated")
    return TensorInfo(name, path, DTYPES[dtype], tuple(shape), base + begin)


def _is_sizes(value: object) -> bool:
    return isinstance(value, list) and all(type(x) is int and 0 <= x < 2**62 for x in value)


def read_folder(folder: Path) -> dict[str, TensorInfo]:
    """All tensors of a model folder: of the index's files, else of `model.safetensors`, else of all safetensors files,
    without consolidated ones if there are others."""
    index = folder / "model.safetensors.index.json"
    single = folder / "model.safetensors"
    if index.exists():
        paths = _indexed_files(folder, index)
    elif single.exists():  # other files hold adapters, or the same weights under other names
        paths = [single]
    else:
        paths = _all_files(folder)
    if not paths:
        pickled = [p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in folder.glob(pattern)]
        hint = (
            f"; {', '.join(sorted(pickled)[:3])} are pickles, which can run code and are never loaded: "
            "convert them to safetensors where you trust them (save_pretrained with safe_serialization)"
            if pickled
            else ""
        )
        raise CheckpointError(f"{folder} holds no .safetensors files{hint}")
    tensors: dict[str, TensorInfo] = {}
    for path in paths:
        for name, tensor in read_header(path, MAX_TENSORS - len(tensors)).items():
            if name in tensors:
                raise CheckpointError(f"tensor {shown(name)} is both in {tensors[name].path.name} and in {path.name}")
            tensors[name] = tensor
    return tensors


def _all_files(folder: Path) -> list[Path]:
    paths = sorted(folder.glob("*.safetensors"))
    return [path for path in paths if not path.name.startswith("consolidated")] or paths


class _Index(msgspec.Struct):
    """The part of an index that is read; msgspec skips the others without keeping them."""

    weight_map: dict[str, str]


def _indexed_files(folder: Path, index: Path) -> list[Path]:
    try:
        names = set(msgspec.json.decode(read_bytes(index, MAX_INDEX_BYTES), type=_Index).weight_map.values())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{index} is not a safetensors index: {error}") from None
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise CheckpointError(f"{index} names {name!r:.200}, which is no .safetensors file of its folder")
    if not any(os.path.isfile(folder / name) for name in names) and (others := _all_files(folder)):
        return others  # some quantizers copy the original model's index
    for name in names:
        if not os.path.isfile(folder / name):
            raise CheckpointError(f"{index} names {name}, which is missing")
    return sorted(folder / name for name in names)
