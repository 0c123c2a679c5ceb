"""Server-sent events, and watching for clients that disconnect."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, Literal, TypeVar

import msgspec
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jaxserve.server.http.errors import APIError, to_api_error

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"  # a comment, which clients ignore
KEEP_ALIVE_SECONDS = 15.0
_HEADERS = [
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


async def run_until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`. If the client disconnects first, cancels `work` and raises ClientDisconnect.

    The request's body must have been read, so that `receive` has only the disconnect left to report.
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        for pending in (task, watch):
            if not pending.done():
                pending.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await pending


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def event(name: str, data: Any) -> bytes:
    """A named event, as /v1/responses and /v1/messages send them."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode(data))


def error_event(error: APIError) -> bytes:
    return b"data: " + error.body() + b"\n\n"


class EventStream(Response):
    """Sends what a generator yields (one or more whole events at a time), then `closing`.

    The status and headers are sent at the generator's first yield, which may be empty: the request is accepted then. An
    error before it becomes an ordinary response with its status; `on_error` turns a later error into an event. A
    comment is sent in each interval of `keep_alive` seconds without an event, so that proxies keep the connection.
    The generator is closed when the client disconnects.
    """

    content_type = b"text/event-stream; charset=utf-8"
    has_comments = True

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        closing: bytes = DONE,
        on_error: Callable[[APIError], bytes] = error_event,
        keep_alive: float = KEEP_ALIVE_SECONDS,
    ):
        self.events = events
        self._closing = closing
        self._on_error = on_error
        self._keep_alive = keep_alive
        self._sent = False  # whether an event was sent in the current keep-alive interval
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.suppress(ClientDisconnect):
            await run_until_disconnect(receive, self._run(scope, receive, send))

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        comments: asyncio.Task[None] | None = None
        closing = self._closing
        try:
            async with contextlib.aclosing(self.events) as events:
                async for data in events:
                    if comments is None:
                        headers = [(b"content-type", self.content_type), *_HEADERS]
                        await send({"type": "http.response.start", "status": 200, "headers": headers})
                        comments = asyncio.create_task(self._comments(send))
                    if data:
                        await send({"type": "http.response.body", "body": data, "more_body": True})
                        self._sent = True
        except Exception as error:
            answer = to_api_error(error)
            if comments is None:
                await answer.response(scope)(scope, receive, send)
                return
            closing = self._on_error(answer) + closing
        finally:
            if comments is not None:
                comments.cancel()
        await send({"type": "http.response.body", "body": closing, "more_body": False})

    async def _comments(self, send: Send) -> None:
        while self.has_comments:
            await asyncio.sleep(self._keep_alive)
            if not self._sent:
                await send({"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True})
            self._sent = False


class Lines(EventStream):
    """The same for lines of JSON, which have no comments: clients read each line as JSON."""

    content_type = b"application/x-ndjson"
    has_comments = False


class ChunkWriter:
    """Writes the chunks of one streamed response. The members that all chunks share are encoded once.

    `usage` tells which chunks report usage: none ("off"), an extra last one ("last"), or all ("always"). In mode "last"
    the other chunks carry null.
    """

    def __init__(self, head: dict[str, Any], usage: Literal["off", "last", "always"]):
        self._head = b"data: " + msgspec.json.encode(head)[:-1]
        self._mode = usage

    def choice(self, choice: bytes, usage: Any = None, extra: bytes = b"") -> bytes:
        """A chunk with one choice, given as JSON; `extra` is more JSON members, each with a leading comma."""
        members = [self._head, b',"choices":[', choice, b"]", extra]
        if self._mode != "off":
            members += [b',"usage":', msgspec.json.encode(usage) if self._mode == "always" else b"null"]
        return b"".join((*members, b"}\n\n"))

    def last(self, usage: Any) -> bytes:
        """The last chunk, which reports the usage; empty in mode "off"."""
        if self._mode == "off":
            return b""
        return b"".join((self._head, b',"choices":[],"usage":', msgspec.json.encode(usage), b"}\n\n"))
