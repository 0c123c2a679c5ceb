"""POST /v1/messages and /v1/messages/count_tokens, in Anthropic's shape (https://docs.anthropic.com/en/api/messages)."""

from __future__ import annotations

import contextlib
import hashlib
import uuid
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import msgspec
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from jaxserve.server.chat.conversation import ChatRun, encode_chat, prepare
from jaxserve.server.chat.output_parser import Piece
from jaxserve.server.http.errors import APIError
from jaxserve.server.http.notices import noticed
from jaxserve.server.http.sse import EventStream, event, run_until_disconnect
from jaxserve.server.http.state import ServerState, read_body, state_of, to_json
from jaxserve.server.schemas.anthropic import CountTokensRequest, MessagesRequest
from jaxserve.server.tools.base import CallDelta
from jaxserve.server.tools.call_arguments import loads

_decoder = msgspec.json.Decoder(MessagesRequest)
_count_decoder = msgspec.json.Decoder(CountTokensRequest)
_STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}


async def create_message(http: HTTPRequest) -> Response:
    """Answers with one message, or with a stream of events."""
    state = state_of(http)
    body = await read_body(http, _decoder)
    run = await run_until_disconnect(http.receive, prepare(state, http, body.chat(), form_field=body.form_field))
    writer = _Writer(state, run)
    if body.stream:
        return noticed(EventStream(_stream(run, writer), closing=b"", on_error=_error_event), body.notices())

    async def whole() -> Response:
        async for _ in _stream(run, writer):
            pass
        return Response(to_json(writer.message), media_type="application/json")

    return noticed(await run_until_disconnect(http.receive, whole()), body.notices())


async def count_tokens(http: HTTPRequest) -> Response:
    """Answers with the number of tokens in a message's prompt."""
    state = state_of(http)
    body = await read_body(http, _count_decoder)
    state.check_model(body.model)
    tokenizer, info = state.require_ready()
    chat = body.to_chat()
    chat.check()
    ids = await state.text_work(http, lambda: encode_chat(tokenizer, info, chat.conversation()))
    return noticed(Response(to_json({"input_tokens": len(ids)}), media_type="application/json"), body.notices())


async def _stream(run: ChatRun, writer: _Writer) -> AsyncGenerator[bytes, None]:
    begun = False
    async with contextlib.aclosing(run.pieces()) as batches:
        async for pieces in batches:
            chunks = [] if begun else list(writer.begin())
            begun = True
            for piece in pieces:
                chunks += writer.piece(piece)
                if piece.finish_reason is not None:
                    chunks += writer.end(piece)
            yield b"".join(chunks)


def _error_event(error: APIError) -> bytes:
    return b"event: error\ndata: " + error.anthropic_body() + b"\n\n"


class _Writer:
    """Builds a message from pieces. Its methods return the events that report each change."""

    def __init__(self, state: ServerState, run: ChatRun):
        self._run = run
        self._arguments = ""  # JSON text of the open block's arguments, if it is a tool call
        self.message: dict[str, Any] = {
            "id": f"msg_{uuid.uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "model": run.body.model or state.settings.model_name,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }

    @property
    def _blocks(self) -> list[dict[str, Any]]:
        return self.message["content"]

    def begin(self) -> Iterator[bytes]:
        yield _event("message_start", message={**self.message, "usage": self._usage() | {"output_tokens": 0}})
        yield _event("ping")

    def piece(self, piece: Piece) -> Iterator[bytes]:
        if piece.reasoning:
            yield from self._append("thinking", "thinking", piece.reasoning, signature="")
        for part in piece.parts:
            if isinstance(part, str):
                yield from self._append("text", "text", part)
            else:
                yield from self._call(part)

    def end(self, piece: Piece) -> Iterator[bytes]:
        yield from self._close()
        matched = isinstance(piece.stop_reason, str)
        reason = "stop_sequence" if matched else _STOP_REASONS.get(piece.finish_reason or "", "end_turn")
        delta = {"stop_reason": reason, "stop_sequence": piece.stop_reason if matched else None}
        self.message |= {**delta, "usage": self._usage()}
        yield _event("message_delta", delta=delta, usage=self._usage())
        yield _event("message_stop")

    def _append(self, kind: str, field: str, text: str, **others: str) -> Iterator[bytes]:
        if not self._blocks or self._blocks[-1]["type"] != kind:
            yield from self._open({"type": kind, field: "", **others})
        self._blocks[-1][field] += text
        yield self._delta({"type": f"{kind}_delta", field: text})

    def _call(self, call: CallDelta) -> Iterator[bytes]:
        if call.name is not None:
            yield from self._open({"type": "tool_use", "id": call.id, "name": call.name, "input": {}})
        if call.arguments:
            self._arguments += call.arguments
            yield self._delta({"type": "input_json_delta", "partial_json": call.arguments})

    def _open(self, block: dict[str, Any]) -> Iterator[bytes]:
        yield from self._close()
        self._blocks.append(block)
        yield _event("content_block_start", index=len(self._blocks) - 1, content_block=block)

    def _close(self) -> Iterator[bytes]:
        if not self._blocks:
            return
        block = self._blocks[-1]
        if block["type"] == "tool_use":
            if isinstance(arguments := loads(self._arguments), dict):  # arguments that max_tokens cut short stay {}
                block["input"] = arguments
            self._arguments = ""
        elif block["type"] == "thinking":
            block["signature"] = hashlib.sha256(block["thinking"].encode()).hexdigest()
            yield self._delta({"type": "signature_delta", "signature": block["signature"]})
        yield _event("content_block_stop", index=len(self._blocks) - 1)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=len(self._blocks) - 1, delta=delta)

    def _usage(self) -> dict[str, int]:
        """Usage in Anthropic's shape, where input_tokens does not include cached tokens."""
        usage = self._run.usage()
        cached = usage.prompt_tokens_details.cached_tokens
        return {
            "input_tokens": usage.prompt_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": usage.completion_tokens,
        }


def _event(kind: str, **fields: Any) -> bytes:
    return event(kind, {"type": kind, **fields})
