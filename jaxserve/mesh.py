"""Devices as a mesh, and the one table from a weight's logical axes to the mesh's."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.config import ConfigError
from jaxserve.models.config import ModelConfig

AXES = ("data", "stage", "expert", "tensor")

# Logical axis of a weight or an activation -> mesh axis; None is replicated.
RULES: dict[str | None, str | None] = {
    None: None,
    "embed": None,
    "vocab": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
}


def make_mesh(tensor_parallel_size: int = 1, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh of axes data, stage, expert (all 1 today) and tensor. Raises ConfigError when devices are missing."""
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
    chosen = np.asarray(devices[:tensor_parallel_size]).reshape(1, 1, 1, tensor_parallel_size)
    return Mesh(chosen, AXES)


def spec(*logical: str | None) -> PartitionSpec:
    """PartitionSpec of an array whose dimensions have these logical axes."""
    return PartitionSpec(*(RULES[axis] for axis in logical))


def sharding(mesh: Mesh, *logical: str | None) -> NamedSharding:
    return NamedSharding(mesh, spec(*logical))


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def embed_sharded(mesh: Mesh, table: jax.Array, ids: jax.Array) -> jax.Array:
    """Rows ids int32 [tokens] of table [vocab, hidden], whose rows are split over the devices: each looks up its own.
    Left to itself, XLA gathers the whole table."""

    def local(table: jax.Array, ids: jax.Array) -> jax.Array:
        own = ids - jax.lax.axis_index("tensor") * len(table)
        rows = jnp.take(table, own, axis=0, mode="clip")
        mine = (own >= 0) & (own < len(table))
        return jax.lax.psum(jnp.where(mine[:, None], rows, 0), "tensor")

    return jax.shard_map(
        local, mesh=mesh, in_specs=(spec("vocab"), PartitionSpec()), out_specs=PartitionSpec(), check_vma=False
    )(table, ids)


def sharded_kv_heads(config: ModelConfig, tensor_parallel_size: int) -> int:
    """KV heads as laid out over the mesh: each is repeated when there are more devices than heads.

    Raises ConfigError when the heads, the MLP or the vocabulary cannot be split evenly.
    """
    heads, kv_heads, size = config.num_heads, config.num_kv_heads, tensor_parallel_size
    problems = []
    if size <= kv_heads:
        if kv_heads % size:
            problems.append(f"{kv_heads} key-value heads")
    elif size % kv_heads or heads % size:
        problems.append(f"{heads} query heads over {kv_heads} key-value heads")
    if config.intermediate_size % size:
        problems.append(f"an MLP width of {config.intermediate_size}")
    if problems:
        allowed = [n for n in range(1, heads + 1) if _splits(config, n)]
        raise ConfigError(
            f"tensor_parallel_size {size} does not divide {' and '.join(problems)}; this model allows {allowed}"
        )
    return max(kv_heads, size)


def padded_vocab(vocab_size: int, tensor_parallel_size: int) -> int:
    """Rows of embeddings and head so that every device holds as many."""
    return -(-vocab_size // tensor_parallel_size) * tensor_parallel_size


def _splits(config: ModelConfig, size: int) -> bool:
    kv = config.num_kv_heads
    heads_fit = kv % size == 0 if size <= kv else (size % kv == 0 and config.num_heads % size == 0)
    return heads_fit and config.intermediate_size % size == 0
