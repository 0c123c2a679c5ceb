"""One HTTP request's completions: submitted to the engine, turned into text, measured."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, Sequence

import msgspec

from jaxserve.detokenizer import ChoiceDelta, OutputProcessor
from jaxserve.tokenizer import Tokenizer, token_strings
from jaxserve.types import QueueFullError, Request, SamplingParams, TokenLogprob
from server.errors import APIError
from server.metrics import RequestTimes
from server.state import ServerState

_LOWEST_LOGPROB = -9999.0  # stands for minus infinity, which JSON cannot say


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct):
    reasoning_tokens: int


class Usage(msgspec.Struct, omit_defaults=True):
    """Token counts of one HTTP request; a prompt counts once however many completions it has."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | None = None


class Generation:
    """The completions of one or more prompts under the same parameters.

    Choices are numbered prompt index × n + completion index.
    """

    def __init__(
        self,
        state: ServerState,
        tokenizer: Tokenizer,
        prompts: Sequence[list[int]],
        params: Sequence[SamplingParams],
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        streams: bool = False,
    ):
        self._state = state
        self.requests = [
            Request(
                request_id=uuid.uuid4().hex,  # ours alone: what clients call their requests may repeat
                prompt_token_ids=ids,
                params=own,
                priority=priority,
                cache_salt=cache_salt,
                streams=streams,
            )
            for ids, own in zip(prompts, params, strict=True)
        ]
        self.processors = [OutputProcessor(tokenizer, request) for request in self.requests]
        self._times = [RequestTimes(state.metrics, r.params, len(r.prompt_token_ids)) for r in self.requests]
        self._positions = {request.request_id: i for i, request in enumerate(self.requests)}

    async def deltas(self) -> AsyncGenerator[list[ChoiceDelta], None]:
        """What the choices gain, as it comes; `index` is the choice's number. Ends when all have ended.

        Close it when leaving early (`contextlib.aclosing`): that aborts what still runs. Raises what
        `EngineClient.generate` raises, and APIError (500) when the engine gives up on a completion.
        """
        client, timeout = self._state.client, self._state.settings.request_timeout
        try:
            async with contextlib.aclosing(client.generate(self.requests, timeout)) as batches:
                async for updates in batches:
                    now = time.monotonic()
                    deltas = []
                    for update in updates:
                        position = self._positions[update.request_id]
                        processor, times = self.processors[position], self._times[position]
                        before = processor.num_output_tokens
                        delta = processor.process(update)
                        times.tokens(update.index, processor.num_output_tokens - before, now, update.queue_seconds)
                        if delta is not None:
                            self._note_end(position, delta, now)
                            delta.index += position * processor.request.params.n
                            deltas.append(delta)
                    if deltas:
                        yield deltas
        except QueueFullError:
            self._state.metrics.rejections.inc()
            raise

    def _note_end(self, position: int, delta: ChoiceDelta, now: float) -> None:
        """Counts a completion that ended; stops it in the engine where a stop string ended it."""
        if delta.finish_reason is None:
            return
        self._state.metrics.succeeded(delta.finish_reason)
        self._times[position].finish_reasons.append(delta.finish_reason)
        if self.processors[position].finished:
            self._times[position].finished(now)
        if delta.abort:
            self._state.client.abort(self.requests[position].request_id, delta.index)
        if delta.finish_reason in ("error", "abort"):
            raise APIError(500, delta.error or "the engine gave up on the request", code="internal_error")

    async def collect(self) -> list[ChoiceDelta]:
        """All choices, whole and in order."""
        choices: dict[int, ChoiceDelta] = {}
        async with contextlib.aclosing(self.deltas()) as batches:
            async for deltas in batches:
                for delta in deltas:
                    if (choice := choices.get(delta.index)) is not None:
                        choice.extend(delta)
                    else:
                        choices[delta.index] = delta
        return [choices[index] for index in sorted(choices)]

    def usage(self) -> Usage:
        prompt = sum(len(request.prompt_token_ids) for request in self.requests)
        completion = sum(processor.num_output_tokens for processor in self.processors)
        cached = sum(processor.num_cached_tokens for processor in self.processors)
        return Usage(prompt, completion, prompt + completion, PromptTokensDetails(cached))


def json_logprob(value: float) -> float:
    """A log-probability as JSON can carry it."""
    return value if value > _LOWEST_LOGPROB else _LOWEST_LOGPROB


def prompt_logprobs_json(
    tokenizer: Tokenizer, entries: list[TokenLogprob | None] | None
) -> list[dict[str, dict[str, object]] | None] | None:
    """The `prompt_logprobs` of a response: for each prompt token, its alternatives and itself by token id."""
    if entries is None:
        return None
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
    return result
