"""What the Hopper decode kernel reads, and the warpgroup that fetches it: see `mosaic_gpu_decode`."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxserve.pallas_kernels import hopper_rules
from jaxserve.pallas_kernels.hopper_rules import Span
from jaxserve.pallas_kernels.paged_attention.mosaic_gpu_decode_tile import DecodeTile
from jaxserve.pallas_kernels.work_lists import BEGIN, FIRST, LAST, LENGTH, PARTS, ROW

COLUMN = plgpu.Layout.WGMMA.reduce(0)  # of arrays [columns]: what each warp has a copy of


class Arrays(NamedTuple):
    """The arrays in global memory. pair: an item and a KV head, item * kv_heads + head; rows of q and out: heads."""

    items: Any  # int32 [items, 8]
    spans: Any  # int32 [programs + 1]
    table: Any  # int32 [rows, pages of a row]
    first_page: Any  # int32 [1]
    counters: Any  # int32 [rows * kv_heads], zeros before and after
    q: Any  # [heads of all rows, head_dim]
    sinks: Any  # float32 [heads of all rows] times log2(e), or None
    data: Any  # [pages * 2 * kv_heads, page_size, head_dim]
    scale: Any  # float32 [pages * 2 * kv_heads, page_size], or None
    out: Any  # [heads of all rows, head_dim]
    values: Any  # float32 [pairs, head_dim, columns], of items that are parts of a row
    sums: Any  # float32 [pairs, 2, columns]: the peak, and the sum of the probabilities


class Work(NamedTuple):
    """An item for one head, int32 scalars: as the columns of work_lists."""

    row: Any
    length: Any
    first: Any
    begin: Any
    parts: Any
    last: Any
    head: Any


def work_of(tile: DecodeTile, arrays: Arrays, pair: Any) -> Work:
    item = lax.div(pair, jnp.int32(tile.kv_heads))
    row, length, first, begin, parts, last = (
        arrays.items[item, column] for column in (ROW, LENGTH, FIRST, BEGIN, PARTS, LAST)
    )
    return Work(row, length, first, begin, parts, last, lax.rem(pair, jnp.int32(tile.kv_heads)))


def queries_of(tile: DecodeTile, work: Work, heads: int) -> tuple[Any, Any]:
    """The first of the rows of q that are copied for an item, a multiple of 8; and which of them is the group's first.

    heads: rows of q."""
    mine = (work.row * tile.kv_heads + work.head) * tile.stride
    start = jnp.minimum(lax.div(mine, jnp.int32(8)) * 8, heads - tile.columns)
    return start, mine - start


def fetch(tile, arrays, start, end, *, q_smem, q_full, q_free, kv_smem, full, free, scale_smem=None, **_):
    """Queries into two places in turn, and block after block into the next free slot, item after item."""

    def fetch_item(pair, done):
        work, turn = work_of(tile, arrays, pair), lax.rem(pair - start, jnp.int32(2))

        @pl.when(pair - start >= 2)
        def await_place():
            plgpu.barrier_wait(q_free.at[turn])

        top, _ = queries_of(tile, work, arrays.q.shape[0])
        window = (Span(top, tile.columns, multiple=8),)
        hopper_rules.fetch(arrays.q, window, q_smem, (turn,), q_full.at[turn], interpret=tile.interpret)

        def fetch_block(block, carry):
            done, *scales = carry
            slot = lax.rem(done, jnp.int32(tile.slots))
            pieces = _pieces(tile, arrays, work, block)
            following = _scales(tile, arrays, work, block + 1)  # on their way while this block is waited for
            for half in range(2):
                barrier = 2 * slot + half

                @pl.when(done >= tile.slots)
                def await_slot(barrier=barrier):
                    plgpu.barrier_wait(free.at[barrier])

                for page, tokens, place in pieces:
                    window = ((page * 2 + half) * tile.kv_heads + work.head, tokens)
                    target = kv_smem, (slot, half, place)
                    hopper_rules.fetch(arrays.data, window, *target, full.at[barrier], interpret=tile.interpret)
                if tile.codes:
                    for (*_, place), values in zip(pieces, scales[half * len(pieces) :], strict=False):
                        scale_smem[slot, half, pl.ds(place.start, place.size)] = values
                    plgpu.barrier_arrive(full.at[barrier])
            return done + 1, *following

        return lax.fori_loop(work.first, work.last, fetch_block, (done, *_scales(tile, arrays, work, work.first)))[0]

    done = lax.fori_loop(start, end, fetch_item, jnp.int32(0))
    _drain(free, done, tile.slots, 2)
    _drain(q_free, end - start, 2, 1)


def _scales(tile, arrays, work, block):
    """Of a block of codes: the scales of the pieces of keys, then of values, which are too short for the copy engine.

    Beyond the row's end they are those of its last piece. The table of a row without tokens may point nowhere: there
    they are any page's."""
    if not tile.codes:
        return ()
    pieces = _pieces(tile, arrays, work, block)
    planes = [jnp.where(work.length > 0, page, 0) * 2 * tile.kv_heads + work.head for page, *_ in pieces]
    rows = [
        arrays.scale.at[plane + half * tile.kv_heads, pl.ds(tokens.start, tokens.size)]
        for half in range(2)
        for plane, (_, tokens, _) in zip(planes, pieces, strict=True)
    ]
    return tuple(plgpu.load(row, (), layout=COLUMN, optimized=False) for row in rows)


def _pieces(tile, arrays, work, block):
    """Of a block: tuples of page, tokens in it, and place in the block."""
    piece = min(tile.page_size, tile.block)
    # Pages that begin beyond the row's end are not the row's: the last one it has stands in for them.
    places = [block * tile.block + i * piece for i in range(tile.block // piece)]
    places = [jnp.minimum(place, lax.div(work.length - 1, jnp.int32(piece)) * piece) for place in places]
    base = arrays.first_page[0]
    pages = [base + arrays.table[work.row, lax.div(place, jnp.int32(tile.page_size))] for place in places]
    return [
        (page, Span(lax.rem(place, jnp.int32(tile.page_size)), piece, multiple=piece), Span(i * piece, piece))
        for i, (place, page) in enumerate(zip(places, pages, strict=True))
    ]


def _drain(barrier, steps, slots, each):
    """Waits for what is left in a ring of slots, `each` barriers to a slot."""

    def wait(step, _):
        for i in range(each):
            plgpu.barrier_wait(barrier.at[each * lax.rem(step, jnp.int32(slots)) + i])

    lax.fori_loop(jnp.maximum(steps - slots, 0), steps, wait, None)
