"""The record of one HTTP request, its answer and its generations, for the access log and traces."""

from __future__ import annotations

import contextlib
import contextvars
import datetime
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from starlette.datastructures import Headers
from starlette.types import Scope

from jaxserve.types import SamplingParams

CLIENT_LEFT = 499  # the status when the client disconnected before the answer was complete
_current: contextvars.ContextVar[RequestRecord] = contextvars.ContextVar("record")


class Times(Protocol):
    """The part of `metrics.RequestTimes` that records use."""

    params: SamplingParams
    num_prompt_tokens: int
    adapter: str
    arrival: float
    queued: float  # seconds
    first: float | None
    latest: float
    ended: bool
    finish_reasons: list[str]

    @property
    def num_output_tokens(self) -> int: ...


class RequestRecord:
    """One HTTP request, its answer, and what was generated for it. Times are from time.monotonic()."""

    def __init__(self, scope: Scope):
        self.scope = scope
        self.headers = Headers(scope=scope)
        self.began = time.monotonic()
        self.began_utc = time.time()
        self.ended = self.began
        self.status = CLIENT_LEFT
        self.complete = False  # whether the whole answer was sent
        self.request_id = ""
        self.generations: list[Times] = []  # one per prompt
        self.on_late: Callable[[Times], None] | None = None  # called for a generation that ends after the answer

    def line(self, model: str) -> dict[str, Any]:
        """The entry of the access log. It holds the name of the API key, but neither the key nor the query string."""
        key = self.scope.get("state", {}).get("api_key")
        firsts = [times.first for times in self.generations if times.first is not None]
        return {
            "time": datetime.datetime.fromtimestamp(self.began_utc, datetime.UTC).isoformat(timespec="milliseconds"),
            "request_id": self.request_id,
            "key": key.name if key is not None else None,
            "method": self.scope["method"],
            "path": self.scope["path"],
            "status": self.status,
            "model": (self.generations[0].adapter or model) if self.generations else None,
            "prompt_tokens": sum(times.num_prompt_tokens for times in self.generations),
            "output_tokens": sum(times.num_output_tokens for times in self.generations),
            "ttft_seconds": round(min(firsts) - self.began, 6) if firsts else None,
            "duration_seconds": round(self.ended - self.began, 6),
        }


def note_generation(times: Times) -> RequestRecord | None:
    """Adds a prompt's times to the current HTTP request's record. Returns the record; None if there is none."""
    record = _current.get(None)
    if record is not None:
        record.generations.append(times)
    return record


@contextlib.contextmanager
def watching(record: RequestRecord) -> Iterator[None]:
    """Makes `record` the current one for this task and the tasks that it starts."""
    token = _current.set(record)
    try:
        yield
    finally:
        _current.reset(token)
