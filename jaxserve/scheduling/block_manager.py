"""Owners of the KV pages (host side): reference counts, the prefix cache, copy-on-write.

Every page but the null page is in exactly one of three states:

  free        no sequence refers to it, and its content is forgotten
  evictable   no sequence refers to it, but its content is in the prefix cache; reused after all free pages, least
              recently used first
  in use      one or more sequences refer to it

Where no layer of the model sees further back than a window, sequences give up the pages behind it (`first_needed`).
The null page then stands in their place in a sequence's list of pages, and nobody looks at it.

A page that is shared, or in the prefix cache, is immutable. A sequence that needs to write to it gets a copy
(`make_writable`).

Hashes of generated text are computed when a lookup reaches it (`register_lazily`), because hundreds of sequences may
end at once, and few of them are continued.
"""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np

NULL_PAGE = 0  # without owner: padding tokens write to it, and nothing reads it
HASH_BYTES = 32


def root_hash(salt: str | None, adapter: str | None = None) -> bytes:
    """Start of a hash chain. Chains with different salts or adapters never meet."""
    digest = hashlib.sha256()
    for field in (salt, adapter):
        data = b"" if field is None else b"\1" + field.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.digest()


def page_hash(parent: bytes, tokens: Sequence[int] | np.ndarray) -> bytes:
    """Hash of a full page: sha256 of its parent's hash and its tokens, so that it identifies the whole prefix."""
    return hashlib.sha256(parent + np.asarray(tokens, np.int32).tobytes()).digest()


def hash_pages(tokens: Sequence[int], salt: str | None, page_size: int) -> bytes:
    """Hashes of all full pages of a prompt, concatenated, HASH_BYTES each."""
    array, parent, hashes = np.asarray(tokens, np.int32), root_hash(salt), []
    for end in range(page_size, len(array) + 1, page_size):
        parent = page_hash(parent, array[end - page_size : end])
        hashes.append(parent)
    return b"".join(hashes)


