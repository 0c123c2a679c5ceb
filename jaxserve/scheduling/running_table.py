"""The running sequences by slot (host side). Everything that a step needs of them is in arrays, so that a few vector
operations plan hundreds of sequences. `execution.slots` describes what the devices keep for each slot."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice
from operator import attrgetter
from typing import Any

import numpy as np

from jaxserve.config import MAX_PROPOSALS
from jaxserve.limits import MAX_STOP_TOKENS
from jaxserve.scheduling.block_manager import Windows, chunk_of
from jaxserve.scheduling.image_prompts import ImagePrompt
from jaxserve.scheduling.sequence import NO_SLOT, Sequence, Status
from jaxserve.scheduling.step_plan import Rows, Sampler
from jaxserve.types import NO_PENALTY_ROW

ORDER = attrgetter("order")
NO_STOP = np.iinfo(np.int32).max
NO_TOKEN = -2  # pads stop ids: differs from every token, and from the -1 that stands for no new token


@dataclass(frozen=True, slots=True)
class RunningBatch:
    """The running sequences in order, and values that stay the same until one is placed or displaced. Read-only."""

    seqs: list[Sequence]
    request_ids: list[str]
    indices: list[int]
    slot: np.ndarray  # intp [sequences]
    slot_generation: np.ndarray  # int32 [sequences], as the next two
    limit: np.ndarray
    one: np.ndarray  # all 1
    none: np.ndarray  # bool [sequences], all False
    stop_ids: np.ndarray  # int32 [sequences, most]
    one_at_a_time: np.ndarray  # bool [sequences]: the host must see a token before the next can be sampled
    any_masked: bool
    any_beams: bool
    background: np.ndarray  # bool [sequences]: they step aside for all others
    sampler: Sampler  # the least capable one that serves all sequences


class RunningTable:
    """Sequences that have a slot, and their numbers, int32 [slots]. A number means nothing while its slot is free.

    The table owns a running sequence's tokens: row `slot` of `tokens`, int32 [slots, max_len and more], of which
    [0, known) is valid. `Sequence.tokens` is a view of it. (Memory that is never touched costs nothing.)

    Intervals of a sequence's tokens, with computed <= total <= limit and known <= total:
      [0, computed)  their keys and values are in the cache, or will be once the steps in flight have run
      [0, known)     the host knows them
      [0, total)     the host knows them, or a step in flight samples them
      [0, limit)     the prompt and all the output that the sequence may have
    """

    def __init__(
        self,
        max_num_seqs: int,
        page_size: int,
        max_len: int,
        penalty_rows: int | None = None,
        windows: Windows = (None,),
        device_groups: int = 1,
        sees: bool = False,
    ):
        """`device_groups`: the slots and the penalty rows belong to so many groups of devices, in equal parts. `sees`:
        prompts may have pictures."""

        def numbers() -> np.ndarray:
            return np.zeros(max_num_seqs, np.int32)

        self._settings = max_num_seqs, page_size, max_len, penalty_rows, windows, device_groups, sees
        self.device_groups = device_groups
        self.num_slots = max_num_seqs
        self._slots_each = max_num_seqs // device_groups
        self.page_size = page_size
        self.num_groups = len(windows)  # see `BlockManager`
        self.chunk = chunk_of(windows)
        num_groups = len(windows)
        self.slot_generation = numbers()  # incremented when a slot is vacated; see `holds`
        self.tokens = np.zeros((max_num_seqs, max_len + MAX_PROPOSALS + 1), np.int32)
        self.computed, self.known, self.total, self.limit = numbers(), numbers(), numbers(), numbers()
        self.start = numbers()  # `computed` when the sequence was placed; the devices get this number
        self.num_blocks = numbers()  # blocks that have pages, or had pages before they were given up
        # For each group, how many first blocks have given up their pages, because no layer sees them any more.
        self.num_released = np.zeros((max_num_seqs, num_groups), np.int32)
        self.num_registered = numbers()  # how many first blocks were offered to the prefix cache
        # Recurrent models: a step must end after this many tokens, so that the state there can be kept.
        self.state_stop = np.full(max_num_seqs, NO_STOP, np.int32)
        # Models that see: a step must end before the first picture without rows (`image_rows`). Where features stand in
        # the place of tokens, `shown` has what the devices get, else 0.
        self.image_stop = np.full(max_num_seqs, NO_STOP, np.int32)
        self.shown = np.zeros((max_num_seqs, max_len) if sees else (0, 0), np.int32)
        self.positions = np.zeros((3, max_num_seqs, max_len) if sees else (3, 0, 0), np.int32)
        self.looks = np.zeros(max_num_seqs, bool)  # its prompt has pictures
        self.prompt_len = numbers()
        self.scored_until = numbers()  # prompt tokens whose log-probabilities are wanted; usually 0
        self.masked = np.zeros(max_num_seqs, bool)  # sampled after the forward pass, see `engine.constraints`
        self.beams = np.zeros(max_num_seqs, bool)
        # How many tokens are proposed to follow the known ones; they stand behind these in `tokens`. While a step
        # checks them, `computed` and `total` are upper bounds.
        self.proposed = numbers()
        self.proposes = False  # whether any are proposed
        self.steps_aside = False  # the next step computes nothing of background sequences; see `step_aside`
        self.short_steps = False  # the next step may compute some of them, and is to be a short one
        self.draft_reads = True  # a draft head, if there is one, reads the tokens of the next step
        self.sampler = numbers()  # the least capable `Sampler` that serves it
        self.stop_ids = np.full((max_num_seqs, MAX_STOP_TOKENS), NO_TOKEN, np.int32)
        self.most_stops = 1  # columns of stop_ids that were ever used
        # Changes that the devices do not know yet. restored: recurrent states to copy from snapshots to slots, as
        # (source, target). new requests: sequences that are new in their slots. table_copies: rows of the block table
        # to copy, as (source, target) slots. table_entries: entries to write after these copies, int32 [3, n] of (slot,
        # index, page); of two entries for the same place, the later one counts.
        self.restored: list[tuple[int, int]] = []
        self.new_sequences: list[Sequence] = []
        self.table_copies: list[tuple[int, int]] = []
        self.table_entries: list[np.ndarray] = []
        self.maybe_shared: set[Sequence] = set()  # sequences whose next page to write may have several owners
        self.needs_detail: set[Sequence] = set()  # sequences whose next update says more than its tokens
        # Of each group of devices:
        self._free = _divided(list(range(max_num_seqs)), device_groups)
        last = max_num_seqs if penalty_rows is None else penalty_rows
        self._free_penalty_rows = _divided(list(range(1, last + 1)), device_groups)
        self._ordered: list[Sequence] = []
        self._batch: RunningBatch | None = None

    @property
    def num_held(self) -> np.ndarray:
        """Pages of each slot's sequence, int32 [slots]."""
        return self.num_blocks * self.num_groups - self.num_released.sum(axis=1)

    def __len__(self) -> int:
        return len(self._ordered)

    def __iter__(self) -> Iterator[Sequence]:
        """The sequences in order of (priority, arrival, index). The last one is preempted first."""
        return iter(self._ordered)

    @property
    def last(self) -> Sequence:
        return self._ordered[-1]

    def num_places_for(self, seq: Sequence) -> int:
        """How many sequences like this one can be placed: free slots, and free penalty rows if it needs one."""
        free = len(self._free[seq.group])
        return min(free, len(self._free_penalty_rows[seq.group])) if seq.params.has_penalties else free

    def group_of(self, slot: Any) -> Any:
        """The group of devices that each slot belongs to."""
        return slot // self._slots_each

    def last_of(self, group: int) -> Sequence:
        """The last running sequence of a group of devices."""
        return next(seq for seq in reversed(self._ordered) if seq.group == group)

    def num_running(self, group: int) -> int:
        """How many sequences run on a group of devices."""
        return self._slots_each - len(self._free[group])

    @property
    def batch(self) -> RunningBatch:
        """The running batch. It is the same object while the same sequences run."""
        if self._batch is None:
            seqs = self._ordered.copy()
            slot = np.fromiter((seq.slot for seq in seqs), np.intp, len(seqs))
            self._batch = RunningBatch(
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
                np.fromiter((seq.is_background for seq in seqs), bool, len(seqs)),
                Sampler(self.sampler[slot].max(initial=Sampler.GREEDY)),
            )
        return self._batch

    def rows(self, seqs: list[Sequence], count: np.ndarray, num_new: np.ndarray, *, only_decodes: bool = False) -> Rows:
        """Rows that compute the next `count` tokens of running sequences and sample `num_new`."""
        slot = np.asarray([seq.slot for seq in seqs], np.intp)
        start = self.computed[slot]
        columns = slot, self.slot_generation[slot], start, count, num_new, start < self.scored_until[slot]
        return Rows(seqs, *columns, only_decodes=only_decodes)

    def holds(self, rows: Rows) -> np.ndarray:
        """Which rows' sequences still have the slots that they had when the step was planned, bool [rows]."""
        return self.slot_generation[rows.slot] == rows.slot_generation

    def is_idle(self, seq: Sequence) -> bool:
        """Whether a sequence has a slot and nothing to compute."""
        return seq.slot >= 0 and bool(self.computed[seq.slot] == self.total[seq.slot])

    def place(self, seq: Sequence, computed: int, like: int = NO_SLOT) -> None:
        """Gives a slot to a sequence whose pages hold the keys and values of `computed` tokens. If `like` is given,
        its pages are the first of those in that slot."""
        slot = seq.slot = self._free[seq.group].pop()
        seq.penalty_row = self._free_penalty_rows[seq.group].pop() if seq.params.has_penalties else NO_PENALTY_ROW
        seq.status = Status.RUNNING
        insort(self._ordered, seq, key=ORDER)
        self._batch = None
        self.computed[slot] = self.start[slot] = computed
        self.known[slot] = self.total[slot] = len(seq.tokens)
        seq.store_in(self.tokens[slot], self.known[slot : slot + 1])
        self.limit[slot] = seq.prompt_len + seq.max_tokens
        if like == NO_SLOT:
            self.show_pages(seq, 0)
        else:
            self.copy_pages(seq, like)
        self.state_stop[slot] = NO_STOP
        self._look(slot, seq.seen)
        self.num_registered[slot] = computed // self.page_size
        self.num_released[slot] = seq.num_released(self.num_groups)
        self.scored_until[slot] = seq.prompt_len - 1 if seq.scores_prompt else 0
        self.stop_ids[slot] = NO_TOKEN
        self.stop_ids[slot, : len(seq.stop_ids)] = list(seq.stop_ids)
        self.most_stops = max(self.most_stops, len(seq.stop_ids))
        self.new_sequences.append(seq)
        if computed % self.page_size:
            self.maybe_shared.add(seq)
        self.masked[slot] = seq.params.has_mask
        self.beams[slot] = seq.params.use_beam_search
        self.sampler[slot] = Sampler.of(seq.params)
        if seq.params.logprobs is not None or not seq.num_outputs:
            self.needs_detail.add(seq)

    def _look(self, slot: int, seen: ImagePrompt | None) -> None:
        """Takes note of the pictures in the prompt of the sequence that is new in a slot."""
        self.looks[slot] = seen is not None
        self.prompt_len[slot] = 0 if seen is None else len(seen.tokens)
        self.image_stop[slot] = NO_STOP
        if seen is not None:
            length = len(seen.tokens)
            self.shown[slot, :length] = 0
            self.positions[:, slot, :length] = np.arange(length) if seen.positions is None else seen.positions

    def show_image(self, slot: int, places: np.ndarray, shown: np.ndarray) -> None:
        """Sets what the devices get in the place of a picture's tokens."""
        self.shown[slot, places] = shown

    def ahead(self, slot: Any) -> Any:
        """How many tokens a step may compute in a slot, int32 of the shape of `slot`: up to the place where a snapshot
        of the recurrent state is wanted, up to the end of the chunk of tokens that layers see, and up to a picture
        whose features are not computed."""
        computed = self.computed[slot]
        most = np.minimum(self.state_stop[slot], self.image_stop[slot]) - computed
        return most if self.chunk is None else np.minimum(most, self.chunk - computed % self.chunk)

    def next_state_stop(self, seq: Sequence) -> None:
        """Sets the next number of tokens after which a snapshot of a sequence's recurrent state is wanted."""
        self.state_stop[seq.slot] = seq.state_stops.pop(0) if seq.state_stops else NO_STOP

    def show_pages(self, seq: Sequence, first: int) -> None:
        """Queues block-table entries for a sequence's pages from the index `first` on."""
        count = len(seq.pages)
        self.num_blocks[seq.slot] = count // self.num_groups
        if first < count:
            columns = np.full(count - first, seq.slot), np.arange(first, count), seq.pages[first:]
            self.table_entries.append(np.asarray(columns, np.int32))

    def copy_pages(self, seq: Sequence, source: int) -> None:
        """Queues a copy of the block table of the slot `source` for a sequence that is new in its slot."""
        if any((some[0] == source).any() for some in self.table_entries):  # these are written after the copies
            self.show_pages(seq, 0)
            return
        self.num_blocks[seq.slot] = len(seq.pages) // self.num_groups
        self.table_copies.append((source, seq.slot))

    def advance(self, rows: Rows) -> None:
        """Counts what a planned step computes and samples."""
        self.computed[rows.slot] = rows.reach
        self.total[rows.slot] += rows.num_new

    def growth(self, rows: Rows) -> tuple[np.ndarray, np.ndarray]:
        """Indices of rows that need more pages than they have, and how many more each needs."""
        reach = rows.reach
        num_blocks = self.num_blocks[rows.slot]
        growing = np.flatnonzero(reach > num_blocks * self.page_size)
        return growing, (-(-reach[growing] // self.page_size) - num_blocks[growing]) * self.num_groups

    def add_pages(self, seqs: list[Sequence], slot: np.ndarray, count: np.ndarray, pages: list[int]) -> None:
        """Gives sequence i, whose slot is slot[i], the next count[i] of the pages."""
        taken = iter(pages)
        for seq, some in zip(seqs, count.tolist(), strict=True):
            seq.pages += islice(taken, some)
        first = self.num_blocks[slot] * self.num_groups - (np.cumsum(count) - count)
        index = np.repeat(first, count) + np.arange(len(pages))
        self.num_blocks[slot] += count // self.num_groups
        self.table_entries.append(np.asarray((np.repeat(slot, count), index, pages), np.int32))

    def drain_updates(self) -> tuple[list[tuple[int, int]], list[Sequence], list[tuple[int, int]], np.ndarray]:
        """Takes the changes that the devices do not know yet; the caller sends them. Returns copies of states, new
        requests, copies of rows of the block table, and entries of it, int32 [3, n] of (slot, index, page), each place
        at most once."""
        news = (self.restored, self.new_sequences, self.table_copies)
        entries = self.table_entries
        self.restored = []
        self.new_sequences = []
        self.table_copies = []
        self.table_entries = []
        if len(entries) == 1:  # the usual case
            return *news, entries[0]
        if not entries:
            return *news, np.empty((3, 0), np.int32)
        joined = np.concatenate(entries, axis=1)[:, ::-1]  # the latest entry first
        _, first = np.unique(joined[0].astype(np.int64) << 32 | joined[1], return_index=True)
        return *news, joined[:, first]

    def advance_grammars(self, rows: Rows, tokens: np.ndarray) -> list[int]:
        """Advances grammars by the tokens of their rows; returns the indices of rows whose grammar is complete."""
        index = np.flatnonzero(self.masked[rows.slot] & self.holds(rows)).tolist()
        return [i for i in index if rows.seqs[i].advance(tokens[i][tokens[i] >= 0].tolist())]

    def propose(self, slot: int, tokens: np.ndarray) -> None:
        """Proposes tokens to follow the known ones of a slot. No step may be in flight for it. The slot's next step
        checks them, and no other step of the slot may be planned before that one is committed."""
        if self.looks[slot] and (tokens < 0).any():  # what stands for a picture follows nothing
            tokens = tokens[: int(np.argmax(tokens < 0))]
        known = self.known[slot]
        assert known == self.total[slot] == self.computed[slot] + 1, "the last token must be the only one to compute"
        self.tokens[slot, known : known + len(tokens)] = tokens
        self.proposed[slot] = len(tokens)
        self.proposes |= len(tokens) > 0

    def drop_proposals(self, slot: np.ndarray | int) -> None:
        """Forgets the proposals for these slots."""
        self.proposed[slot] = 0
        self.proposes = bool(self.proposed.any())

    def append(self, slot: np.ndarray, tokens: np.ndarray, num_new: np.ndarray | int) -> None:
        """Appends the first `num_new` of the sampled tokens [slots, any], which are known from now on."""
        known = self.known[slot]
        for i, column in enumerate(tokens.T):  # at most MAX_PROPOSALS + 1
            self.tokens[slot, known + i] = column
        self.known[slot] = known + num_new

    def append_rows(self, rows: Rows, tokens: np.ndarray, num_new: np.ndarray, held: np.ndarray) -> None:
        """Appends the first `num_new` of tokens [rows, any] of rows that hold their slots (`held`), and forgets
        proposals that were not kept. A beam forgets its token instead: `Scheduler.reassign` says how it continues."""
        appended = held & (num_new > 0)
        if self.batch.any_beams:
            beams = self.beams[rows.slot]
            self.total[rows.slot[appended & beams]] -= 1
            appended &= ~beams
        index = np.flatnonzero(appended)
        self.append(rows.slot[index], tokens[index], num_new[index])
        if not rows.only_decodes and (checks := rows.checks).any():  # only the last known token is left to compute
            slot = rows.slot[held & checks]
            self.total[slot] = self.known[slot]
            self.computed[slot] = self.known[slot] - 1
            self.drop_proposals(slot)

    def only_add_tokens(self, rows: Rows, tokens: np.ndarray) -> bool:
        """Whether the rows are all running sequences and none has more to say than its tokens.

        Each of them then sampled in every column of `tokens`, so that one count holds for all. A row that stops early
        has -1 in the columns after the stop token, so that only the last column needs to be searched for stop tokens.
        """
        batch = self.batch
        if rows.seqs is not batch.seqs or self.needs_detail or tokens.min() < 0:
            return False
        known = rows.end + tokens.shape[1]
        return not ((batch.stop_ids == tokens[:, -1:]).any() or (known >= batch.limit).any())

    def ended(self, rows: Rows, tokens: np.ndarray, num_new: np.ndarray) -> np.ndarray:
        """Which rows, of those that hold their slots, sampled a stop token or reached their limit, bool [rows]."""
        last = tokens[np.arange(len(rows)), num_new - 1]
        stopped = (self.stop_ids[rows.slot, : self.most_stops] == last[:, None]).any(axis=1)
        return stopped | (self.known[rows.slot] >= self.limit[rows.slot])

    def copy_outputs(self, seq: Sequence, source: Sequence, kept: int) -> None:
        """Gives a sequence the output tokens of a sibling of equal length. Its pages from the index `kept` on are new,
        and block-table entries for them are queued."""
        outputs = slice(seq.prompt_len, int(self.known[source.slot]))
        self.tokens[seq.slot, outputs] = self.tokens[source.slot, outputs]
        self.num_registered[seq.slot] = min(self.num_registered[seq.slot], kept // self.num_groups)
        self.num_released[seq.slot] = self.num_released[source.slot]
        self.show_pages(seq, kept)

    def emptied(self) -> RunningTable:
        """A table of the same size without sequences."""
        return RunningTable(*self._settings)

    def displace(self, seq: Sequence) -> None:
        """Takes the slot away from a sequence. Tokens that steps in flight sample for it become pending."""
        slot = seq.slot
        seq.slot = NO_SLOT
        seq.take_tokens()
        seq.pending_tokens = int(self.total[slot] - self.known[slot])
        del self._ordered[bisect_left(self._ordered, seq.order, key=ORDER)]
        self._batch = None
        self.slot_generation[slot] += 1
        self._free[seq.group].append(slot)
        if seq.penalty_row != NO_PENALTY_ROW:
            self._free_penalty_rows[seq.group].append(seq.penalty_row)
            seq.penalty_row = NO_PENALTY_ROW
        if self.proposes:
            self.drop_proposals(slot)
        self.maybe_shared.discard(seq)
        self.needs_detail.discard(seq)
        if seq in self.new_sequences:
            self.new_sequences.remove(seq)
        self.table_entries = [some[:, some[0] != slot] for some in self.table_entries]

    def check_integrity(self) -> None:
        """Asserts the invariants of slots, order and numbers."""
        assert self.batch.seqs == self._ordered
        owned = [seq.penalty_row for seq in self._ordered if seq.params.has_penalties]
        rows = [*owned, *chain(*self._free_penalty_rows)]
        assert sorted(rows) == list(range(1, len(rows) + 1))
        assert sorted([*self.batch.slot.tolist(), *chain(*self._free)]) == list(range(self.num_slots))
        assert all(self.group_of(seq.slot) == seq.group for seq in self._ordered)
        assert self.maybe_shared | self.needs_detail <= set(self._ordered)
        assert self._ordered == sorted(self._ordered, key=lambda seq: seq.order)
        for seq in self._ordered:
            slot = seq.slot
            assert seq.status is Status.RUNNING
            assert seq.prompt_len <= self.known[slot] <= self.total[slot] <= self.limit[slot]
            assert self.computed[slot] <= self.total[slot]
            assert self.computed[slot] <= self.num_blocks[slot] * self.page_size
            assert self.num_blocks[slot] * self.num_groups == len(seq.pages)
            assert self.num_released[slot].tolist() == seq.num_released(self.num_groups)


def _divided(numbers: list[int], parts: int) -> list[list[int]]:
    """Stacks of equally many consecutive numbers, each with its lowest on top."""
    each = len(numbers) // parts
    return [numbers[part * each : (part + 1) * each][::-1] for part in range(parts)]
