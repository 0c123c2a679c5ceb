"""The pool of LoRA adapters on the devices: an AdapterStack beside each weight, and the programs that write to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.devices.mesh import replicated
from jaxserve.models.adapter_targets import AdapterTargets, Matrices, PoolSizes, Target
from jaxserve.pallas_kernels.lora.stacks import AdapterStack


@dataclass(frozen=True)
class AdapterStacks:
    """Describes the pool's arrays. Their order is: the ranks of all products, then a and b of each product."""

    adapters: AdapterTargets
    sizes: PoolSizes
    mesh: Mesh

    @property
    def targets(self) -> tuple[Target, ...]:
        return self.adapters.targets

    @cached_property
    def abstract(self) -> list[jax.ShapeDtypeStruct]:
        """The shapes of the arrays."""
        shape = (len(self.targets), self.sizes.places, self.most_parts)
        return [jax.ShapeDtypeStruct(shape, jnp.int32, sharding=replicated(self.mesh))] + [
            array for target in self.targets for array in self._of(target)
        ]

    @property
    def most_parts(self) -> int:
        return max(len(target.widths) for target in self.targets)

    def _of(self, target: Target) -> list[jax.ShapeDtypeStruct]:
        made = zip(target.shapes(self.sizes), target.shardings(self.mesh), strict=True)
        return [jax.ShapeDtypeStruct(shape, self.sizes.dtype, sharding=where) for shape, where in made]

    def create(self) -> list[jax.Array]:
        """The arrays of an empty pool."""
        made = jax.jit(
            lambda: [jnp.zeros(x.shape, x.dtype) for x in self.abstract],
            out_shardings=[x.sharding for x in self.abstract],
        )
        return made()

    def added(self, params: dict[str, Any], arrays: Sequence[jax.Array]) -> dict[str, Any]:
        """The parameters with the stacks in their places."""
        ranks, *rest = arrays
        made = dict(params)
        for number, target in enumerate(self.targets):
            a, b = rest[2 * number : 2 * number + 2]
            at, (*path, last) = made, target.path.split("/")
            for name in path:
                at[name] = dict(at.get(name, {}))
                at = at[name]
            at[last] = AdapterStack(a, b, lax.index_in_dim(ranks, number, keepdims=False), target.widths)
        return made

    def unbundling(self, unbundle: Callable[[list[jax.Array]], Any]) -> Callable[[list[jax.Array]], Any]:
        """Makes the parameter tree from the arrays of `unbundle` with those of the pool behind them."""
        count = len(self.abstract)
        return lambda arrays: self.added(unbundle(arrays[:-count]), arrays[-count:])

    def ranks_of(self, matrices: Mapping[str, Matrices]) -> np.ndarray:
        """int32 [products, parts]: the ranks of an adapter's matrices, by the products' paths."""
        ranks = np.zeros((len(self.targets), self.most_parts), np.int32)
        for number, target in enumerate(self.targets):
            if target.path in matrices:
                ranks[number, : len(target.widths)] = matrices[target.path].ranks
        return ranks

    # Programs that write

    @cached_property
    def kinds(self) -> list[int]:
        """The number of a target of each shape, for which a program is compiled."""
        return sorted(set(self._kinds))

    def kind_of(self, number: int) -> int:
        """The first target with arrays like those of this target."""
        return self._kinds[number]

    @cached_property
    def _kinds(self) -> list[int]:
        shapes = [tuple((x.shape, x.sharding) for x in self._of(target)) for target in self.targets]
        return [shapes.index(shape) for shape in shapes]

    def writing(self, kind: int) -> tuple[Callable, tuple[int, ...], tuple, Any]:
        """Function, donated arguments, abstract arguments and results' shardings of the program that writes a place of
        a and b."""
        stacks = self._of(self.targets[kind])
        place = jax.ShapeDtypeStruct((), jnp.int32, sharding=replicated(self.mesh))
        arguments = stacks, place, [_entry(x) for x in stacks]
        return write_place, (0,), arguments, [x.sharding for x in stacks]

    def writing_ranks(self) -> tuple[Callable, tuple[int, ...], tuple, Any]:
        """The same for the program that writes the ranks of all products at a place."""
        ranks = self.abstract[0]
        everywhere = replicated(self.mesh)
        place = jax.ShapeDtypeStruct((), jnp.int32, sharding=everywhere)
        new = jax.ShapeDtypeStruct((ranks.shape[0], ranks.shape[2]), jnp.int32, sharding=everywhere)
        return write_ranks, (0,), (ranks, place, new), everywhere


def write_place(stacks: list[jax.Array], place: jax.Array, new: list[jax.Array]) -> list[jax.Array]:
    """The arrays [places, …] with new entries at a place."""
    return [lax.dynamic_update_index_in_dim(x, y, place, 0) for x, y in zip(stacks, new, strict=True)]


def write_ranks(ranks: jax.Array, place: jax.Array, new: jax.Array) -> jax.Array:
    """ranks int32 [targets, places, parts] with `new` [targets, parts] at a place."""
    return lax.dynamic_update_index_in_dim(ranks, new, place, 1)


def _entry(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    assert isinstance(x.sharding, NamedSharding)
    where = NamedSharding(x.sharding.mesh, PartitionSpec(*x.sharding.spec[1:]))
    return jax.ShapeDtypeStruct(x.shape[1:], x.dtype, sharding=where)
