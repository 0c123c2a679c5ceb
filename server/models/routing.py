"""The middleware that finds the model of a request in a server with several."""

from __future__ import annotations

import contextlib
import re
import time
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxserve.server.endpoints import page
from jaxserve.server.endpoints.ollama import LOAD_SECONDS, SHOW_PATH, known_name, unloaded
from jaxserve.server.http.body import put_back, receive_body, taken_back
from jaxserve.server.http.errors import OLLAMA_PATHS, TRITON_PATHS, own_path
from jaxserve.server.http.middleware import ADMIN_PATHS, MONITOR_PATHS, OPEN_PATHS
from jaxserve.server.http.state import ROUTED, key_of
from jaxserve.server.models.engines import Models
from jaxserve.server.observe.access import MODEL

# Answered by the server itself, whatever the query says.
_OWN_PATHS = (
    OPEN_PATHS
    | page.PATHS
    | {"/v2", "/models", "/metrics", "/load", "/version", "/openapi.json"}
    | {"/api/tags", "/api/ps", "/api/version", "/api/pull", "/api/create", "/api/copy", "/api/push", "/api/delete"}
)
_OWN_BEGINNINGS = *TRITON_PATHS, "/v1/models", "/v1/files", "/v1/batches", "/api/blobs/"
# These do not start a model: their handlers check the admin key only later, or they just watch.
_WATCHING = (ADMIN_PATHS | MONITOR_PATHS) - _OWN_PATHS
_FORMS = "multipart/"
_GENERATE = re.compile(r"/v2/models/(.+?)(/versions/[^/]+)?/generate(_stream)?")


class _Named(msgspec.Struct):
    """`name`: in old requests of Ollama's API."""

    model: Any = None
    name: Any = None


_decoder = msgspec.json.Decoder(_Named)


class Routing:
    """Gives a request the state of the model that it names as `model`, in its JSON body or else in its query, and keeps
    that model in memory until the answer is complete. A request that names none gets the server's own state."""

    def __init__(self, app: ASGIApp, models: Models):
        self.app = app
        self._models = models

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = own_path(scope) if scope["type"] == "http" else ""
        in_path = _GENERATE.fullmatch(path)
        if not path or path in _OWN_PATHS or (path.startswith(_OWN_BEGINNINGS) and in_path is None):
            await self.app(scope, receive, send)
            return
        request = Request(scope, receive)
        state = scope.setdefault("state", {})

        async def receive_again() -> Message:
            """For handlers that do not read the body by `receive_body`."""
            if (received := taken_back(request)) is not None:
                return {"type": "http.request", "body": received.whole(), "more_body": False}
            return await receive()

        async with contextlib.AsyncExitStack() as stack:
            try:
                name = in_path[1] if in_path else await _named(request)
                if name is not None and path.startswith(OLLAMA_PATHS):
                    name = known_name(self._models, name, key_of(request))
                    if (answer := self._without_model(request, path, name)) is not None:
                        await answer(scope, receive, send)
                        return
                if name is not None and path in _WATCHING:
                    state[ROUTED] = self._models.resident(name, key_of(request))
                elif name is not None:
                    began = time.monotonic()
                    state[ROUTED] = await stack.enter_async_context(self._models.hold(request, name))
                    state[LOAD_SECONDS] = time.monotonic() - began
            except ClientDisconnect:
                await Response(status_code=499)(scope, receive, send)
                return
            if name is not None:
                state[MODEL] = state[ROUTED].settings.model_name
            await self.app(scope, receive_again, send)

    def _without_model(self, request: Request, path: str, name: str) -> Response | None:
        """The answer to a request of Ollama's clients that need not start the model: to unload it, or to show what was
        shown before. None for others, and if it is in memory or about to be."""
        if self._models.find(name).state not in ("unloaded", "failed") or (received := taken_back(request)) is None:
            return None
        if path == SHOW_PATH and (shown := self._models.shown.get(name)) is not None:
            return Response(shown, media_type="application/json")
        put_back(request, received)
        return unloaded(path, received.text())


async def _named(request: Request) -> str | None:
    """The name of the model that a request asks for; None: it names none, or its body cannot be read, which its handler
    will tell."""
    content_type = request.headers.get("content-type", "")
    if request.method in ("POST", "PUT", "DELETE") and not content_type.startswith(_FORMS):
        received = await receive_body(request)
        put_back(request, received)
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            found = _decoder.decode(received.text())
            if isinstance(name := found.model, str):
                return name
            if own_path(request.scope).startswith(OLLAMA_PATHS) and isinstance(found.name, str):
                return found.name
    return request.query_params.get("model")
