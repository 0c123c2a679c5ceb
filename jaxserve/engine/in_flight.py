"""Steps in flight, from their dispatch to their results: what is sent to the devices, what comes back, and the updates
that follow from it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxserve.engine.prompt_scores import PooledRows, PromptScores, result_of
from jaxserve.execution.programs import StepProgram, StepPrograms
from jaxserve.execution.runner import ModelRunner
from jaxserve.execution.sampling import SCORE_WORDS, Sampled
from jaxserve.execution.slots import NO_ADAPTER, encode_counts, encode_slot
from jaxserve.execution.step_buffer import StepBatch
from jaxserve.models.pooling import Pooler
from jaxserve.scheduling.engine_stats import EngineStats
from jaxserve.scheduling.running_table import RunningTable
from jaxserve.scheduling.sequence import Sequence
from jaxserve.scheduling.step_plan import DetailedUpdate, Rows, Sampler, read_rows
from jaxserve.types import SequenceUpdate


@dataclass
class Deferred:
    """Draws of rows that are sampled after the forward pass, once the host knows every earlier token and can build
    their masks."""

    row: np.ndarray  # of each draw, the index of its row among the batch's rows
    number: np.ndarray  # which of its row's draws it is; the others are behind proposals
    sampled: list[tuple[int, Sampled]] = field(default_factory=list)  # results of `ModelRunner.sample_deferred`

    @classmethod
    def of(cls, rows: Rows, running: RunningTable) -> Deferred | None:
        """The deferred draws of a batch; None if it has none."""
        count = np.where(running.masked[rows.slot], rows.num_new, 0)
        row = np.repeat(np.arange(len(rows)), count)
        return cls(row, np.arange(len(row)) - (np.cumsum(count) - count)[row]) if len(row) else None

    def keep(self, some: np.ndarray) -> None:
        """Keeps some of the draws, bool [draws]."""
        self.row = self.row[some]
        self.number = self.number[some]

    def join(self, rows: Rows, sampled: Sampled) -> Sampled:
        """The samples of all rows of a batch: `sampled`, with the samples of deferred rows in their places."""
        if not self.sampled:
            return sampled
        tokens: Any = np.array(sampled.tokens)
        scores: Any = sampled.scores
        tokens[self.number, self.row] = np.concatenate([np.asarray(one.tokens)[:count] for count, one in self.sampled])
        if any(rows.seqs[i].params.logprobs is not None for i in set(self.row.tolist())):
            # The step's program may compute no scores, when no other row wants them.
            scores = np.zeros((*tokens.shape, SCORE_WORDS), np.int32) if scores is None else np.array(scores)
            found = [np.asarray(one.scores)[:count] for count, one in self.sampled]
            scores[self.number, self.row] = np.concatenate(found)
        return Sampled(tokens, scores, sampled.expert_load)


@dataclass
class InFlightBatch:
    """A batch of a step: the rows of one call of a compiled step, and what the devices compute for them."""

    rows: Rows
    sampled: Sampled
    deferred: Deferred | None = None
    prompt_scores: PromptScores | None = None
    pooled: PooledRows | None = None

    def tokens(self) -> np.ndarray:
        """Waits for the batch's tokens, int32 [tokens per call, rows of the bucket]. `sampled` is complete after it."""
        if self.deferred is not None:
            self.sampled = self.deferred.join(self.rows, self.sampled)
            self.deferred = None
        return np.asarray(self.sampled.tokens)

    def send_for_results(self, *, scores: bool) -> None:
        """Has the devices send what the rows sample as soon as it is computed. scores: some row may want its own."""
        drawn = self.sampled
        for result in (drawn.tokens, drawn.expert_load, drawn.scores if scores else None):
            if result is not None:
                result.copy_to_host_async()

    def scores(self) -> np.ndarray | None:
        """The scores of all rows, int32 [tokens per call, rows of the bucket, SCORE_WORDS]; None if no row may want
        them. To be called once: what is read again may be put together again."""
        return None if self.sampled.scores is None else np.asarray(self.sampled.scores)

    def expert_load(self) -> np.ndarray:
        """Of all passes of a model with experts, int64 [3], as `expert_routing.load`. It came with the tokens."""
        return np.asarray(self.sampled.expert_load).sum(axis=0, dtype=np.int64)


