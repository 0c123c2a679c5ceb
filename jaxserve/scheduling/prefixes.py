"""The prefix cache as sequences use it (host side): what of a sequence is there already, and what it leaves there."""

from __future__ import annotations

from jaxserve.scheduling.block_manager import BlockManager
from jaxserve.scheduling.running_table import RunningTable
from jaxserve.scheduling.sequence import Lookup, Sequence


class Prefixes:
    """Looks up those that wait, and offers the pages of those that run."""

    def __init__(self, blocks: BlockManager):
        self._blocks = blocks

    def fits(self, seq: Sequence, room: int) -> bool:
        """Whether `room` pages are enough for all known tokens of a sequence that waits; then `seq.lookup` has those of
        them that are cached. One that does not fit is asked about in every step, so it is looked up anew only when it
        may need fewer pages than before, or when enough are free."""
        blocks, last = self._blocks, seq.lookup
        if last and last.needed > room and (last.generation, last.num_tokens) == (blocks.generation, len(seq.tokens)):
            return False
        cached = self._match(seq)
        needed = blocks.pages_for(len(seq.tokens)) - len(cached) + blocks.count_evictable(cached)
        seq.lookup = Lookup(cached, needed, len(seq.tokens), blocks.generation)
        return needed <= room

    def _match(self, seq: Sequence) -> list[int]:
        """Cached pages that the sequence can start from; at least its last token is always computed."""
        if not self._blocks.prefix_caching or seq.scores_prompt:
            return []
        full = (len(seq.tokens) - 1) // self._blocks.page_size
        return self._blocks.match(seq.root_hash, seq.page_hashes(seq.tokens, full, self._blocks.page_size))

    def register(self, running: RunningTable, seq: Sequence, computed: int, *, lazily: bool = False) -> None:
        """Offers a running sequence's pages, of which `computed` tokens are in the cache, to others. `lazily` leaves
        their hashes until somebody asks for what follows the pages before them."""
        slot, size = seq.slot, self._blocks.page_size
        first, full = int(running.num_registered[slot]), computed // size
        if not self._blocks.prefix_caching or full <= first:
            return
        tokens, pages = running.tokens[slot], seq.pages[first:full]
        if lazily:
            before = seq.page_hash(tokens, first - 1, size)
            self._blocks.register_lazily(pages, before, tokens[first * size : full * size].copy())
        else:
            for i, page in enumerate(pages, first):
                self._blocks.register(page, seq.page_hash(tokens, i, size))
        running.num_registered[slot] = full
