"""The middleware that records each request, then writes the access log and passes the record on for tracing."""

from __future__ import annotations

import logging
import time

import msgspec
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxserve.server.observe.output import Output, OutputHandler
from jaxserve.server.observe.request_record import CLIENT_LEFT, RequestRecord, watching
from jaxserve.server.observe.tracing import Tracer

log = logging.getLogger("jaxserve.access")

MODEL = "model"  # key in a request's state of its model's name, in a server with several
# Paths that are requested all the time, as those below /ui are. They are logged only when the key is wrong.
QUIET_PATHS = frozenset(
    {"/", "/health", "/v1/health", "/v2/health/live", "/v2/health/ready", "/ping", "/ready", "/metrics", "/pool"}
)


class Access:
    """Records each request. It is the outermost middleware, so that it sees the answers of all others."""

    def __init__(self, app: ASGIApp, model: str, log_lines: bool, tracer: Tracer | None, api_server: int | None = None):
        """`api_server`: the number of this API server if the server has several; None: lines do not name it."""
        self.app = app
        self._model = model
        self._log_lines = log_lines
        self._tracer = tracer
        self._more = {} if api_server is None else {"front": api_server}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        record = RequestRecord(scope)

        async def send_noting(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                record.request_id = Headers(raw=message["headers"]).get("x-request-id", "")
            await send(message)
            record.complete = message["type"] == "http.response.body" and not message.get("more_body", False)

        try:
            with watching(record):
                await self.app(scope, receive, send_noting)
        finally:
            self._finish(record)

    def _finish(self, record: RequestRecord) -> None:
        record.ended = time.monotonic()
        if not record.complete:
            record.status = CLIENT_LEFT
        path = record.scope["path"]
        quiet = record.status != 401 and (path in QUIET_PATHS or path.startswith("/ui/"))
        model = record.scope.get("state", {}).get(MODEL, self._model)
        if self._log_lines and not quiet:
            log.info("%s", msgspec.json.encode(record.line(model) | self._more).decode())
        if self._tracer is not None:
            self._tracer.record(record, model)


def log_to_stdout() -> None:
    """Sends the access log to standard output, one JSON object a line. Lines are dropped if nobody reads them."""
    log.handlers = [OutputHandler(Output(1), "%(message)s")]
    log.propagate = False
    log.setLevel(logging.INFO)
