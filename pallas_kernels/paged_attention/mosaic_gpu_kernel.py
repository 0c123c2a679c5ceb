"""The Hopper attention kernel: see `mosaic_gpu`, which launches it, for what it computes and how.

Where the cache has scales, it arrives as codes, and the fetcher makes numbers of the queries' dtype of it in shared
memory, a block of keys, then one of values: wgmma takes 8-bit operands only where the inner dimension is the contiguous
one, which it is not for values. The scales are multiplied in on the way, rounded as a cache of that dtype would be. To
scale scores and probabilities instead, exactly, takes 38 registers more than the 128 with which two programs of decode
fit a multiprocessor.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention.mosaic_gpu_items import (
    FIRST,
    FULL_FIRST,
    FULL_LAST,
    LANES,
    LAST,
    LENGTH,
    POSITION,
    ROW,
    Tile,
)
from pallas_kernels.types import KVPages

MASKED = -1e30  # finite, so that a row that sees nothing stays finite
LOG2E = math.log2(math.e)


def launch(
    tile: Tile, items: jax.Array, block_tables: jax.Array, first_page: jax.Array, q: jax.Array, pages: KVPages
) -> tuple[jax.Array, jax.Array]:
    """Values [items, kv_heads, lanes or heads, head_dim] and log2-sum-exp2 of the scores [items, kv_heads, lanes].

    q: in decode [rows, kv_heads, heads, head_dim], else [items, kv_heads, lanes, head_dim]. first_page: int32 scalar,
    which is added to what block_tables say.
    """
    count, kv_heads = items.shape[0], pages.kv_heads
    lanes_out = tile.heads if tile.decode else tile.lanes
    kernel = plgpu.kernel(
        partial(_kernel, tile),
        out_type=(
            jax.ShapeDtypeStruct((count, kv_heads, lanes_out, tile.head_dim), tile.out_dtype),
            jax.ShapeDtypeStruct((count, kv_heads, tile.lanes), jnp.float32),
        ),
        scratch_types=_scratch(tile),
        grid=(kv_heads, count),
        grid_names=("head", "item"),
        num_threads=tile.groups + 1,
        thread_name="warpgroup",
        interpret=tile.interpret,
        kernel_name="paged_decode" if tile.decode else "paged_prompts",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            reduction_scratch_bytes=0,  # our reductions stay within a warp
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
    )
    # A copy may have 5 dimensions, those of tiles included.
    scale = [] if pages.scale is None else [pages.scale.reshape(-1, tile.page_size)]
    return kernel(
        items, block_tables, first_page[None], q, pages.data.reshape(-1, tile.page_size, tile.head_dim), *scale
    )


def _scratch(tile: Tile) -> dict[str, Any]:
    def array(*shape: int, dtype: Any = tile.dtype) -> Any:
        return plgpu.SMEM(shape, dtype, transforms=_swizzled(tile.head_dim, jnp.dtype(dtype)))

    kv = array(tile.slots, 2, tile.block, tile.head_dim)
    log = plgpu.SMEM((tile.lanes,), jnp.float32)
    # Results leave when no keys and values are left to come.
    results = array(tile.lanes, tile.head_dim, dtype=tile.out_dtype), log
    pieces = max(tile.block // tile.page_size, 1)
    scratch: dict[str, Any] = {
        "q_smem": array(tile.lanes, tile.head_dim),
        "kv_smem": plgpu.RefUnion(kv, results) if tile.decode else (kv, (None, log)),
        "q_full": plgpu.Barrier(num_arrivals=1),
        "full": plgpu.Barrier(num_arrivals=1 if tile.codes else pieces, num_barriers=2 * tile.slots),
        "free": plgpu.Barrier(num_arrivals=tile.groups, num_barriers=2 * tile.slots),
    }
    if tile.codes:
        scratch["codes_smem"] = array(tile.stages, 2, tile.block, tile.head_dim, dtype=tile.codes)
        scratch["scale_smem"] = plgpu.SMEM((tile.stages, 2, tile.block), jnp.float32)
        scratch["arrived"] = plgpu.Barrier(num_arrivals=2 * pieces, num_barriers=tile.stages)
    else:
        scratch["clean"] = plgpu.Barrier(num_arrivals=1)
    if tile.interpret:  # the interpreter wants both operands of a matmul in shared memory
        scratch["p_smem"] = plgpu.SMEM((tile.lanes, tile.block), tile.dtype)
    return scratch


def _swizzled(minor: int, dtype: Any) -> tuple[plgpu.TilingTransform, plgpu.SwizzleTransform] | tuple[()]:
    """The widest swizzle that rows of `minor` elements allow; rows of an odd number of 16 bytes need none."""
    swizzle = next((bytes_ for bytes_ in (128, 64, 32) if minor * dtype.itemsize % bytes_ == 0), None)
    if swizzle is None:
        return ()
    return plgpu.TilingTransform((8, swizzle // dtype.itemsize)), plgpu.SwizzleTransform(swizzle)


def _kernel(tile: Tile, items, table, first_page, q, data, *refs, kv_smem, **scratch):
    *scale, values_out, logs_out = refs
    kv_smem, (out_smem, scratch["log_smem"]) = kv_smem
    head, item, group = lax.axis_index("head"), lax.axis_index("item"), lax.axis_index("warpgroup")
    work = [items[item, column] for column in range(8)]
    few, many = (72, 216) if tile.codes else (40, 232)  # registers of those who fetch and those who compute

    @pl.when(work[LAST] > work[FIRST])
    def _():
        @pl.when(group == tile.groups)
        def _():
            if not tile.decode:
                plgpu.set_max_registers(few, action="decrease")
            q_smem, q_full = scratch["q_smem"], scratch["q_full"]
            if tile.decode:
                plgpu.copy_gmem_to_smem(q.at[work[ROW], head], q_smem.at[pl.ds(0, tile.heads)], q_full)
            else:
                plgpu.copy_gmem_to_smem(q.at[item, head], q_smem, q_full)
            fetch = _fetch_codes if tile.codes else _fetch
            fetch(tile, work, head, q.shape[1], (table, first_page[0]), data, *scale, kv_smem=kv_smem, **scratch)

        @pl.when(group < tile.groups)
        def _():
            if not tile.decode:
                plgpu.set_max_registers(many, action="increase")
            _compute(tile, work, item, head, group, values_out, logs_out, kv_smem, out_smem, **scratch)


def _pieces(tile, work, table, step):
    """Of a block: tuples of page, tokens in it, and place in the block."""
    piece = min(tile.page_size, tile.block)
    # Pages that begin beyond the row's end are not the row's: the last one it has stands in for them.
    places = [(work[FIRST] + step) * tile.block + i * piece for i in range(tile.block // piece)]
    places = [jnp.minimum(place, lax.div(work[LENGTH] - 1, jnp.int32(piece)) * piece) for place in places]
    table, first_page = table
    pages = [first_page + table[work[ROW], lax.div(place, jnp.int32(tile.page_size))] for place in places]
    return [
        (page, pl.ds(lax.rem(place, jnp.int32(tile.page_size)), piece), pl.ds(i * piece, piece))
        for i, (place, page) in enumerate(zip(places, pages, strict=True))
    ]


def _drain(barrier, steps, slots):
    """Waits for what is left in a ring of slots, two barriers each."""

    def wait(step, _):
        for half in range(2):
            plgpu.barrier_wait(barrier.at[2 * lax.rem(step, jnp.int32(slots)) + half])

    lax.fori_loop(jnp.maximum(steps - slots, 0), steps, wait, None)


def _fetch(tile, work, head, kv_heads, table, data, *, kv_smem, full, free, clean, **_):
    """The fetching warpgroup: block after block into the next free slot."""
    steps = work[LAST] - work[FIRST]

    def fetch(step, _):
        slot = lax.rem(step, jnp.int32(tile.slots))
        pieces = _pieces(tile, work, table, step)
        for half in range(2):
            barrier = 2 * slot + half

            @pl.when(step >= tile.slots)
            def await_slot(barrier=barrier):
                plgpu.barrier_wait(free.at[barrier])
                plgpu.barrier_wait(full.at[barrier])  # long since: it keeps count of the phases for the last wait

            for page, tokens, place in pieces:
                source = data.at[(page * 2 + half) * kv_heads + head, tokens]
                plgpu.copy_gmem_to_smem(source, kv_smem.at[slot, half, place], full.at[barrier])

    lax.fori_loop(0, steps, fetch, None)
    _drain(full, steps, tile.slots)

    @pl.when(work[LENGTH] < work[LAST] * tile.block)
    def clear():
        last = lax.rem(steps - 1, jnp.int32(tile.slots))
        _clear_values(tile, kv_smem.at[last, 1], work[LENGTH] - (work[LAST] - 1) * tile.block)
        plgpu.commit_smem()

    plgpu.barrier_arrive(clean)
    _drain(free, steps, tile.slots)


def _fetch_codes(
    tile, work, head, kv_heads, table, data, scale, *, kv_smem, codes_smem, scale_smem, arrived, full, free, **_
):
    """The fetching warpgroup: codes into their ring, ahead of time, and from there, converted, into the next free half
    of a slot."""
    steps = work[LAST] - work[FIRST]

    def prepare(step):
        """The pieces of a block, and their scales, too short for the copy engine, on their way into registers."""
        pieces = _pieces(tile, work, table, step)
        rows = [((page * 2 + half) * kv_heads + head, tokens) for half in range(2) for page, tokens, _ in pieces]
        return pieces, [
            plgpu.load(scale.at[row], (), layout=plgpu.Layout.WGMMA.reduce(0), optimized=False) for row in rows
        ]

    def copy(step, pieces, scales):
        stage = lax.rem(step, jnp.int32(tile.stages))
        targets = [(half, piece) for half in range(2) for piece in pieces]
        for (half, (page, tokens, place)), values in zip(targets, scales, strict=True):
            source = data.at[(page * 2 + half) * kv_heads + head, tokens]
            plgpu.copy_gmem_to_smem(source, codes_smem.at[stage, half, place], arrived.at[stage])
            scale_smem[stage, half, place] = values

    def convert(step, _):
        stage, slot = lax.rem(step, jnp.int32(tile.stages)), lax.rem(step, jnp.int32(tile.slots))
        # Prompts, which have fewer registers here, wait for the scales instead. Beyond the last step: any, unused.
        following = prepare(step + tile.stages) if tile.decode else None
        plgpu.barrier_wait(arrived.at[stage])
        for half in range(2):

            @pl.when(step >= tile.slots)
            def await_slot(half=half):
                plgpu.barrier_wait(free.at[2 * slot + half])

            _convert(tile, codes_smem.at[stage, half], scale_smem.at[stage, half], kv_smem.at[slot, half])
            if half == 1:

                @pl.when(work[LENGTH] < (work[FIRST] + step + 1) * tile.block)
                def clear():
                    _clear_values(tile, kv_smem.at[slot, 1], work[LENGTH] - (work[FIRST] + step) * tile.block)

            plgpu.commit_smem()
            plgpu.barrier_arrive(full.at[2 * slot + half])

        @pl.when(step + tile.stages < steps)
        def ahead():
            copy(step + tile.stages, *(following or prepare(step + tile.stages)))

    lax.fori_loop(0, jnp.minimum(steps, tile.stages), lambda step, _: copy(step, *prepare(step)), None)
    lax.fori_loop(0, steps, convert, None)
    _drain(free, steps, tile.slots)


def _convert(tile: Tile, codes, scale, to):
    """Codes [block, head_dim] times their tokens' scales [block]. In small pieces, for want of registers."""
    layout = plgpu.Layout.WGMMA_UPCAST_2X
    width = next((bytes_ for bytes_ in (128, 64, 32) if tile.head_dim % bytes_ == 0), tile.head_dim)
    for top in range(0, tile.block, LANES):
        rows = pl.ds(top, LANES)
        factor = plgpu.load(scale.at[rows], (), layout=layout.reduce(1), optimized=False)
        factor = plgpu.layout_cast(lax.broadcast_in_dim(factor, (LANES, width), (0,)), layout)
        for left in range(0, tile.head_dim, width):
            part = rows, pl.ds(left, width)
            values = plgpu.load(codes.at[part], (), layout=layout)
            values = values.astype(tile.dtype if tile.codes == jnp.int8 else jnp.float16)  # exact
            to[part] = (values.astype(jnp.float32) * factor).astype(tile.dtype)


