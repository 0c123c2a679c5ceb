"""Collects pooled hidden states by sequence, and computes the embedding or score once a prompt is complete."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import numpy as np

from jaxserve.models.pooling import Pooler
from jaxserve.scheduling.sequence import Sequence
from jaxserve.scheduling.step_plan import Rows


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
