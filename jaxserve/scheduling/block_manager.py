"""Owners of the KV pages (host side): reference counts, the prefix cache, copy-on-write.

Every page but the null page is in exactly one of three states:

  free        no sequence refers to it, and its content is forgotten
  evictable   no sequence refers to it, but its content is in the prefix cache; reused after all free pages, least
              recently used first
  in use      one or more sequences refer to it

A model's layers form one or more groups (`execution.layer_groups`), and each group keeps the tokens of a sequence in
pages of its own. A *block* is `page_size` consecutive tokens of a sequence, so a block has a page in each group. A
sequence's list of pages holds the pages of its first block, one for each group in their order, then those of its second
block, and so on.

If the layers of a group see no further back than a window, sequences give up the group's pages before the window
(`first_needed`). The null page then takes their place in a sequence's list, and no kernel reads it.

A page that is shared, or in the prefix cache, is immutable. A sequence that needs to write to it gets a copy
(`make_writable`).

Hashes of generated text are computed only when a lookup reaches the text (`register_lazily`). Hundreds of sequences may
end at once, and clients continue few of them.
"""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np

from jaxserve.scheduling.page_tiers import PageTiers, page_key

# How far back the layers of a model see, and the pages that a sequence keeps for them.


class Chunk(int):
    """The number of tokens in a chunk. A token sees itself and the earlier tokens of its own chunk (Llama 4). The
    number is a multiple of the page size (`kv_cache.fitting_page_size`). The tokens of a sequence that one step
    computes lie in one chunk."""


# For each group of layers: the number of tokens that a token sees, itself included; or its Chunk; None: it sees all.
Windows = tuple[int | Chunk | None, ...]


def chunk_of(windows: Windows) -> Chunk | None:
    """The smallest chunk of these groups of layers; None: no group sees chunks."""
    return min((window for window in windows if isinstance(window, Chunk)), default=None)


def first_needed(computed: Any, window: int | Chunk | None, page_size: int) -> Any:
    """Index of the first block that a token at position `computed` (an int or int32 [n]) or later can still see."""
    if window is None:
        return computed * 0
    if isinstance(window, Chunk):
        return computed // window * (window // page_size)
    return np.maximum(computed - window + 1, 0) // page_size


