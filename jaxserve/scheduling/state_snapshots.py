"""States of recurrent layers at the ends of cached prefixes (host side): which prefix has its state in which place.

A recurrent layer keeps one state of a sequence: that behind its last computed token. So a sequence can start from
cached pages only where the state at their end was copied: a snapshot. The devices have a fixed number of places for
snapshots, each as large as the state in a slot.
"""

from __future__ import annotations

from collections import OrderedDict


class StateSnapshots:
    """Hands out the places from `first` on, `count` of them. The snapshot that nobody used for longest is given up.

    `least`: tokens that a snapshot must save. Each cuts a prompt in two parts, which separate steps compute.
    """

    def __init__(self, first: int, count: int, least: int = 64):
        self.least = least
        self._places = range(first, first + count)
        self._place_of: OrderedDict[bytes, int] = OrderedDict()  # by the hash of the prefix's last block; oldest first

    def __contains__(self, key: bytes) -> bool:
        return key in self._place_of

    def use(self, key: bytes) -> int:
        """The place of the state behind the prefix whose last block has this hash, which must have one."""
        self._place_of.move_to_end(key)
        return self._place_of[key]

    def add(self, key: bytes) -> int | None:
        """A place for the state behind this prefix, to which the caller has it copied; None if it has one already."""
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
