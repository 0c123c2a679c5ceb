"""Log-probabilities on their way from the device's packed rows to a request's answer."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import numpy as np

from jaxserve.runner import ModelRunner
from jaxserve.running import Rows
from jaxserve.sequence import Sequence
from jaxserve.types import MAX_LOGPROBS, TokenLogprob


def read_scores(row: np.ndarray, token: int, count: int) -> TokenLogprob:
    """One row of `Sampled.scores`, with `count` alternatives."""
    logprob = float(row[:1].view(np.float32)[0])
    ids = row[2 : 2 + count].tolist()
    values = row[2 + MAX_LOGPROBS : 2 + MAX_LOGPROBS + count].view(np.float32).tolist()
    top = [(i, value) for i, value in zip(ids, values, strict=True) if i >= 0]
    return TokenLogprob(token, logprob, int(row[1]), top)


@dataclass
class PromptScores:
    """Log-probabilities of a chunk of one prompt, being computed on the device."""

    seq: Sequence
    first: int  # position of the first token that is scored
    tokens: list[int]
    packed: list[jax.Array]

    @classmethod
    def start(cls, rows: Rows, hidden: jax.Array, runner: ModelRunner) -> list[PromptScores]:
        """Dispatches the scoring of every prompt chunk in a batch that asks for it.

        The hidden state at a position scores the token after it; what a preemption computes again is not scored twice.
        """
        started = []
        for i in np.flatnonzero(rows.scores_prompt).tolist():
            seq, start, end = rows.seqs[i], int(rows.start[i]), int(rows.end[i])
            first, end = max(start, seq.num_scored), min(end, seq.prompt_len - 1)
            if first >= end:
                continue
            tokens = seq.tokens[first + 1 : end + 1]
            offset = int(rows.count[:i].sum()) - start
            packed = runner.score_prompt(hidden, np.arange(first, end, dtype=np.int32) + offset, np.asarray(tokens))
            seq.num_scored = end
            started.append(cls(seq, first + 1, tokens, packed))
        return started

    def finish(self) -> None:
        """Waits for the scores and hands them to the sequence."""
        count = self.seq.params.prompt_logprobs or 0
        rows = np.concatenate([np.asarray(part) for part in self.packed])
        self.seq.prompt_scores += [
            read_scores(row, token, count) for row, token in zip(rows[: len(self.tokens)], self.tokens, strict=True)
        ]
