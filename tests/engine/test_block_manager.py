"""The block manager against a gold model that keeps everything in plain dicts and lists and searches them."""

import itertools
import sys
from collections import Counter
from dataclasses import dataclass, field
from random import Random

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jaxserve.scheduling.block_manager import BlockManager, Chunk, StateSnapshots, page_hash, root_hash
from jaxserve.scheduling.prefix_cache import common_prefix

PAGE = 2
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=9)  # two tokens only, so that prefixes meet often
SALTS = st.sampled_from([None, "a", "b"])


def hashes_of(salt: str | None, tokens: list[int]) -> list[bytes]:
    """Hashes of the full pages of `tokens`."""
    keys = []
    parent = root_hash(salt)
    for start in range(0, len(tokens) - PAGE + 1, PAGE):
        parent = page_hash(parent, tokens[start : start + PAGE])
        keys.append(parent)
    return keys


@dataclass
class Owner:
    salt: str | None
    tokens: list[int]
    pages: list[int] = field(default_factory=list)

    def prefix(self, index: int) -> tuple:
        """All that determines the content of pages[index]."""
        return (self.salt, *self.tokens[: (index + 1) * PAGE])


def found(blocks: BlockManager, salt: str | None, tokens: list[int]) -> list[int]:
    """Cached pages that a sequence with these tokens finds."""
    return blocks.match(root_hash(salt), iter(hashes_of(salt, tokens)))


