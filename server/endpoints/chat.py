"""POST /v1/chat/completions."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, Iterable
from typing import Any

import msgspec
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from jaxserve.server.chat.conversation import ChatRun, prepare
from jaxserve.server.chat.generation import Turn, json_logprob, name_tokens, prompt_logprobs_json
from jaxserve.server.chat.output_parser import Piece
from jaxserve.server.http.sse import ChunkWriter, EventStream, run_until_disconnect
from jaxserve.server.http.state import ServerState, read_body, state_of, to_json
from jaxserve.server.schemas.chat import ChatRequest
from jaxserve.server.tools.base import CallDelta
from jaxserve.text.tokenizer import Tokenizer
from jaxserve.types import TokenLogprob

_decoder = msgspec.json.Decoder(ChatRequest)


async def create_chat_completion(http: HTTPRequest) -> Response:
    """Answers with one JSON object, or with a stream of chunks."""
    state = state_of(http)
    body = await read_body(http, _decoder)
    answer = _Answer(state, http, await run_until_disconnect(http.receive, prepare(state, http, body)))
    if body.stream:
        return EventStream(answer.stream())
    return await run_until_disconnect(http.receive, answer.whole())


class _Answer:
    """Writes one request's response, whole or in chunks."""

    def __init__(self, state: ServerState, http: HTTPRequest, run: ChatRun):
        self._state = state
        self._http = http
        self._run = run
        self._body = body = run.body
        self._reasoning_field = state.settings.reasoning_field
        self._top = len(body.logprob_token_ids or ()) or body.top_logprobs or 0
        last = body.messages[-1]
        self._echo = last.text() if body.echo and last.role == "assistant" else ""
        self._head = {
            "id": f"chatcmpl-{body.request_id or uuid.uuid4().hex}",
            "object": "chat.completion.chunk" if body.stream else "chat.completion",
            "created": int(time.time()),
            "model": body.model or state.settings.model_name,
        }

    @property
    def _facts(self) -> dict[str, Any]:
        """What whole answers and chunks begin with; known once the engine has accepted the prompt."""
        return {**self._head, "system_fingerprint": self._run.generation.fingerprint}

    async def whole(self) -> Response:
        pieces = await self._run.collect()
        long = self._body.logprobs or self._body.prompt_logprobs is not None
        data = await self._state.text_work(self._http, lambda: self._encoded(pieces), short=not long)
        return Response(data, media_type="application/json")

    def _encoded(self, pieces: list[Piece]) -> bytes:
        """The answer as JSON."""
        choices = []
        for piece in pieces:
            choice: dict[str, Any] = {
                "index": piece.index,
                "message": self._message(piece),
                "logprobs": self._logprobs(piece),
                "finish_reason": self._finish_reason(piece),
                "stop_reason": piece.stop_reason,
            }
            if self._body.return_token_ids:
                choice["token_ids"] = piece.token_ids
            choices.append(choice)
        generation = self._run.generation
        body: dict[str, Any] = {**self._facts, "choices": choices, "usage": self._run.usage()}
        if self._body.prompt_logprobs is not None:
            entries = generation.processors[0].prompt_logprobs
            body["prompt_logprobs"] = prompt_logprobs_json(self._run.tokenizer, entries)
        if self._body.return_token_ids:
            body["prompt_token_ids"] = generation.requests[0].prompt_token_ids
        return to_json(body)

    def _message(self, piece: Piece) -> dict[str, Any]:
        content = self._echo + piece.content
        message: dict[str, Any] = {
            "role": "assistant",
            "content": content or (None if piece.calls else ""),
            "refusal": None,
        }
        if piece.reasoning:
            message[self._reasoning_field] = piece.reasoning
        return message | self._calls(piece)

    def _calls(self, piece: Piece, *, numbered: bool = False) -> dict[str, Any]:
        """The calls in the shape of the request. An answer to `functions` has at most one."""
        if self._body.is_legacy:
            functions = [_call(call)["function"] for call in piece.calls]
            return {"function_call": functions[0]} if functions else {}
        calls = [{**({"index": call.index} if numbered else {}), **_call(call)} for call in piece.calls]
        return {"tool_calls": calls} if calls else {}

    def _finish_reason(self, piece: Piece) -> str | None:
        is_call = self._body.is_legacy and piece.finish_reason == "tool_calls"
        return "function_call" if is_call else piece.finish_reason

    async def stream(self) -> AsyncGenerator[bytes, None]:
        mode = self._body.usage_mode
        writer: ChunkWriter | None = None
        started: set[int] = set()
        prompt_ids = b""
        if self._body.return_token_ids:
            prompt_ids = b',"prompt_token_ids":' + to_json(self._run.generation.requests[0].prompt_token_ids)
        async with contextlib.aclosing(self._run.pieces()) as batches:
            async for pieces in batches:
                writer = writer or ChunkWriter(self._facts, mode)
                chunks = []
                turn = Turn()
                for piece in pieces:
                    usage = self._run.usage() if mode == "always" else None
                    if piece.index not in started:
                        started.add(piece.index)
                        opening = self._opening(piece.index)
                        nothing = usage and usage.before_output()
                        chunks += [writer.choice(choice, nothing, prompt_ids) for choice in opening]
                        prompt_ids = b""
                    chunks.append(writer.choice(self._choice(piece), usage))
                    if turn.is_over:
                        yield b"".join(chunks)
                        chunks = []
                        await turn.give()
                yield b"".join(chunks)
        if writer is not None and (last := writer.last(self._run.usage())):
            yield last

    def _opening(self, index: int) -> list[bytes]:
        """The first chunks of a choice: the role, then the last message if it is echoed."""
        deltas = [{"role": "assistant", "content": ""}]
        if self._echo:
            deltas.append({"content": self._echo})
        return [to_json({"index": index, "delta": d, "logprobs": None, "finish_reason": None}) for d in deltas]

    def _choice(self, piece: Piece) -> bytes:
        """A chunk's choice, as JSON."""
        plain = not (piece.finish_reason or piece.reasoning or piece.calls)
        if plain and not self._body.logprobs and not self._body.return_token_ids:
            text = to_json(piece.content)
            return b'{"index":%d,"delta":{"content":%b},"logprobs":null,"finish_reason":null}' % (piece.index, text)
        delta: dict[str, Any] = {}
        if piece.reasoning:
            delta[self._reasoning_field] = piece.reasoning
        if piece.content:
            delta["content"] = piece.content
        choice: dict[str, Any] = {
            "index": piece.index,
            "delta": delta | self._calls(piece, numbered=True),
            "logprobs": self._logprobs(piece),
            "finish_reason": self._finish_reason(piece),
        }
        if piece.finish_reason is not None:
            choice["stop_reason"] = piece.stop_reason
        if self._body.return_token_ids:
            choice["token_ids"] = piece.token_ids
        return to_json(choice)

    def _logprobs(self, piece: Piece) -> dict[str, Any] | None:
        if not self._body.logprobs:
            return None
        as_ids = self._body.return_tokens_as_token_ids
        top = self._top
        content = logprobs_json(self._run.tokenizer, piece.logprobs, top, as_ids)
        if self._body.return_accepted_proposals:
            for entry, score in zip(content, piece.logprobs, strict=True):
                entry["accepted"] = score.accepted
        return {"content": content, "refusal": None}


def _call(call: CallDelta) -> dict[str, Any]:
    """A tool call, or a later part of its arguments, in OpenAI's shape."""
    if call.name is None:
        return {"function": {"arguments": call.arguments}}
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def logprobs_json(
    tokenizer: Tokenizer, entries: Iterable[TokenLogprob], top: int, as_ids: bool | None = None
) -> list[dict[str, Any]]:
    """Each token's log-probability with `top` alternatives, in OpenAI's shape for chats (`as_ids`: see name_tokens)."""

    def one(token: int, logprob: float) -> dict[str, Any]:
        text = name_tokens(tokenizer, [token], as_ids)[0]
        data = list(tokenizer.token_bytes(token))
        return {"token": text, "logprob": json_logprob(logprob), "bytes": data}

    return [
        {**one(entry.token_id, entry.logprob), "top_logprobs": [one(*alternative) for alternative in entry.top[:top]]}
        for entry in entries
    ]
