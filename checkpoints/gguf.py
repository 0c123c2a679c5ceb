"""Reads GGUF files; every count, length and offset is checked against the file before it is used.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian: magic, version,
counts, metadata (key -> typed value), tensor infos, and from the next multiple of the alignment on the tensors' data. A
model may be split into files NAME-00001-of-0000N.gguf, of which the first holds the metadata.
"""

from __future__ import annotations

import io
import itertools
import math
import os
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import numpy as np

from jaxserve.checkpoints.errors import CheckpointError
from jaxserve.checkpoints.files import open_regular, shown
from jaxserve.checkpoints.safetensors import MAX_ELEMENTS

MAX_HEADER_BYTES = 2**27  # a vocabulary of a million tokens takes a quarter of it
MAX_DIMENSIONS = 4
MAX_ALIGNMENT = 2**20
MAX_KEY_BYTES = 65535
MAX_NAME_BYTES = 512  # of a tensor
MAX_KEYS = 2**16
MAX_TENSORS = 2**18
MAX_STRINGS = 2**21  # in all arrays: a vocabulary of a million tokens, and its merges


class BlockType(NamedTuple):
    """How a tensor's rows are stored: blocks of `size` weights in `nbytes` bytes each."""

    name: str
    size: int
    nbytes: int


# Tensor types by their number in the file (enum ggml_type). Missing numbers were never in use or have been withdrawn.
TYPES = {
    number: BlockType(*fields)
    for number, fields in {
        0: ("F32", 1, 4),
        1: ("F16", 1, 2),
        2: ("Q4_0", 32, 18),
        3: ("Q4_1", 32, 20),
        6: ("Q5_0", 32, 22),
        7: ("Q5_1", 32, 24),
        8: ("Q8_0", 32, 34),
        10: ("Q2_K", 256, 84),
        11: ("Q3_K", 256, 110),
        12: ("Q4_K", 256, 144),
        13: ("Q5_K", 256, 176),
        14: ("Q6_K", 256, 210),
        16: ("IQ2_XXS", 256, 66),
        17: ("IQ2_XS", 256, 74),
        18: ("IQ3_XXS", 256, 98),
        19: ("IQ1_S", 256, 50),
        20: ("IQ4_NL", 32, 18),
        21: ("IQ3_S", 256, 110),
        22: ("IQ2_S", 256, 82),
        23: ("IQ4_XS", 256, 136),
        28: ("F64", 1, 8),
        29: ("IQ1_M", 256, 56),
        30: ("BF16", 1, 2),
        34: ("TQ1_0", 256, 54),
        35: ("TQ2_0", 256, 66),
        39: ("MXFP4", 32, 17),
    }.items()
}
# dtypes of metadata values by their number in the file; 7 is bool, 8 string, 9 array.
_SCALARS = {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?",
            10: "<u8", 11: "<i8", 12: "<f8"}  # fmt: skip
# Special tokens with these texts end a turn even if the file does not say so (as in llama.cpp).
_END_TEXTS = frozenset(
    ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>", "<end_of_turn>", "<EOT>")
)
_CONTROL = 3  # the token type of special tokens
_BOOL = 7
_STRING = 8
_ARRAY = 9
HEADER_ONLY = "jaxserve.header_only"  # metadata key of files without the tensors' data, see `write_header`
_SMALLEST_ENTRY = 13  # least bytes of a metadata entry: a key's length, a type, a value
_SMALLEST_TENSOR = 32  # least bytes of a tensor info: a name's length, a count, one dimension, a type, an offset
_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


class StoredTensor(NamedTuple):
    """A tensor's place in the file; `start` is in bytes from the beginning, and the last of `shape` a row's length."""

    name: str
    path: Path
    type: BlockType
    shape: tuple[int, ...]
    start: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) // self.type.size * self.type.nbytes