@dataclass
class InFlightStep:
    """A step that was dispatched and is not committed yet."""

    batches: list[InFlightBatch]
    tokens_per_call: int  # the most tokens that a row may have sampled
    dispatched: float  # time.perf_counter()
    estimated: float | None = None  # seconds by data sheet of a step that has prompts beside decodes

    @property
    def checks(self) -> bool:
        """Whether it checks proposals. How many tokens its rows have is known once it is committed."""
        return any(batch.rows.checks.any() for batch in self.batches)

    def passes(self, tokens: list[np.ndarray], *, static: bool) -> int:
        """Passes of the model. Loops of `static` programs do not end early; others end when no row samples a token."""
        looped = [ids for batch, ids in zip(self.batches, tokens, strict=True) if batch.rows.only_decodes]
        return max([1, *(len(ids) if static else int((ids >= 0).any(axis=1).sum()) for ids in looped)])


# Completes updates that say more than their tokens: a sequence's first or last one, or one with log-probabilities.


def complete(
    detail: DetailedUpdate,
    scores: np.ndarray | None,
    eos_token_ids: Collection[int],
    pooler: Pooler | None,
    counters: EngineStats,
    checks: np.ndarray,
) -> SequenceUpdate:
    """The complete update of `detail`, whose tokens it counts. `scores` and `checks` are `Sampled.scores` and
    `Rows.checks` of the detail's batch."""
    update, seq, row, is_first = detail
    tokens = update.token_ids
    counters.generation_tokens += len(tokens)
    if update.finish_reason == "stop":
        update.complete = tokens[-1] not in seq.stop_ids
        if not update.complete and tokens[-1] not in eos_token_ids:
            update.stop_token = tokens[-1]
    if (grammar := seq.params.grammar) is not None and seq.matcher is not None and update.finish_reason == "error":
        allowed = " (allowed_token_ids may exclude all tokens that it allows)" if seq.params.allowed_token_ids else ""
        update.error = f"the grammar failed{allowed}: {seq.matcher.error}"
        update.error_param = grammar.field
    if (count := seq.params.logprobs) is not None and tokens:
        accepted = len(tokens) - 1 if checks[row] else 0  # the last one was drawn behind them
        assert scores is not None, f"{seq.request.request_id} drew without log-probabilities"
        update.logprobs = read_rows(scores[: len(tokens), row], tokens, count, accepted)
    if is_first and seq.index == 0:
        counters.prompt_tokens += seq.prompt_len
        update.num_cached_tokens = seq.num_cached or 0
        update.queue_seconds = seq.queue_seconds
        if seq.params.prompt_logprobs is not None:
            update.prompt_logprobs = seq.prompt_scores
        if pooler is not None:
            update.pooled = result_of(seq, pooler)
    return update


# What dispatching a step takes: the slots of new requests, and the programs of batches.


def fill_slots(
    placed: list[Sequence], running: RunningTable, runner: ModelRunner, place_of: Callable[[Sequence], int]
) -> None:
    """Writes the slots of these sequences, and counts their tokens if they have penalties. place_of: the places of
    their adapters."""
    rows = []
    for seq in placed:
        length = int(running.start[seq.slot])
        shift = 0 if seq.seen is None else seq.seen.shift
        place = NO_ADAPTER if seq.adapter is None else place_of(seq)
        numbers = seq.prompt_len, seq.penalty_row, length, place, shift
        rows.append(encode_slot(seq.slot, seq.params, seq.seed, tuple(seq.stop_ids), *numbers))
    runner.set_slots(rows)
    penalized = [seq for seq in placed if seq.params.has_penalties]
    if penalized:
        counted = [encode_counts(seq.penalty_row, seq.tokens, seq.prompt_len) for seq in penalized]
        runner.count_tokens(np.concatenate(counted, axis=1))


def program_of(batch: StepBatch, running: RunningTable, programs: StepPrograms) -> StepProgram:
    """The least capable program that serves a batch's rows."""
    rows = batch.rows
    sampler = running.batch.sampler
    if rows.seqs is not running.batch.seqs:  # the running batch's sampler may do more than these rows need
        sampler = Sampler((running.sampler[rows.slot] * (rows.num_new > 0)).max())
    if not rows.only_decodes and rows.checks.any():
        return programs.choose_checking(batch.shape, sampler)
    return programs.choose(batch.shape, sampler, int(rows.num_new.max()), rows.scores, drafts=running.draft_reads)
