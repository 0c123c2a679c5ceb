"""The running sequences, by slot: what a step needs of each, in arrays, so that hundreds are planned by a few vector
operations (host side; the devices' share of a slot is in `slots`)."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from jaxserve.sequence import NO_SLOT, Sequence, Status
from jaxserve.types import MAX_STOP_TOKENS


@dataclass(slots=True)
class Rows:
    """The rows of a step, a column per field: `count` tokens of a sequence from `start` on, then `draws` new ones.

    A row of one token may draw several, each computed in turn; others draw one, or none if their tokens go on later.
    """

    seqs: list[Sequence]
    slot: np.ndarray  # int32 [rows], as the next four
    tenure: np.ndarray  # of the slot, when the step was planned
    start: np.ndarray
    count: np.ndarray
    draws: np.ndarray
    is_known: np.ndarray  # bool: the host knows the tokens; else the device does, from the step before
    scores_prompt: np.ndarray  # bool: the hidden states are wanted, for log-probabilities of the prompt

    def __len__(self) -> int:
        return len(self.seqs)

    @property
    def end(self) -> np.ndarray:
        return self.start + self.count

    @property
    def reach(self) -> np.ndarray:
        """Tokens whose keys and values are in the cache once the row has run."""
        return self.end + np.maximum(self.draws - 1, 0)

    def extend(self, others: Rows) -> Rows:
        """These rows, then the others."""
        mine, theirs = self._columns(), others._columns()
        columns = (np.concatenate(pair) for pair in zip(mine, theirs, strict=True))
        return Rows(self.seqs + others.seqs, *columns)

    def take(self, index: np.ndarray) -> Rows:
        """Some of the rows, in the order of `index`."""
        return Rows([self.seqs[i] for i in index.tolist()], *(column[index] for column in self._columns()))

    def _columns(self) -> tuple[np.ndarray, ...]:
        return self.slot, self.tenure, self.start, self.count, self.draws, self.is_known, self.scores_prompt


class Running:
    """Sequences that have a slot, and their numbers, int32 [slots]. A number means nothing while its slot is free.

    The tokens of a running sequence are here, not in the sequence: `tokens`, int32 [slots, max_len], of which the first
    `known` count. (Memory that is never touched costs nothing.)

    computed  tokens whose keys and values are in the cache, or will be once the steps in flight have run
    known     tokens that the host knows
    total     tokens, with those that steps in flight are to draw: computed <= total
    limit     prompt and all the output it may have: total <= limit
    """

    def __init__(self, max_num_seqs: int, page_size: int, max_len: int):
        def numbers() -> np.ndarray:
            return np.zeros(max_num_seqs, np.int32)

        self.page_size = page_size
        self.seqs = np.full(max_num_seqs, None, object)
        self.request_ids = np.full(max_num_seqs, "", object)
        self.indices = numbers()
        self.tenure = numbers()  # counts those who have had the slot: tells whether one has it still
        self.tokens = np.zeros((max_num_seqs, max_len), np.int32)
        self.computed, self.known, self.total, self.limit = numbers(), numbers(), numbers(), numbers()
        self.num_pages = numbers()
        self.num_sent = numbers()  # pages that the device's block table has, or will have
        self.num_registered = numbers()  # leading pages that were offered to the prefix cache
        self.scored_until = numbers()  # log-probabilities are wanted of the prompt's tokens up to here; mostly 0
        self.stop_ids = np.full((max_num_seqs, MAX_STOP_TOKENS), -1, np.int32)
        self.most_stops = 1  # columns of stop_ids that were ever used
        self.is_new = np.zeros(max_num_seqs, bool)  # the device's slot is not filled yet
        self.may_share = np.zeros(max_num_seqs, bool)  # the page that it writes to next may have other owners
        self.is_notable = np.zeros(max_num_seqs, bool)  # its next update says more than its tokens
        self._free = list(range(max_num_seqs - 1, -1, -1))
        self._ordered: list[Sequence] = []
        self._slots: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self._ordered)

    def __iter__(self) -> Iterator[Sequence]:
        """By (priority, arrival, index): the last is the first to be preempted."""
        return iter(self._ordered)

    @property
    def last(self) -> Sequence:
        return self._ordered[-1]

    @property
    def has_free_slot(self) -> bool:
        return bool(self._free)

    @property
    def slots(self) -> np.ndarray:
        """Slots of the running sequences, in order."""
        if self._slots is None:
            self._slots = np.fromiter((seq.slot for seq in self._ordered), np.int32, len(self._ordered))
        return self._slots

    def place(self, seq: Sequence, computed: int) -> None:
        """Gives a slot to a sequence whose pages hold the keys and values of `computed` tokens."""
        slot = seq.slot = self._free.pop()
        seq.status = Status.RUNNING
        insort(self._ordered, seq, key=lambda s: s.order)
        self._slots = None
        self.seqs[slot], self.request_ids[slot], self.indices[slot] = seq, seq.request_id, seq.index
        self.tokens[slot, : len(seq.tokens)] = seq.tokens
        self.computed[slot] = computed
        self.known[slot] = self.total[slot] = len(seq.tokens)
        self.limit[slot] = seq.prompt_len + seq.max_tokens
        self.num_pages[slot], self.num_sent[slot] = len(seq.pages), 0
        self.num_registered[slot] = computed // self.page_size
        self.scored_until[slot] = seq.prompt_len - 1 if seq.scores_prompt else 0
        self.stop_ids[slot] = -1
        self.stop_ids[slot, : len(seq.stop_ids)] = list(seq.stop_ids)
        self.most_stops = max(self.most_stops, len(seq.stop_ids))
        self.is_new[slot] = True
        self.may_share[slot] = computed % self.page_size > 0
        self.is_notable[slot] = seq.params.logprobs is not None or not seq.num_outputs

    def displace(self, seq: Sequence) -> None:
        """Takes the slot away; what steps in flight draw is owed to the sequence."""
        slot, seq.slot = seq.slot, NO_SLOT
        seq.tokens = self.tokens[slot, : self.known[slot]].tolist()
        seq.owed = int(self.total[slot] - self.known[slot])
        self._ordered.remove(seq)
        self._slots = None
        self.seqs[slot] = None
        self.tenure[slot] += 1
        self._free.append(slot)

    def check_integrity(self) -> None:
        """Asserts the invariants of slots, order and numbers."""
        slots = self.slots.tolist() + self._free
        assert sorted(slots) == list(range(len(self.seqs)))
        assert self._ordered == sorted(self._ordered, key=lambda seq: seq.order)
        for seq in self._ordered:
            slot = seq.slot
            assert seq.status is Status.RUNNING
            assert self.seqs[slot] is seq
            assert seq.prompt_len <= self.known[slot] <= self.total[slot] <= self.limit[slot]
            assert self.computed[slot] <= self.total[slot]
            assert self.computed[slot] <= len(seq.pages) * self.page_size
            assert self.num_pages[slot] == len(seq.pages)
            assert 0 <= self.num_sent[slot] <= len(seq.pages)
