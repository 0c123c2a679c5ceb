"""A snapshot of the KV page pool: which pages are owned, shared, cached and free. Computed on request."""

from __future__ import annotations

import time
from itertools import chain
from typing import TYPE_CHECKING

import msgspec
import numpy as np

if TYPE_CHECKING:
    from jaxserve.scheduling.block_manager import BlockManager
    from jaxserve.scheduling.engine_stats import EngineStats
    from jaxserve.scheduling.running_table import RunningTable
    from jaxserve.scheduling.scheduler import Scheduler
    from jaxserve.scheduling.sequence import Sequence

MAX_CELLS = 4096
MAX_LISTED = 256  # sequences with a line of their own
MAX_SHARES = 8192  # pairs of (cell, owner) of shared pages
MAX_SCANNED = 65_536  # pages in use that are read, which takes about 3 ms
FREE, CACHED, SHARED, LISTED = range(4)  # codes of cells; LISTED + i: only listed sequence i owns it


class PoolOwner(msgspec.Struct):
    """A running sequence. `request_id` is the server's own, not the client's."""

    request_id: str
    index: int
    pages: int
    prompt_tokens: int
    computed_tokens: int
    tokens: int
    max_tokens: int  # prompt and output
    adapter: str = ""  # name of its LoRA adapter


class PoolSnapshot(msgspec.Struct):
    """The pool at one moment, and counters to compute rates from.

    `cells` has at most MAX_CELLS codes. Each stands for `pages_per_cell` consecutive pages; the last one stands for the
    rest. A cell with pages in use has the greatest of their codes, so that no owner is overlooked. Another cell has the
    code of its first page. `cells_used` counts the pages in use of each cell. `owners` lists the first MAX_LISTED
    running sequences; one further code stands for all others. `share_cells` and `share_owners` are at most
    MAX_SHARES pairs of a cell with a page of several owners and one of these owners. If more than MAX_SCANNED pages are
    in use, only every n-th page of a sequence is read, and it counts as n pages.
    """

    seconds: float = 0.0  # time of a monotonic clock
    page_size: int = 0  # tokens
    pages: int = 0
    pages_used: int = 0
    pages_shared: int = 0
    pages_cached: int = 0
    num_running: int = 0
    num_waiting: int = 0
    prompt_tokens: int = 0  # since start, like the next
    generation_tokens: int = 0
    # Of speculative decoding, as in EngineStats:
    spec_drafts: int = 0
    spec_proposed: int = 0
    spec_accepted_at: list[int] = []
    pages_per_cell: int = 1
    cells: list[int] = []
    cells_used: list[int] = []
    owners: list[PoolOwner] = []
    share_cells: list[int] = []
    share_owners: list[int] = []


def pool_snapshot(blocks: BlockManager, scheduler: Scheduler, stats: EngineStats) -> PoolSnapshot:
    """The pool as it stands. Costs a few vector operations over at most MAX_SCANNED pages and MAX_CELLS cells."""
    running = scheduler.running
    capacity = blocks.num_pages - 1
    seqs = running.batch.seqs
    slot = running.batch.slot
    stride = -(-int(running.num_held[slot].sum()) // MAX_SCANNED) or 1
    held, owner = _held_pages(seqs, stride)
    num_owners = np.bincount(held, minlength=capacity)
    per_cell = -(-capacity // MAX_CELLS)
    starts = np.arange(0, capacity, per_cell)
    used = np.minimum(np.add.reduceat(num_owners > 0, starts, dtype=np.int32) * stride, per_cell)
    shared = num_owners[held] > 1
    pairs = np.unique(np.stack((held[shared] // per_cell, owner[shared])), axis=1)[:, :MAX_SHARES]
    return PoolSnapshot(
        seconds=time.monotonic(),
        page_size=blocks.page_size,
        pages=blocks.capacity,
        pages_used=blocks.num_used,
        pages_shared=int((num_owners > 1).sum()) * stride,
        pages_cached=blocks.num_cached,
        num_running=len(seqs),
        num_waiting=stats.num_waiting,
        prompt_tokens=stats.prompt_tokens,
        generation_tokens=stats.generation_tokens,
        spec_drafts=stats.spec_drafts,
        spec_proposed=stats.spec_proposed,
        spec_accepted_at=stats.spec_accepted_at,
        pages_per_cell=per_cell,
        cells=_cells(blocks, held, owner, num_owners, starts),
        cells_used=used.tolist() if per_cell > 1 else [],
        owners=_owners(running, seqs[:MAX_LISTED]),
        share_cells=pairs[0].tolist(),
        share_owners=pairs[1].tolist(),
    )


def _held_pages(seqs: list[Sequence], stride: int) -> tuple[np.ndarray, np.ndarray]:
    """(page numbers minus 1, index of each page's owner) of every `stride`-th page of each sequence. No sequence owns
    page 0. Owners beyond MAX_LISTED have the index MAX_LISTED."""
    scanned = [list(filter(None, seq.pages[::stride])) for seq in seqs]
    counts = np.fromiter(map(len, scanned), np.int32, len(seqs))
    held = np.fromiter(chain.from_iterable(scanned), np.int32, int(counts.sum())) - 1
    return held, np.repeat(np.minimum(np.arange(len(seqs)), MAX_LISTED), counts)


def _cells(
    blocks: BlockManager, held: np.ndarray, owner: np.ndarray, num_owners: np.ndarray, starts: np.ndarray
) -> list[int]:
    """The code of each cell, whose first pages are `starts`."""
    codes = np.full(blocks.num_pages - 1, FREE, np.int32)
    codes[held] = LISTED + owner
    codes[num_owners > 1] = SHARED
    cached = [CACHED * blocks.is_cached(page) for page in (starts + 1).tolist()]
    return np.maximum(np.maximum.reduceat(codes, starts), cached).tolist()


def _owners(running: RunningTable, seqs: list[Sequence]) -> list[PoolOwner]:
    columns = np.stack((running.num_held, running.computed, running.known, running.limit), axis=1)
    return [
        PoolOwner(seq.request_id, seq.index, pages, seq.prompt_len, computed, known, limit, seq.request.adapter)
        for seq, (pages, computed, known, limit) in zip(seqs, columns[[seq.slot for seq in seqs]].tolist(), strict=True)
    ]
