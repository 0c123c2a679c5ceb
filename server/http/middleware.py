"""Plain ASGI middleware: request ids, unexpected errors, API keys, and the limits on connections and bodies."""

from __future__ import annotations

import re
import uuid
from collections.abc import Sequence, Set

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxserve.server.http.connections import Connections
from jaxserve.server.http.counts import Counts, requests_of
from jaxserve.server.http.errors import APIError, to_api_error, unavailable
from jaxserve.server.http.keys import ApiKey, find_key
from jaxserve.server.http.request_limits import Bodies, Body, too_long
from jaxserve.server.ipc.messages import ServedWeights

# answered without a key
OPEN_PATHS = frozenset({"/health", "/ready", "/ping", "/v2/health/live", "/v2/health/ready"})
RESERVED_PATHS = OPEN_PATHS | {"/metrics"}  # answered even on connections beyond the limit
ADAPTER_PATHS = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
WEIGHT_PATHS = "/sleep", "/wake_up", "/is_sleeping", "/update_weights", "/update_weights_from_disk"
# Their handlers check the admin key.
ADMIN_PATHS = frozenset({"/reset_prefix_cache", "/profile", *ADAPTER_PATHS, *WEIGHT_PATHS})
REPOSITORY_PATHS = "/v2/repository/models/"  # so do the handlers of the paths below this
MONITOR_PATHS = frozenset({"/metrics", "/load", "/pool", "/slots"})  # they reveal facts about the requests of all keys
FILES_PATH = "/v1/files"  # where files are uploaded
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


def note_weights(http: Request, weights: ServedWeights) -> None:
    """Notes the weights that compute the answer to a request, for `RequestId`."""
    http.scope.setdefault("state", {})["weight_version"] = weights.version


