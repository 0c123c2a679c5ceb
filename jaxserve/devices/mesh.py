"""The mesh of devices, and the table that maps logical axes of weights to axes of the mesh."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from jaxserve.config import ConfigError

AXES = ("data", "stage", "expert", "tensor", "sequence")

MeshAxes = str | tuple[str, ...] | None  # the axes of a mesh that split an axis of an array; None: it is not split
EVERYONE = ("expert", "tensor", "sequence")

# Logical axis of a weight or an activation -> axes of the mesh. All devices share heads, dense MLPs and the vocabulary.
# Each has some of the experts, if the axis "expert" is larger than 1, and a part of the width of these. Devices along
# "sequence" have the same key-value head, and different tokens of it in the cache (`pallas_kernels.token_shares`).
RULES: dict[str | None, MeshAxes] = {
    None: None,
    "embed": None,
    "vocab": EVERYONE,
    "kv_heads": EVERYONE,
    "cached_heads": ("expert", "tensor"),
    "cached_tokens": "sequence",
    "mlp": EVERYONE,
    "expert": "expert",
    "expert_mlp": ("tensor", "sequence"),
}


def make_mesh(
    tensor_parallel_size: int = 1,
    devices: Sequence[jax.Device] | None = None,
    expert_parallel: bool = False,
    context_parallel_size: int = 1,
) -> Mesh:
    """A mesh with AXES of `tensor_parallel_size` devices. Groups of `context_parallel_size` devices lie along
    "sequence", and these groups along "expert" if `expert_parallel`, else along "tensor".

    Raises ConfigError for too few devices, or a context_parallel_size that does not divide their number.
    """
    if tensor_parallel_size % context_parallel_size:
        raise ConfigError(
            f"decode_context_parallel_size {context_parallel_size} must divide tensor_parallel_size "
            f"{tensor_parallel_size}"
        )
    devices = jax.devices() if devices is None else devices
    if len(devices) < tensor_parallel_size:
        hint = (
            f"; to try it on CPU, set XLA_FLAGS=--xla_force_host_platform_device_count={tensor_parallel_size}"
            if devices[0].platform == "cpu"
            else ""
        )
        raise ConfigError(
            f"tensor_parallel_size {tensor_parallel_size} needs as many devices, "
            f"but JAX sees {len(devices)} {devices[0].platform} device(s){hint}"
        )
    groups = tensor_parallel_size // context_parallel_size
    experts_and_tensor = (groups, 1) if expert_parallel else (1, groups)
    shape = (1, 1, *experts_and_tensor, context_parallel_size)
    return Mesh(np.asarray(devices[:tensor_parallel_size]).reshape(shape), AXES)


def num_devices(mesh: Mesh) -> int:
    return mesh.size


def is_split(mesh: Mesh) -> bool:
    """Whether a model on this mesh is spread over several devices."""
    return mesh.size > 1


def on_one_cpu(mesh: Mesh) -> bool:
    """Whether the C++ kernels can serve a model on this mesh."""
    return not is_split(mesh) and mesh.devices.flat[0].platform == "cpu"


def ways(mesh: Mesh, logical: str) -> int:
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
