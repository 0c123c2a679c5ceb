"""One HTTP request's completions: submits them to the engine, detokenizes and measures them."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, Iterable, Sequence
from typing import TypeVar

import msgspec
from starlette.requests import Request as HTTPRequest

from jaxserve.adapters.registry import ServedAdapter
from jaxserve.limits import MAX_HELD_LOGPROBS
from jaxserve.scheduling.block_manager import hash_pages
from jaxserve.server.chat.output_parser import Piece
from jaxserve.server.http.body import body_of
from jaxserve.server.http.errors import APIError
from jaxserve.server.http.middleware import note_weights
from jaxserve.server.http.state import ServerState, key_of, tenant_of
from jaxserve.server.ipc.messages import ServedWeights
from jaxserve.server.observe.metrics import RequestTimes
from jaxserve.server.schemas.common import SamplingFields
from jaxserve.text.detokenizer import ChoiceDelta, OutputProcessor, StopStrings
from jaxserve.text.tokenizer import Tokenizer, token_strings
from jaxserve.types import (
    Image,
    InvalidRequestError,
    QueueFullError,
    Request,
    SamplingParams,
    SequenceUpdate,
    TokenLogprob,
)

Part = TypeVar("Part", ChoiceDelta, Piece)  # what one choice gains

TURN_SECONDS = 0.01  # longest time that one request may hold the event loop
LONG_PROMPT = 4096  # tokens; the engine hashes the pages of shorter ones itself, within 0.2 ms
_PIECE = 64  # prompt tokens whose log-probabilities are encoded at a time
_LOWEST_LOGPROB = -9999.0  # stands for minus infinity, which JSON cannot express


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct):
    reasoning_tokens: int


class Usage(msgspec.Struct, omit_defaults=True):
    """Token counts of one HTTP request. A prompt counts once, even if it has several completions."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | None = None

    def before_output(self) -> Usage:
        """The same without any output."""
        details = self.completion_tokens_details and CompletionTokensDetails(0)
        return Usage(self.prompt_tokens, 0, self.prompt_tokens, self.prompt_tokens_details, details)


class Turn:
    """The time that one request may hold the event loop before other tasks run."""

    def __init__(self) -> None:
        self._end = time.monotonic() + TURN_SECONDS

    @property
    def is_over(self) -> bool:
        return time.monotonic() > self._end

    async def give(self) -> None:
        """Lets other tasks run, then begins a new turn."""
        await asyncio.sleep(0)
        self._end = time.monotonic() + TURN_SECONDS


