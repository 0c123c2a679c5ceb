"""/v1/responses: create, get, cancel and delete. The server keeps the latest responses."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncGenerator, Iterable, Iterator

import msgspec
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from jaxserve.server.chat.conversation import ChatRun, encode_chat, prepare
from jaxserve.server.chat.output_parser import Piece
from jaxserve.server.endpoints.response_writer import ResponseWriter
from jaxserve.server.http.errors import APIError, to_api_error
from jaxserve.server.http.keys import ApiKey
from jaxserve.server.http.notices import noticed
from jaxserve.server.http.response_store import EventLog, StoredResponse
from jaxserve.server.http.sse import EventStream, run_until_disconnect
from jaxserve.server.http.state import ServerState, key_of, read_body, state_of, to_json
from jaxserve.server.schemas.chat import Message
from jaxserve.server.schemas.response_items import Item, Reader, listed
from jaxserve.server.schemas.responses import InputTokensRequest, ResponsesRequest
from jaxserve.types import InvalidRequestError

_decoder = msgspec.json.Decoder(ResponsesRequest)
_count_decoder = msgspec.json.Decoder(InputTokensRequest)
_decode_messages = msgspec.json.Decoder(list[Message]).decode
_MAX_LISTED = 100  # items in one answer of /input_items
_MAX_REFERRED = 8 * 2**20  # bytes of all stored responses whose items one input refers to


async def create_response(http: HTTPRequest) -> Response:
    """Answers with a response or a stream of events. A response made in the background is answered at once."""
    state = state_of(http)
    body = await read_body(http, _decoder)
    body.check()
    owner = key_of(http)
    if body.background and owner is not None and owner.max_concurrency is not None:
        raise APIError(400, "background is not available under a key with a limited concurrency", param="background")
    reader = _conversation(state, body, owner)
    tools = body.tool_map()
    chat = body.to_chat(reader.messages, tools)
    with _about_input():
        run = await run_until_disconnect(http.receive, prepare(state, http, chat, form_field="text"))
    writer = ResponseWriter(body, body.model or state.settings.model_name, run.tokenizer, tools)
    items = b"" if body.store is False else to_json(listed(body.items))
    work = _Work(state, run, writer, reader.messages, items, owner)
    notices = [*tools.notices, *reader.notices]
    if body.background:
        log = work.start(bool(body.stream))
        return noticed(EventStream(log.follow(-1), closing=b"") if log else _json(writer.encoded()), notices)
    if body.stream:
        return noticed(EventStream(work.stream(), closing=b""), notices)
    await run_until_disconnect(http.receive, work.whole())
    return noticed(_json(writer.encoded()), notices)


@contextlib.contextmanager
def _about_input() -> Iterator[None]:
    """Errors about the messages of a chat name the field that these were made of."""
    try:
        yield
    except InvalidRequestError as error:
        if error.param == "messages":
            error.param = "input"
        raise


async def count_input_tokens(http: HTTPRequest) -> Response:
    """POST /v1/responses/input_tokens: the number of tokens in a response's prompt."""
    state = state_of(http)
    body = await read_body(http, _count_decoder)
    state.check_model(body.model)
    tokenizer, info = state.require_ready()
    reader = _conversation(state, body, key_of(http))
    tools = body.tool_map()
    chat = body.to_chat(reader.messages, tools)
    with _about_input():
        chat.check()
    prompt = chat.conversation()
    ids = await state.text_work(http, lambda: encode_chat(tokenizer, info, prompt, chat.truncate_prompt_tokens))
    answer = {"object": "response.input_tokens", "input_tokens": len(ids)}
    return noticed(_json(to_json(answer)), [*tools.notices, *reader.notices])


def _conversation(state: ServerState, body: ResponsesRequest, owner: ApiKey | None) -> Reader:
    """The messages of the previous response's conversation, then of this request's input."""

    decoded: dict[bytes, dict[str, Item]] = {}  # a stored response as JSON -> id -> item of its output

    def lookup(name: str) -> Item | None:
        stored = state.responses.with_item(name, owner)
        if stored is None:
            return None
        if stored.response not in decoded:
            if len(stored.response) + sum(map(len, decoded)) > _MAX_REFERRED:
                raise InvalidRequestError(f"input refers to responses of more than {_MAX_REFERRED} bytes", "input")
            output = msgspec.json.decode(stored.response)["output"]
            decoded[stored.response] = {item["id"]: msgspec.convert(item, Item) for item in output}
        return decoded[stored.response].pop(name, None)  # an item may be used once

    reader = Reader(lookup)
    if body.previous_response_id is not None:
        previous = state.responses.get(body.previous_response_id, owner, "previous_response_id")
        if not previous.messages:
            raise APIError(400, "the previous response has not been completed", param="previous_response_id")
        reader.messages += _decode_messages(previous.messages)
    reader.read(body.items)
    if not reader.messages:
        raise InvalidRequestError("input has no message", "input")
    return reader


async def compact(http: HTTPRequest) -> Response:
    """/v1/responses/compact of OpenAI's API, which is not served. Without it, "compact" would be a response's id."""
    raise APIError(
        404, f"{http.url.path} is not served; send the whole conversation, or previous_response_id, to /v1/responses"
    )


async def get_response(http: HTTPRequest) -> Response:
    """GET /v1/responses/{id}; with `stream=true`, the response's events after number `starting_after`."""
    stored = state_of(http).responses.get(http.path_params["id"], key_of(http))
    if http.query_params.get("stream", "false").lower() not in ("true", "1"):
        return _json(stored.response)
    if stored.log is None:
        raise APIError(400, "only a response that was asked for with background and stream has events", param="stream")
    return EventStream(stored.log.follow(_query_int(http, "starting_after", -1, -1, 2**31)), closing=b"")


