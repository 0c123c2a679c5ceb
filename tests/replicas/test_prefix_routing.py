"""Prefix-aware routing without Ray: blocks of prompts, the choice of a replica, and what it gains in a simulation."""

from __future__ import annotations

import json
import math
import random
from collections import OrderedDict, deque

import pytest

from jaxserve.prefix_routing import BLOCK_BYTES, MOST_BLOCKS, PrefixTable, prompt_blocks
from jaxserve.ray.merged_metrics import merged

SYSTEM = {"role": "system", "content": "You are a patient assistant. " * 40}


def blocks_of(**body) -> tuple[bytes, ...]:
    return prompt_blocks(json.dumps({"model": "m", **body}).encode())


def common(a: tuple[bytes, ...], b: tuple[bytes, ...]) -> int:
    """How many blocks two prompts share at their beginnings."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def test_a_conversation_continues_its_blocks():
    first = [SYSTEM, {"role": "user", "content": "Why is the sky blue? " * 30}]
    more = [*first, {"role": "assistant", "content": "Rayleigh."}, {"role": "user", "content": "Go on. " * 99}]
    before = blocks_of(messages=first)
    after = blocks_of(messages=more, temperature=0.3, stream=True)
    assert common(before, after) >= len(before) - 1 > 5
    assert len(after) > len(before)


@pytest.mark.parametrize(
    "other",
    [
        {"model": "another"},
        {"cache_salt": "tenant"},
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"messages": [{"role": "system", "content": "Y" + SYSTEM["content"]}]},
    ],
)
def test_what_no_cached_page_may_be_shared_with_shares_no_block(other):
    assert common(blocks_of(messages=[SYSTEM]), blocks_of(**{"messages": [SYSTEM]} | other)) == 0


def test_every_kind_of_prompt_has_blocks():
    text = "def add(a, b): " * 99
    for prompt in (text, [text, "second"], list(range(1000)), [list(range(1000))]):
        assert common(blocks_of(prompt=prompt), blocks_of(prompt=prompt)) > 3
    assert blocks_of(instructions=text, input="a") != blocks_of(instructions=text[1:], input="a")
    assert len(blocks_of(prompt="x" * (2 * MOST_BLOCKS * BLOCK_BYTES))) == MOST_BLOCKS


@pytest.mark.parametrize("body", [b"", b"[1]", b"{", b"\xff", b"3", b"[" * 100_000, b'{"prompt": "short"}'])
def test_other_bodies_have_no_blocks(body):
    assert prompt_blocks(body) == ()


def test_the_longest_beginning_wins():
    table = PrefixTable()
    table.note((b"1", b"2"), "a")
    table.note((b"1", b"3"), "b")
    idle = {"a": 0, "b": 0, "c": 0}
    assert table.choose((b"1", b"2", b"9"), idle) == "a"
    assert table.choose((b"1", b"3", b"9"), idle) == "b"
    assert table.choose((b"1", b"9"), idle | {"a": 3}) == "b"  # both have seen it, and this one is less loaded
    table.forget("b")
    assert table.choose((b"1", b"9"), idle) == "a"
    assert len(table) == 2


def test_a_short_common_beginning_does_not_gather_requests():
    table = PrefixTable()
    table.note((b"1", b"2", b"3", b"4", b"5"), "a")
    assert table.choose((b"1", b"2", b"3", b"8", b"9"), {"a": 2, "b": 0}) == "a"  # three of five blocks
    assert table.choose((b"1", b"2", b"7", b"8", b"9"), {"a": 2, "b": 0}) == "b"


def test_a_loaded_replica_is_passed_over():
    table = PrefixTable(factor=1.25, slack=4)
    table.note((b"1",), "a")
    assert table.choose((b"1",), {"a": 5, "b": 0}) == "a"  # at most 1.25 × 6 / 2 + 4
    assert table.choose((b"1",), {"a": 13, "b": 0}) == "b"
    assert table.choose((), {"a": 2, "b": 1, "c": 2}) == "b"  # nothing to share: the least loaded


def test_somebody_is_always_free():
    table = PrefixTable(factor=1.0, slack=0)
    draw = random.Random(0)
    for _ in range(2000):
        loads = {str(i): draw.randrange(6) for i in range(draw.randrange(1, 7))}
        assert table.choose((b"x",), loads) in loads


def test_tables_that_know_nothing_agree():
    loads = dict.fromkeys(map(str, range(5)), 0)
    chosen = []
    for i in range(200):
        blocks = tuple(b"%d %d" % (i, block) for block in range(20))
        chosen.append(PrefixTable().choose(blocks, loads))
        assert PrefixTable().choose(blocks[:9], dict(reversed(loads.items()))) == chosen[-1]
        left = {name: load for name, load in loads.items() if name != "3"}
        assert chosen[-1] == "3" or PrefixTable().choose(blocks, left) == chosen[-1]  # the others keep theirs
    assert min(map(chosen.count, loads)) > 20


def test_the_oldest_blocks_are_forgotten():
    table = PrefixTable(capacity=10)
    for i in range(8):
        table.note((b"common", b"own %d" % i, b"end %d" % i), str(i % 2))
    assert len(table) == 10
    idle = {"0": 0, "1": 0}
    assert table.choose((b"common", b"own 6", b"end 6"), idle) == "0"
    assert table.choose((b"common", b"own 7", b"end 7"), idle) == "1"


class Cache:
    """A replica's prefix cache: the blocks used last, as far as they fit."""

    def __init__(self, room: int):
        self._room, self._blocks = room, OrderedDict[bytes, None]()

    def use(self, blocks: tuple[bytes, ...]) -> int:
        """How many blocks at the beginning are found; then all of them are there."""
        found = 0
        while found < len(blocks) and blocks[found] in self._blocks:
            found += 1
        for block in reversed(blocks):
            self._blocks.pop(block, None)
            self._blocks[block] = None
        while len(self._blocks) > self._room:
            self._blocks.popitem(last=False)
        return found


