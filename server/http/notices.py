"""Notices of what was left out of a request, in a header of the answer and in the log."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

log = logging.getLogger("jaxserve.server")

HEADER = b"x-jaxserve-warning"
_MAX_LENGTH = 1000  # characters of the header


class NoticedResponse(Response):
    """Sends another response with a header that tells what was left out of the request."""

    def __init__(self, response: Response, text: str):
        self._response = response
        self._header = (HEADER, text.encode("ascii", "backslashreplace"))
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_noticed(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], self._header]}
            await send(message)

        await self._response(scope, receive, send_noticed)


def noticed(response: Response, notices: Sequence[str]) -> Response:
    """The response with the notices in a header, if there are any; logs them as well."""
    if not notices:
        return response
    text = "; ".join(notices)[:_MAX_LENGTH]
    log.warning("left out of a request: %s", text)
    return NoticedResponse(response, text)


def shown(value: Any) -> str:
    """A client's value for use in a notice: in ASCII, short and without line breaks."""
    return ascii(value)[:64]
