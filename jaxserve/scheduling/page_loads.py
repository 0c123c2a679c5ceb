"""Waiting sequences whose pages are copied from a lower tier first (host side; `page_tiers` says what is there).

When a waiting sequence could begin, and more of its prefix is in a lower tier than on the devices, it is set aside, and
other sequences pass it. New pages are allocated for what is missing, and a *load* owns them and the cached pages before
them until all contents are there. The pages then are in the prefix cache, and the sequence is in the queue again, where
it finds them. A sequence is set aside at most once each time it waits, so that it cannot starve; and as many slots stay
free as there are loads, so that it finds one. Running sequences that need the pages take them: a load then ends early.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

from jaxserve.scheduling.block_manager import IN_LOWER_TIER, NULL_PAGE, BlockManager
from jaxserve.scheduling.page_tiers import block_of, page_key
from jaxserve.scheduling.sequence import Sequence
from jaxserve.scheduling.waiting import Waiting


@dataclass(eq=False)
class Load:
    """Pages that are copied to the devices for a waiting sequence.

    pages: all that it holds meanwhile: those of the sequence's prefix that are cached, in the order of its blocks, with
    the new ones in their places. missing: the new ones, and the keys of what is copied to them.
    """

    seq: Sequence
    pages: list[int]
    missing: list[tuple[int, bytes]]
    stopped: bool = False  # it was given up, and owns no pages any more


class PageLoads:
    """Begins and ends the loads of one scheduler."""

    def __init__(self, blocks: BlockManager):
        self._blocks = blocks
        self._tiers = blocks.tiers
        self.active: list[Load] = []  # in their order
        self.hits = 0  # tokens that were found in a lower tier

    def begin(self, seq: Sequence) -> bool:
        """Begins to load pages of a waiting sequence which fits, if that pays. The caller then sets it aside."""
        blocks = self._blocks
        tiers = self._tiers
        size = self._blocks.page_size
        if tiers is None or seq.was_set_aside or seq.scores_prompt or not tiers.may_load:
            return False
        full = (len(seq.tokens) - 1) // size
        pages = blocks.match_below(seq.root_hash, seq.page_hashes(seq.tokens, full, size))
        missing = [i for i, page in enumerate(pages) if page == IN_LOWER_TIER]
        held = [page for page in pages if page not in (IN_LOWER_TIER, NULL_PAGE)]
        places = [divmod(i, blocks.num_groups) for i in missing]
        keys = [page_key(seq.page_hash(seq.tokens, index, size), group) for index, group in places]
        gained = (len(pages) - len(seq.lookup.pages if seq.lookup else [])) // blocks.num_groups * size
        room = blocks.num_available - blocks.count_evictable(held)
        if not missing or len(missing) > room or not tiers.pay(gained, keys):
            return False
        blocks.share(held)
        new = blocks.allocate(len(missing))
        for i, page in zip(missing, new, strict=True):
            pages[i] = page
        self.active.append(Load(seq, pages, list(zip(new, keys, strict=True))))
        self.hits += gained
        seq.was_set_aside = True
        return True

    def finish(self, load: Load, failed: Container[int], waiting: Waiting) -> None:
        """All pages of a load have their contents, except those that `failed`. Lookups find them from now on."""
        for page, key in load.missing:
            if page not in failed:
                block_hash, group = block_of(key)
                block = [NULL_PAGE] * self._blocks.num_groups
                block[group] = page
                self._blocks.register(block, block_hash)
        self._end(load)
        waiting.release([load.seq])

    def drop(self, seq: Sequence) -> None:
        """A sequence that may be set aside has ended."""
        for load in [load for load in self.active if load.seq is seq]:
            self._end(load)

    def give_way(self, waiting: Waiting) -> bool:
        """Ends all loads, so that running sequences can have their pages. Returns whether there were any."""
        loads = self.active.copy()
        for load in loads:
            self._end(load)
        waiting.release(load.seq for load in loads)
        return bool(loads)

    def start_over(self) -> None:
        """Forgets all loads. Nobody owns any page."""
        for load in self.active:
            load.stopped = True
        self.active = []

    def _end(self, load: Load) -> None:
        self.active.remove(load)
        load.stopped = True
        self._blocks.free(load.pages)
