"""The body of the TPU's kernel for latent attention: the computation of one item, and the copies that run ahead of it.
The order of items, tables and blocks is that of `paged_attention/tpu_kernel.py`."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxserve.pallas_kernels.latent_attention.tpu_plan import LatentPlan, LatentRefs, LatentScratch
from jaxserve.pallas_kernels.paged_attention.tpu_kernel import (
    MASKED,
    UNSEEN,
    Span,
    _across,
    _each_table_chunk,
    _is_border,
    _pages_of,
)
from jaxserve.pallas_kernels.paged_attention.tpu_plan import TABLES, Scalars
from jaxserve.pallas_kernels.tpu_dma import aligned, copy


def kernel(plan: LatentPlan, *refs: Any) -> None:
    """Computes one item. It has at least one block, whose copy the item before has started."""
    count = len(Scalars._fields) - 1  # without slots, because nothing is written
    scalars = Scalars(*refs[:count])
    others = iter(refs[count:])
    q = next(others)
    tables = next(others)
    data = next(others)
    inputs = LatentRefs(q, tables, data, next(others) if plan.has_scale else None, next(others))
    scratch = LatentScratch(*(next(others) if part is not None else None for part in LatentScratch.shapes(plan)))

    item = pl.program_id(0)
    items = scalars.count[0]
    span = Span.of(plan, scalars, item)
    tile = scalars.tile[item]
    first, last = span.units(plan.block_tokens)
    pages = partial(_start_pages, plan, scalars, inputs, scratch)
    table: Any = partial(_each_table_chunk, plan, inputs, scratch)  # type: ignore[arg-type]  # of the same names

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
        scratch.peak[...] = jnp.full_like(scratch.peak, UNSEEN)
        scratch.total[...] = jnp.zeros_like(scratch.total)

    def step(block, _):
        slot = scratch.turn[0]

        @pl.when(block < last)
        def next_block():
            pages(span, block + 1, 1 - slot)

        @pl.when((block == last) & (item + 1 < items))
        def next_item():
            following = Span.of(plan, scalars, item + 1)
            table(following, lambda copy: copy.wait())
            pages(following, following.units(plan.block_tokens)[0], 1 - slot)

        _await_pages(plan, scratch, span, block, slot)
        border = _is_border(plan, span, tile * plan.tile, block * plan.block_tokens)
        add = partial(_add_block, plan, inputs.q, scratch, span, tile * plan.tile, block * plan.block_tokens, slot)
        pl.when(border)(partial(add, masked=True))
        pl.when(jnp.logical_not(border))(partial(add, masked=False))
        scratch.turn[0] = 1 - slot

    lax.fori_loop(first, last + 1, step, None)

    @pl.when((item + 1 == items) | (scalars.tile[jnp.minimum(item + 1, items - 1)] != tile))
    def end_of_tile():
        def finish(i, _):
            rows = pl.ds(i * plan.unit, plan.unit)
            total = jnp.maximum(scratch.total[rows], 1e-30)
            inputs.out[rows] = (scratch.values[rows] / _across(total, plan.rank)).astype(inputs.out.dtype)

        lax.fori_loop(0, plan.queries // plan.unit, finish, None)


def _start_pages(
    plan: LatentPlan, scalars: Scalars, inputs: LatentRefs, scratch: LatentScratch, span: Span, block: Any, slot: Any
) -> None:
    """Starts the copies of a block's pages. The part of the table with their numbers has arrived."""
    table = span.item % TABLES * plan.table_entries
    size = plan.page_size
    first_page = block * plan.block_pages
    shift = scalars.first_page[0]

    def one(page, _):
        index = shift + scratch.table[table + page]
        at = page - first_page
        where = pl.ds(aligned(at * size, size), size)
        copy(inputs.data.at[index], scratch.kv.at[slot, where], scratch.arrived.at[slot]).start()
        if plan.has_scale:
            copy(inputs.data_scale.at[index], scratch.kv_scale.at[slot, at], scratch.arrived.at[slot]).start()

    lax.fori_loop(*_pages_of(plan, span, block), one, None)


def _await_pages(plan: LatentPlan, scratch: LatentScratch, span: Span, block: Any, slot: Any) -> None:
    """Waits for a block's pages: once for a full block, otherwise once for each power of two in their number."""
    begin, end = _pages_of(plan, span, block)
    count = end - begin
    arrived = scratch.arrived.at[slot]

    def await_some(pages: int) -> None:
        where = scratch.kv.at[slot, pl.ds(0, pages * plan.page_size)]
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


