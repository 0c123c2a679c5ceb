"""How many tokens a row draws in one call (host side): a loop spares the host, but others wait for it."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Sequence


class Pace:
    """Measures the steps of one engine. `goal`: seconds that a call may take while a client reads along.

    Attributes:
      step_seconds: what a token of a row took of late.
      device_seconds: what the devices took for it, as far as the host saw.
      host_seconds: what the host took for a call, without waiting for the devices.
    """

    def __init__(self, goal: float):
        self._goal = goal
        self.step_seconds = self.device_seconds = 1.0
        self.host_seconds = 0.0
        self._began = self._waited = 0.0  # this call: when, and seconds that the host waited in it
        self._last_arrival = 0.0  # when a step's tokens came

    def begin(self) -> None:
        """A call begins."""
        self._began, self._waited = time.perf_counter(), 0.0

    def end(self) -> None:
        """The call ends."""
        self.host_seconds += 0.3 * (time.perf_counter() - self._began - self._waited - self.host_seconds)

    def arrived(self, asked: float, dispatched: float, passes: int) -> float:
        """The tokens of a call are here, for which the model ran `passes` times: as often as the row that drew most has
        drawn, or the fixed length of the program's loop. `asked` and `dispatched` say when the host began to wait, and
        when it sent the call. Returns how long the devices took for it, at most."""
        now = time.perf_counter()
        seconds = now - max(dispatched, self._last_arrival)  # it began when the one before ended, or later
        self.step_seconds += 0.3 * (seconds / passes - self.step_seconds)
        if now - asked > seconds / 10:
            self.device_seconds += 0.3 * (seconds / passes - self.device_seconds)
        else:  # they had been done for a while, nobody knows how long
            self.device_seconds = 0.8 * min(self.device_seconds, self.step_seconds) + 1e-9
        self._waited += now - asked
        self._last_arrival = now
        return seconds

    def tokens_per_call(self, lengths: Sequence[int], *, watched: bool, holds_up: bool) -> int:
        """How many tokens a row may draw in the next call, one of `lengths` (ascending, from 1 on): few enough that
        clients see them, and newcomers begin, within the goal; four times the goal where nobody watches. Where some
        rows or newcomers have to wait for the others (`holds_up`), the devices take no longer for more tokens than the
        host takes for a call."""
        most = int(self._goal * (1 if watched else 4) / self.step_seconds)
        if holds_up:
            most = min(most, 1 + int(self.host_seconds / self.device_seconds))
        return lengths[max(bisect_right(lengths, most) - 1, 0)]
