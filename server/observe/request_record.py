"""What one HTTP request came to, for the access log and the traces."""

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

CLIENT_LEFT = 499  # the status of what nobody waited for
_current: contextvars.ContextVar[RequestRecord] = contextvars.ContextVar("record")


class Times(Protocol):
    """When one prompt's request arrived and when its tokens came (`metrics.RequestTimes`)."""

    params: SamplingParams
    num_prompt_tokens: int
    arrival: float
    queued: float  # seconds
    first: float | None
    latest: float
    ended: bool
    finish_reasons: list[str]

    @property
    def num_output_tokens(self) -> int: ...


class RequestRecord:
    """One HTTP request, its answer, and what was generated for it; times from time.monotonic()."""

    def __init__(self, scope: Scope):
        self.scope = scope
        self.headers = Headers(scope=scope)
        self.began = time.monotonic()
        self.began_utc = time.time()
        self.ended = self.began
        self.status = CLIENT_LEFT
        self.complete = False  # the answer was sent to its end
        self.request_id = ""
        self.generations: list[Times] = []  # one a prompt
        self.on_late: Callable[[Times], None] | None = None  # for those that end after the answer

    def line(self, model: str) -> dict[str, Any]:
        """The entry of the access log. The name of the API key is in it, the key and the query are not."""
        key = self.scope.get("state", {}).get("api_key")
        firsts = [times.first for times in self.generations if times.first is not None]
        return {
            "time": datetime.datetime.fromtimestamp(self.began_utc, datetime.UTC).isoformat(timespec="milliseconds"),
            "request_id": self.request_id,
            "key": key.name if key is not None else None,
            "method": self.scope["method"],
            "path": self.scope["path"],
            "status": self.status,
            "model": model if self.generations else None,
            "prompt_tokens": sum(times.num_prompt_tokens for times in self.generations),
            "output_tokens": sum(times.num_output_tokens for times in self.generations),
            "ttft_seconds": round(min(firsts) - self.began, 6) if firsts else None,
            "duration_seconds": round(self.ended - self.began, 6),
        }


def note_generation(times: Times) -> RequestRecord | None:
    """Adds a prompt's times to the HTTP request that they belong to, which is returned; None where nobody watches."""
    record = _current.get(None)
    if record is not None:
        record.generations.append(times)
    return record


@contextlib.contextmanager
def watching(record: RequestRecord) -> Iterator[None]:
    """What is generated meanwhile, in this task or those that it starts, belongs to this request."""
    token = _current.set(record)
    try:
        yield
    finally:
        _current.reset(token)