@dataclass(frozen=True)
class GGUFFile:
    """A file's header. Values of `metadata` are ints, floats, bools, strings, NumPy arrays, and lists of strings."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, StoredTensor]


def end_ids(metadata: Mapping[str, Any]) -> list[int]:
    """The tokens that end a text or a turn, with the file's end-of-sequence token first."""
    named = [metadata.get(f"tokenizer.ggml.{role}_token_id") for role in ("eos", "eot", "eom")]
    tokens, types = (metadata.get(f"tokenizer.ggml.{key}") for key in ("tokens", "token_type"))
    found = []
    if isinstance(tokens, list) and isinstance(types, np.ndarray):
        found = [i for i in np.flatnonzero(types[: len(tokens)] == _CONTROL).tolist() if tokens[i] in _END_TEXTS]
    return list(dict.fromkeys([i for i in named if type(i) is int] + found))


def known_gguf(path: Path) -> GGUFFile:
    """As `read_gguf`, with a cache of the last file until it changes. Start-up asks for config, weights and tokenizer
    separately, and reading a large vocabulary takes long."""
    try:
        stat = path.stat()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    return _remembered(path, (stat.st_ino, stat.st_size, stat.st_mtime_ns))


@lru_cache(maxsize=1)
def _remembered(path: Path, version: tuple[int, ...]) -> GGUFFile:
    """`version` changes when the file is changed or replaced."""
    return read_gguf(path)


def encoders_beside(path: Path) -> list[Path]:
    """The files beside a GGUF file that may have its image encoder (see `gguf_mmproj`)."""
    return [found for found in sorted(path.parent.glob("*mmproj*.gguf")) if found != path]


def forget() -> None:
    """Empties the cache of `known_gguf` after start-up: a large vocabulary takes tens of MiB."""
    _remembered.cache_clear()


def read_gguf(path: Path) -> GGUFFile:
    """Reads a file's header and, if it is the first of several parts, those of the others. Raises CheckpointError."""
    first = _read_file(path)
    count = first.metadata.get("split.count", 0)
    if type(count) is not int or count <= 1 or HEADER_ONLY in first.metadata:
        return first
    name = _PART.fullmatch(path.name)
    if name is None or int(name[2]) != 1 or int(name[3]) != count:
        raise CheckpointError(f"{path} is one of {count} parts: give the first, NAME-00001-of-{count:05}.gguf")
    tensors = dict(first.tensors)
    for number in range(2, count + 1):
        part = _read_file(path.with_name(f"{name[1]}-{number:05}-of-{count:05}.gguf"))
        if twice := tensors.keys() & part.tensors.keys():
            raise CheckpointError(f"{part.path}: tensor {shown(min(twice))} is in {tensors[min(twice)].path.name} too")
        tensors |= part.tensors
    return GGUFFile(path, first.metadata, tensors)