class Generation:
    """The completions of one or more prompts under the same parameters. `stops`: the stop strings, if prepared.

    `body` has the other fields that concern the engine. A choice's number is prompt index × n + completion index.
    """

    def __init__(
        self,
        state: ServerState,
        tokenizer: Tokenizer,
        http: HTTPRequest,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        body: SamplingFields,
        stops: StopStrings | None = None,
        adapter: ServedAdapter | None = None,
        images: Sequence[Image] = (),
    ):
        self._state, self._key, self._body = state, key_of(http), body_of(http)
        priority = state.priority(http, body.priority)
        cache_salt = state.cache_salt(http, body.cache_salt)
        self.requests = [
            Request(
                request_id=uuid.uuid4().hex,  # not the client's id, which may not be unique
                prompt_token_ids=ids,
                params=params,
                priority=priority,
                cache_salt=cache_salt,
                streams=bool(body.stream),
                tenant=tenant_of(http),
                adapter=adapter.name if adapter is not None else "",
                adapter_digest=adapter.digest if adapter is not None else "",
                images=list(images),
            )
            for ids in prompts
        ]
        self._recorded = None if state.recorder is None else state.recorder.begin(self.requests)
        stops = stops or StopStrings(params.stop)  # shared by all prompts
        self.processors = [OutputProcessor(tokenizer, request, stops) for request in self.requests]
        self.times = [RequestTimes(state.metrics, request) for request in self.requests]
        self._prompt_tokens = sum(map(len, prompts))
        self._output_tokens = self._cached_tokens = 0
        self._held_logprobs = 0  # log-probabilities kept until an answer that is not streamed is complete
        self._http, self.weights = http, ServedWeights()
        self._positions = {request.request_id: i for i, request in enumerate(self.requests)}

    @property
    def fingerprint(self) -> str | None:
        """The `system_fingerprint` of the answer; known once the engine has accepted the prompts."""
        return self._state.fingerprint_of(self.weights, self.requests[0].adapter_digest)

    def _accepted(self, weights: ServedWeights) -> None:
        self.weights = weights
        note_weights(self._http, weights)

    async def _hash_long_prompts(self) -> None:
        """Hashes the pages of long prompts in a thread, so that the engine does not do it between steps."""
        long = [one for one in self.requests if len(one.prompt_token_ids) >= LONG_PROMPT and not one.images]
        if not long or self._state.client.info is None:
            return
        page_size = self._state.client.info.page_size

        def work() -> None:
            for request in long:
                prompt = request.prompt_token_ids
                adapter = request.adapter_digest or None
                request.page_hashes = hash_pages(prompt, request.cache_salt, page_size, adapter)

        await self._state.off_loop(work)

    async def deltas(self) -> AsyncGenerator[list[ChoiceDelta], None]:
        """What the choices gain, as it is generated; `index` is the choice's number. Ends when all choices have ended.

        The first list comes as soon as the engine has accepted the prompts, and may be empty. Closing the generator
        aborts what still runs, so callers that leave early must close it (`contextlib.aclosing`). Raises what
        `EngineClient.generate` raises, and APIError (500) if the engine gives up on a completion.
        """
        client = self._state.client
        timeout = self._state.timeout(self._http)
        n = self.requests[0].params.n
        accepted = False
        if self._prompt_tokens >= LONG_PROMPT:
            await self._hash_long_prompts()
        try:
            with self._state.accounts.hold(self._key, len(self.requests), n):
                async with contextlib.aclosing(client.generate(self.requests, timeout, self._accepted)) as batches:
                    async for updates in batches:
                        if self._body is not None:
                            self._body.release()  # the engine has the request, so the body's memory is free
                        deltas = []
                        turn = Turn()
                        for update in updates:
                            if (delta := self._process(update)) is not None:
                                deltas.append(delta)
                            if deltas and turn.is_over:
                                yield deltas
                                deltas = []
                                await turn.give()
                        if deltas or not accepted:
                            yield deltas
                        accepted = True
        except QueueFullError:
            self._state.metrics.rejections.inc()
            raise
        finally:
            if self._recorded is not None:
                self._recorded.end()

    def _process(self, update: SequenceUpdate) -> ChoiceDelta | None:
        """What an update adds to its choice; None if that is nothing yet."""
        position = self._positions[update.request_id]
        now = time.monotonic()
        if self._recorded is not None:
            self._recorded.take(update)
        processor = self.processors[position]
        times = self.times[position]
        if not processor.request.streams:
            self._count_logprobs(update, processor.request.params)
        before = processor.num_output_tokens
        cached = processor.num_cached_tokens
        delta = processor.process(update)
        more = processor.num_output_tokens - before
        self._output_tokens += more
        self._cached_tokens += processor.num_cached_tokens - cached
        times.tokens(update.index, more, now, update.queue_seconds)
        if delta is not None:
            self._note_end(position, delta, now)
            delta.index += position * processor.request.params.n
        return delta

    def _count_logprobs(self, update: SequenceUpdate, params: SamplingParams) -> None:
        """Raises InvalidRequestError if an answer that is not streamed holds too many log-probabilities."""
        self._held_logprobs += len(update.logprobs or ()) * (1 + (params.logprobs or 0))
        self._held_logprobs += len(update.prompt_logprobs or ()) * (1 + (params.prompt_logprobs or 0))
        if self._held_logprobs > MAX_HELD_LOGPROBS:
            raise InvalidRequestError(
                f"the answer holds more than {MAX_HELD_LOGPROBS} log-probabilities; ask for fewer, or for a stream",
                "logprobs",
            )

    def _note_end(self, position: int, delta: ChoiceDelta, now: float) -> None:
        """Counts a completion if it has ended. Stops it in the engine if a stop string ended it here."""
        if delta.finish_reason is None:
            return
        self._state.metrics.succeeded(delta.finish_reason)
        self.times[position].finish_reasons.append(delta.finish_reason)
        if self.processors[position].finished:
            self.times[position].finished(now)
        if delta.abort:
            self._state.client.abort(self.requests[position].request_id, delta.index)
        if delta.finish_reason in ("error", "abort"):
            raise APIError(500, delta.error or "the engine gave up on the request", code="internal_error")

    async def collect(self) -> list[ChoiceDelta]:
        """All choices, whole and in order."""
        return await whole_choices(self.deltas())

    def usage(self) -> Usage:
        prompt = self._prompt_tokens
        output = self._output_tokens
        return Usage(prompt, output, prompt + output, PromptTokensDetails(self._cached_tokens))


async def whole_choices(batches: AsyncGenerator[list[Part], None]) -> list[Part]:
    """Joins the parts of each choice; returns the choices in order. Closes `batches`."""
    choices: dict[int, Part] = {}
    async with contextlib.aclosing(batches):
        async for parts in batches:
            for part in parts:
                if (choice := choices.get(part.index)) is not None:
                    choice.extend(part)
                else:
                    choices[part.index] = part
    return [choices[index] for index in sorted(choices)]


def name_tokens(tokenizer: Tokenizer, ids: Iterable[int], as_ids: bool | None) -> list[str]:
    """Names of tokens beside their log-probabilities: their text, or "token_id:123", which is always distinct."""
    return [f"token_id:{token}" for token in ids] if as_ids else token_strings(tokenizer, ids)


def json_logprob(value: float) -> float:
    """A log-probability that JSON can express."""
    return value if value > _LOWEST_LOGPROB else _LOWEST_LOGPROB


def prompt_logprobs_json(tokenizer: Tokenizer, entries: list[TokenLogprob | None] | None) -> msgspec.Raw | None:
    """The `prompt_logprobs` of a response: for each prompt token, by token id, itself and its alternatives.

    Slow for long prompts: call it in a thread. Other threads can run between pieces of _PIECE tokens.
    """
    if entries is None:
        return None
    pieces = (entries[at : at + _PIECE] for at in range(0, len(entries), _PIECE))
    return msgspec.Raw(b"[%b]" % b",".join(_prompt_piece(tokenizer, piece)[1:-1] for piece in pieces))


def _prompt_piece(tokenizer: Tokenizer, entries: list[TokenLogprob | None]) -> bytes:
    result: list[dict[str, dict[str, object]] | None] = []
    for entry in entries:
        if entry is None:
            result.append(None)
            continue
        ranked = [(token, logprob, rank) for rank, (token, logprob) in enumerate(entry.top, start=1)]
        if all(token != entry.token_id for token, _, _ in ranked):
            ranked.append((entry.token_id, entry.logprob, entry.rank))
        texts = token_strings(tokenizer, (token for token, _, _ in ranked))
        result.append(
            {
                str(token): {"logprob": json_logprob(logprob), "rank": rank, "decoded_token": text}
                for (token, logprob, rank), text in zip(ranked, texts, strict=True)
            }
        )
    return msgspec.json.encode(result)
