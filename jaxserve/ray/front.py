"""The front: reads requests, chooses replicas for them, and passes the answers on."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import msgspec
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from jaxserve.prefix_routing import prompt_blocks
from jaxserve.ray.merged_metrics import merged
from jaxserve.ray.replica import Call, Head

log = logging.getLogger("jaxserve.ray")

_TRIES = 2  # replicas that a request is given to one after the other, while nothing of its answer has been sent
_ANSWER_SECONDS = 30.0  # for what all replicas are asked
_RESPONSES = "/v1/responses"
# What changes a server is done by all of them.
_FOR_ALL = {"/reset_prefix_cache", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"}


class Front:
    """The deployment's class. `replicas`: the handle of the replicas."""

    def __init__(self, replicas: DeploymentHandle, max_body_bytes: int):
        self._all = replicas
        self._replicas = replicas.options(method_name="answer", stream=True)
        self._max_body_bytes = max_body_bytes

    async def __call__(self, http: Request) -> Response:
        path = http.scope["path"].removeprefix(http.scope.get("root_path", ""))
        query = http.scope["query_string"].decode("latin-1")
        received = bytearray()
        async for chunk in http.stream():
            if len(received) + len(chunk) > self._max_body_bytes:
                return _error(413, f"the request body is longer than {self._max_body_bytes} bytes", path)
            received += chunk
        body = bytes(received)
        target = path + (f"?{query}" if query else "")
        call = Call(http.method, target, list(http.headers.items()), body, prompt_blocks(body))
        try:
            if path == "/metrics":
                return await self._metrics(call)
            if path in _FOR_ALL:
                return await self._worst_of_all(call)
            if path.startswith(f"{_RESPONSES}/") and path != f"{_RESPONSES}/input_tokens":
                return await self._found_response(call)
            if path == _RESPONSES and (earlier := _earlier_response(body)):
                call = replace(call, avoid=await self._without(earlier, call))
            return await self._answer(call, path)
        except (RayError, RayServeException, TimeoutError) as error:
            log.warning("a request to %s failed: %s", path, error)
            return _error(503, "no replica could answer; try again", path)

    async def _answer(self, call: Call, path: str) -> Response:
        """The answer of one replica. A request is given to another one if the first is lost before its answer begins,
        or refuses new requests."""
        for again in reversed(range(_TRIES)):
            stream = self._replicas.remote(call)
            try:
                head = await anext(stream)
            except RayError:
                if not again:
                    raise
                continue
            except asyncio.CancelledError:  # the client has disconnected
                stream.cancel()
                raise
            if head.status != 503 or not again:
                break
            stream.cancel()
            call = replace(call, avoid=call.avoid | {head.replica})
        response = StreamingResponse(_rest(stream, path, head.is_event_stream), head.status)
        response.raw_headers = head.raw_headers
        return response

    async def _ask_all(self, call: Call) -> list[tuple[Head, bytes]]:
        found = await self._all.broadcast("whole_answer", call).results_async(
            timeout_s=_ANSWER_SECONDS, return_exceptions=True
        )
        answers = [answer for answer in found if isinstance(answer, tuple)]
        if not answers:
            raise found[0]
        return answers

    async def _worst_of_all(self, call: Call) -> Response:
        """Has every replica do it; the answer is that of one which failed, if there is one."""
        return _response(*max(await self._ask_all(call), key=lambda answer: answer[0].status))

    async def _found_response(self, call: Call) -> Response:
        """A stored response is with the replica that made it: the answer is that of the one which knows it."""
        return _response(*min(await self._ask_all(call), key=lambda answer: answer[0].status))

    async def _without(self, response: str, call: Call) -> frozenset[str]:
        """The names of the replicas that do not have a stored response."""
        target = f"{_RESPONSES}/{response}"
        answers = await self._ask_all(replace(call, method="GET", target=target, body=b""))
        return frozenset(head.replica for head, _ in answers if head.status != 200)

    async def _metrics(self, call: Call) -> Response:
        """The metrics of all replicas, with the label `replica`, for whom they are shown to."""
        answers = await self._ask_all(call)
        worst = max(answers, key=lambda answer: answer[0].status)
        if worst[0].status != 200:
            return _response(*worst)
        text = merged({head.replica: body.decode() for head, body in answers})
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


async def _rest(stream: Any, path: str, events: bool) -> AsyncIterator[bytes]:
    """The rest of an answer. If its replica is lost, a stream of events ends with an error after the last whole event;
    any other answer ends too early, which clients see by its length."""
    part = b""  # of an event whose end has not come
    try:
        async for chunk in stream:
            whole, end, part = (part + chunk).rpartition(b"\n\n") if events else (chunk, b"", b"")
            if whole:
                yield whole + end
        if part:
            yield part
    except RayError as error:
        log.warning("a replica was lost during an answer to %s: %s", path, error)
        if not events:
            raise
        body = _error(503, "the replica that was answering has been lost", path).body
        name = b"event: error\n" if path.startswith("/v1/messages") else b""
        yield name + b"data: " + bytes(body) + b"\n\n"
    finally:
        stream.cancel()  # does nothing after the last chunk


def _earlier_response(body: bytes) -> str | None:
    """`previous_response_id` of a request's body, if it can be part of a path."""
    try:
        earlier = msgspec.json.decode(body, type=dict).get("previous_response_id")
    except msgspec.DecodeError:
        return None
    return earlier if isinstance(earlier, str) and earlier.replace("_", "").replace("-", "").isalnum() else None


def _response(head: Head, body: bytes) -> Response:
    response = Response(body, head.status)
    response.raw_headers = head.raw_headers
    return response


def _error(status: int, message: str, path: str) -> Response:
    """An error in OpenAI's shape, or on its paths in Anthropic's."""
    if path.startswith("/v1/messages"):
        kind = "overloaded_error" if status == 503 else "request_too_large"
        content: dict[str, Any] = {"type": "error", "error": {"type": kind, "message": message}}
    else:
        kind = "service_unavailable_error" if status == 503 else "invalid_request_error"
        code = "replica_unavailable" if status == 503 else "request_too_large"
        content = {"error": {"message": message, "type": kind, "param": None, "code": code}}
    headers = {"Retry-After": "1"} if status == 503 else {}
    return Response(msgspec.json.encode(content), status, headers=headers, media_type="application/json")
