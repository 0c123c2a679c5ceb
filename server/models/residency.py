"""Which models are in memory, which starts next, and which is stopped for it: a state machine without processes.

Memory is counted in bytes of each device; on CPU the host's memory is one device. A model takes its size on each of its
devices, from its start until its process has ended. Requests wait in the order in which they first asked for a model,
and a model that waits keeps later ones from taking memory of its devices.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

SETTLE_SECONDS = 0.1  # from a model's last request to its stop; work that it began in the background shows by then
PATIENCE_SECONDS = 5.0  # from here on a model that waits makes others, which are never without requests, give way

State = Literal["unloaded", "starting", "ready", "leaving", "stopping"]


class Action(NamedTuple):
    """What is to be done about a model: its process starts or is stopped, or the requests that wait for it are refused,
    because pinned models leave too little memory for it."""

    kind: Literal["start", "stop", "refuse"]
    name: str


@dataclass
class Place:
    """A model's part of the memory.

    Attributes:
      devices: where it runs.
      pinned: it is stopped only by `unload`.
      keep_alive: seconds without a request after which it is stopped; infinite: never.
      size: bytes on each of its devices; None: not known yet.
      state: of its process. While it is "leaving", running requests go on and new ones wait for the next start.
      running, waiting: number of requests.
      used: when it became ready, or its last request ended.
      asked: when it entered the queue; None: it is not in the queue.
      unload: it is stopped as soon as it has answered the requests that wait for its start.
    """

    devices: tuple[str, ...]
    pinned: bool
    keep_alive: float
    size: int | None = None
    state: State = "unloaded"
    running: int = 0
    waiting: int = 0
    used: float = -math.inf
    asked: float | None = None
    unload: bool = False

    @property
    def is_resident(self) -> bool:
        return self.state != "unloaded"

    def is_idle(self, now: float) -> bool:
        return self.state == "ready" and not self.running and now >= self.used + SETTLE_SECONDS

    def idle_until(self) -> float:
        """When it is stopped if no request comes."""
        return math.inf if self.pinned else self.used + max(self.keep_alive, SETTLE_SECONDS)


class Residency:
    """The models of a server by name, and the memory that they share. All times are of one clock, in seconds.

    budget: bytes of each device.
    """

    def __init__(self, budget: Mapping[str, int]):
        self.budget = dict(budget)
        self.places: dict[str, Place] = {}
        self._queue: list[str] = []

    def add(self, name: str, devices: Iterable[str], *, pinned: bool = False, keep_alive: float = math.inf) -> Place:
        place = self.places[name] = Place(tuple(devices), pinned, keep_alive)
        return place

    # Requests

    def ask(self, name: str, now: float) -> bool:
        """A request has come for a model whose size is known. Returns whether it may run now; otherwise it waits, until
        `started` or `failed`, unless `give_up` says that it has left."""
        place = self.places[name]
        if place.state == "ready":
            place.running += 1
            return True
        place.waiting += 1
        if place.state != "starting":
            self._enqueue(name, now)
        return False

    def give_up(self, name: str) -> None:
        """A request no longer waits for its model."""
        place = self.places[name]
        place.waiting -= 1
        if not place.waiting and not (place.pinned and place.state == "unloaded") and place.asked is not None:
            self._dequeue(name)

    def began(self, name: str) -> None:
        """A model has more work, for which no request asked here."""
        self.places[name].running += 1

    def ended(self, name: str, now: float) -> None:
        """A request that could run has ended."""
        place = self.places[name]
        place.running -= 1
        place.used = now

    def want(self, name: str, now: float) -> None:
        """Starts a model without a request."""
        if not self.places[name].is_resident:
            self._enqueue(name, now)

    def unload(self, name: str) -> None:
        """Stops a model once the requests that it has are answered; later ones wait for the next start."""
        place = self.places[name]
        if place.state == "ready":
            place.state = "leaving"
        elif place.state == "starting":
            place.unload = True
        elif place.state == "unloaded" and not place.waiting and place.asked is not None:
            self._dequeue(name)

    # Processes

    def started(self, name: str, now: float) -> None:
        """A model is ready; the requests that waited for it run."""
        place = self.places[name]
        place.state = "leaving" if place.unload else "ready"
        place.unload = False
        place.running += place.waiting
        place.waiting = 0
        place.used = now

    def failed(self, name: str) -> None:
        """A model could not start, and its process has ended; the requests that waited for it fail."""
        place = self.places[name]
        place.state = "unloaded"
        place.unload = False
        place.waiting = 0

    def died(self, name: str) -> None:
        """A model that was ready has no engine any more. Its requests fail by themselves; `stopped` follows when its
        memory is free."""
        self.places[name].state = "stopping"

    def stopped(self, name: str) -> None:
        """The process of a model that is stopped has ended."""
        self.places[name].state = "unloaded"

    # Decisions

    def plan(self, now: float) -> list[Action]:
        """What to do now. The states of the models that it names have changed already."""
        actions = []
        for name, place in self.places.items():
            over = place.state == "leaving" and not place.running and now >= place.used + SETTLE_SECONDS
            if over or (place.is_idle(now) and now >= place.idle_until()):
                actions.append(self._stop(name))
        blocked: set[str] = set()
        for name in list(self._queue):
            place = self.places[name]
            if not blocked.isdisjoint(place.devices) or place.state != "unloaded":
                continue
            if self._size(name) > self.room(name):
                self._dequeue(name)
                place.waiting = 0
                actions.append(Action("refuse", name))
                continue
            if all(self.free(device) >= self._size(name) for device in place.devices):
                self._dequeue(name)
                place.state = "starting"
                actions.append(Action("start", name))
                continue
            blocked.update(place.devices)
            actions += self._make_room(name, now)
        return actions

    def due(self, now: float) -> float:
        """When `plan` must be called next if nothing happens; infinite: never."""
        times = [math.inf]
        for place in self.places.values():
            if place.state == "leaving" and not place.running:
                times.append(place.used + SETTLE_SECONDS)
            elif place.state == "ready" and not place.running:
                times += [place.idle_until(), *([place.used + SETTLE_SECONDS] if self._queue else [])]
        times += [self.places[name].asked + PATIENCE_SECONDS for name in self._queue]  # type: ignore[operator]
        return min(time for time in times if time > now or time == math.inf)

    def used(self, device: str) -> int:
        """Bytes that models take on a device."""
        return sum(place.size or 0 for place in self._residents(device))

    def free(self, device: str) -> int:
        return self.budget[device] - self.used(device)

    def room(self, name: str) -> int:
        """The most bytes that a model can ever have on each of its devices: what pinned models leave."""
        others = [place for other, place in self.places.items() if place.pinned and other != name]

        def pinned(device: str) -> int:
            return sum(place.size or 0 for place in others if device in place.devices)

        return min(self.budget[device] - pinned(device) for device in self.places[name].devices)

    def _make_room(self, name: str, now: float) -> list[Action]:
        """Stops models without requests for one that waits, the least recently used first, if that is enough. Has
        others leave if it has waited for long."""
        wanted = self.places[name]
        patient = wanted.asked is not None and now < wanted.asked + PATIENCE_SECONDS
        ready = [
            (place.used, other)
            for other, place in self.places.items()
            if place.state == "ready" and not place.pinned and not _apart(place, wanted)
        ]
        idle = [other for _, other in sorted(ready) if self.places[other].is_idle(now)]
        busy = [other for _, other in sorted(ready) if not self.places[other].is_idle(now)]
        chosen: list[str] = []
        for other in idle if patient else idle + busy:
            if self._suffices(name, chosen):
                break
            chosen.append(other)
        if not self._suffices(name, chosen):
            return []
        for other in reversed(list(chosen)):  # spares those that smaller ones before them make unnecessary
            rest = [one for one in chosen if one != other]
            if self._suffices(name, rest):
                chosen = rest
        for other in chosen:
            if other in busy:
                self.places[other].state = "leaving"
        return [self._stop(other) for other in chosen if other in idle]

    def _suffices(self, name: str, chosen: Iterable[str]) -> bool:
        """Whether a model fits once those that are on their way out, and the chosen ones, have ended."""
        chosen = set(chosen)

        def stays(other: str, place: Place) -> bool:
            return place.is_resident and place.state not in ("leaving", "stopping") and other not in chosen

        for device in self.places[name].devices:
            kept = sum(
                place.size or 0
                for other, place in self.places.items()
                if device in place.devices and stays(other, place)
            )
            if kept + self._size(name) > self.budget[device]:
                return False
        return True

    def _stop(self, name: str) -> Action:
        self.places[name].state = "stopping"
        return Action("stop", name)

    def _size(self, name: str) -> int:
        size = self.places[name].size
        assert size is not None, f"{name} was asked for before its size was known"
        return size

    def _residents(self, device: str) -> list[Place]:
        return [place for place in self.places.values() if place.is_resident and device in place.devices]

    def _enqueue(self, name: str, now: float) -> None:
        place = self.places[name]
        if place.asked is None:
            place.asked = now
            self._queue.append(name)

    def _dequeue(self, name: str) -> None:
        self.places[name].asked = None
        self._queue.remove(name)

    def check_integrity(self) -> None:
        """Raises AssertionError if the state is not one that can be."""
        for device, most in self.budget.items():
            assert self.used(device) <= most, f"{device} has {self.used(device)} bytes of {most}"
        assert len(set(self._queue)) == len(self._queue)
        for name, place in self.places.items():
            assert (place.asked is not None) == (name in self._queue), name
            assert place.running >= 0, name
            assert place.waiting >= 0, name
            assert place.state != "ready" or not place.waiting, f"{name} is ready, and requests wait for it"
            assert not place.waiting or place.state == "starting" or name in self._queue, name
            assert not place.is_resident or place.size is not None, name
            assert name not in self._queue or place.state not in ("starting", "ready"), name


def _apart(place: Place, wanted: Place) -> bool:
    """Whether two models have no device in common."""
    return set(place.devices).isdisjoint(wanted.devices)
