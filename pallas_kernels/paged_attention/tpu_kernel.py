"""The body of the TPU's attention kernel: the work of one item, and the copies that run ahead of it.

While a block of cached tokens is computed, these copies are in flight: the next block's pages, the rows of the block
tables for the next two items, and, where items write, the last item's new token (`tpu_write`). `Scalars`, `Refs` and
`Scratch` define the references.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxserve.pallas_kernels.paged_attention import tpu_write
from jaxserve.pallas_kernels.paged_attention.tpu_plan import LANES, TABLE_CHUNK, TABLES, Plan, Refs, Scalars, Scratch
from jaxserve.pallas_kernels.tpu_dma import aligned, copy

MASKED = -1e30  # score of a masked key
UNSEEN = -1e20  # initial peak of a token without visible keys; exp(MASKED - UNSEEN) is 0


class Span(NamedTuple):
    """An item: its row; its tokens [begin, end); the number that turns a token into its position; the oldest and newest
    positions that any of its tokens sees (newest is -1 where nothing is cached)."""

    item: Any
    row: Any
    begin: Any
    end: Any
    shift: Any
    oldest: Any
    newest: Any

    @staticmethod
    def of(plan: Plan, scalars: Scalars, item: Any) -> Span:
        row = scalars.row[item]
        first = scalars.tile[item] * plan.tile
        begin = jnp.maximum(scalars.q_start[row], first)
        end = jnp.minimum(scalars.q_start[row + 1], first + plan.tile)
        shift = scalars.kv_len[row] - scalars.q_start[row + 1]
        oldest = jnp.maximum(begin + shift - plan.window + 1, 0) if plan.window else 0
        return Span(item, row, begin, end, shift, oldest, jnp.maximum(end + shift - 1, -1))

    def units(self, size: int) -> tuple[Any, Any]:
        """First and last visible unit of `size` positions; the last is the first where nothing is visible."""
        return self.oldest // size, jnp.maximum(self.newest, 0) // size


def kernel(plan: Plan, has_sinks: bool, *refs: Any) -> None:
    """Computes one item. An item has at least one block; the item before it has started the first block's copies."""
    count = len(Scalars._fields) - (not plan.writes)
    scalars = Scalars(*refs[:count])
    others = iter(refs[count:])
    inputs = Refs.of(plan, has_sinks, others)
    scratch = Scratch(*(next(others) if part is not None else None for part in Scratch.shapes(plan)))

    item = pl.program_id(0)
    items = scalars.count[0]
    span = Span.of(plan, scalars, item)
    tile = scalars.tile[item]
    first, last = span.units(plan.block_tokens)
    pages = partial(_start_pages, plan, scalars, inputs, scratch)
    table = partial(_each_table_chunk, plan, inputs, scratch)

    @pl.when(item == 0)
    def first_item():
        scratch.turn[0] = 0
        table(span, lambda copy: copy.start())

        @pl.when(items > 1)
        def second_table():
            table(Span.of(plan, scalars, 1), lambda copy: copy.start())

        table(span, lambda copy: copy.wait())
        pages(span, first, 0)

    @pl.when(item + 2 < items)
    def later_table():
        table(Span.of(plan, scalars, item + 2), lambda copy: copy.start())

    @pl.when((item == 0) | (scalars.tile[jnp.maximum(item - 1, 0)] != tile))
    def new_tile():
        scratch.values[...] = jnp.zeros_like(scratch.values)
        scratch.peak[...] = jnp.full_like(scratch.peak, UNSEEN) if inputs.sinks is None else inputs.sinks[...]
        scratch.total[...] = jnp.full_like(scratch.total, 0.0 if inputs.sinks is None else 1.0)

    def step(block, _):
        slot = scratch.turn[0]
        if plan.writes:  # the slot that is filled next may still be the source of a write

            @pl.when((block == first) & (item > 0) & (scalars.slots[jnp.maximum(item - 1, 0)] >= 0))
            def written_before():
                tpu_write.await_written(plan, inputs, scratch)

        @pl.when(block < last)
        def next_block():
            pages(span, block + 1, 1 - slot)

        @pl.when((block == last) & (item + 1 < items))
        def next_item():
            following = Span.of(plan, scalars, item + 1)
            table(following, lambda copy: copy.wait())
            pages(following, following.units(plan.block_tokens)[0], 1 - slot)

        _await_pages(plan, scratch, span, block, slot)
        if plan.writes:

            @pl.when((block == last) & (scalars.slots[item] >= 0))
            def write():
                tpu_write.put(plan, inputs, scratch, span.newest, block, slot)
                tpu_write.start(plan, inputs, scratch, scalars, span.newest, block, slot, item)

        border = _is_border(plan, span, tile * plan.tile, block * plan.block_tokens)
        add = partial(_add_block, plan, inputs.q, scratch, span, tile * plan.tile, block * plan.block_tokens, slot)
        pl.when(border)(partial(add, masked=True))
        pl.when(jnp.logical_not(border))(partial(add, masked=False))
        scratch.turn[0] = 1 - slot

    lax.fori_loop(first, last + 1, step, None)
    if plan.writes:

        @pl.when((item + 1 == items) & (scalars.slots[item] >= 0))
        def written_last():
            tpu_write.await_written(plan, inputs, scratch)

    @pl.when((item + 1 == items) | (scalars.tile[jnp.minimum(item + 1, items - 1)] != tile))
    def end_of_tile():
        def finish(head):
            total = jnp.maximum(scratch.total[head], 1e-30)
            inputs.out[head] = (scratch.values[head] / _across(total, plan.head_dim)).astype(inputs.out.dtype)

        together = plan.heads_together

        def some(i, _):
            for head in range(together):
                finish(i * together + head)

        lax.fori_loop(0, plan.kv_heads // together, some, None)


def _each_table_chunk(plan: Plan, inputs: Refs, scratch: Scratch, span: Span, act) -> None:
    """Calls `act` on each copy of a row's table from HBM to SMEM, for the entries whose pages the item sees."""
    place = span.item % TABLES
    first, last = span.units(plan.page_size * TABLE_CHUNK)

    def one(chunk, _):
        begin = chunk * TABLE_CHUNK
        source = inputs.tables.at[span.row, pl.ds(aligned(begin, TABLE_CHUNK), TABLE_CHUNK)]
        target = scratch.table.at[pl.ds(aligned(place * plan.table_entries + begin, TABLE_CHUNK), TABLE_CHUNK)]
        act(copy(source, target, scratch.table_arrived.at[place]))

    lax.fori_loop(first, last + 1, one, None)


def _pages_of(plan: Plan, span: Span, block: Any) -> tuple[Any, Any]:
    """The pages [begin, end) of a row that one of its blocks needs; empty where nothing is cached."""
    first_page = block * plan.block_pages
    begin = jnp.maximum(span.oldest // plan.page_size, first_page)
    end = jnp.minimum(span.newest // plan.page_size + 1, first_page + plan.block_pages)
    return begin, end


def _start_pages(plan: Plan, scalars: Scalars, inputs: Refs, scratch: Scratch, span: Span, block, slot) -> None:
    """Starts the copies of a block's pages. The row's table must have arrived."""
    table = span.item % TABLES * plan.table_entries
    size = plan.page_size
    first_page = block * plan.block_pages
    shift = scalars.first_page[0]

    def one(page, _):
        index = shift + scratch.table[table + page]
        at = page - first_page
        where = pl.ds(aligned(at * size, size), size)
        copy(inputs.data.at[index], scratch.kv.at[slot, :, :, where], scratch.arrived.at[slot]).start()
        if plan.has_scale:
            copy(inputs.data_scale.at[index], scratch.kv_scale.at[slot, at], scratch.arrived.at[slot]).start()

    lax.fori_loop(*_pages_of(plan, span, block), one, None)


def _await_pages(plan: Plan, scratch: Scratch, span: Span, block, slot) -> None:
    """Waits for a block's pages: once for a full block, otherwise once for each power of two in their number."""
    begin, end = _pages_of(plan, span, block)
    count = end - begin
    arrived = scratch.arrived.at[slot]

    def await_some(pages: int) -> None:
        where = scratch.kv.at[slot, :, :, pl.ds(0, pages * plan.page_size)]
        copy(where, where, arrived).wait()
        if plan.has_scale:
            scales = scratch.kv_scale.at[slot, pl.ds(0, pages)]
            copy(scales, scales, arrived).wait()

    @pl.when(count == plan.block_pages)
    def full():
        await_some(plan.block_pages)

    @pl.when((count > 0) & (count < plan.block_pages))
    def border():
        for bit in range((plan.block_pages - 1).bit_length()):
            pl.when((count >> bit) % 2 == 1)(partial(await_some, 1 << bit))


def _is_border(plan: Plan, span: Span, first_token: Any, first_position: Any) -> Any:
    """Whether some token of the tile must not see some position of the block, so that a mask is needed."""
    border = first_position + plan.block_tokens - 1 > span.begin + span.shift
    if plan.tile > 1:
        border |= (span.begin > first_token) | (span.end < first_token + plan.tile)
    if plan.window:
        border |= first_position <= span.end - 1 + span.shift - plan.window
    return border


def _add_block(
    plan: Plan, q: Any, scratch: Scratch, span: Span, first_token: Any, first_position: Any, slot: Any, *, masked: bool
) -> None:
    """Adds a block of keys and values to the running softmax of all heads. `masked`: some positions are not visible.

    A unit is some queries of a head. The matrix unit computes the scores of a unit while the vector unit computes the
    softmax of the unit before it, so scores are requested one unit ahead.
    """
    tokens = plan.block_tokens
    token = first_token + lax.broadcasted_iota(jnp.int32, (plan.tile, tokens), 0)
    position = first_position + lax.broadcasted_iota(jnp.int32, (plan.tile, tokens), 1)
    seen = (token >= span.begin) & (token < span.end) & (position <= token + span.shift)
    if plan.window:
        seen &= position > token + span.shift - plan.window

    def filled(shape, axis):
        """Selects the positions that copies have filled. Others may be NaN, and NaN * 0 is NaN."""
        position = first_position + lax.broadcasted_iota(jnp.int32, shape, axis)
        return (position >= span.oldest) & (position <= span.newest)

    precision = lax.Precision.HIGHEST if plan.compute_dtype == jnp.float32 else lax.Precision.DEFAULT
    dot = partial(lax.dot_general, precision=precision, preferred_element_type=jnp.float32)

    def scores_of(head, rows):
        k = _block_of(plan, scratch, slot, 0, head)
        return dot(q[head, rows].astype(plan.compute_dtype), k, (((1,), (1,)), ((), ())))

    def update(head, rows, scores):
        scores *= plan.scale
        if plan.has_scale:
            scores *= _scale_row(plan, scratch, slot, 0, head)
        if plan.softcap:
            scores = plan.softcap * jnp.tanh(scores / plan.softcap)
        if masked:
            scores = _mask(plan, scores, seen)
        before = scratch.peak[head, rows]
        peak = jnp.maximum(before, scores.max(1, keepdims=True))
        keep = jnp.exp(before - peak)
        p = jnp.exp(scores - _across(peak, tokens))
        scratch.peak[head, rows] = peak
        scratch.total[head, rows] = keep * scratch.total[head, rows] + p.sum(1, keepdims=True)
        v = _block_of(plan, scratch, slot, 1, head)
        if masked:
            v = jnp.where(filled((tokens, plan.head_dim), 0), v, jnp.zeros_like(v))
        if plan.has_scale:
            factor = _scale_row(plan, scratch, slot, 1, head)
            p *= jnp.where(filled((1, tokens), 1), factor, 0.0) if masked else factor
        weighted = dot(p.astype(plan.compute_dtype), v, (((1,), (0,)), ((), ())))
        scratch.values[head, rows] = scratch.values[head, rows] * _across(keep, plan.head_dim) + weighted

    def some(i, _):
        units = [(i * plan.heads_together + head, pl.ds(row, plan.unit))
                 for head in range(plan.heads_together) for row in range(0, plan.queries, plan.unit)]  # fmt: skip
        ahead = scores_of(*units[0])
        for unit, following in zip(units, [*units[1:], None], strict=True):
            scores = ahead
            if following is not None:
                ahead = scores_of(*following)
            update(*unit, scores)

    lax.fori_loop(0, plan.kv_heads // plan.heads_together, some, None)


def _block_of(plan: Plan, scratch: Scratch, slot: Any, which: int, head: Any) -> jax.Array:
    """A head's keys (which = 0) or values (1), [block tokens, head_dim]."""
    parts = [scratch.kv[slot, which, head * plan.parts + i] for i in range(plan.parts)]
    return jnp.concatenate(parts, axis=1).astype(plan.compute_dtype)


def _across(x: jax.Array, width: int) -> jax.Array:
    """Returns [queries, width] from x [queries, LANES] with equal lanes. Unlike a broadcast of one lane it is free."""
    return x[:, :width] if width <= LANES else jnp.concatenate([x] * (width // LANES), axis=1)


def _mask(plan: Plan, scores: jax.Array, seen: jax.Array) -> jax.Array:
    """Masks scores [unit, block tokens], rows in order of group, then token. seen: [tile, block tokens]."""
    if plan.tile == 1:
        return jnp.where(seen, scores, MASKED)
    parts = scores.reshape(-1, plan.tile, plan.block_tokens)
    return jnp.where(seen[None], parts, MASKED).reshape(scores.shape)


def _scale_row(plan: Plan, scratch: Scratch, slot, which: int, head: Any) -> jax.Array:
    """The scales of a head's keys (which = 0) or values (1), float32 [1, block tokens]."""
    rows = [scratch.kv_scale[slot, page, which, pl.ds(head, 1)] for page in range(plan.block_pages)]
    return jnp.concatenate(rows, axis=1)
