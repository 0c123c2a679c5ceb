"""Steps in flight: dispatched to the devices, and not committed yet."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxserve.engine.pooled import PooledRows
from jaxserve.engine.prompt_scores import PromptScores
from jaxserve.execution.sampling import SCORE_WORDS, Sampled
from jaxserve.scheduling.running_table import RunningTable
from jaxserve.scheduling.step_plan import Rows


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
        if not running.lineup.any_masked:
            return None
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

    def expert_load(self) -> np.ndarray | None:
        """Of all passes, int64 [3], as `routing.load`; None for a model without experts. It came with the tokens."""
        load = self.sampled.expert_load
        return None if load is None else np.asarray(load).sum(axis=0, dtype=np.int64)


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

    def tokens(self) -> list[np.ndarray]:
        """Waits for the tokens of all batches, and returns those of each batch."""
        return [batch.tokens() for batch in self.batches]

    def passes(self, tokens: list[np.ndarray], *, static: bool) -> int:
        """Passes of the model. Loops of `static` programs do not end early; others end when no row samples a token."""
        looped = [ids for batch, ids in zip(self.batches, tokens, strict=True) if batch.rows.only_decodes]
        return max([1, *(len(ids) if static else int((ids >= 0).any(axis=1).sum()) for ids in looped)])
