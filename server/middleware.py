"""Plain ASGI middleware: request ids, unexpected errors, API keys, and the limits on connections and bodies."""

from __future__ import annotations

import re
import uuid
from collections import Counter
from collections.abc import Callable, Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server import ui
from server.errors import APIError, to_api_error, unavailable
from server.keys import ApiKey, find_key

OPEN_PATHS = frozenset(
    {"/health", "/ready", "/ping"}
)  # answered without a key, and when there are too many connections
ADMIN_PATHS = frozenset({"/reset_prefix_cache"})  # their handlers ask for a key of their own
_SMALL_BODY = 64 * 2**10  # bytes; always taken
_BODIES = 8
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class RequestId:
    """Gives every response an `X-Request-Id`: the client's own where it is well-formed, else a new one."""

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        header = (b"x-request-id", (given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex).encode())

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), header]
            await send(message)

        await self.app(scope, receive, send_with_id)


class UnexpectedErrors:
    """Answers 500, and keeps the connection, where a handler fails in a way that nobody thought of."""

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def send_noting_start(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self.app(scope, receive, send_noting_start)
        except Exception as error:
            if started or scope["type"] != "http":
                raise  # half an answer is out: all that is left is to break the connection
            await to_api_error(error).response(scope)(scope, receive, send)


class ConnectionLimit:
    """Answers 503, and closes the connection, where more than `limit` of them are open."""

    def __init__(self, app: ASGIApp, limit: int, connections: Callable[[], int], refused: Callable[[], None]):
        self.app = app
        self._limit, self._connections, self._refused = limit, connections, refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._connections() <= self._limit or scope["path"] in OPEN_PATHS:
            await self.app(scope, receive, send)
            return
        self._refused()
        error = unavailable(f"{self._limit} connections are open already; try again later", "too_many_connections")
        error.headers["Connection"] = "close"
        await error.response(scope)(scope, receive, send)


class ApiKeys:
    """Answers 401 to requests without one of the keys, whatever the path, but for OPEN_PATHS, ADMIN_PATHS and the
    page; and 429 to those beyond what may run under their key at a time. Handlers find the key in
    `scope["state"]["api_key"]`."""

    def __init__(self, app: ASGIApp, keys: Sequence[ApiKey]):
        self.app = app
        self._keys = keys
        self._running: Counter[ApiKey] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS | ADMIN_PATHS | ui.PATHS:
            await self.app(scope, receive, send)
            return
        key = find_key(self._keys, Headers(scope=scope))
        if key is None:
            error = APIError(
                401,
                "a valid API key is required, as in 'Authorization: Bearer KEY'",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
            await error.response(scope)(scope, receive, send)
            return
        if key.max_concurrency is not None and self._running[key] >= key.max_concurrency:
            text = f"{key.max_concurrency} requests are running under this key already; wait for one to end"
            error = APIError(429, text, code="too_many_requests", headers={"Retry-After": "1"})
            await error.response(scope)(scope, receive, send)
            return
        scope.setdefault("state", {})["api_key"] = key
        self._running[key] += 1
        try:
            await self.app(scope, receive, send)
        finally:
            self._running[key] -= 1


class BodyLimit:
    """Answers 413 to bodies longer than `limit` bytes, without reading them to their end; and 503 to those beyond
    _SMALL_BODY while what has come of unfinished ones is more than _BODIES times the limit."""

    def __init__(self, app: ASGIApp, limit: int):
        self.app = app
        self._limit = limit
        self._coming = 0  # bytes of bodies whose end has not come

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        too_long = APIError(413, f"the body is longer than {self._limit} bytes", code="body_too_long")
        length = Headers(scope=scope).get("content-length", "0")
        if length.isdecimal() and int(length[:20]) > self._limit:
            await too_long.response(scope)(scope, receive, send)
            return
        received = 0

        async def receive_limited() -> Message:
            nonlocal received
            message = await receive()
            size = len(message.get("body", b""))
            received += size
            self._coming += size
            if received > self._limit:
                raise too_long
            if received > _SMALL_BODY and self._coming > _BODIES * self._limit:
                raise unavailable("too many long requests are being received; try again later", "too_many_bodies")
            if not message.get("more_body", False):
                self._coming -= received
                received = 0
            return message

        try:
            await self.app(scope, receive_limited, send)
        finally:
            self._coming -= received
