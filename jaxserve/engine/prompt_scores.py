"""What steps give for prompts: log-probabilities of their tokens, pooled hidden states for embeddings and scores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import numpy as np

from jaxserve.execution.runner import ModelRunner
from jaxserve.execution.step_buffer import StepBatch
from jaxserve.models.pooling import Pooler
from jaxserve.scheduling.sequence import Sequence
from jaxserve.scheduling.step_plan import Rows, read_rows


@dataclass
class PromptScores:
    """Log-probabilities of prompt tokens in one batch, which the devices are computing.

    Attributes:
      parts: each sequence and its prompt tokens that are scored, in the order of `packed`.
      packed: int32 [tokens or more, SCORE_WORDS].
    """

    parts: list[tuple[Sequence, list[int]]]
    packed: jax.Array

    @classmethod
    def start(cls, batch: StepBatch, runner: ModelRunner, place_of: Callable[[Sequence], int]) -> PromptScores | None:
        """Dispatches one call that scores all prompt chunks, of the batch that was dispatched last, whose requests want
        log-probabilities. Returns None if nothing is left to score.

        The hidden state at a position scores the token after it. Tokens that are computed again after a preemption are
        not scored twice. place_of: the place of a sequence's adapter, or -1.
        """
        parts = []
        places = []
        rows = batch.rows
        first_tokens = batch.first_tokens
        for i in np.flatnonzero(rows.scores_prompt).tolist():
            seq = rows.seqs[i]
            start = int(rows.start[i])
            end = int(rows.end[i])
            first = max(start, seq.num_scored)
            end = min(end, seq.prompt_len - 1)
            if first >= end:
                continue
            parts.append((seq, seq.prompt[first + 1 : end + 1].tolist()))
            places.append(np.arange(first, end, dtype=np.int32) + (int(first_tokens[i]) - start))
            seq.num_scored = end
        if not parts:
            return None
        adapters = np.repeat([place_of(seq) for seq, _ in parts], [len(tokens) for _, tokens in parts])
        targets = np.concatenate([tokens for _, tokens in parts])
        packed = runner.score_prompt(np.concatenate(places), targets, adapters.astype(np.int32))
        packed.copy_to_host_async()
        return cls(parts, packed)

    def finish(self) -> None:
        """Waits for the scores and adds them to the sequences."""
        rows = np.asarray(self.packed)
        for seq, tokens in self.parts:
            seq.prompt_scores += read_rows(rows, tokens, seq.params.prompt_logprobs or 0)
            rows = rows[len(tokens) :]


@dataclass
class PooledRows:
    """The pooled hidden states of one batch, which the devices are still computing.

    Attributes:
      rows: the batch's rows.
      pooled: float32 [rows of the bucket, hidden], see `steps.pool_rows`.
    """

    rows: Rows
    pooled: jax.Array

    def finish(self, pooler: Pooler) -> None:
        """Waits for the pooled hidden states and adds them to the sequences' results.

        Steps finish in the order in which they were dispatched. After a preemption a prompt is computed again from its
        first token, or, if only the last token counts, from a cached prefix. So nothing of an earlier attempt remains.
        """
        pooled = np.asarray(self.pooled)
        for seq, start, row in zip(self.rows.seqs, self.rows.start.tolist(), pooled, strict=False):
            if pooler.method == "last" or start == 0:
                seq.pooled = row.copy()
            elif pooler.method == "mean":
                assert seq.pooled is not None, f"{seq.request_id} was not pooled from its first token on"
                seq.pooled = seq.pooled + row


def result_of(seq: Sequence, pooler: Pooler) -> bytes:
    """The embedding or score of a sequence whose prompt is complete: little-endian float32."""
    assert seq.pooled is not None
    pooled = seq.pooled / seq.prompt_len if pooler.method == "mean" else seq.pooled
    return pooler(pooled).astype("<f4").tobytes()
