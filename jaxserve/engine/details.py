"""Completes updates that say more than their tokens: a sequence's first or last one, or one with log-probabilities."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from jaxserve.engine.pooled import result_of
from jaxserve.models.pooling import Pooler
from jaxserve.scheduling.logprobs import read_rows
from jaxserve.scheduling.stats import EngineStats
from jaxserve.scheduling.step_plan import DetailedUpdate
from jaxserve.types import SequenceUpdate


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
