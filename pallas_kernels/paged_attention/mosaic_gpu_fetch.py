"""The warpgroup that fetches keys and values for the Hopper kernel of prompts (`mosaic_gpu_prompt_kernel`), in which
queries are the rows of the matrix unit's tile.

A cache with scales arrives as codes. The fetching warpgroup converts them in shared memory to the queries' dtype, a
block of keys and then one of values, because wgmma takes 8-bit operands only where the inner dimension is contiguous,
which it is not for values. The scales are multiplied in during the conversion, with the rounding of the queries' dtype.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxserve.pallas_kernels import hopper_rules
from jaxserve.pallas_kernels.hopper_rules import Span
from jaxserve.pallas_kernels.paged_attention.mosaic_gpu_prompt_tile import LANES, PromptTile
from jaxserve.pallas_kernels.work_lists import FIRST, LAST, LENGTH, ROW


def code_width(tile: PromptTile) -> int:
    """How many codes of a token are converted at a time; fewer where accumulators leave few registers."""
    return 128 if tile.head_dim <= 128 else 64


def pieces_of(tile, work, table, step):
    """Returns tuples (page, tokens in it, place in the block) of a block's pieces. table: (block table, first page, the
    first position that any query token of the row sees, or None without a window)."""
    piece = min(tile.page_size, tile.block)
    # Pages beyond the row's end or before its window belong to others. Their values may be infinite, and 0 times these
    # would be NaN. The row's last or first piece replaces them.
    places = [(work[FIRST] + step) * tile.block + i * piece for i in range(tile.block // piece)]
    places = [jnp.minimum(place, lax.div(work[LENGTH] - 1, jnp.int32(piece)) * piece) for place in places]
    table, first_page, oldest = table
    if oldest is not None:
        places = [jnp.maximum(place, lax.div(oldest, jnp.int32(piece)) * piece) for place in places]
    pages = [first_page[0] + table[work[ROW], lax.div(place, jnp.int32(tile.page_size))] for place in places]
    return [
        (page, Span(lax.rem(place, jnp.int32(tile.page_size)), piece, multiple=piece), Span(i * piece, piece))
        for i, (place, page) in enumerate(zip(places, pages, strict=True))
    ]


def drain(barrier, steps, slots):
    """Waits for the last steps of a ring of `slots` slots, two barriers each."""

    def wait(step, _):
        for half in range(2):
            plgpu.barrier_wait(barrier.at[2 * lax.rem(step, jnp.int32(slots)) + half])

    lax.fori_loop(jnp.maximum(steps - slots, 0), steps, wait, None)


def fetch(tile, work, head, kv_heads, table, data, *, kv_smem, full, free, clean, **_):
    """Copies each block into the next free slot, keys before values."""
    steps = work[LAST] - work[FIRST]

    def fetch(step, _):
        slot = lax.rem(step, jnp.int32(tile.slots))
        pieces = pieces_of(tile, work, table, step)
        for half in range(2):
            barrier = 2 * slot + half

            @pl.when(step >= tile.slots)
            def await_slot(barrier=barrier):
                plgpu.barrier_wait(free.at[barrier])
                plgpu.barrier_wait(full.at[barrier])  # completed already; keeps the phases for the last wait

            for page, tokens, place in pieces:
                window = ((page * 2 + half) * kv_heads + head, tokens)
                target = kv_smem, (slot, half, place)
                hopper_rules.fetch(data, window, *target, full.at[barrier], interpret=tile.interpret)

    lax.fori_loop(0, steps, fetch, None)
    drain(full, steps, tile.slots)

    @pl.when(work[LENGTH] < work[LAST] * tile.block)
    def clear():
        last = lax.rem(steps - 1, jnp.int32(tile.slots))
        clear_values(tile, kv_smem.at[last, 1], work[LENGTH] - (work[LAST] - 1) * tile.block)
        plgpu.commit_smem()

    plgpu.barrier_arrive(clean)
    drain(free, steps, tile.slots)


def fetch_codes(
    tile, work, head, kv_heads, table, data, scale, *, kv_smem, codes_smem, scale_smem, arrived, full, free, **_
):
    """Copies codes into their ring ahead of time, then converts them into the next free half of a slot."""
    steps = work[LAST] - work[FIRST]

    def copy(step):
        stage = lax.rem(step, jnp.int32(tile.stages))
        pieces = pieces_of(tile, work, table, step)
        for half in range(2):
            rows = [(page * 2 + half) * kv_heads + head for page, _, _ in pieces]
            for row, (_, tokens, place) in zip(rows, pieces, strict=True):
                target = codes_smem, (stage, half, place)
                hopper_rules.fetch(data, (row, tokens), *target, arrived.at[stage], interpret=tile.interpret)
            # The scales of a page are too short for the copy engine.
            of_pages = [
                plgpu.load(
                    scale.at[row, pl.ds(tokens.start, tokens.size)],
                    (),
                    layout=plgpu.Layout.WGMMA.reduce(0),
                    optimized=False,
                )
                for row, (_, tokens, _) in zip(rows, pieces, strict=True)
            ]
            for (_, _, place), values in zip(pieces, of_pages, strict=True):
                scale_smem[stage, half, pl.ds(place.start, place.size)] = values

    def convert(step, _):
        stage = lax.rem(step, jnp.int32(tile.stages))
        slot = lax.rem(step, jnp.int32(tile.slots))
        plgpu.barrier_wait(arrived.at[stage])
        for half in range(2):

            @pl.when(step >= tile.slots)
            def await_slot(half=half):
                plgpu.barrier_wait(free.at[2 * slot + half])

            widen(tile, codes_smem.at[stage, half], scale_smem.at[stage, half], kv_smem.at[slot, half])
            if half == 1:

                @pl.when(work[LENGTH] < (work[FIRST] + step + 1) * tile.block)
                def clear():
                    clear_values(tile, kv_smem.at[slot, 1], work[LENGTH] - (work[FIRST] + step) * tile.block)

            plgpu.commit_smem()
            plgpu.barrier_arrive(full.at[2 * slot + half])

        @pl.when(step + tile.stages < steps)
        def ahead():
            copy(step + tile.stages)

    lax.fori_loop(0, jnp.minimum(steps, tile.stages), lambda step, _: copy(step), None)
    lax.fori_loop(0, steps, convert, None)
    drain(free, steps, tile.slots)


def widen(tile: PromptTile, codes, scale, to):
    """Writes codes [block, head_dim] times their tokens' scales [block] to `to`, in small pieces to save registers."""
    layout = plgpu.Layout.WGMMA_UPCAST_2X
    widths = (bytes_ for bytes_ in (128, 64, 32) if bytes_ <= code_width(tile) and tile.head_dim % bytes_ == 0)
    width = next(widths, tile.head_dim)
    for top in range(0, tile.block, LANES):
        rows = pl.ds(top, LANES)
        factor = plgpu.load(scale.at[rows], (), layout=layout.reduce(1), optimized=False)
        factor = plgpu.layout_cast(lax.broadcast_in_dim(factor, (LANES, width), (0,)), layout)
        for left in range(0, tile.head_dim, width):
            part = rows, pl.ds(left, width)
            values = plgpu.load(codes.at[part], (), layout=layout)
            values = values.astype(tile.dtype if tile.codes == jnp.int8 else jnp.float16)  # exact
            to[part] = (values.astype(jnp.float32) * factor).astype(tile.dtype)


def clear_values(tile: PromptTile, v_smem, valid):
    """Writes zeros from row `valid` on, in small pieces to save registers: 0 times NaN would be NaN."""
    width = tile.head_dim if tile.head_dim % 64 else 64
    for top in range(0, tile.block, LANES):
        row = plgpu.broadcasted_iota(jnp.int32, (LANES, width), 0, layout=plgpu.Layout.WGMMA) + top
        for left in range(0, tile.head_dim, width):
            part = v_smem.at[pl.ds(top, LANES), pl.ds(left, width)]
            part[...] = jnp.where(row < valid, plgpu.load(part, (), layout=plgpu.Layout.WGMMA), 0)
