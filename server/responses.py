"""/v1/responses: create, get, cancel and delete. Answers are kept in this process's memory, the latest of them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator

import msgspec
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from server.conversation import ChatRun, prepare
from server.errors import APIError, to_api_error
from server.keys import ApiKey
from server.response_store import StoredResponse
from server.response_writer import ResponseWriter
from server.schemas_chat import Message
from server.schemas_responses import ResponsesRequest
from server.sse import EventStream, run_until_disconnect
from server.state import ServerState, key_of, read_body, state_of, to_json

_decoder = msgspec.json.Decoder(ResponsesRequest)
_decode_messages = msgspec.json.Decoder(list[Message]).decode


async def create_response(http: HTTPRequest) -> Response:
    """Answers with one response or a stream of events; or at once, where it is to be made in the background."""
    state = state_of(http)
    body = await read_body(http, _decoder)
    body.check()
    owner, earlier = key_of(http), []
    if body.background and owner is not None and owner.max_concurrency is not None:
        raise APIError(400, "background is not available under a key with a limited concurrency", param="background")
    if body.previous_response_id is not None:
        previous = state.responses.get(body.previous_response_id, owner, "previous_response_id")
        if not previous.messages:
            raise APIError(400, "the previous response has not been completed", param="previous_response_id")
        earlier = _decode_messages(previous.messages)
    messages = body.conversation_after(earlier)
    run = await run_until_disconnect(http.receive, prepare(state, http, body.to_chat(messages), form_field="text"))
    work = _Work(
        state, run, ResponseWriter(body, body.model or state.settings.model_name, run.tokenizer), messages, owner
    )
    if body.stream:
        return EventStream(work.stream(), closing=b"")
    if body.background:
        work.start()
    else:
        await run_until_disconnect(http.receive, work.whole())
    return _json(work.writer.encoded())


async def get_response(http: HTTPRequest) -> Response:
    """GET /v1/responses/{id}."""
    return _json(state_of(http).responses.get(http.path_params["id"], key_of(http)).response)


async def cancel_response(http: HTTPRequest) -> Response:
    """POST /v1/responses/{id}/cancel: stops one that is made in the background; one that has ended stays as it is."""
    store, name = state_of(http).responses, http.path_params["id"]
    stored = store.get(name, key_of(http))
    if stored.task is None:
        raise APIError(400, "only a response that is made in the background can be cancelled")
    await _stop(stored.task)
    return _json(store.get(name, key_of(http)).response)


async def delete_response(http: HTTPRequest) -> Response:
    """DELETE /v1/responses/{id}."""
    store, name = state_of(http).responses, http.path_params["id"]
    if (task := store.get(name, key_of(http)).task) is not None:
        await _stop(task)
    store.remove(name)
    return _json(to_json({"id": name, "object": "response", "deleted": True}))


async def _stop(task: asyncio.Task[None]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")


class _Work:
    """One response being made."""

    def __init__(
        self, state: ServerState, run: ChatRun, writer: ResponseWriter, messages: list[Message], owner: ApiKey | None
    ):
        self._state, self._run, self.writer, self._messages, self._owner = state, run, writer, messages, owner
        self._task: asyncio.Task[None] | None = None

    async def whole(self) -> None:
        (piece,) = await self._run.collect()
        list(self.writer.piece(piece))
        list(self.writer.end(piece.finish_reason, self._run.usage()))
        self._store([*self._messages, self.writer.message()])

    async def stream(self) -> AsyncGenerator[bytes, None]:
        writer, begun = self.writer, False
        try:
            async with contextlib.aclosing(self._run.pieces()) as batches:
                async for pieces in batches:
                    events = [] if begun else list(writer.begin())
                    begun = True
                    for piece in pieces:
                        events += writer.piece(piece)
                        if piece.finish_reason is not None:
                            events += writer.end(piece.finish_reason, self._run.usage())
                            self._store([*self._messages, writer.message()])
                    yield b"".join(events)
        except Exception as error:
            if not begun:
                raise
            yield b"".join(writer.fail(to_api_error(error)))

    def start(self) -> None:
        """Makes the response in the background; it can be asked for at once."""
        self._task = asyncio.create_task(self._in_background())
        self._store([])

    async def _in_background(self) -> None:
        try:
            await self.whole()
        except asyncio.CancelledError:
            self.writer.response["status"] = "cancelled"
            self._store([])
        except Exception as error:
            list(self.writer.fail(to_api_error(error)))
            self._store([])

    def _store(self, messages: list[Message]) -> None:
        if self.writer.response["store"]:
            name = self.writer.response["id"]
            conversation = to_json(messages) if messages else b""
            self._state.responses.put(
                name, StoredResponse(self._owner, self.writer.encoded(), conversation, self._task)
            )
