"""POST /invocations, the endpoint that Amazon SageMaker calls."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from jaxserve.server.endpoints.chat import create_chat_completion
from jaxserve.server.endpoints.completions import create_completion
from jaxserve.server.http.body import put_back, receive_body
from jaxserve.server.http.state import read_body
from jaxserve.types import InvalidRequestError


class Invocation(msgspec.Struct):
    """The fields that tell which endpoint a body is for."""

    messages: Any = None
    prompt: Any = None


_decoder = msgspec.json.Decoder(Invocation)


async def invoke(http: HTTPRequest) -> Response:
    """Answers with a chat completion if the body has messages, with a completion if it has a prompt."""
    received = await receive_body(http)
    put_back(http, received)
    body = await read_body(http, _decoder)
    put_back(http, received)
    if (body.messages is None) == (body.prompt is None):
        raise InvalidRequestError("give either messages, for a chat completion, or prompt, for a completion", "prompt")
    return await (create_completion(http) if body.messages is None else create_chat_completion(http))
