"""Which adapter is in which place of the devices' pool, and which sequences wait for a place (host side).

A batch can use the adapters that are in the pool. A sequence *holds* the place of its adapter while it runs or waits
for a slot, and a place that is held keeps its adapter. Sequences whose adapter has no place are *parked*: they wait
here, and so hold up no other sequence.

Adapters get places in the order of their first parked sequences, and each gets the place that nobody has held for
longest. All sequences that are parked for it by then may begin. While adapters wait for a place, as many places are
*closed*, the ones granted first: a sequence that arrived later than the first one that waits cannot join those that
hold a closed place. So every place is free after a while, and no adapter starves.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from operator import attrgetter

from jaxserve.adapters.registry import ServedAdapter
from jaxserve.scheduling.sequence import Sequence

_ORDER = attrgetter("order")


@dataclass
class Place:
    """A place of the pool with an adapter. `granted` and `used` are times of the pool's clock, which counts events."""

    number: int
    adapter: ServedAdapter
    granted: int
    used: int
    ready: bool = False  # all of the adapter's weights are uploaded before the next step
    held: dict[str, set[Sequence]] = field(default_factory=dict)  # request id -> its sequences that hold the place


class AdapterPool:
    """The places of one engine. Adapters are told apart by the digests of their contents."""

    def __init__(self, num_places: int):
        self.num_places = num_places
        self._places: dict[str, Place] = {}  # digest -> place
        self._parked: dict[str, list[Sequence]] = {}  # digest -> sequences in their order; no list is empty
        self._clock = count()
        self.loads = self.evictions = 0

    # Sequences

    def admit(self, seq: Sequence) -> bool:
        """Lets a sequence hold the place of its adapter, or parks it. Returns whether it may begin. One that is resumed
        joins those that hold a closed place, too."""
        if seq.adapter is None:
            return True
        place = self._places.get(seq.adapter.digest)
        if place is not None and place.ready and (seq.is_resumed or self._may_join(seq, place)):
            self.hold(seq)
            return True
        self.unpark(seq)
        insort(self._parked.setdefault(seq.adapter.digest, []), seq, key=_ORDER)
        return False

    def _may_join(self, seq: Sequence, place: Place) -> bool:
        return seq.request_id in place.held or seq.order < self._bound(place)

    def hold(self, seq: Sequence) -> None:
        """Lets a sequence hold the place of its adapter, which is ready. Has no effect if it does already."""
        if seq.adapter is not None:
            place = self._places[seq.adapter.digest]
            assert place.ready
            place.held.setdefault(seq.request_id, set()).add(seq)
            place.used = next(self._clock)

    def let_go(self, seq: Sequence) -> None:
        """A sequence that may have held a place does so no more: it has ended, or it waits for its client."""
        if seq.adapter is None or (place := self._places.get(seq.adapter.digest)) is None:
            return
        if seqs := place.held.get(seq.request_id):
            seqs.discard(seq)
            place.used = next(self._clock)
            if not seqs:
                del place.held[seq.request_id]

    def unpark(self, seq: Sequence) -> bool:
        """Removes a parked sequence; returns whether it was parked."""
        if seq.adapter is None:
            return False
        parked = self._parked.get(seq.adapter.digest, [])
        at = bisect_left(parked, seq.order, key=_ORDER)
        if at == len(parked) or parked[at] is not seq:
            return False
        del parked[at]
        if not parked:
            del self._parked[seq.adapter.digest]
        return True

    def place_of(self, seq: Sequence) -> int | None:
        """The number of the place that a sequence with a slot uses; None without an adapter."""
        if seq.adapter is None:
            return None
        place = self._places[seq.adapter.digest]
        assert seq in place.held[seq.request_id], "a sequence uses a place that it does not hold"
        return place.number

    @property
    def parked(self) -> Iterator[Sequence]:
        for seqs in self._parked.values():
            yield from seqs

    def parked_for(self, adapter: ServedAdapter) -> list[Sequence]:
        return list(self._parked.get(adapter.digest, ()))

    def start_over(self) -> None:
        """Forgets all sequences; places keep their adapters."""
        self._parked.clear()
        for place in self._places.values():
            place.held.clear()

    # Places

    @property
    def places(self) -> list[Place]:
        return list(self._places.values())

    def needed(self) -> list[ServedAdapter]:
        """The adapters that wait for a place, in the order in which they get one."""
        firsts = [seqs[0] for digest, seqs in self._parked.items() if digest not in self._places]
        return [seq.adapter for seq in sorted(firsts, key=_ORDER) if seq.adapter is not None]

    def _bound(self, place: Place) -> tuple[float, ...]:
        """Sequences whose order is below this may join those that hold the place."""
        if not (needed := self.needed()):
            return (float("inf"),)
        granted_later = sum(other.granted > place.granted for other in self._places.values())
        if granted_later < len(self._places) - len(needed):
            return (float("inf"),)
        return self._parked[needed[0].digest][0].order

    def grant(self, adapter: ServedAdapter) -> Place | None:
        """A place for an adapter that has none; None if sequences hold every place. The caller uploads the weights,
        then calls `open`."""
        taken = {place.number for place in self._places.values()}
        number = next((number for number in range(self.num_places) if number not in taken), None)
        if number is None:
            idle = [place for place in self._places.values() if place.ready and not place.held]
            if not idle:
                return None
            out = min(idle, key=lambda place: place.used)
            del self._places[out.adapter.digest]
            number = out.number
            self.evictions = self.evictions + 1
        place = Place(number, adapter, next(self._clock), next(self._clock))
        self._places[adapter.digest] = place
        self.loads += 1
        return place

    def open(self, place: Place) -> list[Sequence]:
        """The place's weights are uploaded before the next step. Returns the sequences that were parked for it, in
        their order. They hold it now."""
        place.ready = True
        return self._unpark_below(place, (float("inf"),))

    def reopened(self) -> list[Sequence]:
        """Removes and returns the parked sequences whose place was closed to them, and is not any more."""
        seqs: list[Sequence] = []
        for place in self._places.values():
            if place.ready and place.adapter.digest in self._parked:
                seqs += self._unpark_below(place, self._bound(place))
        return seqs

    def _unpark_below(self, place: Place, bound: tuple[float, ...]) -> list[Sequence]:
        parked = self._parked.pop(place.adapter.digest, [])
        end = bisect_left(parked, bound, key=_ORDER)
        if parked[end:]:
            self._parked[place.adapter.digest] = parked[end:]
        for seq in parked[:end]:
            self.hold(seq)
        return parked[:end]

    def lose(self, place: Place) -> None:
        """The place's contents are lost, or incomplete. Nobody may hold it."""
        assert not place.held
        del self._places[place.adapter.digest]

    def check_integrity(self) -> None:
        """Asserts that no adapter has two places, and that no sequence is in two lists."""
        numbers = [place.number for place in self._places.values()]
        assert len(set(numbers)) == len(numbers) <= self.num_places
        assert set(numbers) <= set(range(self.num_places))
        parked = set(self.parked)
        for digest, place in self._places.items():
            assert place.adapter.digest == digest
            assert place.ready or not place.held
            for request_id, seqs in place.held.items():
                assert seqs
                assert not seqs & parked
                assert all(seq.request_id == request_id and seq.adapter.digest == digest for seq in seqs if seq.adapter)
        for digest, waiting in self._parked.items():
            assert waiting
            assert waiting == sorted(waiting, key=_ORDER)
            assert all(seq.adapter is not None and seq.adapter.digest == digest for seq in waiting)
