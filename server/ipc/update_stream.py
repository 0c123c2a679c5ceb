"""The updates of one `EngineClient.generate` call that have arrived and not been taken."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from jaxserve.types import SequenceUpdate


def weight(update: SequenceUpdate) -> int:
    """A measure of an update's memory: its tokens and alternative tokens, plus one."""
    total = 1 + len(update.token_ids)
    for scores in (update.logprobs, update.prompt_logprobs):
        if scores:
            total += sum(1 + len(score.top) for score in scores if score is not None)
    return total


class UpdateStream:
    """Updates of one `generate` call that have arrived and not been taken.

    Attributes:
      unread: sum of these updates' weights.
      paused: requests that are paused until these updates are taken.
      running: request id -> completions that have not ended in the engine.
      unaccepted: ids of requests for which no message has come from the engine.

    `on_accepted` is called when the first message has come for any of them.
    """

    def __init__(self, on_accepted: Callable[[], object] = lambda: None) -> None:
        self._on_accepted: Callable[[], object] | None = on_accepted
        self.unread = 0
        self.paused: set[str] = set()
        self.running: dict[str, set[int]] = {}
        self.unaccepted: set[str] = set()
        self._updates: list[SequenceUpdate] = []
        self._error: Exception | None = None
        self._changed = asyncio.Event()

    @property
    def over(self) -> bool:
        return not self.running and not self._updates and self._error is None

    def put(self, update: SequenceUpdate) -> None:
        if update.finish_reason is not None:
            self.close(update.request_id, update.index)
        self._updates.append(update)
        self.accept(update.request_id)

    def accept(self, *request_ids: str) -> None:
        if self._on_accepted is not None:
            self._on_accepted()
            self._on_accepted = None
        self.unaccepted.difference_update(request_ids)
        self._changed.set()

    def fail(self, error: Exception) -> None:
        self._error = self._error or error
        self._changed.set()

    def close(self, request_id: str, index: int) -> None:
        indices = self.running.get(request_id, set())
        indices.discard(index)
        if not indices:
            self.running.pop(request_id, None)

    async def start(self) -> list[SequenceUpdate]:
        """The updates that came before all requests were accepted, usually none. Raises a refused request's error."""
        while self.unaccepted and self._error is None:
            self._changed.clear()
            await self._changed.wait()
        if self._error is not None:
            raise self._error
        updates = self._updates
        self._updates = []
        return updates

    async def take(self) -> list[SequenceUpdate]:
        """All updates that have arrived; waits for the first. An error is raised after the updates before it."""
        while not self._updates and self._error is None:
            self._changed.clear()
            await self._changed.wait()
        if not self._updates and self._error is not None:
            raise self._error
        updates = self._updates
        self._updates = []
        return updates
