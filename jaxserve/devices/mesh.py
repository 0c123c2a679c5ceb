"""The mesh of devices, and the table that maps logical axes of weights to axes of the mesh."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from jaxserve.config import ConfigError

log = logging.getLogger(__name__)

AXES = ("data", "expert_data", "stage", "expert", "tensor", "sequence")

MeshAxes = str | tuple[str, ...] | None  # the axes of a mesh that split an axis of an array; None: it is not split
GROUPS = ("data", "expert_data")  # groups of devices with sequences of their own lie along one of these
MODEL_AXES = ("expert", "tensor", "sequence")  # the devices of a group

# Logical axis of a weight or an activation -> axes of the mesh. The devices of a group share heads, dense MLPs and the
# vocabulary; other groups have copies. All devices of all groups share the experts: each has some of them, if the axes
# "expert_data" and "expert" are larger than 1, and a part of the width of these. Devices along "sequence" have the same
# key-value head, and different tokens of it in the cache (`pallas_kernels.token_shares`).
RULES: dict[str | None, MeshAxes] = {
    None: None,
    "embed": None,
    "vocab": MODEL_AXES,
    "kv_heads": MODEL_AXES,
    "cached_heads": ("expert", "tensor"),
    "cached_tokens": "sequence",
    "mlp": MODEL_AXES,
    "expert": ("expert_data", "expert"),
    "expert_mlp": ("data", "tensor", "sequence"),
}


def make_mesh(
    tensor_parallel_size: int = 1,
    devices: Sequence[jax.Device] | None = None,
    expert_parallel: bool = False,
    context_parallel_size: int = 1,
    data_parallel_size: int = 1,
) -> Mesh:
    """A mesh with AXES of `data_parallel_size` groups of `tensor_parallel_size` devices. With `expert_parallel` groups
    lie along "expert_data" and the devices of a group along "expert", else along "data" and "tensor". Among these,
    sets of `context_parallel_size` devices lie along "sequence". Groups take the devices host by host, so that a group
    spans no more hosts than it must.

    Raises ConfigError for too few devices, or a context_parallel_size that does not divide the devices of a group.
    """
    if tensor_parallel_size % context_parallel_size:
        raise ConfigError(
            f"decode_context_parallel_size {context_parallel_size} must divide tensor_parallel_size "
            f"{tensor_parallel_size}"
        )
    devices = jax.devices() if devices is None else devices
    needed = data_parallel_size * tensor_parallel_size
    if len(devices) < needed:
        groups = "" if data_parallel_size == 1 else f"data_parallel_size {data_parallel_size} x "
        platform = devices[0].platform
        hint = f"; to try it on CPU, set XLA_FLAGS=--xla_force_host_platform_device_count={needed}"
        raise ConfigError(
            f"{groups}tensor_parallel_size {tensor_parallel_size} needs {needed} devices, "
            f"but JAX sees {len(devices)} {platform} device(s){hint if platform == 'cpu' else ''}"
        )
    if data_parallel_size > 1:
        devices = by_host(devices)
    count = data_parallel_size
    sharing = tensor_parallel_size // context_parallel_size
    shape = (1, count, 1, sharing, 1) if expert_parallel else (count, 1, 1, 1, sharing)
    return Mesh(np.asarray(devices[:needed]).reshape(*shape, context_parallel_size), AXES)


def unsplit(mesh: Mesh) -> Mesh:
    """A mesh of the same devices in the same order, on which each device of a group has all of a model."""
    return Mesh(mesh.devices.reshape(*mesh.devices.shape[:2], -1, 1, 1, 1), AXES)


def tell_devices(mesh: Mesh) -> None:
    """Logs which devices a model runs on."""
    log.info("devices: %d x %s", mesh.size, mesh.devices.flat[0].device_kind)


def by_host(devices: Sequence[jax.Device]) -> list[jax.Device]:
    """The devices of the first host, then those of the next one, and so on; those of a host keep their order."""
    return sorted(devices, key=lambda device: device.process_index)


def spans_hosts(mesh: Mesh) -> bool:
    """Whether the devices belong to several processes, so that a process sees only its own devices' parts of an
    array."""
    return len({device.process_index for device in mesh.devices.flat}) > 1


def num_groups(mesh: Mesh) -> int:
    """How many groups of devices have sequences of their own, and copies of attention's weights."""
    return num_parts(mesh, GROUPS)