def most_pages(tokens: int, page_size: int, windows: Windows, step: int) -> list[int]:
    """The most pages that a sequence of `tokens` tokens holds at a time, for each group: pages for the window before a
    step, and for the step's own tokens. `step` is the most tokens that a step computes."""
    blocks = -(-tokens // page_size)
    return [blocks if window is None else min(blocks, -(-(window - 1 + step) // page_size) + 1) for window in windows]


NULL_PAGE = 0  # has no owner; padding writes to it, and nothing reads it
IN_LOWER_TIER = -1  # stands for a page whose content is only in a lower tier
HASH_BYTES = 32


def root_hash(salt: str | None, adapter: str | None = None) -> bytes:
    """Start of a hash chain. Chains with different salts or adapters (digests of their contents) never meet."""
    digest = hashlib.sha256()
    for field in (salt, adapter):
        data = b"" if field is None else b"\1" + field.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.digest()


def page_hash(parent: bytes, tokens: Sequence[int] | np.ndarray) -> bytes:
    """Hash of a full page: sha256 of its parent's hash and its tokens, so that it identifies the whole prefix."""
    return hashlib.sha256(parent + np.asarray(tokens, np.int32).tobytes()).digest()


def hash_pages(tokens: Sequence[int], salt: str | None, page_size: int, adapter: str | None = None) -> bytes:
    """Hashes of all full pages of a prompt, concatenated, HASH_BYTES each."""
    array = np.asarray(tokens, np.int32)
    parent = root_hash(salt, adapter)
    hashes = []
    for end in range(page_size, len(array) + 1, page_size):
        parent = page_hash(parent, array[end - page_size : end])
        hashes.append(parent)
    return b"".join(hashes)


@dataclass(eq=False)
class Tail:
    """Blocks in the prefix cache without hashes yet. They follow the block with the hash `parent`."""

    parent: bytes
    tokens: np.ndarray  # int32, the tokens of the blocks
    pages: deque[int]  # the pages of the blocks; the null page if a group has none
    num_kept: int  # how many of `pages` the tail still has; the others were evicted or belong to another tail


class BlockManager:
    """Allocates the pages 1 .. num_pages - 1; page 0 is the null page. `first` is added to these numbers, but not to 0.

    Attributes:
      windows: how far back each group of layers sees.
      states: the snapshots of a model with recurrent layers, whose sequences start only from cached pages that have
        one; None for other models.
      tiers: learns which pages are evicted, and keeps their contents; None: they are lost.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        *,
        prefix_caching: bool = True,
        windows: Windows = (None,),
        states: StateSnapshots | None = None,
        tiers: PageTiers | None = None,
        first: int = 0,
    ):
        self.num_pages = num_pages
        self._own = range(first + 1, first + num_pages)
        self.page_size = page_size
        self.windows = windows
        self.num_groups = len(windows)
        self.prefix_caching = prefix_caching
        self.states = states if prefix_caching else None
        self.tiers = tiers if prefix_caching else None
        self._refs, self._free = self._unowned()
        self._evictable: OrderedDict[int, None] = OrderedDict()  # oldest first
        self._hash_of: dict[int, bytes | Tail] = {}
        self._pages_of: dict[bytes, list[int]] = {}  # block's hash -> pages; null pages if not cached
        self._tails: dict[bytes, dict[Tail, None]] = {}  # hash of the parent -> tails
        self.generation = 0  # incremented when a lookup may find a longer prefix or need fewer pages
        self.losses = 0  # incremented when a lookup may find a shorter prefix

    @property
    def capacity(self) -> int:
        return self.num_pages - 1

    @property
    def num_available(self) -> int:
        """Pages that `allocate` could hand out now."""
        return len(self._free) + len(self._evictable)

    @property
    def num_used(self) -> int:
        return self.capacity - self.num_available

    @property
    def num_cached(self) -> int:
        """Evictable pages."""
        return len(self._evictable)

    def is_cached(self, page: int) -> bool:
        """Whether the page is evictable."""
        return page in self._evictable

    @overload
    def pages_for(self, tokens: int) -> int: ...
    @overload
    def pages_for(self, tokens: np.ndarray) -> np.ndarray: ...
    def pages_for(self, tokens: Any) -> Any:
        """Pages of all groups that hold this number of tokens."""
        return -(-tokens // self.page_size) * self.num_groups

    def needed_pages(self, tokens: int, cached: Sequence[int], step: int) -> int:
        """Pages that must be available for a sequence of `tokens` tokens that starts from the `cached` pages, if a step
        computes at most `step` tokens. A sequence gives up pages before a window, so it needs at most as many as it
        holds at a time.
        """
        new = (self.pages_for(tokens) - len(cached)) // self.num_groups
        most = most_pages(tokens, self.page_size, self.windows, step)
        evictable = [self.count_evictable(cached[group :: self.num_groups]) for group in range(self.num_groups)]
        return sum(min(new + cost, pages) for cost, pages in zip(evictable, most, strict=True))

    def allocate(self, count: int) -> list[int]:
        """Hands out `count` pages to one owner. The caller has checked `num_available`."""
        assert count <= self.num_available, f"{count} pages asked for, {self.num_available} available"
        pages = []
        for _ in range(count):
            page = self._free.pop() if self._free else self._evict()
            self._refs[page] = 1
            pages.append(page)
        return pages

    def _evict(self) -> int:
        page = next(iter(self._evictable))
        if self.tiers is not None:
            if (lower := self.key_of(page)) is None:
                return self._free.pop()
            self.tiers.evicted(page, lower)
        del self._evictable[page]
        key = self._hash_of.pop(page)
        if isinstance(key, Tail):
            key.num_kept -= 1
            if not key.num_kept:
                self._remove(key)
        else:
            self._forget(page, key)
        return page

    def cached_pages(self) -> list[int]:
        """The evictable pages, the next to be evicted first."""
        return list(self._evictable)

    def key_of(self, page: int) -> bytes | None:
        """The key of a page that was evictable (see `page_tiers`); None if it is not any more. Hashes what has no hash
        yet, which frees a page if another one has its content."""
        while page in self._evictable and isinstance(key := self._hash_of[page], Tail):
            self._hash_tails(key.parent)
        if page not in self._evictable:
            return None
        key = self._hash_of[page]
        assert isinstance(key, bytes)
        return page_key(key, self._pages_of[key].index(page))

    def page_of(self, parent: bytes, block_hash: bytes, group: int) -> int | None:
        """The cached page of a group for the block with this hash, which follows `parent`."""
        if block_hash not in self._pages_of and parent in self._tails:
            self._hash_tails(parent)
        return self._pages_of.get(block_hash, [NULL_PAGE] * self.num_groups)[group] or None

    def _forget(self, page: int, key: bytes) -> None:
        """Removes a page from the prefix cache's block with the hash `key`."""
        block = self._pages_of[key]
        block[block.index(page)] = NULL_PAGE
        self.losses += 1
        if not any(block):
            del self._pages_of[key]

    def share(self, pages: Iterable[int], owners: int = 1) -> None:
        """Adds owners to pages that are in use or evictable."""
        for page in filter(None, pages):
            if self._refs[page] == 0:
                del self._evictable[page]
                self.generation += 1
            self._refs[page] += owners

    def free(self, pages: Sequence[int]) -> None:
        """Removes one owner of each page. The last pages are evicted first, because prefixes are more often shared."""
        refs = self._refs
        hash_of = self._hash_of
        evictable = self._evictable
        free = self._free
        for page in filter(None, reversed(pages)):  # null pages stand for pages that were given up
            owners = refs[page] = refs[page] - 1
            if owners == 0:
                if page in hash_of:
                    evictable[page] = None
                else:
                    free.append(page)
            else:
                assert owners > 0, f"page {page} freed twice"

    def is_writable(self, page: int) -> bool:
        return self._refs[page] == 1 and page not in self._hash_of

    def make_writable(self, pages: list[int], index: int) -> tuple[int, int]:
        """Replaces pages[index], which its owner may not write to, by a new page; returns (old, new) for the copy."""
        old = pages[index]
        assert not self.is_writable(old)
        (new,) = self.allocate(1)
        pages[index] = new
        self.free([old])
        return old, new

    def match(self, root: bytes, hashes: Iterable[bytes]) -> list[int]:
        """Cached pages of the longest prefix whose blocks have these hashes, a chain that starts from `root`. The
        caller must `share` the pages at once.

        In groups with a window, pages before the window need not be cached; the null page takes their place. If some
        group has no window, the iterator `hashes` is read no further than needed.
        """
        return self._usable(*self._cached_blocks(root, hashes))

    def match_below(self, root: bytes, hashes: Iterable[bytes]) -> list[int]:
        """The same with contents that are in a lower tier: `IN_LOWER_TIER` takes the place of the page of each."""
        return self._usable(*self._cached_blocks(root, hashes, self.tiers))

    def num_cached_blocks(self, root: bytes, hashes: Iterable[bytes]) -> int:
        """How many leading blocks of this chain are cached, whether or not a sequence can start from them."""
        return len(self._cached_blocks(root, hashes)[0])

    def _cached_blocks(
        self, root: bytes, hashes: Iterable[bytes], tiers: PageTiers | None = None
    ) -> tuple[list[bytes], list[int]]:
        """The leading blocks of this chain that are cached in all groups without a window: their hashes and their
        pages. Contents in `tiers` count as cached. A prompt has thousands of blocks, so a block must take little."""
        missing = [NULL_PAGE] * self.num_groups
        pages_of = self._pages_of
        keys = []
        pages = []
        parent = root
        for key in hashes:
            if key not in pages_of and parent in self._tails:
                self._hash_tails(parent)
            block = pages_of.get(key, missing)
            if NULL_PAGE in block:
                if tiers is not None:
                    below = (
                        IN_LOWER_TIER if page_key(key, group) in tiers else NULL_PAGE
                        for group in range(self.num_groups)
                    )
                    block = [page or lower for page, lower in zip(block, below, strict=True)]
                if any(page == NULL_PAGE and window is None for page, window in zip(block, self.windows, strict=True)):
                    break
            keys.append(key)
            pages += block
            parent = key
        return keys, pages

    def _usable(self, keys: list[bytes], pages: list[int]) -> list[int]:
        """The pages of the longest run of first blocks that a sequence can start from. It can start if in each group
        all pages within the window are cached, and if recurrent layers have a snapshot. The null page takes the place
        of pages before the window."""
        count = np.arange(1, len(keys) + 1)
        groups = self.num_groups
        states = self.states
        usable = count > 0 if states is None else np.fromiter((key in states for key in keys), bool, len(keys))
        for group, window in enumerate(self.windows):
            if window is not None:
                is_missing = np.asarray(pages[group::groups]) == NULL_PAGE
                last_missing = np.maximum.accumulate(np.where(is_missing, count - 1, -1))
                usable &= first_needed(count * self.page_size, window, self.page_size) > last_missing
        best = int(count[usable].max(initial=0))
        del pages[best * groups :]
        for group, first in enumerate(self.first_blocks(best)):
            pages[group : first * groups : groups] = [NULL_PAGE] * first
        return pages

    def first_blocks(self, count: int) -> list[int]:
        """For each group, the first block that the token after `count` full blocks still sees."""
        return [int(first_needed(count * self.page_size, window, self.page_size)) for window in self.windows]

    def count_evictable(self, pages: Iterable[int]) -> int:
        """How many of these pages are evictable."""
        return sum(self._refs[page] == 0 for page in filter(None, pages))

    def register(self, block: Sequence[int], key: bytes) -> None:
        """Adds the pages of a full block, which are in use, to the prefix cache. Null pages stand for pages that were
        given up. If a group already has a page with this hash, lookups keep finding that page."""
        if not self.prefix_caching:
            return
        cached = self._pages_of.get(key) or [NULL_PAGE] * self.num_groups
        new = [
            (group, page)
            for group, page in enumerate(block)
            if page != NULL_PAGE and cached[group] == NULL_PAGE and page not in self._hash_of
        ]
        for group, page in new:
            cached[group] = page
            self._hash_of[page] = key
        if new:
            self._pages_of[key] = cached
            self.generation += 1

    def register_lazily(self, pages: Sequence[int], parent: bytes, tokens: np.ndarray) -> None:
        """Adds the pages of full blocks, which are in use, to the prefix cache without hashes. The blocks hold `tokens`
        (int32 [blocks * page_size]) and follow the block with the hash `parent`."""
        new = [page for page in pages if page != NULL_PAGE and page not in self._hash_of]
        if self.prefix_caching and new:
            tail = Tail(parent, tokens, deque(pages), len(new))
            self._hash_of.update(dict.fromkeys(new, tail))
            self._tails.setdefault(parent, {})[tail] = None
            self.generation += 1

    def _hash_tails(self, parent: bytes) -> None:
        """Hashes the first block of every tail with this parent. The tail's other blocks then follow that block."""
        for tail in self._tails.pop(parent):
            key = page_hash(parent, tail.tokens[: self.page_size])
            block = [tail.pages.popleft() for _ in range(self.num_groups)]
            block = [page if self._hash_of.get(page) is tail else NULL_PAGE for page in block]
            kept = [page for page in block if page != NULL_PAGE]
            tail.num_kept -= len(kept)
            for page in kept:
                del self._hash_of[page]
            self.register(block, key)
            for page in kept:
                if page in self._evictable and page not in self._hash_of:  # another page has its content
                    del self._evictable[page]
                    self._free.append(page)
            if tail.num_kept:
                tail.parent = key
                tail.tokens = tail.tokens[self.page_size :]
                self._tails.setdefault(key, {})[tail] = None

    def _remove(self, tail: Tail) -> None:
        siblings = self._tails[tail.parent]
        del siblings[tail]
        if not siblings:
            del self._tails[tail.parent]

    def reset_prefix_cache(self) -> None:
        """Forgets all cached content. Pages in use keep their owners."""
        self.losses += 1
        self._free.extend(self._evictable)
        for forgotten in (self._evictable, self._hash_of, self._pages_of, self._tails):
            forgotten.clear()
        if self.states is not None:
            self.states.clear()

    def clear(self) -> None:
        """Forgets all owners and all cached content. Lower tiers keep theirs."""
        self.reset_prefix_cache()
        if self.tiers is not None:
            self.tiers.forget_leaving()
        self._refs, self._free = self._unowned()

    def _unowned(self) -> tuple[list[int], list[int]]:
        """(reference counts when no page has an owner, a stack of all pages as free ones with the lowest on top)."""
        return [0] * self._own.stop, list(reversed(self._own))

    def check_integrity(self, owners: Iterable[Sequence[int]] = ()) -> None:
        """Asserts the invariants; `owners` are the page lists of all sequences."""
        owned = Counter(page for pages in owners for page in pages if page != NULL_PAGE)
        in_use = {page for page, owners in enumerate(self._refs) if owners}
        free = set(self._free)
        evictable = set(self._evictable)
        assert len(free) == len(self._free), "a page is free twice"
        assert not free & (evictable | in_use)
        assert not evictable & in_use
        assert free | evictable | in_use == set(self._own), "a page is lost, or the null page is owned"
        assert {page: self._refs[page] for page in in_use} == dict(owned), "reference counts differ from the owners"
        assert evictable <= set(self._hash_of), "an evictable page has no hash"
        assert not free & set(self._hash_of), "a free page is still in the prefix cache"
        for check in [part.check_integrity for part in (self.states, self.tiers) if part is not None]:
            check()
        hashed = {page: key for page, key in self._hash_of.items() if not isinstance(key, Tail)}
        cached = [(page, key) for key, block in self._pages_of.items() for page in block if page != NULL_PAGE]
        assert len(cached) == len(hashed), "a page is cached twice"
        assert dict(cached) == hashed
        assert all(any(block) and len(block) == self.num_groups for block in self._pages_of.values())
        kept = Counter(key for key in self._hash_of.values() if isinstance(key, Tail))
        tails = [tail for siblings in self._tails.values() for tail in siblings]
        assert all(tail.parent == parent for parent, siblings in self._tails.items() for tail in siblings)
        assert kept == {tail: tail.num_kept for tail in tails}, "a tail is lost, or kept for nothing"


# Snapshots of recurrent states at the ends of cached prefixes, and the places where they lie.
#
# A recurrent layer keeps one state per sequence: the state after its last computed token. So a sequence can start
# from cached pages only if a copy of the state at the end of these pages exists, called a snapshot. The devices have
# a fixed number of places for snapshots, each as large as the state in a slot.


class StateSnapshots:
    """Hands out `count` places, from `first` on. The least recently used snapshot is given up for a new one.

    `least`: tokens that a snapshot must save. Making one cuts a prompt into two parts, which separate steps compute.
    `interval`: tokens between the snapshots of a prompt that are made in case that others share its beginning; 0: none
    are. It is a multiple of the page size.
    """

    def __init__(self, first: int, count: int, least: int = 64, interval: int = 0):
        self.least = least
        self.interval = interval
        self._places = range(first, first + count)
        self._place_of: OrderedDict[bytes, int] = OrderedDict()  # hash of a prefix's last block -> place; oldest first

    def __contains__(self, key: bytes) -> bool:
        return key in self._place_of

    def at_intervals(self, end: int) -> Iterator[int]:
        """The numbers of tokens, below `end`, at which snapshots are made in case that others share a prompt's
        beginning. What many prompts share is at their beginnings. So when half of the places are taken by one prompt,
        its intervals become twice as long, and again each time that its length doubles."""
        dense = self.interval * max(len(self._places) // 2, 1)
        at = self.interval
        while 0 < at < end:
            yield at
            at += self.interval << (at // dense).bit_length()

    def use(self, key: bytes) -> int:
        """The place of the snapshot of the prefix whose last block has the hash `key`. It must exist."""
        self._place_of.move_to_end(key)
        return self._place_of[key]

    def add(self, key: bytes) -> int | None:
        """A place for a snapshot of this prefix, to which the caller copies the state; None if there is one already."""
        if key in self._place_of:
            self._place_of.move_to_end(key)
            return None
        taken = len(self._place_of)
        place = self._places[taken] if taken < len(self._places) else self._place_of.popitem(last=False)[1]
        self._place_of[key] = place
        return place

    def clear(self) -> None:
        """Forgets all snapshots."""
        self._place_of.clear()

    def check_integrity(self) -> None:
        """Asserts that no two prefixes have the same place."""
        assert sorted(self._place_of.values()) == sorted(self._places[: len(self._place_of)])
