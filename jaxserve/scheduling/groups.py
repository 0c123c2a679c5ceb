"""Sequences of several groups of devices (data parallelism, host side): each group has slots and pages of its own.

One queue, one running table and one plan serve all groups, so that fairness, priorities and limits hold for all of
them together. A waiting sequence is given to a group when it can begin: to the group with the longest cached prefix of
it, unless that group runs many more sequences than others; else to the one that runs the fewest. It stays there until
it loses its slot. Slots and pages are numbered through all groups: those of the first group come first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NotRequired, TypedDict, Unpack

import numpy as np

from jaxserve.scheduling.block_manager import NULL_PAGE, BlockManager, Windows
from jaxserve.scheduling.prefix_cache import Prefixes, shared_pages, uncached, unshare
from jaxserve.scheduling.row_choice import AdmissionBudget, MicroBatches, choose_rows
from jaxserve.scheduling.running_table import RunningTable
from jaxserve.scheduling.scheduler import Scheduler
from jaxserve.scheduling.sequence import Sequence as Completion
from jaxserve.scheduling.step_plan import Rows

FURTHER = 8  # a cached prefix counts in a group that runs at most max_num_seqs / FURTHER sequences more than another


class GroupBlocks:
    """The pages of all groups, for what concerns single pages or all of them. `parts` are the groups' own, which hand
    pages out and find prefixes. Each has `num_pages` numbers, the first of which stands for its null page."""

    def __init__(
        self, groups: int, num_pages: int, page_size: int, *, prefix_caching: bool = True, windows: Windows = (None,)
    ):
        self.parts = [
            BlockManager(num_pages, page_size, prefix_caching=prefix_caching, windows=windows, first=i * num_pages)
            for i in range(groups)
        ]
        self._each = num_pages
        one = self.parts[0]
        self.num_pages = groups * num_pages
        self.page_size = page_size
        self.windows: Windows = one.windows
        self.num_groups = one.num_groups  # groups of layers
        self.prefix_caching = one.prefix_caching
        self.states = self.tiers = None

    def _of(self, pages: Iterable[int]) -> BlockManager:
        """The group that pages belong to, which all belong to the same."""
        return self.parts[next(filter(None, pages), NULL_PAGE) // self._each]

    @property
    def capacity(self) -> int:
        return sum(part.capacity for part in self.parts)

    @property
    def num_available(self) -> int:
        return sum(part.num_available for part in self.parts)

    @property
    def num_used(self) -> int:
        return sum(part.num_used for part in self.parts)

    @property
    def num_cached(self) -> int:
        return sum(part.num_cached for part in self.parts)

    def pages_for(self, tokens: Any) -> Any:
        return self.parts[0].pages_for(tokens)

    def is_cached(self, page: int) -> bool:
        return self._of([page]).is_cached(page)

    def is_writable(self, page: int) -> bool:
        return self._of([page]).is_writable(page)

    def make_writable(self, pages: list[int], index: int) -> tuple[int, int]:
        return self._of([pages[index]]).make_writable(pages, index)

    def share(self, pages: Sequence[int], owners: int = 1) -> None:
        self._of(pages).share(pages, owners)

    def free(self, pages: Sequence[int]) -> None:
        self._of(pages).free(pages)

    def register(self, block: Sequence[int], key: bytes) -> None:
        self._of(block).register(block, key)

    def register_lazily(self, pages: Sequence[int], parent: bytes, tokens: np.ndarray) -> None:
        self._of(pages).register_lazily(pages, parent, tokens)

    def reset_prefix_cache(self) -> None:
        for part in self.parts:
            part.reset_prefix_cache()

    def clear(self) -> None:
        for part in self.parts:
            part.clear()

    def check_integrity(self, owners: Iterable[Sequence[int]] = ()) -> None:
        held = [list(pages) for pages in owners]
        for part in self.parts:
            part.check_integrity([pages for pages in held if self._of(pages) is part])


class SchedulerSizes(TypedDict):
    """Settings of a `Scheduler` that one for several groups has for each of them: what steps may hold, and how prompts
    share them with decodes."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    prefill_chunk: NotRequired[int | None]
    prefill_bursts: NotRequired[bool]
    prompts_first: NotRequired[bool]
    penalty_rows: int
    stages: NotRequired[int]