class BlockManagerMachine(RuleBasedStateMachine):
    """Owners with tokens come, grow, fork and go. The gold model knows what every page holds and who last let it go."""

    @initialize(num_pages=st.integers(2, 12), prefix_caching=st.sampled_from([True, True, True, False]))
    def create(self, num_pages, prefix_caching):
        self.blocks = BlockManager(num_pages, PAGE, prefix_caching=prefix_caching)
        self.everything = set(range(1, num_pages))
        self.owners: list[Owner] = []
        self.content: dict[int, tuple] = {}  # page -> prefix that was written there last
        self.cached: dict[tuple, int] = {}  # prefix -> the page it is found at
        self.idle: list[int] = []  # cached and nobody's, in the order in which they were let go

    # The gold model

    def owned(self) -> set[int]:
        return {page for owner in self.owners for page in owner.pages}

    def expect_allocated(self, pages: list[int]) -> None:
        """Pages without content go first, then the cached ones, oldest first. Called before anyone owns them."""
        blank = self.everything - self.owned() - set(self.idle)
        count = min(len(pages), len(blank))
        assert set(pages[:count]) <= blank
        assert pages[count:] == self.idle[: len(pages) - count]
        assert len(set(pages)) == len(pages)
        for page in pages[count:]:
            self.idle.remove(page)
            del self.cached[self.content.pop(page)]

    def let_go(self, pages: list[int]) -> None:
        """Called after their owner dropped them."""
        for page in reversed(pages):
            if page not in self.owned() and page in self.cached.values():
                self.idle.append(page)

    def write(self, owner: Owner, first: int) -> None:
        """Fills the owner's pages from index `first` on, and offers the full ones to the cache."""
        keys = hashes_of(owner.salt, owner.tokens)
        for index in range(first, len(owner.pages)):
            page = owner.pages[index]
            assert self.blocks.is_writable(page), "a page that others can see would be overwritten"
            self.content[page] = owner.prefix(index)
            if index < len(keys):
                self.blocks.register([page], keys[index])
                if self.blocks.prefix_caching:
                    self.cached.setdefault(owner.prefix(index), page)

    def pick(self, data) -> Owner:
        return self.owners[data.draw(st.integers(0, len(self.owners) - 1), label="owner")]

    # Operations

    @rule(salt=SALTS, tokens=TOKENS)
    def start(self, salt, tokens):
        """A prompt: takes what is cached, allocates the rest, writes it."""
        owner = Owner(salt, tokens)
        pages = found(self.blocks, salt, tokens)
        prefixes = [owner.prefix(i) for i in range(len(tokens) // PAGE)]
        expected = [self.cached[prefix] for prefix in itertools.takewhile(self.cached.__contains__, prefixes)]
        assert pages == expected
        for index, page in enumerate(pages):
            assert self.content[page] == owner.prefix(index), "a hit on a page with other tokens"
        assert self.blocks.count_evictable(pages) == len(set(pages) & set(self.idle))
        missing = self.blocks.pages_for(len(tokens)) - len(pages)
        if missing > self.blocks.num_available - self.blocks.count_evictable(pages):
            return
        self.blocks.share(pages)
        owner.pages = list(pages)
        self.idle = [page for page in self.idle if page not in pages]
        self.owners.append(owner)
        new = self.blocks.allocate(missing)
        self.expect_allocated(new)
        owner.pages += new
        self.write(owner, len(pages))

    @precondition(lambda self: self.owners)
    @rule(data=st.data(), token=st.integers(0, 1))
    def grow(self, data, token):
        """One more token, in a new page or in the last one, which may have to be copied first."""
        owner = self.pick(data)
        index = len(owner.tokens) // PAGE
        if index == len(owner.pages):
            if not self.blocks.num_available:
                return
            new = self.blocks.allocate(1)
            self.expect_allocated(new)
            owner.pages += new
        elif not self.copy_if_needed(owner, index):
            return
        owner.tokens.append(token)
        self.write(owner, index)

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def overwrite(self, data):
        """Writes a page again that may be shared or cached, as a fork does that computes its prompt's last token."""
        owner = self.pick(data)
        index = data.draw(st.integers(0, len(owner.pages) - 1), label="index")
        if self.copy_if_needed(owner, index):
            page = owner.pages[index]
            self.content[page] = owner.prefix(index)

    def copy_if_needed(self, owner: Owner, index: int) -> bool:
        page = owner.pages[index]
        owners = sum(other.pages.count(page) for other in self.owners)
        writable = owners == 1 and page not in self.cached.values()
        assert self.blocks.is_writable(page) is writable
        if writable:
            return True
        if not self.blocks.num_available:
            return False
        old, new = self.blocks.make_writable(owner.pages, index)
        assert old == page
        assert owner.pages[index] == new
        owner.pages[index] = old
        self.expect_allocated([new])
        owner.pages[index] = new
        self.let_go([old])
        self.content[new] = self.content[old]
        return True

    @precondition(lambda self: self.owners)
    @rule(data=st.data(), count=st.integers(1, 5))
    def fork(self, data, count):
        parent = self.pick(data)
        child = Owner(parent.salt, parent.tokens[: count * PAGE], parent.pages[:count])
        self.blocks.share(child.pages)
        self.owners.append(child)

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def free(self, data):
        owner = self.pick(data)
        self.blocks.free(owner.pages)
        self.owners.remove(owner)
        self.let_go(owner.pages)

    @rule()
    def reset(self):
        self.blocks.reset_prefix_cache()
        self.cached.clear()
        self.idle.clear()

    @invariant()
    def agrees(self):
        if not hasattr(self, "blocks"):
            return
        self.blocks.check_integrity([owner.pages for owner in self.owners])
        assert self.blocks.num_used == len(self.owned())
        assert self.blocks.num_available == len(self.everything) - len(self.owned())
        assert self.blocks.capacity == len(self.everything)

    def teardown(self):
        for owner in getattr(self, "owners", []):
            self.blocks.free(owner.pages)
        if hasattr(self, "blocks"):
            self.blocks.check_integrity()
            assert self.blocks.num_available == self.blocks.capacity
            assert sorted(self.blocks.allocate(self.blocks.capacity)) == sorted(self.everything)


BlockManagerMachine.TestCase.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
TestBlockManager = BlockManagerMachine.TestCase


def cached_owner(blocks: BlockManager, tokens: list[int], salt: str | None = None) -> list[int]:
    """Pages of an owner whose full pages are in the cache."""
    pages = blocks.allocate(blocks.pages_for(len(tokens)))
    for page, key in zip(pages, hashes_of(salt, tokens), strict=False):
        blocks.register([page], key)
    return pages


def test_the_null_page_is_never_handed_out():
    blocks = BlockManager(9, PAGE)
    assert sorted(blocks.allocate(8)) == list(range(1, 9))
    assert blocks.num_available == 0
    with pytest.raises(AssertionError, match="1 pages asked for, 0 available"):
        blocks.allocate(1)


def test_the_least_recently_used_goes_first_and_its_tail_before_its_head():
    blocks = BlockManager(7, PAGE)
    old = cached_owner(blocks, [0, 0, 0, 0, 0, 0])
    new = cached_owner(blocks, [1, 1, 1, 1, 1, 1])
    blocks.free(old)
    blocks.free(new)
    assert blocks.allocate(6) == [*reversed(old), *reversed(new)]


def test_use_makes_young_again():
    blocks = BlockManager(5, PAGE)
    one = cached_owner(blocks, [0, 0, 0, 0])
    two = cached_owner(blocks, [1, 1, 1, 1])
    blocks.free(one)
    blocks.free(two)
    hit = found(blocks, None, [0, 0, 0, 0])
    assert hit == one
    blocks.share(hit)
    blocks.free(hit)
    assert blocks.allocate(4) == [*reversed(two), *reversed(one)]


def test_blank_pages_go_before_cached_ones():
    blocks = BlockManager(5, PAGE)
    cached = cached_owner(blocks, [0, 0, 0, 0])
    blank = blocks.allocate(2)
    blocks.free(cached)
    blocks.free(blank)
    assert set(blocks.allocate(2)) == set(blank)
    assert found(blocks, None, [0, 0, 0, 0]) == cached


def test_what_lost_its_head_is_not_found():
    blocks = BlockManager(4, PAGE)
    head, tail = cached_owner(blocks, [0, 0, 0, 0])
    blocks.free([head])  # the tail stays in use
    others = blocks.allocate(2)
    assert head in others
    assert found(blocks, None, [0, 0, 0, 0]) == []
    blocks.check_integrity([[tail], others])


def test_the_first_page_with_a_content_stays_the_one_that_is_found():
    blocks = BlockManager(5, PAGE)
    first = cached_owner(blocks, [0, 0])
    second = cached_owner(blocks, [0, 0])
    assert found(blocks, None, [0, 0]) == first
    blocks.free(second)
    assert found(blocks, None, [0, 0]) == first
    blocks.free(first)
    assert blocks.num_available == 4


# Pages whose hashes nobody has computed yet


def tail_owner(blocks: BlockManager, head: list[int], tail: list[int]) -> list[int]:
    """Pages of an owner of two lists of tokens, the second of which was put into the cache without hashes."""
    pages = cached_owner(blocks, head) + blocks.allocate(len(tail) // PAGE)
    parent = hashes_of(None, head)[-1] if head else root_hash(None)
    blocks.register_lazily(pages[len(head) // PAGE :], parent, np.asarray(tail, np.int32))
    return pages


@pytest.mark.parametrize("head", [[], [0, 0, 0, 1]])
def test_a_tail_is_found_page_by_page(head):
    blocks = BlockManager(20, PAGE)
    one = tail_owner(blocks, head, [0, 0, 0, 0, 1, 1])
    other = tail_owner(blocks, head, [0, 0, 1, 1])
    blocks.free(one)
    blocks.check_integrity([other])
    blocks.free(other)
    middle = len(head) // PAGE
    hit = found(blocks, None, [*head, 0, 0, 0, 0, 1, 1, 0, 0])
    assert hit == one
    blocks.check_integrity()
    assert found(blocks, None, [*head, 0, 0, 1, 1]) == [*one[: middle + 1], other[middle + 1]]
    assert blocks.num_available == blocks.capacity
    blocks.check_integrity()


def test_a_tail_loses_its_end_first_and_then_is_forgotten():
    blocks = BlockManager(5, PAGE)
    pages = tail_owner(blocks, [0, 0], [0, 1, 1, 0, 1, 1])
    blocks.free(pages)
    assert blocks.allocate(2) == [pages[3], pages[2]]
    assert found(blocks, None, [0, 0, 0, 1, 1, 0]) == pages[:2]
    blocks.allocate(2)
    assert not blocks._tails
    blocks.reset_prefix_cache()
    assert found(blocks, None, [0, 0]) == []


def test_a_page_of_a_tail_that_is_another_s_by_now_is_not_found():
    """The head of the tail was in another's hands when its owner left, so it is evicted in its own time."""
    blocks = BlockManager(4, PAGE)
    first, second = tail_owner(blocks, [], [0, 0, 1, 1])
    blocks.share([second])
    blocks.free([first, second])
    (new,) = blocks.allocate(2)[1:]
    assert new == first
    assert found(blocks, None, [0, 0, 1, 1]) == []
    blocks.check_integrity([[second], [new], [3]])
    assert not blocks.is_writable(second)


def test_pages_of_a_tail_may_belong_to_two():
    blocks = BlockManager(9, PAGE)
    one = tail_owner(blocks, [], [0, 0, 1, 1])
    blocks.share(one)
    other = [*one, *blocks.allocate(1)]
    blocks.register_lazily(other, root_hash(None), np.asarray([0, 0, 1, 1, 0, 1], np.int32))
    blocks.free(one)
    blocks.free(other)
    assert found(blocks, None, [0, 0, 1, 1, 0, 1]) == other
    blocks.check_integrity()


def test_the_generation_is_another_after_all_that_could_help_one_who_waits():
    blocks = BlockManager(9, PAGE)
    seen = {blocks.generation}

    def changed() -> bool:
        before = len(seen)
        seen.add(blocks.generation)
        return len(seen) > before

    pages = cached_owner(blocks, [0, 0])
    assert changed()
    blocks.free(pages)
    assert not changed()
    blocks.share(pages)
    assert changed(), "what was evictable, and counted as available, is in use"
    blocks.allocate(1)
    assert not changed()
    tail_owner(blocks, [], [1, 1])
    assert changed()


def test_losses_are_counted_after_all_that_could_hurt_one_who_waits():
    blocks = BlockManager(4, PAGE)
    pages = cached_owner(blocks, [0, 0, 1, 1])
    blocks.free(pages)
    before = blocks.losses
    (kept, _) = blocks.allocate(2)
    assert blocks.losses == before + 1, "the free page, then a cached one"
    blocks.reset_prefix_cache()
    assert blocks.losses > before + 1
    blocks.free([kept])


def usable(by_block: list[list[int]], windows, has_state: list[bool]) -> list[int]:
    """What `match` finds, by definition: the longest run of blocks such that each page within a window is cached."""

    def first(count: int, window) -> int:
        position = count * PAGE  # of the next token
        if window is None:
            return 0
        return (position - position % window if isinstance(window, Chunk) else max(position - window + 1, 0)) // PAGE

    run = next((i for i, block in enumerate(by_block) if any(map(has_no_window(windows), block, windows))), None)
    for count in range(len(by_block[:run]), 0, -1):
        firsts = [first(count, window) for window in windows]
        if has_state[count - 1] and all(
            block[group] for group, begin in enumerate(firsts) for block in by_block[begin:count]
        ):
            return [
                page if i >= begin else 0
                for i, block in enumerate(by_block[:count])
                for page, begin in zip(block, firsts, strict=True)
            ]
    return []


def has_no_window(windows):
    return lambda page, window: page == 0 and window is None


def test_snapshots_at_intervals():
    """They are dense at the beginning, and take half of the places for each time that a prompt doubles at most."""
    states = StateSnapshots(0, 8, interval=64)
    assert list(states.at_intervals(1100)) == [64, 128, 192, 256, 384, 512, 768, 1024]
    assert list(states.at_intervals(64)) == []
    assert list(StateSnapshots(0, 8).at_intervals(1100)) == []


@pytest.mark.parametrize("windows", [(None,), (5,), (None, 4), (3, 7), (Chunk(6), None), (Chunk(4), 5)])
@pytest.mark.parametrize("recurrent", [False, True])
def test_a_match_is_the_longest_usable_run(windows, recurrent):
    """Blocks of which some pages were never registered, in all kinds of windows."""
    random = Random(len(windows))
    found_some = Counter()
    for _ in range(200):
        states = StateSnapshots(1, 50, least=PAGE) if recurrent else None
        blocks = BlockManager(60, PAGE, windows=windows, states=states)
        length = random.randrange(13)
        keys = hashes_of(None, [random.randrange(2) for _ in range(PAGE * length)])
        missing = random.choice([0.0, 0.1, 0.5])
        by_block = []
        has_state = []
        for key in keys:
            block = [0 if random.random() < missing else page for page in blocks.allocate(len(windows))]
            blocks.register(block, key)
            by_block.append(block)
            has_state.append(not recurrent or random.random() < 0.5)
            if recurrent and has_state[-1]:
                states.add(key)
        pages = blocks.match(root_hash(None), keys)
        assert pages == usable(by_block, windows, has_state)
        found_some[len(pages) // len(windows)] += 1
    assert len(found_some) > 5


@pytest.mark.parametrize("windows", [(None,), (None, 64)])
def test_no_function_is_called_for_each_block_of_a_match(windows):
    """A prompt of 131,072 tokens has 8,192 blocks. A match took 30 to 46 ms, in each step in which it could change."""

    def calls(length: int) -> int:
        blocks = BlockManager(length * len(windows) + 1, PAGE, windows=windows)
        keys = [i.to_bytes(32, "little") for i in range(length)]
        for key in keys:
            blocks.register(blocks.allocate(len(windows)), key)
        count = 0

        def note(frame, event, arg):
            nonlocal count
            count += event == "call"

        sys.setprofile(note)
        try:
            pages = blocks.match(root_hash(None), keys)
        finally:
            sys.setprofile(None)
        assert len(pages) == length * len(windows)
        return count

    assert calls(400) <= calls(40)


def test_common_prefix():
    for length, same in itertools.product(range(9), range(9)):
        one = list(range(length))
        other = [page if i < same else page + 100 for i, page in enumerate(range(7))]
        assert common_prefix(one, other) == min(length, same, 7)
    assert common_prefix([1, 2, 3, 4], [1, 9, 3, 4]) == 1


def test_freeing_twice_is_an_error():
    blocks = BlockManager(3, PAGE)
    pages = blocks.allocate(1)
    blocks.free(pages)
    with pytest.raises(AssertionError, match="freed twice"):
        blocks.free(pages)


def test_check_integrity_notices():
    blocks = BlockManager(4, PAGE)
    pages = blocks.allocate(2)
    blocks.check_integrity([pages])
    for owners in ([], [pages[:1]], [pages, pages[:1]], [[*pages, 3]]):
        with pytest.raises(AssertionError):
            blocks.check_integrity(owners)


# Hashes


def test_roots_differ_between_salts_and_adapters():
    fields = [None, "", "a", "b", "ab", "\1a", "\0", "\1"]
    roots = {root_hash(salt, adapter) for salt in fields for adapter in fields}
    assert len(roots) == len(fields) ** 2
    assert root_hash("a") == root_hash("a", None)
    assert {len(root) for root in roots} == {32}


def test_fields_of_a_root_are_framed_by_their_lengths():
    """Nothing that one field holds can look like the border between two."""
    framed = (2).to_bytes(8, "little").decode() + "\1b"
    for border in ("\1b", framed):
        assert root_hash("a" + border) != root_hash("a", "b")
        assert root_hash("a" + border, "c") != root_hash("a", "b" + border)


def test_a_page_hash_stands_for_the_whole_prefix():
    root = root_hash(None)
    one = page_hash(root, [1, 2])
    other = page_hash(root, [2, 1])
    chains = [one, other, page_hash(one, [1, 2]), page_hash(other, [1, 2]), page_hash(root, [1, 2, 1, 2])]
    assert len(set(chains)) == len(chains)
    assert page_hash(root, (1, 2)) == one
    assert page_hash(root, [1, 256]) != page_hash(root, [257, 0])


def test_another_salt_finds_nothing():
    blocks = BlockManager(9, PAGE)
    pages = cached_owner(blocks, [1, 2, 3, 4], salt="mine")
    assert found(blocks, "mine", [1, 2, 3, 4, 5, 6]) == pages
    for salt in (None, "", "yours"):
        assert found(blocks, salt, [1, 2, 3, 4]) == []


# Groups of layers: a block has a page in each

# groups whose layers see all, and 3 tokens
FULL = 0
NARROW = 1


def grouped_owner(blocks: BlockManager, tokens: list[int]) -> list[int]:
    pages = blocks.allocate(blocks.pages_for(len(tokens)))
    for i, key in enumerate(hashes_of(None, tokens)):
        blocks.register(pages[2 * i : 2 * i + 2], key)
    return pages


def test_a_prefix_needs_the_pages_of_each_group_s_window():
    blocks = BlockManager(20, PAGE, windows=(None, 3))
    tokens = [0, 1, 1, 0, 0, 0, 1, 1]
    pages = grouped_owner(blocks, tokens)
    assert len(pages) == 8
    # Behind 8 tokens the narrow group sees positions 6 and 7, in block 3; behind 6 tokens those of block 2.
    assert found(blocks, None, tokens) == [pages[0], 0, pages[2], 0, pages[4], 0, *pages[6:]]
    blocks.free(pages)
    # Evicts what was let go first: of each block the narrow group's page, then the other, from the last block on.
    assert blocks.allocate(blocks.num_available - 7) == [*range(9, 20), pages[7]][: blocks.num_available + 12 - 7]
    blocks.check_integrity([list(range(9, 20)), [pages[7]]])
    assert found(blocks, None, tokens) == [pages[0], 0, pages[2], 0, *pages[4:6]]


def test_a_prefix_ends_where_a_group_without_a_window_has_no_page():
    blocks = BlockManager(20, PAGE, windows=(None, 3))
    tokens = [0, 1, 1, 0, 0, 0, 1, 1]
    pages = grouped_owner(blocks, tokens)
    others = blocks.allocate(11)
    blocks.free([pages[2]])
    assert blocks.allocate(1) == [pages[2]]
    assert found(blocks, None, tokens) == pages[:2]
    blocks.check_integrity([[*pages[:2], *pages[3:]], others, [pages[2]]])


def test_a_group_s_page_may_come_back_to_a_block_that_is_cached():
    """Another owner computed the block anew, and its page takes the place of the one that was evicted."""
    blocks = BlockManager(9, PAGE, windows=(None, 3))
    one = grouped_owner(blocks, [0, 0])
    other = blocks.allocate(6)
    blocks.free(other)
    blocks.free([one[NARROW]])
    taken = blocks.allocate(7)
    assert one[NARROW] in taken
    assert found(blocks, None, [0, 0]) == []
    blocks.free(taken)
    again = grouped_owner(blocks, [0, 0])
    assert found(blocks, None, [0, 0]) == [one[FULL], again[NARROW]]
    blocks.check_integrity([[one[FULL]], again])


@pytest.mark.parametrize("released", [0, 2])
def test_a_tail_of_groups_is_found_block_by_block(released):
    """Pages that were given up before are no part of it."""
    blocks = BlockManager(20, PAGE, windows=(None, 3))
    tokens = [0, 0, 1, 1, 0, 1]
    pages = blocks.allocate(6)
    for i in range(released):
        blocks.free([pages[2 * i + NARROW]])
        pages[2 * i + NARROW] = 0
    blocks.register_lazily(pages, root_hash(None), np.asarray(tokens, np.int32))
    blocks.free(pages)
    blocks.check_integrity()
    assert found(blocks, None, tokens) == [pages[0], 0, pages[2], 0, *pages[4:]]
    assert found(blocks, None, tokens[:4]) == ([pages[0], 0, *pages[2:4]] if not released else [])
    blocks.check_integrity()


def test_a_sequence_needs_what_it_holds_at_a_time():
    blocks = BlockManager(200, PAGE, windows=(None, 8))
    # 50 pages of the group without a window, and 8 tokens' window and 4 new ones in the other: 6 pages and a border.
    assert blocks.needed_pages(100, [], step=4) == 50 + 7
    assert blocks.needed_pages(4, [], step=4) == 4
    pages = grouped_owner(blocks, [0, 1] * 45)
    cached = found(blocks, None, [0, 1] * 45)
    assert blocks.needed_pages(100, cached, step=4) == 5 + 5
    blocks.free(pages)
    assert blocks.needed_pages(100, cached, step=4) == 50 + 7