def _block_of(
    plan: LatentPlan, scratch: LatentScratch, span: Span, first_position: Any, slot: Any, masked: bool
) -> Any:
    """The block as a reference [block tokens, width] in the type of the computation. Rows that no copy has filled
    become zero, because they may be NaN, and NaN * 0 is NaN."""
    block = scratch.kv.at[slot]
    if masked or plan.converts:
        # Selected in float32, where it is exact for all dtypes: narrow ones lack masks on some chips.
        found = block[...].astype(jnp.float32)
        if masked:
            position = first_position + lax.broadcasted_iota(jnp.int32, found.shape, 0)
            found = jnp.where(position <= span.newest, found, 0.0)
        block = scratch.wide if plan.converts else block
        block[...] = found.astype(block.dtype)
    return block


def _add_block(
    plan: LatentPlan, q: Any, scratch: LatentScratch, span: Span, first_token: Any, first_position: Any, slot: Any, *,
    masked: bool,
) -> None:  # fmt: skip
    """Adds a block of cached tokens to the running softmax of all queries, one unit after the other. A unit is all
    queries of some tokens. `masked`: some queries must not see all tokens of the block."""
    tokens = plan.block_tokens
    rank = plan.rank
    block = _block_of(plan, scratch, span, first_position, slot, masked)
    precision = lax.Precision.HIGHEST if plan.compute_dtype == jnp.float32 else lax.Precision.DEFAULT
    dot = partial(lax.dot_general, precision=precision, preferred_element_type=jnp.float32)
    latent_scale: Any = None
    key_scale: Any = None
    if plan.has_scale:
        latent_scale, key_scale = (_scale_row(plan, scratch, slot, part) for part in range(2))
        if masked:
            owned = first_position + lax.broadcasted_iota(jnp.int32, (1, tokens), 1) <= span.newest
            latent_scale, key_scale = (jnp.where(owned, x, 0.0) for x in (latent_scale, key_scale))

    def scores_of(unit):
        query = q[pl.ds(unit * plan.unit, plan.unit)].astype(plan.compute_dtype)
        if not plan.has_scale:
            return dot(query, block[...], (((1,), (1,)), ((), ())))
        of_latents = dot(query[:, :rank], block[:, :rank], (((1,), (1,)), ((), ())))
        return of_latents * latent_scale + dot(query[:, rank:], block[:, rank:], (((1,), (1,)), ((), ()))) * key_scale

    def seen(unit):
        shape = (plan.unit_tokens, tokens)
        token = first_token + unit * plan.unit_tokens + lax.broadcasted_iota(jnp.int32, shape, 0)
        position = first_position + lax.broadcasted_iota(jnp.int32, shape, 1)
        return (token >= span.begin) & (token < span.end) & (position <= token + span.shift)

    def update(unit, scores):
        rows = pl.ds(unit * plan.unit, plan.unit)
        scores *= plan.scale
        if masked:
            parts = scores.reshape(plan.unit_tokens, plan.heads, tokens)
            scores = jnp.where(seen(unit)[:, None], parts, MASKED).reshape(scores.shape)
        before = scratch.peak[rows]
        peak = jnp.maximum(before, scores.max(1, keepdims=True))
        keep = jnp.exp(before - peak)
        p = jnp.exp(scores - _across(peak, tokens))
        scratch.peak[rows] = peak
        scratch.total[rows] = keep * scratch.total[rows] + p.sum(1, keepdims=True)
        if plan.has_scale:
            p *= latent_scale
        weighted = dot(p.astype(plan.compute_dtype), block[:, :rank], (((1,), (0,)), ((), ())))
        scratch.values[rows] = scratch.values[rows] * _across(keep, rank) + weighted

    lax.fori_loop(0, plan.queries // plan.unit, lambda unit, _: update(unit, scores_of(unit)), None)


def _scale_row(plan: LatentPlan, scratch: LatentScratch, slot: Any, part: int) -> jax.Array:
    """float32 [1, block tokens]: the scales of the latents (part = 0) or of the rotated keys (part = 1)."""
    rows = [scratch.kv_scale[slot, page, pl.ds(part, 1)] for page in range(plan.block_pages)]
    return jnp.concatenate(rows, axis=1)