def most_pages(tokens: int, page_size: int, window: int | None, step: int) -> int:
    """Pages that a sequence of so many tokens holds at a time, at most: the window behind the tokens of a step, and
    these. `window`: see `BlockManager`; step: the most tokens that a step computes."""
    whole = -(-tokens // page_size)
    return whole if window is None else min(whole, -(-(window - 1 + step) // page_size) + 1)


def common_prefix(one: list[int], other: list[int]) -> int:
    """How many of the first pages are equal. A binary search over slices: microseconds for thousands of pages."""
    same, most = 0, min(len(one), len(other))
    while same < most:
        middle = (same + most + 1) // 2
        if one[same:middle] == other[same:middle]:
            same = middle
        else:
            most = middle - 1
    return same


@dataclass(eq=False)
class Tail:
    """Pages in the prefix cache without hashes yet. They follow the page with the hash `parent`."""

    parent: bytes
    tokens: np.ndarray  # int32, of `pages`
    pages: list[int]
    num_kept: int  # of `pages`; the others were evicted or belong to another tail


class BlockManager:
    """Allocates the pages 1 .. num_pages - 1; page 0 is the null page.

    `window`: how many tokens back any layer sees, a token itself included; None: some layer sees all.
    """

    def __init__(self, num_pages: int, page_size: int, *, prefix_caching: bool = True, window: int | None = None):
        self.num_pages = num_pages
        self.page_size = page_size
        self.window = window
        self.prefix_caching = prefix_caching
        self._refs, self._free = self._unowned()
        self._evictable: OrderedDict[int, None] = OrderedDict()  # oldest first
        self._hash_of: dict[int, bytes | Tail] = {}
        self._page_of: dict[bytes, int] = {}
        self._tails: dict[bytes, dict[Tail, None]] = {}  # by parent
        self.generation = 0  # incremented when a lookup may find a longer prefix or need fewer pages

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
        """Pages that hold this number of tokens."""
        return -(-tokens // self.page_size)

    @overload
    def first_needed(self, computed: int) -> int: ...
    @overload
    def first_needed(self, computed: np.ndarray) -> np.ndarray: ...
    def first_needed(self, computed: Any) -> Any:
        """Index of the first page that tokens from the position `computed` on can still see."""
        return computed * 0 if self.window is None else np.maximum(computed - self.window + 1, 0) // self.page_size

    def most_pages(self, tokens: int, step: int) -> int:
        """Pages that a sequence of so many tokens holds at a time, at most, if a step computes `step` of them."""
        return most_pages(tokens, self.page_size, self.window, step)

    def allocate(self, count: int) -> list[int]:
        """`count` pages for one owner. The caller has checked `num_available`."""
        assert count <= self.num_available, f"{count} pages asked for, {self.num_available} available"
        pages = []
        for _ in range(count):
            page = self._free.pop() if self._free else self._evict()
            self._refs[page] = 1
            pages.append(page)
        return pages

    def _evict(self) -> int:
        page, _ = self._evictable.popitem(last=False)
        key = self._hash_of.pop(page)
        if isinstance(key, Tail):
            key.num_kept -= 1
            if not key.num_kept:
                self._remove(key)
        else:
            del self._page_of[key]
        return page

    def share(self, pages: Iterable[int], owners: int = 1) -> None:
        """Adds owners to pages that are in use or evictable."""
        for page in filter(None, pages):
            if self._refs[page] == 0:
                del self._evictable[page]
                self.generation += 1
            self._refs[page] += owners

    def free(self, pages: Sequence[int]) -> None:
        """Removes one owner of each page. The last pages are evicted first, because prefixes are more often shared."""
        refs, hash_of, evictable, free = self._refs, self._hash_of, self._evictable, self._free
        for page in reversed(pages):
            if page == NULL_PAGE:
                break  # what lies before was given up
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
        """Cached pages of the longest prefix with these page hashes, a chain that starts from `root`. The caller must
        `share` the pages at once.

        Where there is a window, the pages before it need not be cached; the null page stands for them. Otherwise no
        more hashes are taken than needed.
        """
        pages, parent = [], root
        for key in hashes:
            if key not in self._page_of and parent in self._tails:
                self._hash_tails(parent)
            page = self._page_of.get(key, NULL_PAGE)
            if page == NULL_PAGE and self.window is None:
                break
            pages.append(page)
            parent = key
        return pages if self.window is None else self._usable(pages)

    def _usable(self, pages: list[int]) -> list[int]:
        """The most of the first pages of which those within the window are all cached; the null page for the others."""
        missing = -1  # index of the last page, of those up to `count`, that is not cached
        best = 0
        for count, page in enumerate(pages, 1):
            if page == NULL_PAGE:
                missing = count - 1
            if int(self.first_needed(count * self.page_size)) > missing:
                best = count
        first = int(self.first_needed(best * self.page_size))
        return [NULL_PAGE] * first + pages[first:best]

    def count_evictable(self, pages: Iterable[int]) -> int:
        """How many of these pages are evictable."""
        return sum(self._refs[page] == 0 for page in filter(None, pages))

    def register(self, page: int, key: bytes) -> None:
        """Adds a full page, in use, to the prefix cache. Lookups find the first page that was added with a hash."""
        if self.prefix_caching and key not in self._page_of and page not in self._hash_of:
            self._page_of[key] = page
            self._hash_of[page] = key
            self.generation += 1

    def register_lazily(self, pages: Sequence[int], parent: bytes, tokens: np.ndarray) -> None:
        """Adds full pages, in use, to the prefix cache without computing their hashes. They hold `tokens`, int32
        [pages * page_size], and follow the page with the hash `parent`."""
        new = [page for page in pages if page not in self._hash_of]
        if self.prefix_caching and new:
            tail = Tail(parent, tokens, list(pages), len(new))
            self._hash_of.update(dict.fromkeys(new, tail))
            self._tails.setdefault(parent, {})[tail] = None
            self.generation += 1

    def _hash_tails(self, parent: bytes) -> None:
        """Hashes the first page of every tail with this parent. The tail's other pages then follow that page."""
        for tail in self._tails.pop(parent):
            page, key = tail.pages.pop(0), page_hash(parent, tail.tokens[: self.page_size])
            if self._hash_of.get(page) is tail:
                tail.num_kept -= 1
                del self._hash_of[page]
                self.register(page, key)
                if page in self._evictable and page not in self._hash_of:  # another page has its content
                    del self._evictable[page]
                    self._free.append(page)
            if tail.num_kept:
                tail.parent, tail.tokens = key, tail.tokens[self.page_size :]
                self._tails.setdefault(key, {})[tail] = None

    def _remove(self, tail: Tail) -> None:
        siblings = self._tails[tail.parent]
        del siblings[tail]
        if not siblings:
            del self._tails[tail.parent]

    def reset_prefix_cache(self) -> None:
        """Forgets all cached content. Pages in use keep their owners."""
        self._free.extend(self._evictable)
        for forgotten in (self._evictable, self._hash_of, self._page_of, self._tails):
            forgotten.clear()

    def clear(self) -> None:
        """Forgets all owners and all cached content."""
        self.reset_prefix_cache()
        self._refs, self._free = self._unowned()

    def _unowned(self) -> tuple[list[int], list[int]]:
        """Reference counts without owners, and all pages as a stack of free ones, the lowest on top."""
        return [0] * self.num_pages, list(range(self.num_pages - 1, NULL_PAGE, -1))

    def check_integrity(self, owners: Iterable[Sequence[int]] = ()) -> None:
        """Asserts the invariants; `owners` are the page lists of all sequences."""
        owned = Counter(page for pages in owners for page in pages if page != NULL_PAGE)
        in_use = {page for page in range(self.num_pages) if self._refs[page]}
        free, evictable = set(self._free), set(self._evictable)
        assert len(free) == len(self._free), "a page is free twice"
        assert not free & evictable
        assert not free & in_use
        assert not evictable & in_use
        assert free | evictable | in_use == set(range(1, self.num_pages)), "a page is lost, or the null page is owned"
        assert {page: self._refs[page] for page in in_use} == dict(owned), "reference counts differ from the owners"
        assert evictable <= set(self._hash_of), "an evictable page has no hash"
        assert not free & set(self._hash_of), "a free page is still in the prefix cache"
        hashed = {key: page for page, key in self._hash_of.items() if not isinstance(key, Tail)}
        assert hashed == self._page_of
        kept = Counter(key for key in self._hash_of.values() if isinstance(key, Tail))
        tails = [tail for siblings in self._tails.values() for tail in siblings]
        assert all(tail.parent == parent for parent, siblings in self._tails.items() for tail in siblings)
        assert kept == {tail: tail.num_kept for tail in tails}, "a tail is lost, or kept for nothing"
