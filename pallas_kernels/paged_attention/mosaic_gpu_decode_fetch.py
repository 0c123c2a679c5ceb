"""The inputs of the Hopper decode kernel and the warpgroup that fetches them. See `mosaic_gpu_decode`."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxserve.pallas_kernels import hopper_rules
from jaxserve.pallas_kernels.hopper_rules import Span
from jaxserve.pallas_kernels.paged_attention.mosaic_gpu_decode_tile import DecodeTile
from jaxserve.pallas_kernels.work_lists import cut

COLUMN = plgpu.Layout.WGMMA.reduce(0)  # layout of arrays [columns] of which each warp has a copy
SPAN = 5  # numbers of a span


class Arrays(NamedTuple):
    """The arrays in global memory. Items are numbered as in `work_lists.equal_spans`."""

    # int32: the spans, SPAN numbers for each program and for the end. Then counters [rows * kv_heads] of the parts that
    # are done, which are zeros before and after the launch.
    spans: Any
    length: Any  # int32 [rows]
    table: Any  # int32 [rows, pages of a row]
    first_page: Any  # int32 [1]
    q: Any  # [heads of all rows, head_dim]
    sinks: Any  # float32 [heads of all rows] times log2(e), or None
    data: Any  # [pages * 2 * kv_heads, page_size, head_dim]
    scale: Any  # float32 [pages * 2 * kv_heads, page_size], or None
    out: Any  # [heads of all rows, head_dim]
    values: Any  # float32 [items, head_dim, columns], for rows with several parts
    sums: Any  # float32 [items, 2, columns]: the peak, and the sum of the probabilities


class Work(NamedTuple):
    """An item: one part of a row for one head, as int32 scalars."""

    row: Any
    part: Any
    head: Any
    length: Any  # of the row
    parts: Any  # of the row
    first: Any  # the item has the row's blocks first to last - 1
    last: Any


class Items(NamedTuple):
    """The items of a program: the number of the first, that of the one after the last, and the first item itself."""

    start: Any
    end: Any
    first: Work


def items_of(tile: DecodeTile, arrays: Arrays, program: Any) -> Items:
    start, *first = (arrays.spans[program * SPAN + column] for column in range(SPAN))
    return Items(start, arrays.spans[(program + 1) * SPAN], _work(tile, *first))


def following(tile: DecodeTile, arrays: Arrays, work: Work) -> Work:
    """The item after `work`. After the list's last item this is any item."""
    last_head = work.head + 1 == tile.kv_heads
    head = jnp.where(last_head, 0, work.head + 1)
    part = jnp.where(last_head, work.part + 1, work.part)
    ended = part == work.parts
    row = jnp.where(ended, jnp.minimum(work.row + 1, arrays.length.shape[0] - 1), work.row)
    return _work(tile, row, jnp.where(ended, 0, part), head, arrays.length[row])


def _work(tile: DecodeTile, row: Any, part: Any, head: Any, length: Any) -> Work:
    parts = cut(length, tile.block, tile.window, tile.most_parts)
    return Work(row, part, head, length, parts.number, *parts.bounds(part))


def queries_of(tile: DecodeTile, work: Work, heads: int) -> tuple[Any, Any]:
    """Returns the first row of q to copy for an item, a multiple of 8, and the place of the group's first query in it.

    heads: rows of q.
    """
    mine = (work.row * tile.kv_heads + work.head) * tile.stride
    start = jnp.minimum(lax.div(mine, jnp.int32(8)) * 8, heads - tile.columns)
    return start, mine - start


def fetch(tile, arrays, items, *, q_smem, q_full, q_free, kv_smem, full, free, scale_smem=None, **_):
    """Copies queries into two buffers in turn, and each block of all items into the next free slot of the ring."""

    start, end, first = items

    def fetch_item(item, carry):
        done, *columns = carry
        work = Work(*columns)
        turn = lax.rem(item - start, jnp.int32(2))

        @pl.when(item - start >= 2)
        def await_place():
            plgpu.barrier_wait(q_free.at[turn])

        top, _ = queries_of(tile, work, arrays.q.shape[0])
        window = (Span(top, tile.columns, multiple=8),)
        hopper_rules.fetch(arrays.q, window, q_smem, (turn,), q_full.at[turn], interpret=tile.interpret)

        def fetch_block(block, carry):
            done, *scales = carry
            slot = lax.rem(done, jnp.int32(tile.slots))
            pieces = _pieces(tile, arrays, work, block)
            following = _scales(tile, arrays, work, block + 1)  # these loads run while this block is waited for
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

        next_work = following(tile, arrays, work)
        scales = _scales(tile, arrays, work, work.first)
        return lax.fori_loop(work.first, work.last, fetch_block, (done, *scales))[0], *next_work

    done, *_ = lax.fori_loop(start, end, fetch_item, (jnp.int32(0), *first))
    _drain(free, done, tile.slots, 2)
    _drain(q_free, end - start, 2, 1)


def _scales(tile, arrays, work, block):
    """Loads the scales of a block of codes, piece by piece: those of keys, then of values.

    They are too short for the copy engine. Pieces beyond the row's end get the scales of the row's last piece. A row
    without tokens may have any page in its table; its scales are then those of an arbitrary page.
    """
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
    """Returns tuples (page, tokens in it, place in the block) of a block's pieces."""
    piece = min(tile.page_size, tile.block)
    # Pages beyond the row's end or before its window belong to others. Their values may be infinite, and 0 times these
    # would be NaN. The row's last or first piece replaces them.
    places = [block * tile.block + i * piece for i in range(tile.block // piece)]
    places = [jnp.minimum(place, lax.div(work.length - 1, jnp.int32(piece)) * piece) for place in places]
    if tile.window:
        oldest = jnp.maximum(work.length - tile.window, 0)
        places = [jnp.maximum(place, lax.div(oldest, jnp.int32(piece)) * piece) for place in places]
    base = arrays.first_page[0]
    pages = [base + arrays.table[work.row, lax.div(place, jnp.int32(tile.page_size))] for place in places]
    return [
        (page, Span(lax.rem(place, jnp.int32(tile.page_size)), piece, multiple=piece), Span(i * piece, piece))
        for i, (place, page) in enumerate(zip(places, pages, strict=True))
    ]


def _drain(barrier, steps, slots, each):
    """Waits for the last steps of a ring that has `slots` slots of `each` barriers."""

    def wait(step, _):
        for i in range(each):
            plgpu.barrier_wait(barrier.at[each * lax.rem(step, jnp.int32(slots)) + i])

    lax.fori_loop(jnp.maximum(steps - slots, 0), steps, wait, None)
