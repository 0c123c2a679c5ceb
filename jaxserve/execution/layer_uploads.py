"""Weights of layers that stay in host memory, and come to the devices when a step needs them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.experimental.layout import Format

from jaxserve.devices.layouts import place_of

HOST = "pinned_host"  # the kind of memory from which devices copy without help of the processor
MOST = 2  # layers whose weights are on the devices at a time: one computes, and the next one arrives


def move_to_host(x: jax.Array) -> jax.Array:
    """The array in host memory, divided among the devices as before. `x` is deleted."""
    place = place_of(x)
    if isinstance(place, Format):
        assert place.sharding is not None
        place = Format(place.layout, place.sharding.with_memory_kind(HOST))
    else:
        place = place.with_memory_kind(HOST)
    made = jax.block_until_ready(jax.device_put(x, place))
    x.delete()
    return made


@dataclass
class Present:
    """A layer whose weights are on the devices, or on their way. `result` is what is computed with them, if it is."""

    number: int
    arrays: list[jax.Array]
    result: jax.Array | None = None


class LayerUploads:
    """Brings the weights of layers to the devices in turn, again and again.

    While the devices compute with a layer, the weights of the next one arrive. Then those of the layer before have been
    deleted: at most MOST layers are on the devices. The host waits for that, since copies that have begun take memory.

    Args:
      layers: the weights of each layer, as `move_to_host` returns them.
      places: where each of them belongs on the devices: a sharding, or with the order in memory a Format.
    """

    def __init__(self, layers: Sequence[list[jax.Array]], places: Sequence[list[Any]]):
        assert len(layers) > MOST, "fewer layers could all stay on the devices"
        self._layers = layers
        self._places = places
        self._present: deque[Present] = deque()

    @property
    def present(self) -> list[int]:
        """The numbers of the layers that are on the devices, the next ones last."""
        return [one.number for one in self._present]

    def take(self, number: int) -> list[jax.Array]:
        """The weights of a layer on the devices. Layers are taken in order, from the last one to the first one again.
        After a failed step any layer may be taken."""
        found = next((one for one in self._present if one.number == number and one.result is None), None)
        if found is None:
            self.clear()
            found = self._bring(number)
        return found.arrays

    def used(self, number: int, result: jax.Array) -> None:
        """Tells that the layer that was taken last is not needed after `result` exists, and sends for the next one.
        Waits until the layer before has been computed. Raises the devices' error if that has failed."""
        current = self._present[-1]
        assert current.number == number, "layers are used in the order in which they are taken"
        current.result = result
        while len(self._present) >= MOST:
            jax.block_until_ready(self._present[0].result)
            self._drop_oldest()
        self._bring((number + 1) % len(self._layers))

    def clear(self) -> None:
        """Frees the devices' memory of all layers. Nothing may be computing with them, unless it has failed."""
        while self._present:
            self._drop_oldest()

    def _bring(self, number: int) -> Present:
        arrays = jax.device_put(self._layers[number], self._places[number])
        self._present.append(Present(number, arrays))
        return self._present[-1]

    def _drop_oldest(self) -> None:
        for x in self._present.popleft().arrays:
            x.delete()
