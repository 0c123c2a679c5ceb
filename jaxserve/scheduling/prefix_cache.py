"""How sequences share pages (host side): cached pages that they start from, pages that they add to the prefix cache,
and copies of shared pages that they are about to write to."""

from __future__ import annotations

import numpy as np

from jaxserve.scheduling.block_manager import NULL_PAGE, BlockManager, StateSnapshots, first_needed
from jaxserve.scheduling.running_table import RunningTable
from jaxserve.scheduling.sequence import Lookup, Sequence
from jaxserve.scheduling.step_plan import Rows


def uncached(seq: Sequence, blocks: BlockManager) -> int:
    """How many tokens of a waiting sequence are not in the cached pages that it was found to fit with."""
    cached = len(seq.lookup.pages) if seq.lookup else 0
    return len(seq.tokens) - cached // blocks.num_groups * blocks.page_size


class Prefixes:
    """Looks up waiting sequences, and offers pages of running ones to the cache."""

    def __init__(self, blocks: BlockManager):
        self._blocks = blocks

    def fits(self, seq: Sequence, room: int, step: int) -> bool:
        """Whether `room` pages are enough for all tokens of a waiting sequence, if a step computes at most `step` of
        them. If so, `seq.lookup` has its cached pages.

        The scheduler asks in every step about a sequence that does not fit. So the sequence is looked up again only
        when it may need fewer pages than before, or when enough pages are available and some were evicted.
        """
        blocks = self._blocks
        last = seq.lookup
        gains = blocks.generation, len(seq.tokens)
        is_latest = last is not None and last.gains == gains
        if last and is_latest and last.needed > room:
            return False
        if last and is_latest and last.losses == blocks.losses:
            cached = last.pages
        elif blocks.prefix_caching and not seq.scores_prompt:  # never its last token, which is always computed
            full = (len(seq.tokens) - 1) // blocks.page_size
            cached = blocks.match(seq.root_hash, seq.page_hashes(seq.tokens, full, blocks.page_size))
        else:
            cached = []
        needed = blocks.needed_pages(len(seq.tokens), cached, step)
        seq.lookups[seq.group] = Lookup(cached, needed, gains, blocks.losses)
        return needed <= room

    def begin_state(self, running: RunningTable, seq: Sequence, computed: int) -> None:
        """Prepares the recurrent state of a new request that starts with `computed` cached tokens. The snapshot at the
        end of these tokens is copied to its slot, and its steps will end where a new snapshot is wanted."""
        states = self._blocks.states
        size = self._blocks.page_size
        if states is None:
            return
        if computed:
            place = states.use(seq.page_hash(seq.tokens, computed // size - 1, size))
            running.restored.append((place, seq.slot))
        seq.state_stops = self._state_stops(seq, computed, states)
        running.next_state_stop(seq)

    def _state_stops(self, seq: Sequence, computed: int, states: StateSnapshots) -> list[int]:
        """The numbers of tokens after which a snapshot is wanted, ascending: where the sequence departs from an earlier
        one, at the end of its last full block, and in intervals before. Each saves at least `states.least` tokens more
        than the one before."""
        blocks = self._blocks
        size = self._blocks.page_size
        full = (len(seq.tokens) - 1) // size
        shared = blocks.num_cached_blocks(seq.root_hash, seq.page_hashes(seq.tokens, full, size))
        stops = [computed]
        for end in (shared * size, full * size):
            if end - stops[-1] >= states.least:
                stops.append(end)
        between = [
            at
            for at in states.at_intervals(stops[-1])
            if at > computed and all(abs(at - stop) >= states.least for stop in stops)
        ]
        return sorted(stops[1:] + between)

    def keep_states(self, running: RunningTable, rows: Rows) -> list[tuple[int, int]]:
        """Gives places to new snapshots, for rows of a step that end where one is wanted. Returns the copies to make
        after the step, as (slot, place). Later lookups find these snapshots."""
        states = self._blocks.states
        assert states is not None
        size = self._blocks.page_size
        copies = []
        for i in np.flatnonzero(rows.end == running.state_stop[rows.slot]).tolist():
            seq = rows.seqs[i]
            slot = int(rows.slot[i])
            place = states.add(seq.page_hash(running.tokens[slot], int(rows.end[i]) // size - 1, size))
            if place is not None:
                copies.append((slot, place))
            running.next_state_stop(seq)
        self._blocks.generation += bool(copies)
        return copies

    def register(self, running: RunningTable, seq: Sequence, computed: int, *, lazily: bool = False) -> None:
        """Offers the full pages among the first `computed` tokens of a running sequence to the prefix cache. With
        `lazily`, their hashes are computed when a lookup reaches them."""
        slot = seq.slot
        size = self._blocks.page_size
        first = int(running.num_registered[slot])
        full = computed // size
        if not self._blocks.prefix_caching or full <= first:
            return
        groups = self._blocks.num_groups
        tokens = running.tokens[slot]
        pages = seq.pages[first * groups : full * groups]
        if lazily:
            before = seq.page_hash(tokens, first - 1, size)
            self._blocks.register_lazily(pages, before, tokens[first * size : full * size].copy())
        else:
            for i in range(first, full):
                block = seq.pages[i * groups : (i + 1) * groups]
                self._blocks.register(block, seq.page_hash(tokens, i, size))
        running.num_registered[slot] = full

    def release_unseen(self, running: RunningTable) -> None:
        """Gives up the pages that none of the tokens still to be computed sees. The prefix cache may keep them.

        A step in flight may still read such a page. The devices run that step before any step that writes to the page
        for its next owner. Siblings that will be forked begin with the last token of the prompt, so the pages that this
        token sees stay.
        """
        for group, window in enumerate(self._blocks.windows):
            if window is not None:
                self._release_behind(window, group, running)

    def _release_behind(self, window: int, group: int, running: RunningTable) -> None:
        blocks = self._blocks
        batch = running.batch
        released = running.num_released[:, group]
        computed = running.computed[batch.slot]
        if running.proposes:  # a step in flight may keep none of the proposals that it checks
            known = running.known[batch.slot]
            checked = (running.proposed[batch.slot] > 0) & (running.total[batch.slot] > known)
            computed = np.where(checked, known - 1, computed)
        first = first_needed(computed, window, blocks.page_size)
        for i in np.flatnonzero(first > released[batch.slot]).tolist():
            seq = batch.seqs[i]
            slot = batch.seqs[i].slot
            end = int(first[i])
            if seq.unforked:
                end = min(end, int(first_needed(seq.prompt_len - 1, window, blocks.page_size)))
            if end <= released[slot]:
                continue
            self.register(running, seq, min(end * blocks.page_size, int(running.known[slot])))
            behind = slice(int(released[slot]) * blocks.num_groups + group, end * blocks.num_groups, blocks.num_groups)
            blocks.free(seq.pages[behind])
            seq.pages[behind] = [NULL_PAGE] * (end - int(released[slot]))
            released[slot] = end


# Pages that sequences share: those that the next step would write to are copied first.


def shared_pages(rows: Rows, running: RunningTable, blocks: BlockManager) -> list[tuple[Sequence, int]]:
    """Pages that rows would write to and that have other owners or are cached: (sequence, index in its pages)."""
    shared = []
    groups = blocks.num_groups
    for seq in running.maybe_shared.intersection(rows.seqs):
        block = int(running.computed[seq.slot]) // blocks.page_size
        for index in range(block * groups, min((block + 1) * groups, len(seq.pages))):
            if not blocks.is_writable(seq.pages[index]):
                shared.append((seq, index))
    return sorted(shared, key=lambda pair: pair[0].order)


def unshare(
    rows: Rows, shared: list[tuple[Sequence, int]], running: RunningTable, blocks: BlockManager
) -> list[tuple[int, int]]:
    """Replaces shared pages by copies; returns the copies to make, (source, target) each."""
    copies = []
    for seq, index in shared:
        if not blocks.is_writable(seq.pages[index]):  # the last owner keeps the page
            copies.append(blocks.make_writable(seq.pages, index))
            running.show_pages(seq, index)
    if running.maybe_shared:
        running.maybe_shared.difference_update(rows.seqs)
    return copies


def common_prefix(one: list[int], other: list[int]) -> int:
    """How many of the first pages of two lists are equal. A binary search over slices takes microseconds for thousands
    of pages."""
    same = 0
    most = min(len(one), len(other))
    while same < most:
        middle = (same + most + 1) // 2
        if one[same:middle] == other[same:middle]:
            same = middle
        else:
            most = middle - 1
    return same
