"""A step as the scheduler plans it: its rows, what they need of the sampler, and the updates that result from it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from jaxserve.limits import MAX_LOGPROBS
from jaxserve.scheduling.image_prompts import EncoderJob
from jaxserve.scheduling.sequence import Sequence
from jaxserve.types import SamplingParams, SequenceUpdate, StepOutput, TokenLogprob


class Sampler(IntEnum):
    """What a compiled step can do for its rows. Each kind also does what the kinds before it do, with equal results."""

    NONE = -1  # samples nothing and computes no logits
    GREEDY = 0  # the most likely token
    PLAIN = 1  # samples at a temperature
    FILTERED = 2  # top-k, top-p and min-p
    FULL = 3  # penalties, bias, min_tokens and log-probabilities
    ANY = 4  # all of these, chosen at run time

    @classmethod
    def of(cls, params: SamplingParams) -> Sampler:
        """The least capable kind for these parameters. Sequences with a mask are left to `steps.sample_deferred`."""
        if params.has_mask:
            return cls.GREEDY
        if params.has_penalties or params.logit_bias or params.min_tokens or params.logprobs is not None:
            return cls.FULL
        if params.greedy:
            return cls.GREEDY
        return cls.FILTERED if params.top_k > 0 or params.top_p < 1 or params.min_p > 0 else cls.PLAIN


@dataclass(slots=True)
class Rows:
    """The rows of a step, a column per field: `count` tokens of a sequence from `start` on, then `num_new` new ones.

    A row of one token may sample several new tokens, which the same call computes one after the other. A row of several
    tokens samples one token, or none if a later step continues its prompt. If its `num_new` is above 1, the last
    `num_new` - 1 of its tokens are proposals, and the devices decide how many of them it keeps (`checks`).
    """

    seqs: list[Sequence]
    slot: np.ndarray  # intp [rows], with which NumPy indexes three times as fast as with int32
    slot_generation: np.ndarray  # int32 [rows], like the next three: `RunningTable.slot_generation` at planning
    start: np.ndarray
    count: np.ndarray
    num_new: np.ndarray
    scores_prompt: np.ndarray  # bool [rows]: log-probabilities of the prompt need the hidden states
    only_decodes: bool = field(default=False, kw_only=True)  # every count is 1, and nothing scores a prompt

    def __len__(self) -> int:
        return len(self.seqs)

    @property
    def end(self) -> np.ndarray:
        return self.start + self.count

    @property
    def reach(self) -> np.ndarray:
        """How many tokens of each sequence have keys and values in the cache once the step has run."""
        return self.start + (self.num_new if self.only_decodes else np.maximum(self.count, self.num_new))

    @property
    def checks(self) -> np.ndarray:
        """Which rows check proposals, bool [rows]. How many tokens they keep is known once the step has run."""
        return (self.num_new > 1) & (self.count > 1)

    @property
    def scores(self) -> bool:
        """Whether some row needs its hidden states."""
        return not self.only_decodes and bool(self.scores_prompt.any())

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes."""
        return int(self.num_new.sum()) if self.only_decodes else int((self.reach - self.start).sum())

    def extend(self, others: Rows) -> Rows:
        """These rows, then the others."""
        columns = map(np.concatenate, zip(self._columns(), others._columns(), strict=True))
        return Rows(self.seqs + others.seqs, *columns)

    def take(self, index: np.ndarray) -> Rows:
        """Some of the rows, in the order of `index`."""
        columns = (column[index] for column in self._columns())
        return Rows([self.seqs[i] for i in index.tolist()], *columns, only_decodes=self.only_decodes)

    def output(self, index: np.ndarray, tokens: np.ndarray, num_new: np.ndarray) -> StepOutput:
        """The output for the rows in `index`, which report nothing but tokens: the first `num_new` [rows] of `tokens`
        [rows, any]."""
        seqs = [self.seqs[i] for i in index.tolist()]
        ids = tokens[index].tolist()
        if (num_new[index] < tokens.shape[1]).any():
            ids = [some[:count] for some, count in zip(ids, num_new[index].tolist(), strict=True)]
        return StepOutput([seq.request_id for seq in seqs], [seq.index for seq in seqs], ids, [])

    def _columns(self) -> tuple[np.ndarray, ...]:
        return self.slot, self.slot_generation, self.start, self.count, self.num_new, self.scores_prompt


@dataclass(slots=True)
class StepPlan:
    """Rows of a step, and what must be done before it runs.

    Attributes:
      rows: decodes first.
      copies: pages to copy, (source, target) each.
      restored: recurrent states to copy, (snapshot, slot) each.
      placed: sequences that are new in their slots. The devices need their parameters.
      table_copies: rows of the block table to copy, one after the other, (source, target) slots each.
      table_updates: int32 [3, any], new entries of the block table, written after the copies: (slot, index, page).
      kept: recurrent states to copy behind the step, (slot, snapshot) each.
      images: pictures whose features are computed before it.
    """

    rows: Rows
    copies: list[tuple[int, int]]
    restored: list[tuple[int, int]]
    placed: list[Sequence]
    table_copies: list[tuple[int, int]]
    table_updates: np.ndarray
    kept: list[tuple[int, int]]
    images: list[EncoderJob] = field(default_factory=list)


class DetailedUpdate(NamedTuple):
    """An update that may say more than its tokens: a sequence's first or last update, or one with log-probabilities.
    For a beam it has the sampled token, which the sequence does not keep."""

    update: SequenceUpdate
    seq: Sequence
    row: int  # index among the rows that were committed
    is_first: bool


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
