"""Sleep, and new weights, while API servers are connected: a change waits until no request runs, and new ones wait for
it.

So all tokens of a request come from the same weights. Requests that come while new weights are awaited are held back
and then computed with these; before a sleep they are refused.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxserve.adapters.reading import FileReader
from jaxserve.checkpoints.files import clipped, contents_of
from jaxserve.server.ipc import messages
from jaxserve.server.ipc.api_server_connection import ApiServerConnection
from jaxserve.types import QueueFullError

log = logging.getLogger("jaxserve.engine")

MAX_HELD = 1024  # requests that wait for new weights, for an engine without a limit of its own
WeightChange = messages.Sleep | messages.WakeUp | messages.UpdateWeights


@dataclass
class UpdateChecked:
    """A thread has looked at the files of new weights. `error`: why they cannot be used."""

    asked: messages.UpdateWeights
    error: Exception | None

    @property
    def ticket(self) -> int:
        return self.asked.ticket


@dataclass
class _Asked:
    """A change that waits, and the API server that asked for it. `deadline`: time.monotonic() at which it is given
    up."""

    api_server: ApiServerConnection
    message: WeightChange
    deadline: float


class WeightChanges:
    """The change that an engine's requests must end for, if there is one, and the requests that it holds back.

    Attributes:
      running: a change is being made, which may take minutes.
      served: the weights that the engine serves now.
    """

    def __init__(self, engine: Any, served: messages.ServedWeights):
        self.running = False
        self.served = served
        self._engine, self._weights = engine, getattr(engine, "weights", None)
        self._most = getattr(getattr(engine, "config", None), "max_waiting", None) or MAX_HELD
        self._asked: _Asked | None = None
        self._held: list[tuple[ApiServerConnection, messages.Submit]] = []
        self._reader, self._checks = FileReader(), ThreadPoolExecutor(1, thread_name_prefix="weights")

    @property
    def waits(self) -> bool:
        return self._asked is not None

    @property
    def level(self) -> int:
        """How deeply the engine sleeps; see `Weights.level`."""
        return 0 if self._weights is None else self._weights.level

    def seconds_left(self) -> float:
        """Until the change that waits is given up."""
        assert self._asked is not None
        return max(0.0, self._asked.deadline - time.monotonic())

    def ask(
        self,
        api_server: ApiServerConnection,
        message: WeightChange | UpdateChecked,
        then: Callable[[UpdateChecked], object],
    ) -> bool:
        """Notes a change that is possible; answers any other. The files of new weights are looked at first, by a thread
        that then calls `then`, whose message comes back here. Returns whether running requests are to be aborted."""
        try:
            if self._weights is None:
                raise ValueError("the weights of this engine cannot be changed")
            if self._asked is not None:
                raise QueueFullError("another change of the weights is under way")
            match message:
                case messages.Sleep():
                    self._weights.check_sleep(message.level)
                case messages.UpdateWeights():
                    self._checks.submit(self._check, message, then)
                    return False
                case UpdateChecked():
                    if message.error is not None:
                        raise message.error
                    message = message.asked
        except Exception as error:
            api_server.send(_failure(message, error))
            return False
        patience = 0.0 if isinstance(message, messages.WakeUp) else message.timeout
        self._asked = _Asked(api_server, message, time.monotonic() + patience)
        return not isinstance(message, messages.WakeUp) and message.aborts

    def _check(self, asked: messages.UpdateWeights, then: Callable[[UpdateChecked], object]) -> None:
        assert self._weights is not None
        path = Path(asked.path)
        found = None
        try:
            self._reader.check_headers(path)
            with contents_of(path):
                self._weights.check_update(path)
        except Exception as error:
            found = error
        then(UpdateChecked(asked, found))

    def holds(self, api_server: ApiServerConnection, submit: messages.Submit) -> bool:
        """Whether a new request must wait for the change that waits, in which case it is kept. Raises QueueFullError
        for one that cannot wait, because the engine is about to sleep or too many wait already."""
        assert self._asked is not None
        if isinstance(self._asked.message, messages.Sleep):
            raise QueueFullError("the engine is about to sleep; try again after it was woken up")
        if sum(len(one.prompts) for _, one in self._held) + len(submit.prompts) > self._most:
            raise QueueFullError(f"{self._most} requests are waiting for new weights already; try again later")
        self._held.append((api_server, submit))
        return True

    def drop(self, api_server: ApiServerConnection, request_id: str | None = None) -> None:
        """Forgets the requests of an API server that has gone, or a request whose client has gone."""
        self._held = [
            (one, submit)
            for one, submit in self._held
            if one is not api_server or (request_id is not None and request_id not in _names(submit))
        ]

    def make(self, *, at_rest: bool, announce: Callable[[], None]) -> list[tuple[ApiServerConnection, messages.Submit]]:
        """Makes the change that waits if the engine is `at_rest`, or gives it up if its time is over. Returns the
        requests that were held back. `announce` tells all API servers of the new state, before the answer."""
        asked = self._asked
        if asked is None or not (at_rest or time.monotonic() > asked.deadline):
            return []
        answer: messages.ChangeDone
        if at_rest:
            answer = self._make(asked.message)
            announce()
        else:
            answer = _failure(asked.message, QueueFullError("requests were still running when the time was over"))
        self._asked = None
        asked.api_server.send(answer)
        held = self._held
        self._held = []
        return held

    def _make(self, message: WeightChange) -> messages.ChangeDone:
        assert self._weights is not None
        self.running = True
        try:
            match message:
                case messages.Sleep():
                    self._weights.sleep(message.level)
                case messages.WakeUp():
                    self._weights.wake_up()
                case messages.UpdateWeights():
                    digest = self._weights.update(Path(message.path))
                    updates = self.served.updates + 1
                    self.served = messages.ServedWeights(message.version or str(updates), updates, message.path, digest)
        except Exception as error:
            return _failure(message, error)
        finally:
            self.running = False
        return messages.ChangeDone(message.ticket)


def _failure(message: WeightChange | UpdateChecked, error: Exception) -> messages.ChangeDone:
    match error:
        case ValueError() | OSError():
            code = messages.INVALID
        case QueueFullError():
            code = messages.QUEUE_FULL
        case _:
            log.exception("the weights could not be changed", exc_info=error)
            code = messages.INTERNAL_ERROR
    return messages.ChangeDone(message.ticket, clipped(str(error) or type(error).__name__), code)


def _names(submit: messages.Submit) -> list[str]:
    return [name for name, _, _ in submit.prompts]
