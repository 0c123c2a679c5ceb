"""A picture of the KV page pool: who owns which page, what is shared, cached, free. Computed when somebody asks."""

from __future__ import annotations

import time
from itertools import chain
from typing import TYPE_CHECKING

import msgspec
import numpy as np

if TYPE_CHECKING:
    from jaxserve.scheduling.block_manager import BlockManager
    from jaxserve.scheduling.scheduler import Scheduler
    from jaxserve.scheduling.stats import EngineStats

MAX_CELLS = 4096
MAX_LISTED = 256  # sequences with a line of their own
MAX_SHARES = 8192  # pairs of (cell, owner) of shared pages
MAX_SCANNED = 65_536  # pages in use that are looked at: some 3 ms
FREE, CACHED, SHARED, LISTED = range(4)  # what a cell's code says; LISTED + i: owned by listed sequence i alone


class PoolOwner(msgspec.Struct):
    """A running sequence. Its request has an id of the server's own, not the client's."""

    request_id: str
    index: int
    pages: int
    prompt_tokens: int
    computed_tokens: int
    tokens: int
    max_tokens: int  # prompt and output


class PoolSnapshot(msgspec.Struct):
    """The pool at one moment, and the counters that rates are made of.

    `cells` has at most MAX_CELLS codes. Each stands for `pages_per_cell` pages in the order of their numbers (the last
    for what is left). Where these differ, it is the greatest code of those in use, so that none is overlooked, or
    else the first page's; `cells_used` counts those in use. `owners` lists the first MAX_LISTED running sequences; the
    code after theirs stands for all others. `share_cells` and `share_owners` are pairs: a cell with a page of several
    owners, and one of these, at most MAX_SHARES of them. Where more than MAX_SCANNED pages are in use, every n-th page
    of each sequence stands for n.
    """

    seconds: float = 0.0  # of a steady clock
    page_size: int = 0  # tokens
    pages: int = 0
    pages_used: int = 0
    pages_shared: int = 0
    pages_cached: int = 0
    num_running: int = 0
    num_waiting: int = 0
    prompt_tokens: int = 0  # since start, as the next
    generation_tokens: int = 0
    pages_per_cell: int = 1
    cells: list[int] = []
    cells_used: list[int] = []
    owners: list[PoolOwner] = []
    share_cells: list[int] = []
    share_owners: list[int] = []


def pool_snapshot(blocks: BlockManager, scheduler: Scheduler, stats: EngineStats) -> PoolSnapshot:
    """The pool as it stands. Costs a few vector operations over at most MAX_SCANNED pages and MAX_CELLS cells."""
    running, capacity = scheduler.running, blocks.capacity
    seqs, slot = running.lineup.seqs, running.lineup.slot
    stride = -(-int(running.num_pages[slot].sum()) // MAX_SCANNED) or 1
    scanned = [seq.pages[::stride] for seq in seqs]
    counts = np.fromiter(map(len, scanned), np.int32, len(seqs))
    held = np.fromiter(chain.from_iterable(scanned), np.int32, int(counts.sum())) - 1  # there is no page 0
    owner = np.repeat(np.minimum(np.arange(len(seqs)), MAX_LISTED), counts)

    owners_of_page = np.bincount(held, minlength=capacity)
    codes = np.full(capacity, FREE, np.int32)
    codes[held] = LISTED + owner
    codes[owners_of_page > 1] = SHARED
    per_cell = -(-capacity // MAX_CELLS)
    starts = np.arange(0, capacity, per_cell)
    cached = [CACHED * blocks.is_cached(page) for page in (starts + 1).tolist()]
    used = np.minimum(np.add.reduceat(owners_of_page > 0, starts, dtype=np.int32) * stride, per_cell)
    shared = owners_of_page[held] > 1
    pairs = np.unique(np.stack((held[shared] // per_cell, owner[shared])), axis=1)[:, :MAX_SHARES]

    numbers = np.stack((running.num_pages, running.computed, running.known, running.limit), axis=1)[slot].tolist()
    listed = [
        PoolOwner(seq.request_id, seq.index, pages, seq.prompt_len, computed, known, limit)
        for seq, (pages, computed, known, limit) in zip(seqs[:MAX_LISTED], numbers, strict=False)
    ]
    return PoolSnapshot(
        seconds=time.monotonic(),
        page_size=blocks.page_size,
        pages=capacity,
        pages_used=blocks.num_used,
        pages_shared=int((owners_of_page > 1).sum()) * stride,
        pages_cached=blocks.num_cached,
        num_running=len(seqs),
        num_waiting=stats.num_waiting,
        prompt_tokens=stats.prompt_tokens,
        generation_tokens=stats.generation_tokens,
        pages_per_cell=per_cell,
        cells=np.maximum(np.maximum.reduceat(codes, starts), cached).tolist(),
        cells_used=used.tolist() if per_cell > 1 else [],
        owners=listed,
        share_cells=pairs[0].tolist(),
        share_owners=pairs[1].tolist(),
    )
