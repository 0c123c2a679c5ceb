"""Packs parameters into fewer arrays. A call of a compiled step costs time for each argument, and half the leaves of a
model are small vectors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jaxserve.pallas_kernels.operands import Row


def bundle(params: Any, *, as_rows: bool = False) -> tuple[list[jax.Array], Callable[[list[jax.Array]], Any]]:
    """Stacks the vectors of a pytree of arrays (or of their shapes) that have equal shape, dtype and sharding.

    Returns the arrays, each with such vectors as rows or with one other leaf, and a function that rebuilds the pytree
    from them, which may be jitted. With `as_rows` it represents such vectors as Rows, which kernels read in place.
    """

    def vector(array: jax.Array, i: int) -> jax.Array | Row:
        return Row(array, jnp.int32(i)) if as_rows else lax.index_in_dim(array, i, keepdims=False)

    leaves, structure = jax.tree.flatten(params)
    by_form: dict[Any, list[int]] = defaultdict(list)
    for i, x in enumerate(leaves):
        by_form[(x.shape, x.dtype, x.sharding) if x.ndim == 1 else i].append(i)
    groups = list(by_form.values())

    def unbundle(arrays: list[jax.Array]) -> Any:
        found: dict[int, jax.Array | Row] = {}
        for array, group in zip(arrays, groups, strict=True):
            rows = [vector(array, i) for i in range(len(group))] if len(group) > 1 else [array]
            found.update(zip(group, rows, strict=True))
        return jax.tree.unflatten(structure, [found[i] for i in range(len(leaves))])

    return [_stack([leaves[i] for i in group]) if len(group) > 1 else leaves[group[0]] for group in groups], unbundle


def _stack(rows: list[Any]) -> Any:
    sharding = rows[0].sharding
    if isinstance(sharding, NamedSharding):
        sharding = NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec))
    if isinstance(rows[0], jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct((len(rows), *rows[0].shape), rows[0].dtype, sharding=sharding)
    return jax.jit(lambda *rows: jnp.stack(rows), out_shardings=sharding)(*rows)
