"""The running sequences, by slot: what a step needs of each, in arrays, so that hundreds are planned by a few vector
operations (host side; the devices' share of a slot is in `slots`)."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

import numpy as np

from jaxserve.config import MAX_TOKENS_PER_CALL
from jaxserve.limits import MAX_STOP_TOKENS
from jaxserve.scheduling.sampler import Sampler
from jaxserve.scheduling.sequence import NO_SLOT, Sequence, Status
from jaxserve.types import NO_PENALTY_ROW, SequenceUpdate

NO_TOKEN = -2  # equals no token, nor the -1 of those that were not drawn


@dataclass(slots=True)
class Rows:
    """The rows of a step, a column per field: `count` tokens of a sequence from `start` on, then `num_new` new ones.

    A row of one token may draw several, each computed in turn; others draw one, or none if their tokens go on later.
    """

    seqs: list[Sequence]
    slot: np.ndarray  # intp [rows], with which NumPy indexes three times as fast as with int32
    slot_generation: np.ndarray  # int32 [rows], as the next three: of the slot, when the step was planned
    start: np.ndarray
    count: np.ndarray
    num_new: np.ndarray
    scores_prompt: np.ndarray  # bool: the hidden states are wanted, for log-probabilities of the prompt
    only_decodes: bool = field(default=False, kw_only=True)  # every count is 1, and nothing scores a prompt

    def __len__(self) -> int:
        return len(self.seqs)

    @property
    def end(self) -> np.ndarray:
        return self.start + self.count

    @property
    def reach(self) -> np.ndarray:
        """Tokens whose keys and values are in the cache once the row has run."""
        if self.only_decodes:
            return self.start + self.num_new
        return self.end + np.maximum(self.num_new - 1, 0)

    @property
    def scores(self) -> bool:
        """Whether some row's hidden states are wanted."""
        return not self.only_decodes and bool(self.scores_prompt.any())

    @property
    def num_tokens(self) -> int:
        """That the step computes."""
        return int(self.num_new.sum()) if self.only_decodes else int((self.reach - self.start).sum())

    def extend(self, others: Rows) -> Rows:
        """These rows, then the others."""
        mine, theirs = self._columns(), others._columns()
        columns = (np.concatenate(pair) for pair in zip(mine, theirs, strict=True))
        return Rows(self.seqs + others.seqs, *columns)

    def take(self, index: np.ndarray) -> Rows:
        """Some of the rows, in the order of `index`."""
        columns = (column[index] for column in self._columns())
        return Rows([self.seqs[i] for i in index.tolist()], *columns, only_decodes=self.only_decodes)

    def _columns(self) -> tuple[np.ndarray, ...]:
        return self.slot, self.slot_generation, self.start, self.count, self.num_new, self.scores_prompt


@dataclass(slots=True)
class StepPlan:
    """Rows of a step, and what must be done before it runs.

    Attributes:
      rows: those that decode first.
      copies: pages to copy, (source, target) each.
      placed: sequences whose slots are to be filled.
      table_copies: rows of the block table to copy before that, one after the other, (source, target) slots each.
      table_updates: int32 [3, any], block-table entries that are new: (slot, index, page).
    """

    rows: Rows
    copies: list[tuple[int, int]]
    placed: list[Sequence]
    table_copies: list[tuple[int, int]]
    table_updates: np.ndarray


class DetailedUpdate(NamedTuple):
    """An update that may say more than its tokens: a sequence's first or last, or one with log-probabilities."""

    update: SequenceUpdate
    seq: Sequence
    row: int  # its place among the rows that ran
    is_first: bool


@dataclass(frozen=True, slots=True)
class Lineup:
    """The running sequences in order, and what of them stays as it is until one comes or goes; not to be written to."""

    seqs: list[Sequence]
    request_ids: list[str]
    indices: list[int]
    slot: np.ndarray  # intp [sequences]
    slot_generation: np.ndarray  # int32 [sequences], as the next two
    limit: np.ndarray
    one: np.ndarray
    none: np.ndarray  # bool [sequences]
    stop_ids: np.ndarray  # int32 [sequences, most]
    one_at_a_time: np.ndarray  # bool [sequences]: what it draws next depends on what the host makes of its last token
    any_masked: bool
    any_beams: bool
    sampler: Sampler  # the least that serves all of them