class GroupScheduler(Scheduler):
    """A `Scheduler` for several groups. `max_num_seqs`, `max_num_batched_tokens` and `penalty_rows` are those of
    each."""

    blocks: Any  # GroupBlocks

    def __init__(self, blocks: GroupBlocks, **sizes: Unpack[SchedulerSizes]):
        super().__init__(blocks, **sizes)  # type: ignore[arg-type]
        groups = len(blocks.parts)
        max_num_seqs = sizes["max_num_seqs"]
        max_model_len = sizes["max_model_len"]
        penalty_rows = sizes["penalty_rows"]
        windows = blocks.windows
        self.running = RunningTable(
            groups * max_num_seqs,
            blocks.page_size,
            max_model_len,
            groups * penalty_rows,
            windows,
            groups,
        )
        self.turns = MicroBatches(self.turns.stages, groups * max_num_seqs, groups)
        self._own_prefixes = [Prefixes(part) for part in blocks.parts]
        self._further = max(1, max_num_seqs // FURTHER)

    def _pages_of(self, group: int) -> BlockManager:
        return self.blocks.parts[group]

    def _rows_with_pages(self, tokens_per_call: int) -> tuple[Rows, list[tuple[int, int]]]:
        """As in `Scheduler`. A group that lacks pages preempts its own last sequences."""
        running = self.running
        parts = self.blocks.parts
        while True:
            rows = choose_rows(running, tokens_per_call, self.budget, len(self.waiting), self.turns)
            growing, missing = running.growth(rows)
            shared = shared_pages(rows, running, self.blocks) if running.maybe_shared else []
            owner = running.group_of(rows.slot[growing])
            needed = np.bincount(owner, missing, len(parts)).astype(int)
            for seq, _ in shared:
                needed[seq.group] += 1
            short = [i for i, part in enumerate(parts) if needed[i] > part.num_available]
            if not short:
                break
            if len(rows) and rows.num_new.max() > 1:
                tokens_per_call = 1
                running.drop_proposals(rows.slot)
            else:
                for group in short:
                    self._preempt(running.last_of(group))
        copies = unshare(rows, shared, running, self.blocks)
        for group in np.unique(owner).tolist():
            some = owner == group
            index = growing[some]
            count = missing[some]
            pages = parts[group].allocate(int(count.sum()))
            running.add_pages([rows.seqs[i] for i in index.tolist()], rows.slot[index], count, pages)
        return rows, copies

    def _next_admissible(self, share: AdmissionBudget | None = None) -> Completion | None:
        """As in `Scheduler`, if some group has a slot, pages and tokens. The sequence's `group` then is the best of
        these. Others pass it if all groups that have a slot and tokens for it lack pages."""
        while self.waiting and not (seq := self.waiting.peek()).pending_tokens:
            group, lacks_pages = self._choose_group(seq, share)
            if group is not None:
                seq.group = group
                return seq
            if not lacks_pages or not self.waiting.pass_by():
                break
        return None

    def _choose_group(self, seq: Completion, share: AdmissionBudget | None) -> tuple[int | None, bool]:
        """The best group that has a slot, pages and, with `share`, tokens for a waiting sequence; and if there is none,
        whether a group lacks nothing but pages."""
        best: tuple[tuple[int, int], int] | None = None
        lacks_pages = False
        least = min(map(self.running.num_running, range(len(self.blocks.parts))))
        for group, part in enumerate(self.blocks.parts):
            seq.group, running = group, self.running.num_running(group)
            if (share is not None and share.room(seq, group) <= 0) or not self.running.num_places_for(seq):
                continue
            room = part.num_available - (part.capacity // 100 if running else 0)
            if not self._own_prefixes[group].fits(seq, room, self.budget.most):
                lacks_pages = True
                continue
            if share is not None and share.room(seq, group, uncached(seq, part)) <= 0:
                continue
            cached = len(seq.lookup.pages) if seq.lookup and running <= least + self._further else 0
            if best is None or (-cached, running) < best[0]:
                best = (-cached, running), group
        return None if best is None else best[1], lacks_pages
