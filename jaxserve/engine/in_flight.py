"""Steps on their way: dispatched to the devices, and not taken in yet."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxserve.engine.prompt_scores import PromptScores
from jaxserve.execution.sampling import SCORE_WORDS, Sampled
from jaxserve.scheduling.running_table import Rows


@dataclass
class Deferred:
    """Rows of a batch that draw once it is known what they may: when all tokens before are."""

    rows: Rows  # the batch's
    index: np.ndarray  # of those rows
    drawn: list[Sampled] = field(default_factory=list)

    @classmethod
    def of(cls, rows: Rows, masked: np.ndarray) -> Deferred | None:
        """masked: bool [slots], of those that draw once their masks are known."""
        index = np.flatnonzero(masked[rows.slot] & (rows.num_new > 0))
        return cls(rows, index) if len(index) else None

    def join(self, drawn: Sampled) -> Sampled:
        """What the batch drew, theirs included."""
        if not self.drawn:
            return drawn
        tokens: Any = np.array(drawn.tokens)
        scores: Any = drawn.scores
        count = len(self.index)
        tokens[0, self.index] = np.concatenate([one.tokens for one in self.drawn])[:count]
        if any(self.rows.seqs[i].params.logprobs is not None for i in self.index.tolist()):
            # The step's program may have none: its own rows want none.
            scores = np.zeros((*tokens.shape, SCORE_WORDS), np.int32) if scores is None else np.array(scores)
            scores[0, self.index] = np.concatenate([one.scores for one in self.drawn])[:count]
        return Sampled(tokens, scores)


@dataclass
class InFlightStep:
    """A step that was dispatched and not committed yet, in one or more batches."""

    rows: list[Rows]
    drawn: list[Sampled]
    deferred: list[Deferred | None]  # of each batch
    prompt_scores: list[PromptScores]
    tokens_per_call: int  # tokens that a row may have drawn
    dispatched: float  # time.perf_counter()

    def passes(self, tokens: list[np.ndarray]) -> int:
        """Passes of the model in which some row drew, by what came back: a loop may have ended early."""
        return max(1, *(int((ids >= 0).any(axis=1).sum()) for ids in tokens))

    def tokens(self) -> list[np.ndarray]:
        """Those of each batch, int32 [tokens per call, rows]; waits until they are here."""
        pairs = zip(self.drawn, self.deferred, strict=True)
        self.drawn = [drawn if deferred is None else deferred.join(drawn) for drawn, deferred in pairs]
        return [np.asarray(drawn.tokens) for drawn in self.drawn]
