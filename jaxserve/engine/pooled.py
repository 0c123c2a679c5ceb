"""What steps pool of prompts: collected by sequence, until a prompt is whole and its result is made of it."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import numpy as np

from jaxserve.models.pooling import Pooler
from jaxserve.scheduling.sequence import Sequence
from jaxserve.scheduling.step_plan import Rows


@dataclass
class PooledRows:
    """What one batch pools of its rows' tokens, which the devices are computing.

    Attributes:
      pooled: float32 [rows of the bucket, hidden], see `steps.pool_rows`.
    """

    rows: Rows
    pooled: jax.Array

    def finish(self, pooler: Pooler) -> None:
        """Waits for it and adds it to the sequences.

        Steps finish in the order in which they were dispatched. A prompt that is computed anew begins at its first
        token, or, where the last token alone counts, at a cached prefix; so nothing of an earlier attempt remains.
        """
        pooled = np.asarray(self.pooled)
        for seq, start, row in zip(self.rows.seqs, self.rows.start.tolist(), pooled, strict=False):
            if pooler.method == "last" or start == 0:
                seq.pooled = row.copy()
            elif pooler.method == "mean":
                assert seq.pooled is not None, f"{seq.request_id} was not pooled from its first token on"
                seq.pooled = seq.pooled + row


def result_of(seq: Sequence, pooler: Pooler) -> bytes:
    """The embedding or score of a whole prompt: little-endian float32."""
    assert seq.pooled is not None
    pooled = seq.pooled / seq.prompt_len if pooler.method == "mean" else seq.pooled
    return pooler(pooled).astype("<f4").tobytes()
