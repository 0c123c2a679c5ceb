"""Plain ASGI middleware: request ids, unexpected errors, API keys, and the limit on bodies."""

from __future__ import annotations

import hashlib
import hmac
import re
import uuid
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.errors import APIError, to_api_error

OPEN_PATHS = frozenset({"/health", "/ready"})  # answered without a key
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
            await to_api_error(error).response()(scope, receive, send)


class ApiKeys:
    """Answers 401 to requests without one of the keys, whatever the path, but for OPEN_PATHS."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]):
        self.app = app
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._allows(Headers(scope=scope)):
            await self.app(scope, receive, send)
            return
        error = APIError(
            401,
            "a valid API key is required, as in 'Authorization: Bearer KEY'",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
        await error.response()(scope, receive, send)

    def _allows(self, headers: Headers) -> bool:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            return False
        digest = hashlib.sha256(key.strip().encode()).digest()
        # digests have one length and every key is compared, so the time tells nothing about any of them
        return sum(hmac.compare_digest(digest, known) for known in self._digests) > 0


class BodyLimit:
    """Answers 413 to bodies longer than `limit` bytes, without reading them to their end."""

    def __init__(self, app: ASGIApp, limit: int):
        self.app = app
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        too_long = APIError(413, f"the body is longer than {self._limit} bytes", code="body_too_long")
        length = Headers(scope=scope).get("content-length", "0")
        if length.isdecimal() and int(length[:20]) > self._limit:
            await too_long.response()(scope, receive, send)
            return
        received = 0

        async def receive_limited() -> Message:
            nonlocal received
            message = await receive()
            if message["type"] == "http.request":
                received += len(message.get("body", b""))
                if received > self._limit:
                    raise too_long
            return message

        await self.app(scope, receive_limited, send)
