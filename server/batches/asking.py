"""Asks the requests of batches through the application, as a client would, but without a network."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Protocol

import msgspec
from starlette.types import ASGIApp

from jaxserve.server.batches.lines import BatchLine
from jaxserve.server.http.errors import APIError
from jaxserve.server.schemas.batches import URLS

_AGAIN_SECONDS = 0.1  # before a request that could not be served is asked again; then twice as long, and so on
_LONGEST_SECONDS = 2.0
_TOGETHER = 2  # engines that may die while they compute a request among others, before it is asked alone
_TRANSIENT = (429, 503)  # a queue that is full, an engine that is being started again or that sleeps
_FAILED_SECONDS = 5.0  # before a model that could not be started is asked for again
# How often one of several models may be refused with a code before that is the answer.
_GIVES_UP = {"model_too_large": 1, "model_failed": 3}
_FALSE = msgspec.Raw(b"false")


class Places:
    """How many requests may be in work at a time, and how many bytes they may have together."""

    def __init__(self, count: int, most_bytes: int = 2**62):
        self._left = count
        self._bytes_left = self._most_bytes = most_bytes
        self._turn = asyncio.Lock()  # those that wait take places in the order in which they came
        self._freed = asyncio.Event()

    async def take(self, size: int) -> None:
        """Waits for a place. A request that is larger than all may be together has one if it is the only one."""
        async with self._turn:
            while not self._left or self._bytes_left < min(size, self._most_bytes):
                self._freed.clear()
                await self._freed.wait()
            self._left -= 1
            self._bytes_left -= size

    def give(self, size: int) -> None:
        self._left += 1
        self._bytes_left += size
        self._freed.set()


class Engines(Protocol):
    """What answers the requests: a client of one engine, or several models.

    Attributes:
      is_ready: whether a request would be taken.
      losses: number of engines that have died.
    """

    @property
    def is_ready(self) -> bool: ...

    @property
    def losses(self) -> int: ...


class Asker:
    """Asks through `app`. `state`: what the handlers find in `scope["state"]`. `fields`: fields, as JSON, that replace
    those of each body."""

    def __init__(
        self, app: ASGIApp, engines: Engines, state: dict[str, Any], fields: dict[str, msgspec.Raw] | None = None
    ):
        self._app = app
        self._engines = engines
        self._state = state
        self._fields = {"stream": _FALSE} | (fields or {})
        self._alone = asyncio.Lock()

    async def answer(self, line: BatchLine) -> tuple[int, bytes]:
        """Status and body of the answer. A request that cannot be served now is asked again; so is one whose engine
        dies, in the end without others of this batch beside it, so that only the one that kills engines fails."""
        if line.method != "POST" or line.url not in URLS:
            text = f"a batch takes POST to {' or '.join(URLS)}, got {line.method[:16]} {line.url[:128]}"
            return 404, APIError(404, text, param="url", code="url_not_found").body()
        for _ in range(_TOGETHER):
            if (answer := await self._ask(line)) is not None:
                return answer
        async with self._alone:
            if (answer := await self._ask(line)) is not None:
                return answer
        text = f"the engine died {_TOGETHER + 1} times while it computed this request"
        return 500, APIError(500, text, code="engine_died").body()

    async def _ask(self, line: BatchLine) -> tuple[int, bytes] | None:
        """Asks until the request can be served; None if the engine died while it computed the request."""
        wait = _AGAIN_SECONDS
        failures = 0
        while True:
            while not self._engines.is_ready:
                await asyncio.sleep(_AGAIN_SECONDS)
            losses = self._engines.losses
            status, body = await self._post(line)
            if status != 200 and losses != self._engines.losses:
                return None
            if status not in _TRANSIENT:
                return status, body
            if (most := _GIVES_UP.get(_code_of(body))) is not None:
                failures += 1
                if failures >= most:
                    return status, body
                await asyncio.sleep(_FAILED_SECONDS)
                continue
            await asyncio.sleep(wait)
            wait = min(2 * wait, _LONGEST_SECONDS)

    async def _post(self, line: BatchLine) -> tuple[int, bytes]:
        body = line.body | self._fields
        if line.url == "/v1/responses":  # nobody asks for it again, unless the request says so
            body = {"store": _FALSE} | body | {"background": _FALSE}
        payload = msgspec.json.encode(body)
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": line.url,
            "raw_path": line.url.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(b"content-type", b"application/json"), (b"content-length", str(len(payload)).encode())],
            "server": ("batch", 0),
            "client": ("batch", 0),
            "state": self._state.copy(),
        }
        incoming = iter([{"type": "http.request", "body": payload, "more_body": False}])
        status = 500
        parts = []

        async def receive() -> dict[str, Any]:
            for message in incoming:
                return message
            await asyncio.Event().wait()  # this client never disconnects
            raise AssertionError

        async def send(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            else:
                parts.append(message.get("body", b""))

        await self._app(scope, receive, send)
        return status, b"".join(parts)


class _Error(msgspec.Struct):
    code: str | None = None


class _Refused(msgspec.Struct):
    error: _Error


def _code_of(body: bytes) -> str:
    """The code of an error."""
    return msgspec.json.decode(body, type=_Refused).error.code or ""


async def answer_all(
    lines: AsyncIterable[BatchLine],
    asker: Asker,
    places: Sequence[Places],
    take: Callable[[BatchLine, int, bytes], Awaitable[None]],
) -> None:
    """Asks all requests, as many at a time as have all of `places`, and calls `take` with each answer as it comes."""

    async def one(line: BatchLine) -> None:
        await take(line, *await asker.answer(line))

    async with asyncio.TaskGroup() as group:
        async for line in lines:
            taken: list[Places] = []
            size = line.size
            try:
                for some in places:
                    await some.take(size)
                    taken.append(some)
            except asyncio.CancelledError:
                _give(taken, size)
                raise
            group.create_task(one(line)).add_done_callback(partial(_give, taken, size))


def _give(places: Sequence[Places], size: int, _: object = None) -> None:
    for some in places:
        some.give(size)
