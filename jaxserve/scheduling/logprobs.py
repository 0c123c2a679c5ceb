"""Unpacks the devices' log-probabilities for requests."""

from __future__ import annotations

import numpy as np

from jaxserve.limits import MAX_LOGPROBS
from jaxserve.types import TokenLogprob


def read_scores(row: np.ndarray, token: int, count: int) -> TokenLogprob:
    """One row of `Sampled.scores`, with `count` alternatives."""
    return read_rows(row[None], [token], count)[0]


def read_rows(rows: np.ndarray, tokens: list[int], count: int, accepted: int = 0) -> list[TokenLogprob]:
    """Rows of `Sampled.scores`, int32 [tokens or more, SCORE_WORDS], with `count` alternatives each. The first
    `accepted` tokens were proposals."""
    rows = rows[: len(tokens)]
    chosen = rows[:, :1].view(np.float32)[:, 0].tolist()
    proposed = [i < accepted for i in range(len(tokens))]
    ranks = rows[:, 1].tolist()
    ids = rows[:, 2 : 2 + count].tolist()
    values = rows[:, 2 + MAX_LOGPROBS : 2 + MAX_LOGPROBS + count].view(np.float32).tolist()
    return [
        TokenLogprob(token, logprob, rank, [pair for pair in zip(top, logprobs, strict=True) if pair[0] >= 0], kept)
        for token, logprob, rank, top, logprobs, kept in zip(tokens, chosen, ranks, ids, values, proposed, strict=True)
    ]
