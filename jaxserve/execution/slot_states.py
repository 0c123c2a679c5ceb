"""The states of recurrent layers. A sequence's state has a fixed size and lies in the sequence's slot, not in pages."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.devices.mesh import is_split, num_shards, sharding, spec
from jaxserve.execution.cache_kinds import layers_of_array
from jaxserve.models.decoder import DecoderLayer
from jaxserve.models.spec import GatedDeltaSpec
from jaxserve.pallas_kernels.delta_net.reference import DeltaRows
from jaxserve.pallas_kernels.operands import DeltaHeads
from jaxserve.pallas_kernels.ops import ACTIVATIONS, Ops
from jaxserve.pallas_kernels.types import DeltaState

AXES = None, "kv_heads"  # logical axes of the arrays' first dimensions


@dataclass(frozen=True)
class StateLayout:
    """The arrays of the states of a model's recurrent layers.

    Each `DeltaState` holds the states of a few layers: first those of its first layer for all slots, then those of its
    second. The padding slot is among them. A step changes the states of its rows in place. Nothing is cleared when a
    sequence begins: the step takes zero for the state of a slot whose length is 0.

    Behind the slots are places for snapshots. These are copies of states, from which sequences with the same prefix
    start.

    Attributes:
      layers: number of recurrent layers.
      slots: number of slots, including the padding slot.
      snapshots: number of places for copies.
    """

    spec: GatedDeltaSpec
    layers: int
    slots: int
    snapshots: int = 0

    @property
    def places(self) -> int:
        """The number of states of a layer: one per slot and per snapshot."""
        return self.slots + self.snapshots

    @property
    def num_arrays(self) -> int:
        """The number of arrays: as few as possible, all alike."""
        return self.layers // layers_of_array(self.layers)

    def place(self, index: int) -> tuple[int, int]:
        """(array, index within the array) of a recurrent layer; `index` counts recurrent layers only."""
        return divmod(index, layers_of_array(self.layers))

    @property
    def array(self) -> DeltaState:
        """The shapes of one of the arrays."""
        return self._states(layers_of_array(self.layers) * self.places)

    def _states(self, count: int) -> DeltaState:
        net = self.spec
        matrix = (count, net.key_heads, net.group, net.key_dim, net.value_dim)
        inputs = (count, net.key_heads, (net.conv_width - 1) * net.channels)
        shapes: Any = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (matrix, inputs))
        return DeltaState(*shapes)

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot over all layers and all devices."""
        return self.layers * sum(x.size * x.dtype.itemsize for x in self._states(1))

    def device_bytes(self, mesh: Mesh) -> int:
        """Bytes of the states of all slots and snapshots on each device."""
        return self.places * self.slot_bytes // num_shards(mesh, "kv_heads")

    def sharding(self, mesh: Mesh) -> NamedSharding:
        return sharding(mesh, *AXES)


def delta_net(
    layer: DecoderLayer, ops: Ops, heads: DeltaHeads, state: DeltaState, rows: DeltaRows, first: jax.Array,
    mesh: Mesh, decode_only: bool,
) -> tuple[jax.Array, DeltaState]:  # fmt: skip
    """`Ops.delta_net` for the heads of each device. `first` is the index of the layer's first state in `state`."""
    net = layer.spec.attention
    assert isinstance(net, GatedDeltaSpec)
    static = mesh.devices.flat[0].platform != "cpu"  # on a GPU a loop of unknown length waits for the host
    options = {"key_dim": net.key_dim, "activation": ACTIVATIONS[net.activation]}
    advance = partial(ops.delta_net, **options, decode_only=decode_only, static=static)
    if not is_split(mesh):
        return advance(heads, state, rows, first)
    by_head = spec(None, "kv_heads")
    everywhere = PartitionSpec()
    splits: Any = (by_head, by_head, by_head, spec("kv_heads"))
    return jax.shard_map(
        advance,
        mesh=mesh,
        in_specs=(DeltaHeads(*splits), by_head, everywhere, everywhere),
        out_specs=(by_head, by_head),
        check_vma=False,
    )(heads, state, rows, first)
