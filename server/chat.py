"""POST /v1/chat/completions."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import AsyncGenerator
from typing import Any, Literal, cast

import msgspec
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from jaxserve.detokenizer import ChoiceDelta
from jaxserve.tokenizer import Tokenizer, token_strings
from jaxserve.types import InvalidRequestError
from server.generation import Generation, json_logprob, prompt_logprobs_json
from server.schemas import ChatRequest, Conversation
from server.sse import ChunkWriter, EventStream, run_until_disconnect
from server.state import ServerState, fit_prompt, read_body, room_for, state_of, to_json

_decoder = msgspec.json.Decoder(ChatRequest)


async def create_chat_completion(http: HTTPRequest) -> Response:
    """Answers with one JSON object, or with a stream of chunks."""
    state = state_of(http)
    body = await read_body(http, _decoder)
    state.check_model(body.model)
    body.check()
    answer = await run_until_disconnect(http.receive, _prepare(state, body))
    if body.stream:
        return EventStream(answer.stream())
    return await run_until_disconnect(http.receive, answer.whole())


async def _prepare(state: ServerState, body: ChatRequest) -> _Answer:
    """Renders, tokenizes and checks the conversation."""
    tokenizer, info = state.require_ready()
    ids = await state.off_loop(lambda: encode_chat(tokenizer, body.conversation()))
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    ids = fit_prompt(ids, info, body.truncate_prompt_tokens, "messages", max_tokens)
    room = room_for(max_tokens, len(ids), info)
    params = body.sampling_params(
        tokenizer.generation_defaults,
        info.vocab_size,
        max_tokens=max_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
    )
    params = tokenizer.with_eos(params, info.eos_token_ids)
    params = msgspec.structs.replace(params, max_tokens=room, min_tokens=min(params.min_tokens, room))
    generation = Generation(
        state,
        tokenizer,
        [ids],
        [params],
        priority=body.priority or 0,
        cache_salt=body.cache_salt,
        streams=bool(body.stream),
    )
    return _Answer(state, tokenizer, body, generation)


def encode_chat(tokenizer: Tokenizer, conversation: Conversation) -> list[int]:
    """Token ids of a rendered conversation. Slow: run it off the event loop.

    Raises InvalidRequestError when the template refuses the messages, or leaves a system message out in silence.
    """
    messages = conversation.template_messages()
    if "developer" not in (tokenizer.chat_template or ""):
        for message in messages:
            if message["role"] == "developer":
                message["role"] = "system"  # the older name of the same role
    options: dict[str, Any] = {
        "add_generation_prompt": conversation.add_generation_prompt,
        "continue_final_message": conversation.continue_final_message,
        **conversation.template_kwargs(),
    }
    text = tokenizer.render_chat(messages, **options)
    if any(m["role"] == "system" and m["content"].strip() not in text for m in messages):
        others = [message for message in messages if message["role"] != "system"]
        if _renders_to(text, tokenizer, others, options):
            raise InvalidRequestError("this model's chat template has no place for system messages", "messages")
    return tokenizer.encode(text, conversation.add_special_tokens)


def _renders_to(text: str, tokenizer: Tokenizer, messages: list[dict[str, str]], options: dict[str, Any]) -> bool:
    try:
        return tokenizer.render_chat(messages, **options) == text
    except InvalidRequestError:
        return False


class _Answer:
    """Writes one request's response, whole or in chunks."""

    def __init__(self, state: ServerState, tokenizer: Tokenizer, body: ChatRequest, generation: Generation):
        self._tokenizer = tokenizer
        self._body = body
        self._generation = generation
        last = body.messages[-1].to_template(0)
        self._echo = last["content"] if body.echo and last["role"] == "assistant" else ""
        self._head = {
            "id": f"chatcmpl-{body.request_id or uuid.uuid4().hex}",
            "object": "chat.completion.chunk" if body.stream else "chat.completion",
            "created": int(time.time()),
            "model": state.settings.model_name,
        }

    async def whole(self) -> Response:
        choices = []
        for delta in await self._generation.collect():
            choice: dict[str, Any] = {
                "index": delta.index,
                "message": {"role": "assistant", "content": self._echo + delta.text, "refusal": None},
                "logprobs": self._logprobs(delta),
                "finish_reason": delta.finish_reason,
                "stop_reason": delta.stop_reason,
            }
            if self._body.return_token_ids:
                choice["token_ids"] = delta.token_ids
            choices.append(choice)
        body: dict[str, Any] = {**self._head, "choices": choices, "usage": self._generation.usage()}
        if self._body.prompt_logprobs is not None:
            entries = self._generation.processors[0].prompt_logprobs
            body["prompt_logprobs"] = prompt_logprobs_json(self._tokenizer, entries)
        if self._body.return_token_ids:
            body["prompt_token_ids"] = self._generation.requests[0].prompt_token_ids
        return Response(to_json(body), media_type="application/json")

    async def stream(self) -> AsyncGenerator[bytes, None]:
        mode = cast(Literal["off", "last", "always"], self._body.usage_mode)
        writer = ChunkWriter(self._head, mode)
        started: set[int] = set()
        prompt_ids = b""
        if self._body.return_token_ids:
            prompt_ids = b',"prompt_token_ids":' + to_json(self._generation.requests[0].prompt_token_ids)
        async with contextlib.aclosing(self._generation.deltas()) as batches:
            async for deltas in batches:
                chunks = []
                for delta in deltas:
                    usage = self._generation.usage() if mode == "always" else None
                    if delta.index not in started:
                        started.add(delta.index)
                        opening = self._opening(delta.index)
                        chunks += [writer.choice(choice, usage, prompt_ids) for choice in opening]
                        prompt_ids = b""
                    chunks.append(writer.choice(self._delta(delta), usage))
                yield b"".join(chunks)
        if last := writer.last(self._generation.usage()):
            yield last

    def _opening(self, index: int) -> list[bytes]:
        """What a choice's chunks begin with: the role, and the last message where it is echoed."""
        deltas = [{"role": "assistant", "content": ""}]
        if self._echo:
            deltas.append({"content": self._echo})
        return [to_json({"index": index, "delta": d, "logprobs": None, "finish_reason": None}) for d in deltas]

    def _delta(self, delta: ChoiceDelta) -> bytes:
        """A choice of a chunk, as JSON."""
        if delta.finish_reason is None and not self._body.logprobs and not self._body.return_token_ids:
            text = to_json(delta.text)
            return b'{"index":%d,"delta":{"content":%b},"logprobs":null,"finish_reason":null}' % (delta.index, text)
        choice: dict[str, Any] = {
            "index": delta.index,
            "delta": {"content": delta.text} if delta.text else {},
            "logprobs": self._logprobs(delta),
            "finish_reason": delta.finish_reason,
        }
        if delta.finish_reason is not None:
            choice["stop_reason"] = delta.stop_reason
        if self._body.return_token_ids:
            choice["token_ids"] = delta.token_ids
        return to_json(choice)

    def _logprobs(self, delta: ChoiceDelta) -> dict[str, Any] | None:
        if not self._body.logprobs:
            return None
        top = self._body.top_logprobs or 0
        content = []
        for entry in delta.logprobs:
            alternatives = [self._entry(token, logprob) for token, logprob in entry.top[:top]]
            content.append({**self._entry(entry.token_id, entry.logprob), "top_logprobs": alternatives})
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        return {
            "token": token_strings(self._tokenizer, [token])[0],
            "logprob": json_logprob(logprob),
            "bytes": list(self._tokenizer.token_bytes(token)),
        }
