"""Which KV pages have copies below the devices' memory: in the host's memory, and in files (host side; no data here).

A page's content is known by its *key*: the hash of its block, which stands for the whole prefix, with tenant's salt and
adapter, and the group of layers that the page belongs to. Copies are made when the prefix cache evicts a page. This
costs nothing while the devices have free pages, and it copies each page once, and only what would be lost.

The host's memory is divided into places of one page each. A place is in one of these states:

  free        it holds nothing
  incoming    a page's content is on its way to it
  held        it holds the content of a key, which sequences can find; the least recently used one is given up first

A held place that a thread reads is *pinned*. It is not used for anything else meanwhile.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import Protocol


class Files(Protocol):
    """Contents in files, see `jaxserve.engine.page_files`."""

    def __contains__(self, key: bytes) -> bool: ...
    def touch(self, key: bytes) -> None: ...


def page_key(block_hash: bytes, group: int) -> bytes:
    """The key of a block's page for a group of layers."""
    return block_hash + bytes([group])


def block_of(key: bytes) -> tuple[bytes, int]:
    """The block's hash and the group of layers that a key was made of."""
    return key[:-1], key[-1]


@dataclass(frozen=True)
class CopyCosts:
    """Measured seconds that decide whether copies pay: to load a page from the host's memory and from a file, and to
    compute a token of a prompt. wait: seconds that a load takes at least."""

    host_page: float
    file_page: float
    token: float
    wait: float

    def pay(self, tokens: int, host_pages: int, file_pages: int) -> bool:
        """Whether loading these pages takes less time than to compute `tokens` tokens."""
        load = self.wait + host_pages * self.host_page + file_pages * self.file_page
        return load < tokens * self.token


class PageTiers:
    """The places of one engine's host memory. `files` are those of the disk; None: there are none."""

    def __init__(self, num_places: int, files: Files | None = None):
        self.num_places = num_places
        self.files = files
        self._held: OrderedDict[bytes, int] = OrderedDict()  # key -> place; oldest first
        self._incoming: dict[int, bytes | None] = {}  # place -> key; None: it was forgotten meanwhile
        self._free = list(range(num_places - 1, -1, -1))
        self._pins: Counter[int] = Counter()  # place -> threads that read it
        self._forgotten: set[int] = set()  # pinned places whose content is forgotten
        self._leaving: list[tuple[int, bytes]] = []
        self.may_load = True
        self.costs: CopyCosts | None = None  # None: loading always pays
        self.evictions = self.dropped = 0

    @property
    def num_held(self) -> int:
        return len(self._held)

    def __contains__(self, key: bytes) -> bool:
        return key in self._held or (self.files is not None and key in self.files)

    def place_of(self, key: bytes) -> int | None:
        """The place that holds a key's content; it counts as just used. None: no place does."""
        if key in self._held:
            self._held.move_to_end(key)
        return self._held.get(key)

    def pay(self, tokens: int, keys: list[bytes]) -> bool:
        """Whether to load the contents of these keys, instead of computing `tokens` tokens."""
        host = sum(key in self._held for key in keys)
        return self.may_load and (self.costs is None or self.costs.pay(tokens, host, len(keys) - host))

    # Copies from the devices

    def evicted(self, page: int, key: bytes) -> None:
        """The prefix cache has given up a page. Its content stays on the devices until the next step."""
        if self.place_of(key) is None:
            self._leaving.append((page, key))
        elif self.files is not None:
            self.files.touch(key)

    def take_leaving(self, most: int) -> list[tuple[int, bytes, int]]:
        """The pages that were evicted since the last call and that are to be copied now, as (page, key, place). Beyond
        `most` pages the last ones are dropped: they would hold up the devices."""
        leaving = self._leaving
        self._leaving = []
        taken = []
        for page, key in leaving[: max(most, 0)]:
            if (place := self._reserve(key)) is not None:
                taken.append((page, key, place))
        self.dropped += len(leaving) - len(taken)
        return taken

    def expect(self, key: bytes) -> int | None:
        """A place for a content that is about to come from elsewhere; None if no place can be used."""
        return self._reserve(key)

    def _reserve(self, key: bytes) -> int | None:
        """A place for a content that is about to come."""
        if self._free:
            place = self._free.pop()
        else:
            oldest = next((key for key, place in self._held.items() if place not in self._pins), None)
            if oldest is None:
                return None
            place = self._held.pop(oldest)
            self.evictions += 1
        self._incoming[place] = key
        return place

    def arrived(self, place: int, *, intact: bool = True) -> None:
        """The content of an incoming place is there; or, unless `intact`, it will never be."""
        key = self._incoming.pop(place)
        if intact and key is not None and key not in self._held:
            self._held[key] = place
        else:
            self._free.append(place)

    # Copies to the devices

    def pin(self, place: int) -> None:
        self._pins[place] += 1

    def unpin(self, place: int) -> None:
        self._pins[place] -= 1
        if not self._pins[place]:
            del self._pins[place]
            if place in self._forgotten:
                self._forgotten.remove(place)
                self._free.append(place)

    # Forgetting

    def forget_leaving(self) -> None:
        """The contents of evicted pages that were not copied yet are lost."""
        self._leaving.clear()

    def clear(self) -> None:
        """Forgets all contents in the host's memory, those on their way there included."""
        self.forget_leaving()
        pinned = {place for place in self._held.values() if place in self._pins}
        self._forgotten |= pinned
        self._free += [place for place in self._held.values() if place not in pinned]
        self._held.clear()
        self._incoming = dict.fromkeys(self._incoming)

    def check_integrity(self) -> None:
        """Asserts that every place is in exactly one state."""
        places = [*self._held.values(), *self._incoming, *self._free, *self._forgotten]
        assert sorted(places) == list(range(self.num_places)), "a place is lost, or in two states"
        assert set(self._pins) <= {*self._held.values(), *self._forgotten}, "a place is read that holds nothing"
        assert self._forgotten <= set(self._pins)
