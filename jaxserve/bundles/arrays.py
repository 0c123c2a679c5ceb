"""Sharded arrays in files: each distinct shard once, and aligned, so that a CPU's arrays are the mapped files."""

from __future__ import annotations

import math
import mmap
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import jax
import msgspec
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxserve.checkpoints.files import open_regular, shown
from jaxserve.checkpoints.int4 import halves
from jaxserve.devices.executables import Leaf, leaf_of, sharding_of

ALIGNED = 64  # bytes: JAX takes an array at such an address without a copy
PART = 2**27  # bytes of a file; a larger shard has a file of its own


class Shard(msgspec.Struct, frozen=True):
    """A shard: the part of each axis, (start, stop), and where its bytes are."""

    index: list[tuple[int, int]]
    file: str
    offset: int


class Stored(msgspec.Struct, frozen=True):
    leaf: Leaf
    shards: list[Shard]


class Writer:
    """Writes shards to files of about PART bytes in `folder`/`place`."""

    def __init__(self, folder: Path, place: str):
        self._folder = folder
        self._place = place
        (folder / place).mkdir()
        self._file: Any = None
        self._name = ""
        self._count = 0

    def write(self, array: jax.Array) -> Stored:
        """Writes an array with all its shards."""
        shards: dict[tuple[tuple[int, int], ...], Shard] = {}
        for shard in array.addressable_shards:
            index = _index(shard.index, array.shape)
            if index not in shards:
                shards[index] = self._shard(index, _packed(np.ascontiguousarray(shard.data)))
        place = array.sharding
        assert isinstance(place, NamedSharding)
        return Stored(leaf_of(array, place), list(shards.values()))

    def _shard(self, index: tuple[tuple[int, int], ...], data: np.ndarray) -> Shard:
        raw = data.reshape(-1).view(np.uint8)
        if self._file is None or (self._file.tell() and self._file.tell() + raw.nbytes > PART):
            self.close()
            self._name = f"{self._place}/{self._count:05}.bin"
            self._file = (self._folder / self._name).open("wb")
            self._count += 1
        offset = -(-self._file.tell() // ALIGNED) * ALIGNED
        self._file.seek(offset)
        self._file.write(raw)
        return Shard(list(index), self._name, offset)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


class Reader:
    """Makes arrays from the files of a folder, which are mapped. `known`: the names of those that may be read."""

    def __init__(self, folder: Path, known: Collection[str]):
        self._folder = folder
        self._known = known
        self._files: dict[str, mmap.mmap] = {}

    def read(self, stored: Sequence[Stored], mesh: Mesh) -> list[jax.Array]:
        return [self._array(one, mesh) for one in stored]

    def _array(self, one: Stored, mesh: Mesh) -> jax.Array:
        leaf = one.leaf
        sharding = sharding_of(one.leaf, mesh)
        shape = tuple(leaf.shape)
        dtype = jax.numpy.dtype(leaf.dtype)
        places = sharding.addressable_devices_indices_map(shape)
        known = {tuple(tuple(part) for part in shard.index): shard for shard in one.shards}
        data = {}
        for device, index in places.items():
            key = _index(index, shape)
            if key not in known:
                raise ValueError(f"there is no shard {key} of an array {list(shape)}")
            data[device] = self._mapped(known[key], dtype)
        parts = [jax.device_put(host, device) for device, host in data.items()]
        return jax.make_array_from_single_device_arrays(shape, sharding, parts)

    def _mapped(self, shard: Shard, dtype: np.dtype) -> np.ndarray:
        shape = tuple(stop - start for start, stop in shard.index)
        count = math.prod(shape)
        if min(shape, default=0) < 0 or shard.offset < 0:
            raise ValueError(f"a shard has the shape {shown(list(shape))} at byte {shown(shard.offset)}")
        if not count:
            return np.zeros(shape, dtype)
        halved = _is_halved(dtype, shape)
        size = count // 2 if halved else count * dtype.itemsize
        if shard.file not in self._files:
            if shard.file not in self._known:
                raise ValueError(f"the bundle has no file {shown(shard.file)} of weights")
            with open_regular(self._folder / shard.file) as file:
                self._files[shard.file] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        bytes_ = np.frombuffer(self._files[shard.file], np.uint8, size, shard.offset)
        return (halves(bytes_) if halved else bytes_).view(dtype).reshape(shape)


def _is_halved(dtype: np.dtype, shape: tuple[int, ...]) -> bool:
    """Whether numbers of 4 bits are stored two in a byte; NumPy has a byte for each."""
    return jax.dtypes.itemsize_bits(dtype) == 4 and bool(shape) and shape[-1] % 2 == 0


def _packed(data: np.ndarray) -> np.ndarray:
    if not _is_halved(data.dtype, data.shape):
        return data
    codes = data.view(np.uint8) & 15
    return codes[..., ::2] | codes[..., 1::2] << 4


def _index(index: Any, shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    ranges = [part.indices(size) for part, size in zip(index, shape, strict=True)]
    return tuple((start, stop) for start, stop, _ in ranges)