class RunningTable:
    """Sequences that have a slot, and their numbers, int32 [slots]. A number means nothing while its slot is free.

    The tokens of a running sequence are here, not in the sequence: `tokens`, int32 [slots, max_len and more], of which
    the first `known` count. (Memory that is never touched costs nothing.)

    computed  tokens whose keys and values are in the cache, or will be once the steps in flight have run
    known     tokens that the host knows
    total     tokens, with those that steps in flight are to draw: computed <= total
    limit     prompt and all the output it may have: total <= limit
    """

    def __init__(self, max_num_seqs: int, page_size: int, max_len: int, penalty_rows: int | None = None):
        def numbers() -> np.ndarray:
            return np.zeros(max_num_seqs, np.int32)

        self._settings = max_num_seqs, page_size, max_len, penalty_rows
        self.page_size = page_size
        self.slot_generation = numbers()  # counts those who have had the slot: tells whether one has it still
        self.tokens = np.zeros((max_num_seqs, max_len + MAX_TOKENS_PER_CALL), np.int32)
        self.computed, self.known, self.total, self.limit = numbers(), numbers(), numbers(), numbers()
        self.num_pages = numbers()
        self.num_registered = numbers()  # leading pages that were offered to the prefix cache
        self.scored_until = numbers()  # log-probabilities are wanted of the prompt's tokens up to here; mostly 0
        self.masked = np.zeros(
            max_num_seqs, bool
        )  # it draws when its tokens so far are known, see `engine.constraints`
        self.beams = np.zeros(max_num_seqs, bool)
        self.sampler = numbers()  # the least `Sampler` that serves it
        self.stop_ids = np.full((max_num_seqs, MAX_STOP_TOKENS), NO_TOKEN, np.int32)
        self.most_stops = 1  # columns of stop_ids that were ever used
        # What the device has not been told yet: who is new in a slot; rows of the block table to copy from one slot to
        # another; then entries of it, int32 [3, any] of (slot, index, page), of which the last for a place counts.
        self.newcomers: list[Sequence] = []
        self.table_copies: list[tuple[int, int]] = []
        self.table_entries: list[np.ndarray] = []
        self.maybe_shared: set[Sequence] = set()  # the page that they write to next may have other owners
        self.needs_detail: set[Sequence] = set()  # their next update says more than its tokens
        self._free = list(range(max_num_seqs - 1, -1, -1))
        self._free_penalty_rows = list(range(max_num_seqs if penalty_rows is None else penalty_rows, 0, -1))
        self._ordered: list[Sequence] = []
        self._lineup: Lineup | None = None

    @property
    def num_slots(self) -> int:
        return len(self.known)

    def __len__(self) -> int:
        return len(self._ordered)

    def __iter__(self) -> Iterator[Sequence]:
        """By (priority, arrival, index): the last is the first to be preempted."""
        return iter(self._ordered)

    @property
    def last(self) -> Sequence:
        return self._ordered[-1]

    def num_places_for(self, seq: Sequence) -> int:
        """How many like this sequence find a free slot, and a penalty row where they need one."""
        return min(len(self._free), len(self._free_penalty_rows)) if seq.params.has_penalties else len(self._free)

    @property
    def lineup(self) -> Lineup:
        """The same object as long as the running sequences are the same."""
        if self._lineup is None:
            seqs = self._ordered.copy()
            slot = np.fromiter((seq.slot for seq in seqs), np.intp, len(seqs))
            self._lineup = Lineup(
                seqs,
                [seq.request_id for seq in seqs],
                [seq.index for seq in seqs],
                slot,
                self.slot_generation[slot],
                self.limit[slot],
                np.ones(len(seqs), np.int32),
                np.zeros(len(seqs), bool),
                self.stop_ids[slot, : self.most_stops],
                self.masked[slot] | self.beams[slot],
                bool(self.masked[slot].any()),
                bool(self.beams[slot].any()),
                Sampler(self.sampler[slot].max(initial=Sampler.GREEDY)),
            )
        return self._lineup

    def place(self, seq: Sequence, computed: int, like: int = NO_SLOT) -> None:
        """Gives a slot to a sequence whose pages hold the keys and values of `computed` tokens. Its pages are the first
        of those in the slot `like`, if that is given."""
        slot = seq.slot = self._free.pop()
        seq.penalty_row = self._free_penalty_rows.pop() if seq.params.has_penalties else NO_PENALTY_ROW
        seq.status = Status.RUNNING
        insort(self._ordered, seq, key=lambda s: s.order)
        self._lineup = None
        self.tokens[slot, : len(seq.tokens)] = seq.tokens
        self.computed[slot] = computed
        self.known[slot] = self.total[slot] = len(seq.tokens)
        self.limit[slot] = seq.prompt_len + seq.max_tokens
        if like == NO_SLOT:
            self.show_pages(seq, 0)
        else:
            self.copy_pages(seq, like)
        self.num_registered[slot] = computed // self.page_size
        self.scored_until[slot] = seq.prompt_len - 1 if seq.scores_prompt else 0
        self.stop_ids[slot] = NO_TOKEN
        self.stop_ids[slot, : len(seq.stop_ids)] = list(seq.stop_ids)
        self.most_stops = max(self.most_stops, len(seq.stop_ids))
        self.newcomers.append(seq)
        if computed % self.page_size:
            self.maybe_shared.add(seq)
        self.masked[slot], self.beams[slot] = seq.params.has_mask, seq.params.use_beam_search
        self.sampler[slot] = Sampler.of(seq.params)
        if seq.params.logprobs is not None or not seq.num_outputs:
            self.needs_detail.add(seq)

    def show_pages(self, seq: Sequence, first: int) -> None:
        """Takes note of a sequence's pages from the index `first` on."""
        self.num_pages[seq.slot] = count = len(seq.pages)
        if first < count:
            columns = np.full(count - first, seq.slot), np.arange(first, count), seq.pages[first:]
            self.table_entries.append(np.asarray(columns, np.int32))

    def copy_pages(self, seq: Sequence, source: int) -> None:
        """Takes note that the pages of a sequence, which is new in its slot, are the first of those in `source`."""
        if any((some[0] == source).any() for some in self.table_entries):  # these would come too late for the copy
            self.show_pages(seq, 0)
            return
        self.num_pages[seq.slot] = len(seq.pages)
        self.table_copies.append((source, seq.slot))

    def add_pages(self, seqs: list[Sequence], slot: np.ndarray, count: np.ndarray, pages: list[int]) -> None:
        """Gives sequences, of these slots, `count` [sequences] of the pages each, one after the other."""
        taken = iter(pages)
        for seq, some in zip(seqs, count.tolist(), strict=True):
            seq.pages += islice(taken, some)
        index = np.repeat(self.num_pages[slot] - (np.cumsum(count) - count), count) + np.arange(len(pages))
        self.num_pages[slot] += count
        self.table_entries.append(np.asarray((np.repeat(slot, count), index, pages), np.int32))

    def take_news(self) -> tuple[list[Sequence], list[tuple[int, int]], np.ndarray]:
        """What the device has not been told yet, which it will be now: the newcomers, copies of rows of the block
        table, and new entries of it, int32 [3, any] (slot, index, page), no place twice."""
        placed, copies, entries = self.newcomers, self.table_copies, self.table_entries
        self.newcomers, self.table_copies, self.table_entries = [], [], []
        if len(entries) == 1:  # mostly
            return placed, copies, entries[0]
        if not entries:
            return placed, copies, np.empty((3, 0), np.int32)
        joined = np.concatenate(entries, axis=1)[:, ::-1]  # the last first
        _, first = np.unique(joined[0].astype(np.int64) << 32 | joined[1], return_index=True)
        return placed, copies, joined[:, first]

    def append(self, slot: np.ndarray, tokens: np.ndarray, drawn: np.ndarray | int) -> None:
        """Takes in the first `drawn` of tokens [slots, any] that sequences have drawn."""
        known = self.known[slot]
        for i, column in enumerate(tokens.T):  # few: as many as a call draws
            self.tokens[slot, known + i] = column
        self.known[slot] = known + drawn

    def emptied(self) -> RunningTable:
        """The same with nobody in it."""
        return RunningTable(*self._settings)

    def known_tokens(self, seq: Sequence) -> np.ndarray:
        """Of a sequence that has a slot."""
        return self.tokens[seq.slot, : self.known[seq.slot]].copy()

    def displace(self, seq: Sequence) -> None:
        """Takes the slot away; what steps in flight draw is owed to the sequence."""
        slot, seq.slot = seq.slot, NO_SLOT
        seq.tokens = self.tokens[slot, : self.known[slot]].copy()
        seq.pending_tokens = int(self.total[slot] - self.known[slot])
        del self._ordered[bisect_left(self._ordered, seq.order, key=lambda s: s.order)]
        self._lineup = None
        self.slot_generation[slot] += 1
        self._free.append(slot)
        if seq.penalty_row != NO_PENALTY_ROW:
            self._free_penalty_rows.append(seq.penalty_row)
            seq.penalty_row = NO_PENALTY_ROW
        self.maybe_shared.discard(seq)
        self.needs_detail.discard(seq)
        if seq in self.newcomers:
            self.newcomers.remove(seq)
        self.table_entries = [some[:, some[0] != slot] for some in self.table_entries]

    def check_integrity(self) -> None:
        """Asserts the invariants of slots, order and numbers."""
        assert self.lineup.seqs == self._ordered
        rows = [seq.penalty_row for seq in self._ordered if seq.params.has_penalties] + self._free_penalty_rows
        assert sorted(rows) == list(range(1, len(rows) + 1))
        slots = self.lineup.slot.tolist() + self._free
        assert sorted(slots) == list(range(self.num_slots))
        assert self.maybe_shared | self.needs_detail <= set(self._ordered)
        assert self._ordered == sorted(self._ordered, key=lambda seq: seq.order)
        for seq in self._ordered:
            slot = seq.slot
            assert seq.status is Status.RUNNING
            assert seq.prompt_len <= self.known[slot] <= self.total[slot] <= self.limit[slot]
            assert self.computed[slot] <= self.total[slot]
            assert self.computed[slot] <= len(seq.pages) * self.page_size
            assert self.num_pages[slot] == len(seq.pages)
