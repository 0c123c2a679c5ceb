"""Errors in OpenAI's shape, `{"error": {"message", "type", "param", "code"}}`, or in that of the path's own API."""

from __future__ import annotations

import logging

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from jaxserve.types import EngineDeadError, InvalidRequestError, QueueFullError

log = logging.getLogger("jaxserve.server")

RETRY_SECONDS = "1"  # Retry-After of a 503
ANTHROPIC_PATHS = "/v1/messages"
# The last ones are not served.
TRITON_PATHS = tuple(
    f"/v2/{name}" for name in ("health", "models", "repository", "trace", "logging", "systemsharedmemory", "cudashared")
)
OLLAMA_PATHS = "/api/"

_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}
# https://docs.anthropic.com/en/api/errors; other statuses are invalid_request_error (below 500) or api_error
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class APIError(Exception):
    """An error answer. Handlers raise it, and the app turns it into a response."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ):
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = _TYPES.get(status, "invalid_request_error" if status < 500 else "internal_server_error")
        self.param = param
        self.code = code
        self.headers = headers or {}

    def body(self) -> bytes:
        """The error as JSON, in OpenAI's shape."""
        return msgspec.json.encode(
            {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}
        )

    def anthropic_body(self) -> bytes:
        """The error as JSON, in Anthropic's shape."""
        kind = _ANTHROPIC_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
        return msgspec.json.encode({"type": "error", "error": {"type": kind, "message": self.message}})

    def plain_body(self) -> bytes:
        """The error as JSON, in the shape of Triton and Ollama."""
        return msgspec.json.encode({"error": self.message})

    def response(self, scope: Scope) -> Response:
        """The error as a response, in the shape that the request's path calls for."""
        path = own_path(scope)
        if path.startswith((*TRITON_PATHS, OLLAMA_PATHS)):
            body = self.plain_body()
        else:
            body = self.anthropic_body() if path.startswith(ANTHROPIC_PATHS) else self.body()
        return Response(body, self.status, headers=self.headers, media_type="application/json")


def own_path(scope: Scope) -> str:
    """The path of a request without that at which a proxy serves this server."""
    return scope["path"].removeprefix(scope.get("root_path", ""))


def unavailable(message: str, code: str) -> APIError:
    """A 503 that asks the client to retry after RETRY_SECONDS."""
    return APIError(503, message, code=code, headers={"Retry-After": RETRY_SECONDS})


def to_api_error(error: Exception) -> APIError:
    """The answer to any exception. An unexpected one is logged, and the answer does not tell its details."""
    match error:
        case APIError():
            return error
        case InvalidRequestError():
            return APIError(400, str(error), param=error.param, code=error.code)
        case QueueFullError():
            return unavailable(str(error), "queue_full")
        case TimeoutError():
            return APIError(504, str(error), code="timeout")
        case EngineDeadError():
            return unavailable(str(error), "engine_unavailable")
        case HTTPException():
            return APIError(error.status_code, error.detail, headers=dict(error.headers or {}))
    log.error("a request failed", exc_info=error)
    return APIError(500, "the server failed to answer; its log has the details")


async def handle_exception(request: Request, error: Exception) -> Response:
    """Starlette's handler for the expected kinds of exceptions."""
    return to_api_error(error).response(request.scope)
