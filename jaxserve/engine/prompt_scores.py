"""Log-probabilities of the tokens of prompts, computed beside the step."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import numpy as np

from jaxserve.execution.runner import ModelRunner
from jaxserve.scheduling.logprobs import read_rows
from jaxserve.scheduling.running_table import Rows
from jaxserve.scheduling.sequence import Sequence


@dataclass
class PromptScores:
    """Log-probabilities of the prompts' tokens in one batch, being computed on the device.

    Attributes:
      parts: each sequence with the tokens of its prompt that are scored, in the order of the rows.
      packed: int32 [rows, SCORE_WORDS]; None where nothing is scored.
    """

    parts: list[tuple[Sequence, list[int]]]
    packed: jax.Array | None

    @classmethod
    def start(cls, rows: Rows, hidden: jax.Array, runner: ModelRunner) -> PromptScores:
        """Dispatches the scoring of every prompt chunk in a batch that asks for it, in one call.

        The hidden state at a position scores the token after it; what a preemption computes again is not scored twice.
        """
        parts, places = [], []
        for i in np.flatnonzero(rows.scores_prompt).tolist():
            seq, start, end = rows.seqs[i], int(rows.start[i]), int(rows.end[i])
            first, end = max(start, seq.num_scored), min(end, seq.prompt_len - 1)
            if first >= end:
                continue
            parts.append((seq, seq.tokens[first + 1 : end + 1].tolist()))
            places.append(np.arange(first, end, dtype=np.int32) + (int(rows.count[:i].sum()) - start))
            seq.num_scored = end
        if not parts:
            return cls([], None)
        packed = runner.score_prompt(hidden, np.concatenate(places), np.concatenate([tokens for _, tokens in parts]))
        packed.copy_to_host_async()
        return cls(parts, packed)

    def finish(self) -> None:
        """Waits for the scores and hands them to the sequences."""
        rows = np.asarray(self.packed)
        for seq, tokens in self.parts:
            seq.prompt_scores += read_rows(rows, tokens, seq.params.prompt_logprobs or 0)
            rows = rows[len(tokens) :]
