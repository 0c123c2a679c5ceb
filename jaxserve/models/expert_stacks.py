"""Brings stacks of experts' weights [experts, out, in] to the devices: some experts at a time, to each device its part.

The host never holds a whole stack. It holds CHUNK_BYTES of it, or one expert if an expert is larger, and what reading
one expert takes. On a CPU, panels are packed directly into the memory where they stay.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import cache
from itertools import chain
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.checkpoints.errors import CheckpointError
from jaxserve.checkpoints.int4 import PackedInt4
from jaxserve.checkpoints.quantized import StoredRows
from jaxserve.config import ConfigError
from jaxserve.devices.mesh import is_split, num_parts
from jaxserve.devices.sharded_ops import quant_specs
from jaxserve.models.panels import Packing
from jaxserve.models.quantized import for_devices, put
from jaxserve.pallas_kernels import cpu_panels
from jaxserve.pallas_kernels.types import BlockArray, QuantArray

CHUNK_BYTES = 64 << 20  # bytes of a stack's members that are brought to the devices at once


def place_stack(path: str, members: Iterator[Any], target: jax.ShapeDtypeStruct, packing: Packing | None) -> Any:
    """Builds a stack on the devices.

    Args:
      path: the stack's path, for messages.
      members: arrays, QuantArrays, BlockArrays or StoredRows [out, in] on the host. Each is read when it is asked for.
      target: shape and sharding of the plain stack.
      packing: on a CPU, members become panels if a type of panels holds them.

    Raises CheckpointError if the members are quantized in different ways.
    """
    first = next(members)
    members = chain([first], members)
    if packing is not None and packing.packed(first) is not None:
        return packing.pack_stack(path, members, target.shape[0], _mesh_of(target))
    return _Stack(path, target).filled(members)


def _mesh_of(target: jax.ShapeDtypeStruct) -> Mesh:
    assert isinstance(target.sharding, NamedSharding)
    assert isinstance(target.sharding.mesh, Mesh)
    return target.sharding.mesh


class _Stack:
    """One stack while it is filled with its members, in their order."""

    def __init__(self, path: str, target: jax.ShapeDtypeStruct):
        assert isinstance(target.sharding, NamedSharding)
        self._path, self._mesh, self._spec = path, _mesh_of(target), target.sharding.spec
        self._count = target.shape[0]
        self._together = 1  # members that are brought to the devices at once
        self._arrays: dict[str, jax.Array] = {}
        self._form: Any = None

    def filled(self, members: Iterator[Any]) -> Any:
        waiting: list[Any] = []
        for number, member in enumerate(members):
            made = self._for_devices(member)
            if not waiting and not number:
                self._form = _without_arrays(made)
                self._together = self._at_once(made)
            if _without_arrays(made) != self._form:
                raise CheckpointError(
                    f"{self._path}: expert {number} is quantized in another way than the experts before it"
                )
            waiting.append(made)
            if len(waiting) == self._together:
                self._write(number + 1 - len(waiting), waiting)
                waiting = []
        return _with_arrays(self._form, self._arrays)

    def _for_devices(self, member: Any) -> Any:
        if not isinstance(member, QuantArray | BlockArray):
            return member
        if isinstance(member, QuantArray) and member.order is not None and is_split(self._mesh):
            raise ConfigError(f"{self._path}: experts in the order of GPTQ's desc_act are served by one device only")
        spec = PartitionSpec(*self._spec[1:])
        return for_devices(member, NamedSharding(self._mesh, spec))

    def _at_once(self, member: Any) -> int:
        """How many members to bring to the devices at once: as many as fit CHUNK_BYTES and divide the number that one
        device holds, so that a chunk belongs to one device."""
        axis = self._spec[0] if len(self._spec) else None
        own = self._count // num_parts(self._mesh, axis)
        size = sum(_bytes(array) for array in _arrays(member).values())
        most = max(1, min(own, CHUNK_BYTES // max(size, 1)))
        return max(n for n in range(1, most + 1) if own % n == 0)

    def _write(self, first: int, members: list[Any]) -> None:
        names = dict.fromkeys(name for member in members for name in _arrays(member))
        for name in names:
            values = [_arrays(member).get(name) for member in members]
            spec = self._spec_of(name, members[0])
            if all(value is None for value in values):
                continue
            filler = next(value for value in values if value is not None)
            host = _stacked([_filling(name, filler) if value is None else value for value in values])
            sharding = NamedSharding(self._mesh, PartitionSpec(None, *spec[1:]))
            chunk = put(host, sharding)
            if self._together == self._count:
                self._arrays[name] = chunk
                continue
            if name not in self._arrays:
                whole = NamedSharding(self._mesh, spec)
                self._arrays[name] = _filled((self._count, *chunk.shape[1:]), chunk.dtype, _neutral(name), whole)
            self._arrays[name] = _writer(self._mesh, spec)(self._arrays[name], chunk, jnp.int32(first))

    def _spec_of(self, name: str, member: Any) -> PartitionSpec:
        """How an array of the stack is split over the mesh, with an entry for each of its axes."""
        if not isinstance(member, QuantArray | BlockArray):
            spec = self._spec
        else:
            whole = quant_specs(_lifted(member), self._spec, self._mesh)
            spec = getattr(whole, name)
        rank = 1 + np.ndim(_arrays(member)[name]) if name in _arrays(member) else len(spec)
        return PartitionSpec(*(*spec, *(None,) * rank)[:rank])


_FIELDS = {
    QuantArray: ("codes", "scale", "zero", "bias", "order", "gain"),
    BlockArray: ("low", "high", "scales", "factors"),
}


def _arrays(member: Any) -> dict[str, Any]:
    """The arrays of a member by the names of their fields. A plain array is called "codes", too."""
    if type(member) not in _FIELDS:
        return {"codes": member}
    found = {name: getattr(member, name) for name in _FIELDS[type(member)]}
    return {name: array for name, array in found.items() if array is not None}


def _without_arrays(member: Any) -> Any:
    """What all members of a stack must have in common: kind, blocks and dtypes. Zero points, biases and gains may be
    missing in some members."""
    if isinstance(member, QuantArray):
        dtypes = str(member.codes.dtype), str(member.scale.dtype), member.order is None
        return QuantArray, member.block, member.activations, dtypes
    if isinstance(member, BlockArray):
        return BlockArray, member.kind
    return np.ndarray, str(member.dtype)


def _with_arrays(form: Any, arrays: dict[str, Any]) -> Any:
    if form[0] is QuantArray:
        return QuantArray(**arrays, block=form[1], activations=form[2])
    if form[0] is BlockArray:
        return BlockArray(**{"high": None, "scales": None, **arrays}, kind=form[1])
    return arrays["codes"]


def _lifted(member: QuantArray | BlockArray) -> Any:
    """The shapes of a stack that has this one member."""

    def lift(array: Any) -> Any:
        return None if array is None else jax.ShapeDtypeStruct((1, *array.shape), array.dtype)

    changed = {name: lift(getattr(member, name)) for name in _FIELDS[type(member)]}
    return dataclasses.replace(member, **changed)


def _neutral(name: str) -> int:
    return 1 if name == "gain" else 0


def _filling(name: str, like: np.ndarray) -> np.ndarray:
    return np.full(like.shape, _neutral(name), like.dtype)


def _bytes(array: Any) -> int:
    return array.data.nbytes if isinstance(array, PackedInt4) else array.nbytes


def _stacked(values: list[Any]) -> Any:
    if all(isinstance(value, PackedInt4) for value in values):
        return PackedInt4(np.stack([value.data for value in values]), values[0].dtype)
    return np.stack([np.asarray(value) for value in values])


@cache
def _maker(shape: tuple[int, ...], dtype: Any, value: int, sharding: NamedSharding) -> Callable[[], jax.Array]:
    return jax.jit(lambda: jnp.full(shape, value, dtype), out_shardings=sharding)


def _filled(shape: tuple[int, ...], dtype: Any, value: int, sharding: NamedSharding) -> jax.Array:
    return _maker(shape, dtype, value, sharding)()


@cache
def _writer(mesh: Mesh, spec: PartitionSpec) -> Callable[..., jax.Array]:
    """A jitted function (stack, chunk of members, index of the first one) -> the stack with these members. The stack is
    donated and changed in place.

    Devices split either each member, or the axis of members. In the second case all members of a chunk belong to one
    device, and the others write back what they have.
    """
    axis = spec[0]

    def local(stack: jax.Array, chunk: jax.Array, first: jax.Array) -> jax.Array:
        if axis is None:
            return jax.lax.dynamic_update_slice_in_dim(stack, chunk, first, 0)
        own = first - jax.lax.axis_index(axis) * len(stack)
        mine = (own >= 0) & (own < len(stack))
        at = jnp.clip(own, 0, len(stack) - len(chunk))
        old = jax.lax.dynamic_slice_in_dim(stack, at, len(chunk))
        return jax.lax.dynamic_update_slice_in_dim(stack, jnp.where(mine, chunk, old), at, 0)

    specs = spec, PartitionSpec(None, *spec[1:]), PartitionSpec()
    mapped = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=spec, check_vma=False)
    return jax.jit(mapped, donate_argnums=0)


def abstract_stack(member: Any, target: jax.ShapeDtypeStruct, packing: Packing | None, mesh: Mesh) -> Any:
    """The shapes of the stack that `place_stack` would make of members like `member`: a QuantArray or BlockArray, of
    arrays or of their shapes, or StoredRows, which become panels."""
    if packing is not None and (isinstance(member, StoredRows) or packing.fits(member)):
        place = NamedSharding(mesh, PartitionSpec())
        made = cpu_panels.abstract_stack(packing.abstract(member, mesh), target.shape[0])
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), made)
    assert isinstance(target.sharding, NamedSharding)
    specs = quant_specs(_lifted(member), target.sharding.spec, mesh)

    def stacked(array: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        shape = (target.shape[0], *array.shape)
        return jax.ShapeDtypeStruct(shape, array.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree.map(stacked, member, specs)