def simulate(choose, note, prompts: list[tuple[bytes, ...]], room: int, running: int) -> tuple[float, float]:
    """Hit rate in blocks, and the largest share of the running requests on one of four replicas times four, where
    `running` requests run at any time and each runs equally long."""
    caches = {str(i): Cache(room) for i in range(4)}
    loads = dict.fromkeys(caches, 0)
    active: deque[str] = deque()
    hits = 0
    most = 0
    for blocks in prompts:
        replica = choose(blocks, loads)
        note(blocks, replica)
        hits += caches[replica].use(blocks)
        loads[replica] += 1
        active.append(replica)
        most = max(most, loads[replica])
        if len(active) > running:
            loads[active.popleft()] -= 1
    return hits / sum(map(len, prompts)), most / (running / 4)


def shared_prefixes(groups: int, own: int, count: int) -> list[tuple[bytes, ...]]:
    """Requests of which each begins with 60 blocks of its group, in random order, followed by `own` of its own."""
    draw = random.Random(1)
    return [
        tuple(b"%d-%d" % (group, i) for i in range(60)) + tuple(b"%d+%d" % (request, i) for i in range(own))
        for request in range(count)
        for group in [draw.randrange(groups)]
    ]


def test_shared_prefixes_are_found_twice_as_often_as_by_chance():
    """32 prefixes of 60 blocks, caches for 13 of them on each of four replicas."""
    prompts = shared_prefixes(groups=32, own=4, count=4000)
    draw = random.Random(2)
    by_chance, _ = simulate(lambda _, loads: draw.choice(list(loads)), lambda *_: None, prompts, 800, 128)
    table = PrefixTable()
    routed, most = simulate(table.choose, table.note, prompts, 800, 128)
    print(f"hit rate {by_chance:.2f} by chance, {routed:.2f} routed; busiest replica {most:.2f} times the mean")
    assert routed >= 2 * by_chance
    assert most <= 1.25 + 4 * 9 / 128


def test_one_prefix_for_all_is_spread():
    table = PrefixTable()
    routed, most = simulate(table.choose, table.note, shared_prefixes(groups=1, own=1, count=2000), 800, 128)
    assert routed > 0.95
    assert most <= math.ceil(1.25 * 32 + 8) / 32 + 0.1


def test_metrics_of_several_servers_are_one_text():
    one = (
        '# HELP a:x About x\n# TYPE a:x gauge\na:x{model_name="m"} 3.0\n# HELP plain p\n# TYPE plain counter\nplain 1\n'
    )
    two = '# HELP a:x About x\n# TYPE a:x gauge\na:x{model_name="m b"} 4.0\n'
    assert merged({"r1": one, "r2": two}).splitlines() == [
        "# HELP a:x About x",
        "# TYPE a:x gauge",
        'a:x{replica="r1",model_name="m"} 3.0',
        'a:x{replica="r2",model_name="m b"} 4.0',
        "# HELP plain p",
        "# TYPE plain counter",
        'plain{replica="r1"} 1',
    ]
