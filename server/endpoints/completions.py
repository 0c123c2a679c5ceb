"""POST /v1/completions."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from jaxserve.server.chat.generation import Generation, Turn, json_logprob, name_tokens, prompt_logprobs_json
from jaxserve.server.http.sse import ChunkWriter, EventStream, run_until_disconnect
from jaxserve.server.http.state import ServerState, fit_prompt, key_of, read_body, room_for, state_of, to_json
from jaxserve.server.schemas.common import CompletionRequest
from jaxserve.text.detokenizer import ChoiceDelta, Detokenizer
from jaxserve.text.fill_in_middle import FillInMiddle
from jaxserve.text.tokenizer import Tokenizer
from jaxserve.types import SamplingParams, TokenLogprob

_decoder = msgspec.json.Decoder(CompletionRequest)


async def create_completion(http: HTTPRequest) -> Response:
    """Answers with one JSON object, or with a stream of chunks."""
    state = state_of(http)
    body = await read_body(http, _decoder)
    answer = await run_until_disconnect(http.receive, prepare_completion(state, http, body))
    if body.stream:
        return EventStream(answer.stream())
    return await run_until_disconnect(http.receive, answer.whole())


async def prepare_completion(
    state: ServerState, http: HTTPRequest, body: CompletionRequest, context: int | None = None
) -> _Answer:
    """Tokenizes and checks the prompts. `context`: see `conversation.prepare`."""
    adapter = state.check_model(body.model)
    body.check()
    tokenizer, info = state.require_ready(context)
    prompts = body.prompts()
    state.accounts.check(key_of(http), len(prompts), body.n)
    body.count_logprobs(info.vocab_size, info.max_logprobs)
    max_tokens = body.output_limit()
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    middle = FillInMiddle(tokenizer) if body.suffix else None
    if middle is not None:
        encoded = await state.encode(http, [*texts, f"{middle.lead}{body.suffix}"], add_special_tokens=False)
        ids = [middle.prompt(text, encoded[-1]) for text in encoded[:-1]]
    else:
        cut = body.truncate_prompt_tokens, body.truncation_side
        found = iter(await state.encode(http, texts, body.add_special_tokens, *cut))
        ids = [next(found) if isinstance(prompt, str) else prompt for prompt in prompts]
    ids = [
        fit_prompt(one, info, body.truncate_prompt_tokens, "prompt", max_tokens, body.truncation_side) for one in ids
    ]
    prompt_logprobs = body.prompt_logprobs
    if body.echo and body.logprobs is not None:
        prompt_logprobs = max(prompt_logprobs or 0, body.logprobs)

    def prepare() -> tuple[SamplingParams, list[_Echo | None]]:
        ends = tuple(body.stop_token_ids or ())
        if not body.ignore_eos:
            ends = tokenizer.with_eos((*ends, *(middle.end_ids if middle else ())), info.eos_token_ids)
        params = body.sampling_params(
            tokenizer,
            info.vocab_size,
            max_tokens=max_tokens,
            room=None if context is None else room_for(max_tokens, max(map(len, ids)), info),
            logprobs=body.logprobs,
            prompt_logprobs=prompt_logprobs,
            stop_token_ids=ends,
            grammar=body.form(),
            skip_special_tokens=body.skip_special_tokens,
            seed=state.seed_of(body.seed),
        )
        echoes: list[_Echo | None] = [None] * len(ids)
        if body.echo:
            echoes = [_Echo(tokenizer, prompt, one, body) for prompt, one in zip(prompts, ids, strict=True)]
        return params, echoes

    params, echoes = await state.text_work(http, prepare, short=True)
    generation = Generation(state, tokenizer, http, ids, params, body, adapter=adapter)
    return _Answer(state, http, tokenizer, body, generation, echoes)


class _Echo:
    """A prompt whose text begins the text of its completions."""

    def __init__(self, tokenizer: Tokenizer, prompt: str | list[int], ids: list[int], body: CompletionRequest):
        cut = body.truncate_prompt_tokens is not None
        self.ids = ids
        if isinstance(prompt, str) and not cut:
            self.text = prompt
        else:
            self.text = tokenizer.decode(ids, body.skip_special_tokens)
        self.offsets: list[int] = []
        if body.logprobs is not None:
            self.offsets = _offsets(tokenizer, ids, self.text)


def _offsets(tokenizer: Tokenizer, ids: list[int], text: str) -> list[int]:
    """The offset in `text` at which each token's text begins. A BOS token that the text omits has length 0."""
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=False)
    hidden = 0
    if ids[0] == tokenizer.bos_token_id and not text.startswith(tokenizer.decode(ids[:1], skip_special_tokens=False)):
        hidden = 1
    offsets = [0] * hidden
    length = 0
    for token in ids[hidden:]:
        offsets.append(min(length, len(text)))
        length += len(detokenizer.push(token))
    return offsets