def num_devices(mesh: Mesh) -> int:
    return mesh.size


def is_split(mesh: Mesh) -> bool:
    """Whether a model on this mesh is spread over several devices."""
    return mesh.size > 1


def on_one_cpu(mesh: Mesh) -> bool:
    """Whether the C++ kernels can serve a model on this mesh."""
    return not is_split(mesh) and mesh.devices.flat[0].platform == "cpu"


def num_shards(mesh: Mesh, logical: str) -> int:
    """Into how many parts a logical axis is split."""
    return num_parts(mesh, RULES[logical])


def num_parts(mesh: Mesh, axes: MeshAxes) -> int:
    """Into how many parts an array is split along these axes of the mesh."""
    return math.prod(mesh.shape[axis] for axis in ((axes,) if isinstance(axes, str) else axes or ()))


def spec(*logical: str | None) -> PartitionSpec:
    """PartitionSpec of an array whose dimensions have these logical axes."""
    return PartitionSpec(*(RULES[axis] for axis in logical))


def sharding(mesh: Mesh, *logical: str | None) -> NamedSharding:
    return NamedSharding(mesh, spec(*logical))


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def by_group(mesh: Mesh, rest: PartitionSpec) -> NamedSharding:
    """The sharding of an array whose first axis has the arrays of all groups, one after the other. Its other axes are
    split like those of `rest`. With a single group it is `rest` itself."""
    return NamedSharding(mesh, rest if num_groups(mesh) == 1 else PartitionSpec(GROUPS, *rest[1:]))


def for_each_group(function: Callable, mesh: Mesh, arguments: tuple) -> Callable:
    """The function that all groups run at the same time, each with its part of these arguments, which are abstract
    arrays with shardings, and whose results are put together `by_group`. Groups exchange nothing unless the function
    does so (`experts_sharded`)."""

    def of_group(x: jax.ShapeDtypeStruct) -> PartitionSpec:
        assert isinstance(x.sharding, NamedSharding)
        return _along(GROUPS, x.sharding.spec)

    return jax.shard_map(
        function,
        mesh=mesh,
        in_specs=jax.tree.map(of_group, arguments),
        out_specs=PartitionSpec(GROUPS),
        axis_names=set(GROUPS),
        check_vma=False,
    )


def within_group(axes: PartitionSpec) -> PartitionSpec:
    """How the devices of a group share the group's part of an array."""
    return _along(MODEL_AXES, axes)


def _along(wanted: tuple[str, ...], axes: PartitionSpec) -> PartitionSpec:
    """The same split along only these axes of the mesh."""
    split = [axis if isinstance(axis, tuple) else (axis,) for axis in axes]
    return PartitionSpec(*(tuple(one for one in axis if one in wanted) or None for axis in split))


def on_each_device(function: Callable, mesh: Mesh, in_specs: Any, out_specs: Any) -> Callable:
    """`function` for each device's parts of the arguments. In what `for_each_group` runs, these are parts of what the
    group has."""
    mapped = functools.partial(jax.shard_map, function, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    if num_groups(mesh) == 1:
        return mapped(mesh=mesh)
    return mapped(axis_names=set(AXES).difference(GROUPS))  # in the program's mesh, where groups are split already


def constrained(x: Any, mesh: Mesh, axes: PartitionSpec) -> Any:
    """x, split in this way over the devices of a group."""
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, axes) if num_groups(mesh) == 1 else axes)


def to_devices(host: Any, sharding: Sharding) -> jax.Array:
    """An array of this host on the devices of a sharding. If they belong to several hosts, each host must call this
    with the same array. Each brings the parts of its own devices, and none waits for another, as in
    `jax.device_put`."""
    if sharding.is_fully_addressable:
        return jax.device_put(host, sharding)
    host = np.asarray(host)
    return jax.make_array_from_callback(host.shape, sharding, lambda part: host[part])


def padded_vocab(vocab_size: int, tensor_parallel_size: int) -> int:
    """Rows of embedding and output head, padded so that all devices hold equally many."""
    return -(-vocab_size // tensor_parallel_size) * tensor_parallel_size
