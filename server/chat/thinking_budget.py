"""Closes a model's reasoning by force when it has taken as many tokens as the client allows."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Callable

import msgspec

from jaxserve.server.chat.generation import Generation, Usage
from jaxserve.server.reasoning import Splitter
from jaxserve.text.detokenizer import ChoiceDelta
from jaxserve.text.tokenizer import Tokenizer
from jaxserve.types import Grammar, QueueFullError, SamplingParams


class BudgetedGeneration:
    """A generation of one completion whose reasoning ends at a budget of tokens.

    Until the budget is spent, it passes on the deltas of `first`. Then it aborts that request in the engine and starts
    a second one, which continues the prompt, the reasoning so far and the mark that closes reasoning. All but the last
    few of these tokens are in the prefix cache. The closing mark is part of the text, but counts as no token. If the
    model's weights were replaced in between, the answer ends with an error.

    `generate(prompt, params)` makes the second generation. `splitter` finds the reasoning in the first one's answer.
    `grammar` is the grammar of the answer after the reasoning.
    """

    def __init__(
        self,
        first: Generation,
        generate: Callable[[list[int], SamplingParams], Generation],
        *,
        budget: int,
        splitter: Splitter,
        grammar: Grammar | None,
        tokenizer: Tokenizer,
        max_model_len: int,
    ):
        self.requests = first.requests
        self.processors = first.processors
        self.times = first.times
        self._first = first
        self._generate = generate
        self._budget = budget
        self._splitter = splitter
        self._grammar = grammar
        self._closing = splitter.forced_closing
        self._closing_ids = tokenizer.encode(self._closing, add_special_tokens=False)
        self._max_model_len = max_model_len
        self._second: Generation | None = None
        self._kept: list[int] = []  # token ids of the first generation, up to the end of the budget
        self._length = 0  # characters of the first generation's text so far
        self._reasoned = 0  # tokens of reasoning so far
        self._is_spent = False

    async def deltas(self) -> AsyncGenerator[list[ChoiceDelta], None]:
        """See Generation.deltas."""
        async with contextlib.aclosing(self._first.deltas()) as batches:
            async for deltas in batches:
                shown = []
                for delta in deltas:
                    if not self._is_spent:
                        shown.append(self._within_budget(delta))
                yield shown
                if self._is_spent:
                    break
        if not self._is_spent:
            return
        self._second = self._continued()
        if self._second is None:
            yield [ChoiceDelta(index=0, finish_reason="length")]
            return
        async with contextlib.aclosing(self._second.deltas()) as batches:
            async for deltas in batches:
                if self._second.weights != self._first.weights:
                    raise QueueFullError("the weights were replaced while the answer was computed; try again")
                yield deltas

    @property
    def fingerprint(self) -> str | None:
        """See Generation.fingerprint."""
        return self._first.fingerprint

    def usage(self) -> Usage:
        usage = self._first.usage()
        if self._is_spent:
            second = self._second.usage().completion_tokens if self._second else 0
            usage.completion_tokens = len(self._kept) + second
            usage.total_tokens = usage.prompt_tokens + usage.completion_tokens
        return usage

    def _continued(self) -> Generation | None:
        """The second generation; None if no token is left for it."""
        params = self.requests[0].params
        spent = len(self._kept)
        prompt = self.requests[0].prompt_token_ids + self._kept + self._closing_ids
        room = min((params.max_tokens or self._max_model_len) - spent, self._max_model_len - len(prompt))
        if room < 1:
            return None
        least = min(max(0, params.min_tokens - spent), room)
        params = msgspec.structs.replace(params, max_tokens=room, min_tokens=least, grammar=self._grammar)
        return self._generate(prompt, params)

    def _within_budget(self, delta: ChoiceDelta) -> ChoiceDelta:
        """The delta. If one of its tokens spends the budget, it is cut after that token and the closing mark added."""
        for i in range(len(delta.token_ids)):
            is_last = i + 1 == len(delta.token_ids)
            begin = 0 if i == 0 else max(0, delta.text_offsets[i] - self._length)
            end = len(delta.text) if is_last else max(0, delta.text_offsets[i + 1] - self._length)
            self._reasoned += self._splitter.reasons
            self._splitter.push(delta.text[begin:end])
            is_over = is_last and delta.finish_reason is not None
            if self._reasoned >= self._budget and self._splitter.reasons and not is_over:
                self._is_spent = True
                self._kept += delta.token_ids[: i + 1]
                return ChoiceDelta(
                    index=delta.index,
                    text=delta.text[:end] + self._closing,
                    token_ids=delta.token_ids[: i + 1],
                    logprobs=delta.logprobs[: i + 1],
                    text_offsets=delta.text_offsets[: i + 1],
                )
        self._kept += delta.token_ids
        self._length += len(delta.text)
        return delta
