"""Event streams and hung-up clients, against a hand-made ASGI server."""

from __future__ import annotations

import asyncio

import pytest
from starlette.requests import ClientDisconnect

from jaxserve.server.http.errors import APIError, to_api_error
from jaxserve.server.http.sse import ChunkWriter, EventStream, run_until_disconnect
from jaxserve.server.schemas.chat import Message, Part
from jaxserve.server.schemas.common import CompletionRequest
from jaxserve.types import EngineDeadError, InvalidRequestError, QueueFullError


async def never():
    await asyncio.Event().wait()


def send_all(events, receive=never, **options) -> tuple[int, bytes]:
    """The status and body that a response sends; 0 for the status where it never says that it is complete."""
    sent: list[dict] = []

    async def send(message):
        sent.append(message)

    asyncio.run(EventStream(events, **options)({"type": "http", "path": "/v1/completions"}, receive, send))
    body = b"".join(message.get("body", b"") for message in sent)
    return (0 if sent[-1].get("more_body") else sent[0]["status"]), body


def test_stream():
    async def events():
        yield b"data: 1\n\n"
        yield b"data: 2\n\n"

    assert send_all(events()) == (200, b"data: 1\n\ndata: 2\n\ndata: [DONE]\n\n")


def test_error_before_and_after_the_first_event():
    async def early():
        raise InvalidRequestError("no", "prompt")
        yield b""

    async def late():
        yield b"data: 1\n\n"
        raise EngineDeadError("gone")

    status, body = send_all(early())
    assert status == 400
    assert b'"param":"prompt"' in body
    status, body = send_all(late())
    assert status == 200
    assert body.startswith(b'data: 1\n\ndata: {"error":')
    assert body.endswith(b"data: [DONE]\n\n")


def test_the_stream_begins_before_its_first_event():
    """The empty beginning sends the headers; comments follow until there is an event, and none after it."""

    async def events():
        yield b""
        await asyncio.sleep(0.3)
        yield b"data: 1\n\n"
        yield b"data: 2\n\n"
        raise EngineDeadError("gone")

    status, body = send_all(events(), keep_alive=0.05)
    begin, _, rest = body.partition(b"data: 1\n\n")
    assert status == 200
    assert begin
    assert begin.replace(b": keep-alive\n\n", b"") == b""
    assert rest.startswith(b'data: 2\n\ndata: {"error":')
    begun = []

    async def never_comes():
        yield b""
        await never()

    async def run():
        async def send(message):
            begun.append(message)

        response = EventStream(never_comes(), keep_alive=60)({"type": "http", "path": "/"}, never, send)
        await asyncio.wait({task := asyncio.ensure_future(response)}, timeout=0.05)
        task.cancel()

    asyncio.run(run())
    assert [message["type"] for message in begun] == ["http.response.start"]


def test_generator_is_closed_when_the_client_leaves():
    closed = []

    async def events():
        try:
            yield b"data: 1\n\n"
            await never()
        finally:
            closed.append(True)

    async def leave():
        await asyncio.sleep(0.05)
        return {"type": "http.disconnect"}

    assert send_all(events(), leave) == (0, b"data: 1\n\n")
    assert closed == [True]


def test_work_is_cancelled_when_the_client_leaves():
    async def leave():
        return {"type": "http.disconnect"}

    async def run():
        with pytest.raises(ClientDisconnect):
            await run_until_disconnect(leave, never())
        assert await run_until_disconnect(never, asyncio.sleep(0, "done")) == "done"

    asyncio.run(run())


def test_chunks():
    head = {"id": "x", "object": "y"}
    assert ChunkWriter(head, "off").choice(b"{}") == b'data: {"id":"x","object":"y","choices":[{}]}\n\n'
    assert ChunkWriter(head, "last").choice(b"{}").endswith(b'"choices":[{}],"usage":null}\n\n')
    assert ChunkWriter(head, "always").choice(b"{}", {"a": 1}).endswith(b'"usage":{"a":1}}\n\n')
    assert ChunkWriter(head, "off").last({}) == b""
    assert ChunkWriter(head, "last").last({"a": 1}).endswith(b'"choices":[],"usage":{"a":1}}\n\n')


def test_errors_get_their_status():
    assert to_api_error(QueueFullError("full")).status == 503
    assert to_api_error(QueueFullError("full")).headers["Retry-After"]
    assert to_api_error(EngineDeadError("gone")).status == 503
    assert to_api_error(InvalidRequestError("no", "n", "c")).code == "c"
    hidden = to_api_error(KeyError("secret"))
    assert hidden.status == 500
    assert b"secret" not in hidden.body()
    assert to_api_error(error := APIError(404, "no")) is error


def test_messages_join_their_text_parts():
    message = Message("user", [Part("text", "a"), Part("text", "b")])
    assert message.to_template(0) == {"role": "user", "content": "a\nb"}


def test_prompts():
    assert CompletionRequest(prompt="a").prompts() == ["a"]
    assert CompletionRequest(prompt=[1, 2]).prompts() == [[1, 2]]
    assert CompletionRequest(prompt=[[1], [2]]).prompts() == [[1], [2]]
    assert CompletionRequest(prompt=["a", "b"]).prompts() == ["a", "b"]