class _Answer:
    """Writes one request's response, whole or in chunks."""

    def __init__(
        self,
        state: ServerState,
        http: HTTPRequest,
        tokenizer: Tokenizer,
        body: CompletionRequest,
        generation: Generation,
        echoes: list[_Echo | None],
    ):
        self._state = state
        self._http = http
        self._tokenizer = tokenizer
        self._body = body
        self.generation = generation
        self._echoes = echoes
        self._n = generation.requests[0].params.n
        self._top = len(body.logprob_token_ids or ()) or body.logprobs or 0
        self._head = {
            "id": f"cmpl-{body.request_id or uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": body.model or state.settings.model_name,
        }

    @property
    def _facts(self) -> dict[str, Any]:
        """What whole answers and chunks begin with; known once the engine has accepted the prompts."""
        return {**self._head, "system_fingerprint": self.generation.fingerprint}

    async def whole(self) -> Response:
        deltas = await self.generation.collect()
        long = self._body.logprobs is not None or self._body.prompt_logprobs is not None
        data = await self._state.text_work(self._http, lambda: self._encoded(deltas), short=not long)
        return Response(data, media_type="application/json")

    def _encoded(self, deltas: list[ChoiceDelta]) -> bytes:
        """The answer as JSON."""
        choices = []
        for delta in deltas:
            choice = self._choice(delta, first=True)
            processor = self.generation.processors[delta.index // self._n]
            if self._body.prompt_logprobs is not None:
                choice["prompt_logprobs"] = prompt_logprobs_json(self._tokenizer, processor.prompt_logprobs)
            choices.append(choice)
        return to_json({**self._facts, "choices": choices, "usage": self.generation.usage()})

    async def stream(self) -> AsyncGenerator[bytes, None]:
        mode = self._body.usage_mode
        writer: ChunkWriter | None = None
        started: set[int] = set()
        async with contextlib.aclosing(self.generation.deltas()) as batches:
            async for deltas in batches:
                writer = writer or ChunkWriter(self._facts, mode)
                chunks = []
                turn = Turn()
                for delta in deltas:
                    choice = self._choice(delta, first=delta.index not in started)
                    started.add(delta.index)
                    usage = self.generation.usage() if mode == "always" else None
                    chunks.append(writer.choice(to_json(choice), usage))
                    if turn.is_over:
                        yield b"".join(chunks)
                        chunks = []
                        await turn.give()
                yield b"".join(chunks)
        if writer is not None and (last := writer.last(self.generation.usage())):
            yield last

    def _choice(self, delta: ChoiceDelta, first: bool) -> dict[str, Any]:
        """A choice of the response, or of a chunk. With `first` it includes the echo."""
        echo = self._echoes[delta.index // self._n]
        choice: dict[str, Any] = {
            "index": delta.index,
            "text": echo.text + delta.text if echo and first else delta.text,
            "logprobs": None,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }
        if self._body.logprobs is not None:
            choice["logprobs"] = self._logprobs(delta, echo, first)
        if self._body.return_token_ids:
            choice["token_ids"] = delta.token_ids
            if first:
                choice["prompt_token_ids"] = self.generation.requests[delta.index // self._n].prompt_token_ids
        return choice

    def _logprobs(self, delta: ChoiceDelta, echo: _Echo | None, first: bool) -> dict[str, Any]:
        """{tokens, token_logprobs, top_logprobs, text_offset} of a delta, with `first` after the echoed prompt's."""
        base = len(echo.text) if echo else 0
        entries: list[TokenLogprob | None] = list(delta.logprobs)
        ids = delta.token_ids
        offsets = [base + offset for offset in delta.text_offsets]
        if echo and first:
            processor = self.generation.processors[delta.index // self._n]
            entries = (processor.prompt_logprobs or [None] * len(echo.ids)) + entries
            ids = echo.ids + ids
            offsets = echo.offsets + offsets
        return {
            "tokens": self._token_strings(ids),
            "token_logprobs": [None if entry is None else json_logprob(entry.logprob) for entry in entries],
            "top_logprobs": [self._alternatives(entry) for entry in entries],
            "text_offset": offsets,
        }

    def _alternatives(self, entry: TokenLogprob | None) -> dict[str, float] | None:
        if entry is None:
            return None
        ranked = entry.top[: self._top]
        if all(token != entry.token_id for token, _ in ranked):
            ranked = [*ranked, (entry.token_id, entry.logprob)]
        texts = self._token_strings([token for token, _ in ranked])
        return {text: json_logprob(logprob) for text, (_, logprob) in reversed(list(zip(texts, ranked, strict=True)))}

    def _token_strings(self, ids: list[int]) -> list[str]:
        return name_tokens(self._tokenizer, ids, self._body.return_tokens_as_token_ids)
