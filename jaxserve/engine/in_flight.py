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
    """Rows sampled after the forward pass, once the host knows every earlier token and can build their masks."""

    index: np.ndarray  # indices of the rows among the batch's rows
    sampled: list[Sampled] = field(default_factory=list)  # results of `ModelRunner.sample_deferred`

    @classmethod
    def of(cls, rows: Rows, running: RunningTable) -> Deferred | None:
        """The deferred rows of a batch; None if it has none."""
        if not running.lineup.any_masked:
            return None
        index = np.flatnonzero(running.masked[rows.slot] & (rows.num_new > 0))
        return cls(index) if len(index) else None

    def join(self, rows: Rows, sampled: Sampled) -> Sampled:
        """The samples of all rows of a batch: `sampled`, with the samples of deferred rows in their places."""
        if not self.sampled:
            return sampled
        tokens: Any = np.array(sampled.tokens)
        scores: Any = sampled.scores
        count = len(self.index)
        tokens[0, self.index] = np.concatenate([one.tokens for one in self.sampled])[:count]
        if any(rows.seqs[i].params.logprobs is not None for i in self.index.tolist()):
            # The step's program may compute no scores, when no other row wants them.
            scores = np.zeros((*tokens.shape, SCORE_WORDS), np.int32) if scores is None else np.array(scores)
            scores[0, self.index] = np.concatenate([one.scores for one in self.sampled])[:count]
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
            self.sampled, self.deferred = self.deferred.join(self.rows, self.sampled), None
        return np.asarray(self.sampled.tokens)

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

    def tokens(self) -> list[np.ndarray]:
        """Waits for the tokens of all batches, and returns those of each batch."""
        return [batch.tokens() for batch in self.batches]

    def passes(self, tokens: list[np.ndarray], *, static: bool) -> int:
        """Passes of the model. Loops of `static` programs do not end early; others end when no row samples a token."""
        looped = [ids for batch, ids in zip(self.batches, tokens, strict=True) if batch.rows.only_decodes]
        return max([1, *(len(ids) if static else int((ids >= 0).any(axis=1).sum()) for ids in looped)])