def write_header(source: Path, target: Path) -> None:
    """Writes a file with the metadata and the list of tensors of a model, but without their data. Config and tokenizer
    can be read from it."""
    model = read_gguf(source)
    raw = _raw_metadata(source)
    alignment = model.metadata.get("general.alignment", 32)
    key = HEADER_ONLY.encode()
    numbers = {kind.name: number for number, kind in TYPES.items()}
    count = struct.unpack_from("<Q", raw, 16)[0]
    parts = [raw[:8], struct.pack("<QQ", len(model.tensors), count + 1), raw[24:]]
    parts += [struct.pack("<Q", len(key)), key, struct.pack("<I?", _BOOL, True)]
    at = 0
    for name, tensor in model.tensors.items():
        shape = tensor.shape[::-1]
        sizes = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
        parts += [struct.pack("<Q", len(name.encode())), name.encode(), sizes]
        parts.append(struct.pack("<IQ", numbers[tensor.type.name], at))
        at += -(-tensor.nbytes // alignment) * alignment
    target.write_bytes(b"".join(parts))


def _raw_metadata(path: Path) -> bytes:
    """The bytes of a checked file from its beginning to the end of the metadata."""
    with _opened(path) as file:
        header = _Header(path, file, os.fstat(file.fileno()).st_size)
        header.bytes(16, "the magic, the version and the number of tensors")
        for _ in range(header.count(_SMALLEST_ENTRY, "the metadata")):
            header.value(header.string("a metadata key", MAX_KEY_BYTES))
        end = file.tell()
        file.seek(0)
        return file.read(end)


def _opened(path: Path) -> BinaryIO:
    return cast(BinaryIO, io.BufferedReader(open_regular(path), 2**16))


def _read_file(path: Path) -> GGUFFile:
    try:
        with _opened(path) as file:
            return _Header(path, file, os.fstat(file.fileno()).st_size).read()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None


class _Header:
    """Reads the part of a file before its data. `left`: bytes that the header may still take; `strings_left`: strings
    that arrays may still have."""

    def __init__(self, path: Path, file: BinaryIO, size: int):
        self.path = path
        self.file = file
        self.size = size
        self.left = min(size, MAX_HEADER_BYTES)
        self.strings_left = MAX_STRINGS

    def refuse(self, why: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {why}")

    def read(self) -> GGUFFile:
        if (magic := self.bytes(4, "the magic")) != b"GGUF":
            raise self.refuse(f"not a GGUF file: it begins with {magic!r}")
        version = self.number("<u4", "the version")
        if version not in (2, 3):
            why = "big-endian" if version in (2 << 24, 3 << 24) else f"of version {version}"
            raise self.refuse(f"a GGUF file {why}; versions 2 and 3, little-endian, can be read")
        tensors = self.count(_SMALLEST_TENSOR, "the tensors", MAX_TENSORS)
        entries = self.count(_SMALLEST_ENTRY, "the metadata", MAX_KEYS)
        metadata: dict[str, Any] = {}
        for _ in range(entries):
            key = self.string("a metadata key", MAX_KEY_BYTES)
            if key in metadata:
                raise self.refuse(f"metadata key {shown(key)} stands there twice")
            metadata[key] = self.value(key)
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 0 < alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
            raise self.refuse(f"general.alignment must be a power of two up to {MAX_ALIGNMENT}, got {shown(alignment)}")
        if HEADER_ONLY in metadata:
            self.size = 2**62  # there is no data in which tensors must lie
        infos = [self.tensor(alignment) for _ in range(tensors)]
        base = -(-self.file.tell() // alignment) * alignment
        return GGUFFile(self.path, metadata, dict(self.placed(infos, base)))

    def placed(self, infos: list[StoredTensor], base: int) -> Iterator[tuple[str, StoredTensor]]:
        """(name, tensor with its place in the file). Checks that tensors lie in the file and do not overlap."""
        infos = sorted((info._replace(start=base + info.start) for info in infos), key=lambda info: info.start)
        for info, after in itertools.zip_longest(infos, infos[1:]):
            end = info.start + info.nbytes
            if end > self.size:
                name = shown(info.name)
                raise self.refuse(f"truncated: tensor {name} ends at byte {end}, but the file has {self.size}")
            if after and end > after.start:
                raise self.refuse(f"tensor {shown(after.name)} overlaps {shown(info.name)}")
            yield info.name, info
        if len({info.name for info in infos}) < len(infos):
            names = sorted(info.name for info in infos)
            twice = next(name for name, after in itertools.pairwise(names) if name == after)
            raise self.refuse(f"tensor {shown(twice)} stands there twice")

    # The elements of a header. `what` names the element in errors.

    def bytes(self, length: int, what: str) -> bytes:
        if length > self.left:
            raise self.refuse(f"{what} claims {length} bytes, but the header has only {self.left} left")
        self.left -= length
        data = self.file.read(length)
        if len(data) < length:
            raise self.refuse("the file was truncated while being read")
        return data

    def number(self, dtype: str, what: str) -> Any:
        return np.frombuffer(self.bytes(np.dtype(dtype).itemsize, what), dtype)[0].item()

    def length(self, what: str) -> int:
        return int.from_bytes(self.bytes(8, what), "little")

    def count(self, smallest: int, what: str, most: int = MAX_HEADER_BYTES) -> int:
        """Reads the number of elements that follow, each of at least `smallest` bytes."""
        count = self.length(what)
        if count * smallest > self.left:
            raise self.refuse(f"{what}: {count} are claimed, which cannot lie in the {self.left} bytes that are left")
        if count > most:
            raise self.refuse(f"{what}: {count} are claimed, and at most {most} are read")
        return count

    def string(self, what: str, most: int = MAX_HEADER_BYTES) -> str:
        length = self.length(what)
        if length > most:
            raise self.refuse(f"{what} claims {length} bytes, more than {most}")
        try:
            return self.bytes(length, what).decode()
        except UnicodeDecodeError:
            raise self.refuse(f"{what} is not valid UTF-8") from None

    def strings(self, count: int, what: str) -> list[str]:
        """As `string` for each, but for millions of them."""
        read = self.file.read
        made = []
        for _ in range(count):
            length = int.from_bytes(read(8), "little")
            self.left -= 8 + length
            if self.left < 0:
                raise self.refuse(f"{what} claims {length} bytes, more than the header has left")
            made.append(read(length))
        if self.file.tell() > self.size or (made and len(made[-1]) < length):
            raise self.refuse("the file was truncated while being read")
        try:
            return [one.decode() for one in made]
        except UnicodeDecodeError:
            raise self.refuse(f"{what} is not valid UTF-8") from None

    def value(self, key: str) -> Any:
        what = f"metadata {shown(key)}"
        kind = self.number("<u4", what)
        if kind == _STRING:
            return self.string(what)
        if kind != _ARRAY:
            return self.scalars(kind, 1, what)[0].item()
        kind = self.number("<u4", what)
        if kind == _STRING:
            count = self.count(8, what, self.strings_left)
            self.strings_left -= count
            return self.strings(count, what)
        if kind == _ARRAY:
            raise self.refuse(f"{what} is an array of arrays, which no known key is")
        return self.scalars(kind, self.length(what), what)

    def scalars(self, kind: int, count: int, what: str) -> np.ndarray:
        if kind not in _SCALARS:
            raise self.refuse(f"{what} has the unknown type {kind}")
        data = self.bytes(count * np.dtype(_SCALARS[kind]).itemsize, what)
        if kind == _BOOL and data.strip(b"\0\1"):
            raise self.refuse(f"{what} is neither true nor false")
        return np.frombuffer(data, _SCALARS[kind])

    def tensor(self, alignment: int) -> StoredTensor:
        """A tensor info; its start is relative to the beginning of the data."""
        name = self.string("a tensor's name", MAX_NAME_BYTES)
        what = f"tensor {shown(name)}"
        dimensions = int.from_bytes(self.bytes(4, what), "little")
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            raise self.refuse(f"{what} has {dimensions} dimensions; 1 to {MAX_DIMENSIONS} are allowed")
        shape = struct.unpack(f"<{dimensions}Q", self.bytes(8 * dimensions, what))[::-1]
        number, start = struct.unpack("<IQ", self.bytes(12, what))
        if 0 in shape or math.prod(shape) > MAX_ELEMENTS:
            raise self.refuse(f"{what} has an invalid shape {list(shape)}")
        if number not in TYPES:
            raise self.refuse(f"{what} has the unknown type {number}; known are {_listed_types()}")
        if shape[-1] % TYPES[number].size:
            raise self.refuse(f"{what} has rows of {shape[-1]}, no multiple of {TYPES[number].name}'s block size")
        if start % alignment or start > self.size:
            raise self.refuse(f"{what} begins {start} bytes into the data, unaligned or behind the file's end")
        return StoredTensor(name, self.path, TYPES[number], shape, start)


def _listed_types() -> str:
    return ", ".join(f"{number} ({kind.name})" for number, kind in TYPES.items())