def _clear_values(tile: Tile, v_smem, valid):
    """Zeros from row `valid` on: a probability of 0 times NaN would be NaN. In small pieces, for want of registers."""
    width = tile.head_dim if tile.head_dim % 64 else 64
    for top in range(0, tile.block, LANES):
        row = plgpu.broadcasted_iota(jnp.int32, (LANES, width), 0, layout=plgpu.Layout.WGMMA) + top
        for left in range(0, tile.head_dim, width):
            part = v_smem.at[pl.ds(top, LANES), pl.ds(left, width)]
            part[...] = jnp.where(row < valid, plgpu.load(part, (), layout=plgpu.Layout.WGMMA), 0)


def _compute(tile, work, item, head, group, values_out, logs_out, kv_smem, out_smem, *,
             q_smem, log_smem, q_full, full, free, clean=None, p_smem=None, **_):  # fmt: skip
    """A computing warpgroup: 64 query rows against all blocks of the item."""
    lanes = pl.ds(group * LANES, LANES)
    q_mine = q_smem.at[lanes]
    across = partial(lax.broadcast_in_dim, broadcast_dimensions=(0,))
    lane = plgpu.broadcasted_iota(jnp.int32, (LANES,), 0, layout=plgpu.Layout.WGMMA.reduce(1)) + group * LANES
    newest = jnp.minimum(work[POSITION] + lax.rem(lane, jnp.int32(tile.tokens)), work[LENGTH] - 1)

    def multiply(a, b):
        def accumulate(acc):
            plgpu.wgmma(acc, a, b)
            return acc[...]

        return pl.run_scoped(accumulate, plgpu.ACC((LANES, b.shape[1]), jnp.float32))

    def weigh(values, p, v):
        if tile.interpret:  # knows neither accumulators that begin with a value, nor operands in registers
            p_smem[lanes, :] = p
            plgpu.commit_smem()
            return values + multiply(p_smem.at[lanes], v)
        return pl.run_state(lambda acc: plgpu.wgmma(acc, p, v))(plgpu.ACC.init(values))

    def step(block, state, masked):
        values, peak, total = state
        slot = lax.rem(block - work[FIRST], jnp.int32(tile.slots))
        plgpu.barrier_wait(full.at[2 * slot])
        scores = multiply(q_mine, plgpu.transpose_ref(kv_smem.at[slot, 0], (1, 0)))
        plgpu.barrier_arrive(free.at[2 * slot])
        if tile.softcap:
            tanh = 2.0 / (1.0 + jnp.exp2(scores * (-2.0 * LOG2E * tile.scale / tile.softcap))) - 1.0
            scores = tanh * (tile.softcap * LOG2E)  # the approximate tanh of the hardware has 11 bits
        else:
            scores = scores * (tile.scale * LOG2E)
        if masked:
            key = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=plgpu.Layout.WGMMA) + block * tile.block
            seen = key <= across(newest, scores.shape)
            if tile.window:
                seen &= key > across(newest - tile.window, scores.shape)
            scores = jnp.where(seen, scores, MASKED)
        # A row that has seen only masked keys gathers nonsense; its first key that counts multiplies that with 0.
        higher = jnp.maximum(peak, scores.max(axis=1))
        keep = jnp.exp2(peak - higher)
        p = jnp.exp2(scores - across(higher, scores.shape))
        total = total * keep + p.sum(axis=1)
        plgpu.barrier_wait(full.at[2 * slot + 1])
        if not tile.codes:

            @pl.when(block == work[LAST] - 1)
            def _():
                plgpu.barrier_wait(clean)

        values = weigh(values * across(keep, values.shape), p.astype(tile.dtype), kv_smem.at[slot, 1])
        plgpu.barrier_arrive(free.at[2 * slot + 1])
        return values, higher, total

    row_layout = plgpu.Layout.WGMMA.reduce(1)
    state = (
        plgpu.layout_cast(jnp.zeros((LANES, tile.head_dim), jnp.float32), plgpu.Layout.WGMMA),
        plgpu.layout_cast(jnp.full((LANES,), MASKED, jnp.float32), row_layout),
        plgpu.layout_cast(jnp.zeros((LANES,), jnp.float32), row_layout),
    )
    plgpu.barrier_wait(q_full)
    if not tile.decode:
        if tile.window:
            state = lax.fori_loop(work[FIRST], work[FULL_FIRST], partial(step, masked=True), state)
        state = lax.fori_loop(work[FULL_FIRST], work[FULL_LAST], partial(step, masked=False), state)
    rest = work[FIRST] if tile.decode else work[FULL_LAST]
    state = lax.fori_loop(rest, work[LAST], partial(step, masked=True), state)

    values, peak, total = state
    to = out_smem if tile.decode else q_mine
    to[...] = (values / across(total, values.shape)).astype(tile.out_dtype)
    log_smem[lanes] = peak + jnp.log(total) * LOG2E
    plgpu.commit_smem()
    if tile.decode:
        plgpu.copy_smem_to_gmem(to.at[pl.ds(0, tile.heads)], values_out.at[item, head])
    else:
        plgpu.copy_smem_to_gmem(to, values_out.at[item, head, lanes])
    plgpu.copy_smem_to_gmem(log_smem.at[lanes], logs_out.at[item, head, lanes])
    plgpu.wait_smem_to_gmem(0)
