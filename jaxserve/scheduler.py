"""Continuous batching (host side): which tokens of which sequences the next step computes.

Each step takes, within a token budget: every decoding sequence, then the running prompts' next chunks, then
newcomers, all in order of (priority, arrival). When pages run out, the last in that order is preempted: its pages are
freed, and it waits to be computed again; its tokens come out the same.

`schedule` may be called again before `commit` of the plans before it (steps in flight): it counts tokens that only the
device knows yet as `pending`.
"""

from __future__ import annotations

import heapq
from bisect import insort
from dataclasses import dataclass, field

from jaxserve.block_manager import BlockManager
from jaxserve.sequence import NO_SLOT, Sequence, Status, child_seed
from jaxserve.types import FinishReason


@dataclass(slots=True)
class Scheduled:
    """One row of a step: `count` tokens of a sequence from `start` on; `samples` if its next token is drawn."""

    seq: Sequence
    start: int
    count: int
    samples: bool

    @property
    def end(self) -> int:
        return self.start + self.count

    @property
    def scores_prompt(self) -> bool:
        """Hidden states of this row give log-probabilities of prompt tokens that are asked for."""
        seq = self.seq
        wanted = seq.params.prompt_logprobs is not None and seq.index == 0
        return wanted and max(self.start, seq.num_scored) < min(self.end, seq.prompt_len - 1)


@dataclass(slots=True)
class StepPlan:
    """Rows of a step; pages to copy and slots to fill before it runs."""

    rows: list[Scheduled]
    copies: list[tuple[int, int]] = field(default_factory=list)
    placed: list[Sequence] = field(default_factory=list)


@dataclass(slots=True)
class Progress:
    """What one step did for one sequence; `row` is its place among the rows that ran."""

    row: int
    seq: Sequence
    token: int | None
    finish_reason: FinishReason | None