class WithoutRootPath:
    """Takes the path at which a proxy serves this server off requests, where the proxy has not, so that every check of
    a path sees the server's own. A path that the server itself may have stays as it is."""

    def __init__(self, app: ASGIApp, root_path: str, paths: Sequence[str]):
        self.app = app
        self._root = root_path
        self._is_own = any(path.startswith(f"{root_path}/") for path in paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if (path == self._root or path.startswith(f"{self._root}/")) and not self._is_own:
            scope = {**scope, "path": path.removeprefix(self._root) or "/"}
        await self.app(scope, receive, send)


class WithRootPath:
    """Gives the routes the path at which a proxy serves this server, as ASGI has it: as `root_path`, and at the
    beginning of `path`. Redirects then lead through the proxy."""

    def __init__(self, app: ASGIApp, root_path: str):
        self.app = app
        self._root = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if "path" in scope:
            scope.setdefault("state", {})  # both scopes have the same
            scope = {**scope, "path": self._root + scope["path"], "root_path": self._root}
        await self.app(scope, receive, send)


class RequestId:
    """Gives every response an `X-Request-Id`: the request's, if it is well-formed, otherwise a new one. Answers that
    were computed by the model also get an `X-Weight-Version`, the version of its weights."""

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
                if (version := scope.get("state", {}).get("weight_version")) is not None:
                    message["headers"].append((b"x-weight-version", version.encode()))
            await send(message)

        await self.app(scope, receive, send_with_id)


class UnexpectedErrors:
    """Answers 500 when a handler raises an unexpected exception, and keeps the connection open."""

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
                raise  # part of an answer is sent, so the connection can only be closed
            await to_api_error(error).response(scope)(scope, receive, send)


class ConnectionLimit:
    """Answers 503 on connections beyond the limit, except to RESERVED_PATHS; closes them after any answer."""

    def __init__(self, app: ASGIApp, connections: Connections):
        self.app = app
        self._connections = connections

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not (scope.get("state", {}).get("surplus") and self._connections.is_over_limit):
            await self.app(scope, receive, send)
            return

        async def send_and_close(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (b"connection", b"close")]
            await send(message)

        if scope["path"] in RESERVED_PATHS:
            await self.app(scope, receive, send_and_close)
            return
        self._connections.refused()
        text = f"{self._connections.limit} connections are open already; try again later"
        await unavailable(text, "too_many_connections").response(scope)(scope, receive, send_and_close)


class ApiKeys:
    """Checks API keys, on every path but OPEN_PATHS, ADMIN_PATHS, those below REPOSITORY_PATHS, and `open_paths`.

    A request without a valid key gets 401, one beyond its key's `max_concurrency` gets 429. Handlers find the key in
    `scope["state"]["api_key"]`. MONITOR_PATHS accept `monitor_keys`. They accept an API key only if it is the only one,
    and otherwise answer it with 403, because they would tell one client about the requests of others.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: Sequence[ApiKey],
        monitor_keys: Sequence[ApiKey] = (),
        open_paths: Set[str] = frozenset(),
        counts: Counts | None = None,
        model_names: Sequence[str] | None = None,
    ):
        """model_names: those of the server's model, for keys that may use only some; None: it has several models, and
        knows later which one is asked for."""
        self.app = app
        self._model_names = model_names
        self._keys = keys
        self._monitor_keys = monitor_keys
        self._shared = len({key.key for key in keys}) > 1
        self._open_paths = OPEN_PATHS | ADMIN_PATHS | open_paths
        self._counts = counts or Counts()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if scope["type"] != "http" or path in self._open_paths or path.startswith(REPOSITORY_PATHS):
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        monitors = scope["path"] in MONITOR_PATHS
        if monitors and find_key(self._monitor_keys, headers) is not None:
            await self.app(scope, receive, send)
            return
        key = find_key(self._keys, headers)
        if key is None:
            error = APIError(
                401,
                "a valid API key is required, as in 'Authorization: Bearer KEY'",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
            await error.response(scope)(scope, receive, send)
            return
        if monitors and self._shared:
            text = (
                f"{scope['path']} tells of the requests of all keys, so it needs the key that the server was started "
                "with as --admin-key or --metrics-key"
            )
            await APIError(403, text, code="admin_key_required").response(scope)(scope, receive, send)
            return
        if self._model_names is not None and not key.may_use(self._model_names):
            text = f"this key may use {', '.join(key.models or ())}, and this server has {', '.join(self._model_names)}"
            await APIError(403, text, code="model_not_allowed").response(scope)(scope, receive, send)
            return
        if not self._enter(key):
            text = f"{key.max_concurrency} requests are running under this key already; wait for one to end"
            error = APIError(429, text, code="too_many_requests", headers={"Retry-After": "1"})
            await error.response(scope)(scope, receive, send)
            return
        scope.setdefault("state", {})["api_key"] = key
        try:
            await self.app(scope, receive, send)
        finally:
            if key.max_concurrency is not None:
                self._counts.add(requests_of(key), -1)

    def _enter(self, key: ApiKey) -> bool:
        """Counts a request under a key with a limit; False if too many are running."""
        if key.max_concurrency is None:
            return True
        with self._counts.lock():
            if self._counts.total(requests_of(key)) >= key.max_concurrency:
                return False
            self._counts.add(requests_of(key), 1)
            return True


class BodyLimit:
    """Answers 413 to a body that is too long, without reading all of it, and 503 to a long body while the bodies of
    other requests take too much memory. Handlers find the body's account in `scope["state"]["body"]`. Uploads of files,
    which are never whole in memory, have limits of their own."""

    def __init__(self, app: ASGIApp, bodies: Bodies):
        self.app = app
        self._bodies = bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] == FILES_PATH:
            await self.app(scope, receive, send)
            return
        length = Headers(scope=scope).get("content-length", "0")
        if length.isdecimal() and int(length[:20]) > self._bodies.longest:
            await too_long(self._bodies.longest).response(scope)(scope, receive, send)
            return
        body = scope.setdefault("state", {})["body"] = Body(self._bodies)

        async def receive_limited() -> Message:
            message = await receive()
            if data := message.get("body"):
                body.grow(len(data))
            return message

        try:
            await self.app(scope, receive_limited, send)
        finally:
            body.release()
