"""Arrays that go from the devices of one mesh to those of another one that belongs to other hosts.

A transfer is a program on the devices of both meshes: each device of the first one sends to its counterpart in the
second one (collective permute). Every process that has some of these devices must run it. A device runs its programs in
order, and a transfer waits for the device's counterpart; so both must have the transfers between them in one order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.stages import Compiled

from jaxserve.devices.mesh import replicated

Forms = Sequence[jax.ShapeDtypeStruct]  # of arrays that go together
_ENDS = PartitionSpec("end")  # the parts of both meshes, one after the other


class MeshLink:
    """The way from the devices of `source` to equally many of `target`. Arrays are whole on every device of a mesh.

    Attributes:
      is_here: whether this process has some of the devices.
      frozen: True: compiling a transfer raises RuntimeError.
    """

    def __init__(self, source: Mesh, target: Mesh):
        ends = source.devices.flatten(), target.devices.flatten()
        self._place = NamedSharding(Mesh(np.stack(ends), ("end", "device")), _ENDS)
        self._arrival = replicated(target)
        self.frozen = False
        self._own: list[Any] = sorted(self._place.addressable_devices, key=lambda device: device.id)
        self.is_here = bool(self._own)
        self._programs: dict[Any, Compiled] = {}
        self._blank: dict[Any, jax.Array] = {}

    def send(self, arrays: Sequence[jax.Array]) -> None:
        """Sends arrays of the first mesh. Returns at once."""
        self._run(arrays, [{shard.device: shard.data for shard in x.addressable_shards} for x in arrays])

    def receive(self, forms: Forms) -> list[jax.Array]:
        """The arrays that are sent next, which have these shapes and dtypes, on the second mesh. Returns at once."""
        there = self._arrival.addressable_devices
        arrays: list[jax.Array] = []
        for form, both in zip(forms, self._run(forms, [{} for _ in forms]), strict=True):
            parts = [shard.data for shard in both.addressable_shards if shard.device in there]
            arrays.append(jax.make_array_from_single_device_arrays(form.shape, self._arrival, parts))
        return arrays

    def compile(self, forms: Sequence[Any]) -> Compiled:
        """The program that transfers arrays like these, or like their forms. Compiles it unless it is known."""
        key = tuple((x.shape, x.dtype) for x in forms)
        if key not in self._programs:
            if self.frozen:
                raise RuntimeError(f"the transfer of {key} was not compiled before the engine was ready")
            given = [jax.ShapeDtypeStruct(_both(shape), dtype, sharding=self._place) for shape, dtype in key]
            mapped = jax.shard_map(_transfer, mesh=self._place.mesh, in_specs=_ENDS, out_specs=_ENDS, check_vma=False)
            self._programs[key] = jax.jit(mapped).lower(given).compile()
        return self._programs[key]

    def _run(self, forms: Sequence[Any], parts: list[dict[jax.Device, jax.Array]]) -> list[jax.Array]:
        """Runs a transfer of these parts of this process's devices. Devices without a part receive one."""
        given = []
        for form, part in zip(forms, parts, strict=True):
            own = [part[d] if d in part else self._nothing(form, d) for d in self._own]
            given.append(jax.make_array_from_single_device_arrays(_both(form.shape), self._place, own))
        return self.compile(forms)(given)

    def _nothing(self, form: Any, device: jax.Device) -> jax.Array:
        """What a device gives that only receives."""
        key = form.shape, form.dtype, device
        if key not in self._blank:
            self._blank[key] = jax.device_put(np.zeros(form.shape, form.dtype), device)
        return self._blank[key]


def _both(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the parts of both ends, one after the other."""
    return (2 * shape[0], *shape[1:])


def _transfer(arrays: list[jax.Array]) -> list[jax.Array]:
    return [jax.lax.ppermute(x, "end", [(0, 1)]) for x in arrays]


def least_of_processes(numbers: Sequence[int]) -> list[int]:
    """The least of each of these numbers in all processes, which must all call this. Waits for them."""
    first = {device.process_index: device for device in reversed(jax.devices())}
    mesh = Mesh(np.asarray([first[process] for process in sorted(first)]), ("process",))
    own = jax.device_put(np.asarray([numbers], np.int32), first[jax.process_index()])
    shape = (len(first), len(numbers))
    place = NamedSharding(mesh, PartitionSpec("process"))
    of_all = jax.make_array_from_single_device_arrays(shape, place, [own])
    least = jax.jit(lambda x: x.min(axis=0), out_shardings=replicated(mesh))(of_all)
    return np.asarray(least).tolist()
