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
from server.limits import Bodies, too_long

OPEN_PATHS = frozenset({"/health", "/ready"})  # answered without a key, and when there are too many connections
ADMIN_PATHS = frozenset({"/reset_prefix_cache"})  # their handlers ask for a key of their own
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
    """Answers 413 to bodies that are too long, without reading them to their end; and 503 to long ones while others
    take too much memory, until what these ask for is submitted. Handlers find theirs in `scope["state"]["body"]`."""

    def __init__(self, app: ASGIApp, bodies: Bodies):
        self.app = app
        self._bodies = bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        length = Headers(scope=scope).get("content-length", "0")
        if length.isdecimal() and int(length[:20]) > self._bodies.longest:
            await too_long(self._bodies.longest).response(scope)(scope, receive, send)
            return
        body = scope.setdefault("state", {})["body"] = self._bodies.open()

        async def receive_limited() -> Message:
            message = await receive()
            if data := message.get("body"):
                body.grow(len(data))
            return message

        try:
            await self.app(scope, receive_limited, send)
        finally:
            body.release()
