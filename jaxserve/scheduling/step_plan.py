"""A step as the scheduler plans it, and the updates that result from it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from jaxserve.scheduling.sequence import Sequence
from jaxserve.types import SequenceUpdate, StepOutput


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
    """

    rows: Rows
    copies: list[tuple[int, int]]
    restored: list[tuple[int, int]]
    placed: list[Sequence]
    table_copies: list[tuple[int, int]]
    table_updates: np.ndarray
    kept: list[tuple[int, int]]


class DetailedUpdate(NamedTuple):
    """An update that may say more than its tokens: a sequence's first or last update, or one with log-probabilities.
    For a beam it has the sampled token, which the sequence does not keep."""

    update: SequenceUpdate
    seq: Sequence
    row: int  # index among the rows that were committed
    is_first: bool
