"""The states of recurrent layers. A sequence's state has a fixed size and lies in the sequence's slot, not in pages."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.devices.mesh import is_split, num_shards, spec
from jaxserve.execution.cache_kinds import layers_of_array
from jaxserve.execution.layer_groups import LayerPlace
from jaxserve.models.spec import (
    GatedDeltaSpec,
    KimiDeltaSpec,
    LightningSpec,
    Mamba2Spec,
    MambaSpec,
    RecurrentSpec,
    ShortConvSpec,
    StatePart,
)
from jaxserve.pallas_kernels.ngrams import recent_tokens, spaced_convolution
from jaxserve.pallas_kernels.operands import (
    ConvInputs,
    DeltaHeads,
    LightningHeads,
    MambaInputs,
    RecentTokens,
    ScanInputs,
    SpacedInputs,
    StateInputs,
)
from jaxserve.pallas_kernels.ops import ACTIVATIONS, Ops
from jaxserve.pallas_kernels.state_rows import StateRows
from jaxserve.pallas_kernels.types import NgramState, State

# For each array of an operation's inputs the axis that devices share; None: each device has the whole array.
SPLIT: dict[type, tuple[int | None, ...]] = {
    DeltaHeads: (1, 1, 1, 0),
    ConvInputs: (1, 0, 0),
    MambaInputs: (1, None, 1, 0, 0, 0, 0, 0, None, None),
    ScanInputs: (1, 1, None, None, 0, 0),
    LightningHeads: (1, 0),
    RecentTokens: (None,),
    SpacedInputs: (None, None),
}

# How many of an operation's inputs have an entry per token. They come first; the others are weights.
PER_TOKEN: dict[type, int] = {
    DeltaHeads: 3, ConvInputs: 1, MambaInputs: 3, ScanInputs: 4, LightningHeads: 1, RecentTokens: 1, SpacedInputs: 1,
}  # fmt: skip

# Operations beside that of the layer's own state.
FURTHER: dict[type, Callable[..., Any]] = {RecentTokens: recent_tokens, SpacedInputs: spaced_convolution}


@dataclass(frozen=True)
class StateLayout:
    """The arrays of the states of a model's recurrent layers.

    Each `State` holds the states of a few layers: first those of its first layer for all slots, then those of its
    second. The padding slot is among them. A step changes the states of its rows in place. Nothing is cleared when a
    sequence begins: the step takes zero for the state of a slot whose length is 0.

    Behind the slots are places for snapshots. These are copies of states, from which sequences with the same prefix
    start.

    Attributes:
      layers: number of recurrent layers.
      slots: number of slots, including the padding slot.
      snapshots: number of places for copies.
    """

    net: RecurrentSpec
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
    def array(self) -> State:
        """The shapes of one of the arrays."""
        count = layers_of_array(self.layers) * self.places
        return jax.tree.map(lambda part: jax.ShapeDtypeStruct((count, *part.shape), part.dtype), self.net.state)

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot over all layers. What each device has whole counts once."""
        return self.layers * sum(map(_bytes, jax.tree.leaves(self.net.state)))

    def device_bytes(self, mesh: Mesh) -> int:
        """Bytes of the states of all slots and snapshots on each device."""
        ways = num_shards(mesh, "kv_heads")
        parts = jax.tree.leaves(self.net.state)
        each = sum(_bytes(part) // (1 if part.split is None else ways) for part in parts)
        return self.places * self.layers * each

    def shardings(self, mesh: Mesh) -> Any:
        return jax.tree.map(partial(NamedSharding, mesh), _splits(self.net))


def _bytes(part: StatePart) -> int:
    return math.prod(part.shape) * np.dtype(part.dtype).itemsize


def advance(
    net: RecurrentSpec, ops: Ops, inputs: StateInputs, state: State, rows: StateRows, first: jax.Array, mesh: Mesh,
    decode_only: bool,
) -> tuple[jax.Array, State]:  # fmt: skip
    """The operation of a recurrent layer, on each device for its share of the layer. `first` is the index of the
    layer's first state in `state`. Returns the results, and the states with those of the rows replaced."""
    operation = FURTHER.get(type(inputs)) or _operation(net, ops)
    operation = partial(operation, decode_only=decode_only, static=_is_static(mesh))
    if not is_split(mesh):
        return operation(inputs, state, rows, first)
    everywhere = PartitionSpec()
    kind: Any = type(inputs)
    axes = SPLIT[kind]
    if isinstance(inputs, ScanInputs) and inputs.b.ndim == 3:  # devices share the heads
        axes = (1, 1, 1, 1, 0, 0)
    shared = kind(*(None if x is None else _split(axis) for x, axis in zip(inputs, axes, strict=True)))
    states = _splits(net)
    return jax.shard_map(
        operation,
        mesh=mesh,
        in_specs=(shared, states, everywhere, everywhere),
        out_specs=(_split(SPLIT[kind][0]), states),
        check_vma=False,
    )(inputs, state, rows, first)


def of_tokens(inputs: StateInputs, index: Any) -> StateInputs:
    """The inputs of some of the tokens, whose arrays begin with the axes of `index`."""
    arrays: Any = inputs
    count = PER_TOKEN[type(inputs)]
    return type(arrays)(*(x[index] for x in arrays[:count]), *arrays[count:])


def keep(
    net: RecurrentSpec, ops: Ops, cache: list[Any], checked: list[tuple[LayerPlace, StateInputs]],
    slot: jax.Array, count: jax.Array, padding_slot: int, mesh: Mesh,
) -> list[Any]:  # fmt: skip
    """Advances the states of rows that have checked proposals, whose slots still have the states before these rows.

    A pass over all proposals has left these states alone. Those behind the tokens that count are now computed from the
    tokens' inputs, one token after the other as in decoding steps, so that they are the states of decoding bit for bit.
    To keep all states behind each proposal instead would take as much memory for each of them as for a sequence.

    Args:
      checked: for each operation of each recurrent layer the layer's place, and the operation's inputs with an entry
        for each of the first tokens of each row, [most tokens, rows, ...].
      slot: int32 [rows].
      count: int32 [rows], how many of its tokens each row keeps.

    Returns the cache.
    """
    rows = len(slot)
    each = jnp.arange(rows)
    run = jax.jit(partial(advance, net, ops, mesh=mesh, decode_only=True))  # so that all layers have one trace
    most = len(checked[0][1][0])

    def one(i: jax.Array, states: dict[int, State]) -> dict[int, State]:
        target = jnp.where(i < count, slot, padding_slot)
        where = StateRows(slot, target, jnp.zeros(rows, bool), jnp.arange(rows + 1), jnp.int32(rows), each)
        for place, inputs in checked:
            _, states[place.array] = run(of_tokens(inputs, i), states[place.array], where, np.int32(place.first))
        return states

    before = {place.array: cache[place.array] for place, _ in checked}
    after = lax.fori_loop(0, most if _is_static(mesh) else jnp.max(count), one, before)
    return [after.get(i, array) for i, array in enumerate(cache)]


def _is_static(mesh: Mesh) -> bool:
    """Whether loops have lengths that the compiler knows: on a GPU other loops wait for the host."""
    return mesh.devices.flat[0].platform != "cpu"


def _operation(net: RecurrentSpec, ops: Ops) -> Callable[..., tuple[jax.Array, State]]:
    if isinstance(net, GatedDeltaSpec):
        operation = partial(ops.delta_net, key_dim=net.key_dim, activation=ACTIVATIONS[net.activation])
        found: Any = operation if net.ngrams is None else partial(_beside_ngrams, operation)
        return cast(Callable[..., Any], found)
    if isinstance(net, KimiDeltaSpec):
        return partial(ops.kimi_delta, activation=ACTIVATIONS[net.activation])
    if isinstance(net, Mamba2Spec):
        options = {"groups": net.groups, "per_group": net.per_group, "activation": ACTIVATIONS[net.activation]}
        return partial(ops.mamba2, **options)
    if isinstance(net, MambaSpec):
        return ops.selective_scan
    if isinstance(net, LightningSpec):
        return ops.lightning
    assert isinstance(net, ShortConvSpec)
    return ops.short_conv


def _beside_ngrams(
    operation: Callable, inputs: DeltaHeads, state: NgramState, *rows: Any, **options: Any
) -> tuple[jax.Array, NgramState]:
    """The operation of a gated delta net among layers that keep more, which stays as it is."""
    out, after = operation(inputs, state.delta, *rows, **options)
    return out, state._replace(delta=after)


def _split(axis: int | None) -> PartitionSpec:
    """How devices share an array: along this axis, or not at all."""
    return PartitionSpec() if axis is None else spec(*(None,) * axis, "kv_heads")


def _splits(net: RecurrentSpec) -> Any:
    """How devices share the arrays of states, which have an axis of states before those of `StatePart.shape`."""
    return jax.tree.map(lambda part: _split(None if part.split is None else part.split + 1), net.state)
