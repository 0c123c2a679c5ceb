"""How many tokens a row samples in one call (host side). More tokens save host work, but delay other requests."""

from __future__ import annotations

import contextlib
import time
from bisect import bisect_right
from collections.abc import Iterator, Sequence


class Pace:
    """Measures the steps of one engine. `goal`: seconds that a call may take while a client reads its tokens.

    Attributes, all recent averages:
      step_seconds: time per token of a row.
      device_seconds: time of the devices per token of a row, as far as the host can tell.
      host_seconds: time of the host per call, without waiting for the devices.
      is_exact: whether the host waited for the last call, so that the time of it that `arrived` returned is exact.
    """

    def __init__(self, goal: float):
        self._goal = goal
        self.step_seconds = self.device_seconds = 1.0
        self.host_seconds = 0.0
        self.is_exact = False
        self._waited = 0.0  # seconds that the host waited in this call
        self._last_arrival = 0.0  # when the latest step's tokens arrived

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """The host's work for one call."""
        began = time.perf_counter()
        self._waited = 0.0
        yield
        self.host_seconds += 0.3 * (time.perf_counter() - began - self._waited - self.host_seconds)

    def arrived(self, asked: float, dispatched: float, passes: int) -> float:
        """Notes that a call's tokens are here. The host began to wait at `asked` and sent the call at `dispatched`; the
        model ran `passes` times. Returns an upper bound of the devices' time for the call."""
        now = time.perf_counter()
        seconds = now - max(dispatched, self._last_arrival)  # the devices start a call after the one before it
        self.step_seconds += 0.3 * (seconds / passes - self.step_seconds)
        self.is_exact = now - asked > seconds / 10
        if self.is_exact:
            self.device_seconds += 0.3 * (seconds / passes - self.device_seconds)
        else:  # the devices were done earlier; the host cannot tell when
            self.device_seconds = 0.8 * min(self.device_seconds, self.step_seconds) + 1e-9
        self._waited += now - asked
        self._last_arrival = now
        return seconds

    def tokens_per_call(self, lengths: Sequence[int], *, watched: bool, holds_up: bool) -> int:
        """How many tokens a row may sample in the next call: one of `lengths`, which ascend from 1.

        The call takes no longer than the goal if a client reads the tokens (`watched`), and four times the goal
        otherwise. If rows or new requests wait for the call (`holds_up`), the tokens after the first take no longer
        than the host's work for a call."""
        most = int(self._goal * (1 if watched else 4) / self.step_seconds)
        if holds_up:
            most = min(most, 1 + int(self.host_seconds / self.device_seconds))
        return lengths[max(bisect_right(lengths, most) - 1, 0)]
