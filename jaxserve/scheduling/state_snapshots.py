"""Snapshots of recurrent states at the ends of cached prefixes (host side), and the places where they lie.

A recurrent layer keeps one state per sequence: the state after its last computed token. So a sequence can start from
cached pages only if a copy of the state at the end of these pages exists, called a snapshot. The devices have a fixed
number of places for snapshots, each as large as the state in a slot.
"""

from __future__ import annotations

from collections import OrderedDict


class StateSnapshots:
    """Hands out `count` places, from `first` on. The least recently used snapshot is given up for a new one.

    `least`: tokens that a snapshot must save. Making one cuts a prompt into two parts, which separate steps compute.
    """

    def __init__(self, first: int, count: int, least: int = 64):
        self.least = least
        self._places = range(first, first + count)
        self._place_of: OrderedDict[bytes, int] = OrderedDict()  # hash of a prefix's last block -> place; oldest first

    def __contains__(self, key: bytes) -> bool:
        return key in self._place_of

    def use(self, key: bytes) -> int:
        """The place of the snapshot of the prefix whose last block has the hash `key`. It must exist."""
        self._place_of.move_to_end(key)
        return self._place_of[key]

    def add(self, key: bytes) -> int | None:
        """A place for a snapshot of this prefix, to which the caller copies the state; None if there is one already."""
        if key in self._place_of:
            self._place_of.move_to_end(key)
            return None
        taken = len(self._place_of)
        place = self._places[taken] if taken < len(self._places) else self._place_of.popitem(last=False)[1]
        self._place_of[key] = place
        return place

    def clear(self) -> None:
        """Forgets all snapshots."""
        self._place_of.clear()

    def check_integrity(self) -> None:
        """Asserts that no two prefixes have the same place."""
        assert sorted(self._place_of.values()) == sorted(self._places[: len(self._place_of)])