async def list_input_items(http: HTTPRequest) -> Response:
    """GET /v1/responses/{id}/input_items: the items of the input, the last one first unless `order` is "asc"."""
    items = msgspec.json.decode(state_of(http).responses.get(http.path_params["id"], key_of(http)).items)
    limit = _query_int(http, "limit", 20, 1, _MAX_LISTED)
    order = http.query_params.get("order", "desc")
    after = http.query_params.get("after")
    if order not in ("asc", "desc"):
        raise APIError(400, f"order must be 'asc' or 'desc', got {order[:64]!r}", param="order")
    if order == "desc":
        items.reverse()
    if after is not None:
        place = next((i for i, item in enumerate(items) if item["id"] == after), None)
        if place is None:
            raise APIError(400, f"there is no item {after[:80]!r}", param="after")
        items = items[place + 1 :]
    page = items[:limit]
    ends = {"first_id": page[0]["id"] if page else "", "last_id": page[-1]["id"] if page else ""}
    return _json(to_json({"object": "list", "data": page, **ends, "has_more": len(items) > limit}))


def _query_int(http: HTTPRequest, name: str, default: int, low: int, high: int) -> int:
    text = http.query_params.get(name)
    if text is None:
        return default
    if not re.fullmatch(r"-?[0-9]{1,10}", text, re.ASCII) or not low <= int(text) <= high:
        raise APIError(400, f"{name} must be an integer between {low} and {high}, got {text[:64]!r}", param=name)
    return int(text)


async def cancel_response(http: HTTPRequest) -> Response:
    """POST /v1/responses/{id}/cancel: stops a response made in the background. A complete one stays as it is."""
    store = state_of(http).responses
    name = http.path_params["id"]
    if not store.get(name, key_of(http)).background:
        raise APIError(400, "only a response that is made in the background can be cancelled")
    await store.stop(name)
    return _json(store.get(name, key_of(http)).response)


async def delete_response(http: HTTPRequest) -> Response:
    """DELETE /v1/responses/{id}."""
    store = state_of(http).responses
    name = http.path_params["id"]
    if store.get(name, key_of(http)).background:
        await store.stop(name)
    store.remove(name)
    return _json(to_json({"id": name, "object": "response", "deleted": True}))


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")


class _Work:
    """Makes one response: whole, as a stream, or in the background."""

    def __init__(
        self,
        state: ServerState,
        run: ChatRun,
        writer: ResponseWriter,
        messages: list[Message],
        items: bytes,
        owner: ApiKey | None,
    ):
        self._state = state
        self._run = run
        self.writer = writer
        self._messages = messages
        self._items = items
        self._owner = owner
        self._task: asyncio.Task[None] | None = None
        self._log: EventLog | None = None

    async def whole(self) -> None:
        async with contextlib.aclosing(self._run.pieces()) as batches:
            async for pieces in batches:
                for piece in pieces:
                    self._take(piece)

    async def stream(self) -> AsyncGenerator[bytes, None]:
        writer = self.writer
        begun = False
        try:
            async with contextlib.aclosing(self._run.pieces()) as batches:
                async for pieces in batches:
                    events = [] if begun else list(writer.begin())
                    begun = True
                    for piece in pieces:
                        events += self._take(piece)
                    yield b"".join(events)
        except Exception as error:
            if not begun:
                raise
            yield b"".join(writer.fail(to_api_error(error)))

    def _take(self, piece: Piece) -> list[bytes]:
        """The events of a piece. The last piece completes the response and stores it."""
        events = list(self.writer.piece(piece))
        if piece.finish_reason is not None:
            events += self.writer.end(piece.finish_reason, self._run.usage())
            self._store([*self._messages, self.writer.message()])
        return events

    def start(self, has_log: bool) -> EventLog | None:
        """Makes the response in the background and stores it at once, incomplete. Returns its log if `has_log`."""
        store = self._state.responses
        name = self.writer.response["id"]
        self._log = store.log_for(name) if has_log else None
        self._task = asyncio.create_task(self._in_background())
        self._store([])
        store.watch(name, self._task)
        return self._log

    async def _in_background(self) -> None:
        try:
            self._tell(self.writer.wait())
            async with contextlib.aclosing(self._run.pieces()) as batches:
                async for pieces in batches:
                    if self.writer.response["status"] == "queued":
                        self._tell(self.writer.begin())
                        self._store([])
                    self._tell(event for piece in pieces for event in self._take(piece))
        except asyncio.CancelledError:
            self.writer.response["status"] = "cancelled"
            self._store([])
        except Exception as error:
            self._tell(self.writer.fail(to_api_error(error)))
            self._store([])
        finally:
            if self._log is not None:
                self._log.close()

    def _tell(self, events: Iterable[bytes]) -> None:
        """Adds events to the log, if there is one; they come into being as the response changes."""
        told = list(events)
        if self._log is not None:
            self._log.add(told)

    def _store(self, messages: list[Message]) -> None:
        writer = self.writer
        if writer.response["store"]:
            background = self._task is not None
            running = background and (writer.response["status"] in ("queued", "in_progress") or self._log is not None)
            stored = StoredResponse(
                owner=self._owner,
                response=writer.encoded(),
                messages=to_json(messages) if messages else b"",
                items=self._items,
                output_ids=tuple(item["id"] for item in writer.response["output"]),
                log=self._log,
                background=background,
                running=running,
            )
            self._state.responses.put(writer.response["id"], stored)
