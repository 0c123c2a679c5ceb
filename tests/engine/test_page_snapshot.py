"""The picture of the page pool, against the block manager's own books."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from jaxserve.scheduling import page_snapshot
from jaxserve.scheduling.block_manager import BlockManager
from jaxserve.scheduling.engine_stats import EngineStats
from jaxserve.scheduling.page_snapshot import CACHED, FREE, LISTED, SHARED, pool_snapshot
from jaxserve.scheduling.scheduler import Scheduler
from jaxserve.scheduling.sequence import Sequence
from jaxserve.types import Request, SamplingParams


def scheduler_of(pages: int, prompts: list[list[int]], n: int = 1, prefix_caching: bool = True) -> Scheduler:
    """A scheduler that has computed these prompts, of pages of 4 tokens, and drawn a token for each completion."""
    blocks = BlockManager(pages + 1, 4, prefix_caching=prefix_caching)
    scheduler = Scheduler(blocks, max_num_seqs=600, max_num_batched_tokens=100_000, max_model_len=4096)
    for arrival, prompt in enumerate(prompts):
        request = Request(
            request_id=f"0/request-{arrival}", prompt_token_ids=prompt, params=SamplingParams(n=n, max_tokens=50)
        )
        scheduler.add(Sequence(request, 0, 1, 50, frozenset(), arrival))
    for _ in range(2):  # siblings begin once the prompt has been computed
        plan = scheduler.schedule()
        scheduler.commit(plan.rows, np.full((len(plan.rows), 1), 7, np.int32))
    scheduler.check_integrity()
    return scheduler


def look(scheduler: Scheduler) -> page_snapshot.PoolSnapshot:
    return pool_snapshot(scheduler.blocks, scheduler, EngineStats(generation_tokens=5, num_waiting=3))


def tally(scheduler: Scheduler) -> list[set[int]]:
    """The running sequences, by their places, that own each page from 1 on."""
    owners: list[set[int]] = [set() for _ in range(scheduler.blocks.capacity)]
    for place, seq in enumerate(scheduler.running):
        for page in seq.pages:
            owners[page - 1].add(place)
    return owners


def test_every_cell_and_every_owner():
    scheduler = scheduler_of(40, [[1] * 9, list(range(20, 30)), [1] * 8 + [5] * 3], n=2)
    scheduler.abort("0/request-1")  # its full pages stay in the cache
    picture = look(scheduler)
    owners = tally(scheduler)
    expected = [
        SHARED if len(own) > 1 else LISTED + min(own) if own else CACHED if scheduler.blocks.is_cached(page) else FREE
        for page, own in enumerate(owners, start=1)
    ]
    assert picture.cells == expected
    assert {SHARED, CACHED, FREE, LISTED, LISTED + 3} <= set(expected)
    pairs = {(cell, owner) for cell, own in enumerate(owners) if len(own) > 1 for owner in own}
    assert set(zip(picture.share_cells, picture.share_owners, strict=True)) == pairs
    assert picture.pages_used == sum(map(bool, owners))
    assert picture.pages_shared == expected.count(SHARED)
    assert picture.pages_cached == expected.count(CACHED)
    assert (picture.pages, picture.num_running, picture.num_waiting, picture.generation_tokens) == (40, 4, 3, 5)
    names = [(owner.request_id, owner.index) for owner in picture.owners]
    assert names == [(f"0/request-{i}", index) for i in (0, 2) for index in (0, 1)]
    first = picture.owners[0]
    assert (first.pages, first.prompt_tokens, first.tokens, first.max_tokens) == (3, 9, 11, 59)


def test_large_pools_are_drawn_in_few_cells():
    scheduler = scheduler_of(page_snapshot.MAX_CELLS * 3 + 1, [[i] * 9 for i in range(page_snapshot.MAX_LISTED + 2)])
    picture = look(scheduler)
    owners = tally(scheduler)
    assert (picture.pages_per_cell, len(picture.cells)) == (4, -(-(page_snapshot.MAX_CELLS * 3 + 1) // 4))
    for cell in range(len(picture.cells)):
        own = owners[cell * 4 : cell * 4 + 4]
        assert picture.cells_used[cell] == sum(map(bool, own))
        greatest = max((min(max(places), page_snapshot.MAX_LISTED) for places in own if places), default=None)
        assert picture.cells[cell] == (FREE if greatest is None else LISTED + greatest)
    assert len(picture.owners) == page_snapshot.MAX_LISTED
    assert len(msgspec.json.encode(picture)) < 100_000


def test_of_very_many_pages_a_part_is_looked_at(monkeypatch):
    scheduler = scheduler_of(200, [[1] * 80, [1] * 82], prefix_caching=True)
    whole = look(scheduler)
    monkeypatch.setattr(page_snapshot, "MAX_SCANNED", 11)
    part = look(scheduler)
    assert (part.pages_used, part.owners) == (whole.pages_used, whole.owners)
    assert abs(part.pages_shared - whole.pages_shared) < 4
    assert 0 < sum(code != FREE for code in part.cells) < sum(code != FREE for code in whole.cells)


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_an_empty_pool(prefix_caching):
    blocks = BlockManager(10, 4, prefix_caching=prefix_caching)
    scheduler = Scheduler(blocks, max_num_seqs=2, max_num_batched_tokens=64, max_model_len=32)
    picture = look(scheduler)
    assert (picture.cells, picture.owners, picture.share_cells) == ([FREE] * 9, [], [])