class Scheduler:
    """Sequences in, plans out, results back in. Knows no arrays and no device."""

    def __init__(self, blocks: BlockManager, *, max_num_seqs: int, max_num_batched_tokens: int):
        self.blocks = blocks
        self.max_num_batched_tokens = max(max_num_batched_tokens, max_num_seqs)  # every decode fits in every step
        self.running: list[Sequence] = []  # by order
        self._waiting: list[tuple[tuple[int, int, int], Sequence]] = []  # a heap; finished ones are skipped lazily
        self._num_waiting = 0
        self._by_request: dict[str, list[Sequence]] = {}
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))
        self._placed: dict[Sequence, None] = {}  # got a slot that no plan has filled yet
        self._watermark = blocks.capacity // 100
        self.num_preemptions = 0
        self.prefix_queries = 0
        self.prefix_hits = 0

    # Coming and going

    @property
    def num_waiting(self) -> int:
        return self._num_waiting

    @property
    def has_work(self) -> bool:
        return bool(self._by_request)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._by_request

    def add(self, seq: Sequence) -> None:
        self._by_request.setdefault(seq.request.request_id, []).append(seq)
        self._wait(seq)

    def abort(self, request_id: str, index: int | None = None) -> None:
        """Drops one completion of a request, or all of it; what is unknown or finished is left alone."""
        for seq in list(self._by_request.get(request_id, ())):
            if index is None:
                seq.unforked = []
                self._finish(seq)
            elif index == seq.index:
                self._fork(seq, share=False)
                self._finish(seq)
            elif index in seq.unforked:
                seq.unforked.remove(index)

    def _wait(self, seq: Sequence) -> None:
        seq.status = Status.WAITING
        heapq.heappush(self._waiting, (seq.order, seq))
        self._num_waiting += 1

    def _place(self, seq: Sequence) -> None:
        seq.status = Status.RUNNING
        seq.slot = self._free_slots.pop()
        self._placed[seq] = None
        insort(self.running, seq, key=lambda s: s.order)

    def _displace(self, seq: Sequence) -> None:
        """Takes pages and slot from a running sequence."""
        self.running.remove(seq)
        self._placed.pop(seq, None)
        self._free_slots.append(seq.slot)
        self.blocks.free(seq.pages)
        seq.slot, seq.pages, seq.pages_sent, seq.num_registered = NO_SLOT, [], 0, 0

    def _finish(self, seq: Sequence) -> None:
        if seq.status is Status.RUNNING:
            self._displace(seq)
        elif seq.status is Status.WAITING:
            self._num_waiting -= 1  # its place in the heap goes when it is met
        seq.status = Status.FINISHED
        siblings = self._by_request[seq.request.request_id]
        siblings.remove(seq)
        if not siblings:
            del self._by_request[seq.request.request_id]

    def _preempt(self, seq: Sequence) -> None:
        self._displace(seq)
        seq.num_computed = 0
        self._wait(seq)
        self.num_preemptions += 1

    # Schedule

    def schedule(self) -> StepPlan | None:
        """The next step, or None when nothing can be computed now."""
        plan: dict[Sequence, Scheduled] = {}
        copies: dict[Sequence, list[tuple[int, int]]] = {}
        budget = self.max_num_batched_tokens
        preemptions = self.num_preemptions
        for decoding in (True, False):
            for seq in list(self.running):
                if seq.is_decoding is decoding and seq.status is Status.RUNNING and not (seq.exhausted and seq.pending):
                    budget += self._extend(seq, budget, plan, copies)
        if self.num_preemptions == preemptions:
            while budget > 0 and (newcomer := self._next_admissible()):
                self._admit(newcomer)
                budget += self._extend(newcomer, budget, plan, copies)
        if not plan:
            return None
        rows = list(plan.values())
        placed = [seq for seq in self._placed if seq in plan]
        for seq in placed:
            del self._placed[seq]
        for row in rows:
            row.seq.num_computed = row.end
            row.seq.pending += row.samples
        return StepPlan(rows, [pair for seq in plan for pair in copies.get(seq, ())], placed)

    def _extend(self, seq: Sequence, budget: int, plan: dict, copies: dict) -> int:
        """Plans the next tokens of a running sequence, preempting from the end until its pages are there; returns the
        change of the budget. `plan` and `copies` lose what is preempted."""
        count = min(seq.total_len - seq.num_computed, budget)
        if count <= 0:
            return 0
        gained = 0
        start, end = seq.num_computed, seq.num_computed + count
        first = start // self.blocks.page_size
        while True:
            missing = self.blocks.pages_for(end) - len(seq.pages)
            shared = [i for i in range(first, len(seq.pages)) if not self.blocks.is_writable(seq.pages[i])]
            if max(missing, 0) + len(shared) <= self.blocks.num_available:
                break
            victim = self.running[-1]
            if (dropped := plan.pop(victim, None)) is not None:
                gained += dropped.count
            copies.pop(victim, None)
            self._preempt(victim)
            if victim is seq:
                return gained
        for index in shared:
            copies.setdefault(seq, []).append(self.blocks.make_writable(seq.pages, index))
            seq.pages_sent = min(seq.pages_sent, index)
        seq.pages.extend(self.blocks.allocate(max(missing, 0)))
        plan[seq] = Scheduled(seq, start, count, samples=end == seq.total_len and seq.max_tokens > 0)
        return gained - count

    def _next_admissible(self) -> Sequence | None:
        """The first waiting sequence, if a slot and pages for all its known tokens are free."""
        while self._waiting and self._waiting[0][1].status is not Status.WAITING:
            heapq.heappop(self._waiting)
        if not self._waiting or not self._free_slots:
            return None
        seq = self._waiting[0][1]
        if seq.pending:  # preempted with a step in flight: its last token is not known yet
            return None
        cached = self._match(seq)
        available = self.blocks.num_available - self.blocks.count_evictable(cached)
        needed = self.blocks.pages_for(seq.total_len) - len(cached)
        return seq if needed + (self._watermark if self.running else 0) <= available else None

    def _match(self, seq: Sequence) -> list[int]:
        """Cached pages that the sequence can start from; at least its last token is always computed."""
        if not self.blocks.prefix_caching or self._scores_prompt(seq):
            return []
        full = (len(seq.tokens) - 1) // self.blocks.page_size
        return self.blocks.match(seq.page_hashes(full, self.blocks.page_size))

    @staticmethod
    def _scores_prompt(seq: Sequence) -> bool:
        return seq.params.prompt_logprobs is not None and seq.index == 0 and seq.num_scored < seq.prompt_len - 1

    def _admit(self, seq: Sequence) -> None:
        heapq.heappop(self._waiting)
        self._num_waiting -= 1
        cached = self._match(seq)
        self.blocks.share(cached)
        seq.pages = cached
        seq.num_registered = len(cached)
        seq.num_computed = len(cached) * self.blocks.page_size
        if seq.num_cached is None and seq.index == 0:
            seq.num_cached = seq.num_computed
            self.prefix_queries += seq.prompt_len
            self.prefix_hits += seq.num_computed
        self._place(seq)

    # Commit

    def commit(self, rows: list[Scheduled], tokens: list[int]) -> list[Progress]:
        """Takes in the tokens that a plan's rows sampled; returns what became of each sequence still wanted.

        `rows` are the plan's, in any order and possibly cut into consecutive pieces.
        """
        progress = []
        for index, row in enumerate(rows):
            seq = row.seq
            if seq.status is Status.FINISHED:
                continue
            token, reason = None, None
            if row.samples:
                token = tokens[index]
                seq.pending -= 1
                seq.tokens.append(token)
                reason = self._why_finished(seq, token)
            elif seq.max_tokens == 0 and row.end == seq.prompt_len:
                reason = "length"
            self._register(seq, row.end)
            if seq.unforked and seq.num_outputs == 1:
                self._fork(seq)
            if reason is not None:
                self._finish(seq)
            progress.append(Progress(index, seq, token, reason))
        return progress

    @staticmethod
    def _why_finished(seq: Sequence, token: int) -> FinishReason | None:
        if token in seq.stop_ids:
            return "stop"
        return "length" if seq.num_outputs >= seq.max_tokens else None

    def _register(self, seq: Sequence, computed: int) -> None:
        """Offers pages that are now full to the prefix cache."""
        full = computed // self.blocks.page_size
        stale = computed > seq.num_computed  # it was preempted since, and has other pages now, if any
        if not self.blocks.prefix_caching or full <= seq.num_registered or stale:
            return
        hashes = seq.page_hashes(full, self.blocks.page_size)
        for i in range(seq.num_registered, full):
            self.blocks.register(seq.pages[i], hashes[i])
        seq.num_registered = full

    def _fork(self, seq: Sequence, *, share: bool = True) -> None:
        """Starts the request's other completions, from the same pages where the prompt is computed (`share`)."""
        for index in seq.unforked:
            child = seq.fork(index, child_seed(seq.seed, index))
            self._by_request[seq.request.request_id].append(child)
            if share and seq.pages and self._free_slots:
                child.num_computed = seq.prompt_len - 1
                child.pages = seq.pages[: self.blocks.pages_for(child.num_computed)]
                child.num_registered = child.num_computed // self.blocks.page_size
                self.blocks.share(child.pages)
                self._place(child)
            else:
                self._wait(child)
        seq.unforked = []

    def check_integrity(self) -> None:
        """Asserts the invariants between sequences, slots and pages."""
        self.blocks.check_integrity([seq.pages for seq in self.running])
        slots = [seq.slot for seq in self.running] + self._free_slots
        assert len(set(slots)) == len(slots)
        assert self.running == sorted(self.running, key=lambda seq: seq.order)
        waiting = [seq for _, seq in self._waiting if seq.status is Status.WAITING]
        assert len(waiting) == self._num_waiting
        everyone = [seq for siblings in self._by_request.values() for seq in siblings]
        assert set(map(id, everyone)) == set(map(id, [*self.running, *waiting]))
        for seq in self.running:
            assert seq.status is Status.RUNNING
            assert seq.num_computed <= seq.total_len
            assert self.blocks.pages_for(seq.num_computed) <= len(seq.pages)
            assert 0 <= seq.pages_sent <= len(seq.pages)
        for seq in waiting:
            assert not seq.pages
            assert seq.slot == NO_SLOT
            assert seq.num_computed == 0
