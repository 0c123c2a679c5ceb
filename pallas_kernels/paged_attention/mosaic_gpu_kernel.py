"""Hopper's decode kernel for sizes of heads that `mosaic_gpu_decode` does not take. `mosaic_gpu` explains it.

A cache with scales arrives as codes. The fetching warpgroup converts them in shared memory to the queries' dtype, a
block of keys and then one of values, because wgmma takes 8-bit operands only where the inner dimension is contiguous,
which it is not for values. The scales are multiplied in during the conversion, with the rounding of the queries' dtype.
Scaling the scores and probabilities instead would be exact, but takes 38 registers more than the 128 with which two
programs fit a multiprocessor.
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

from jaxserve.pallas_kernels import hopper_rules
from jaxserve.pallas_kernels.hopper_rules import Span
from jaxserve.pallas_kernels.paged_attention.mosaic_gpu_fetch import clear_values, drain, fetch, pieces_of, widen
from jaxserve.pallas_kernels.paged_attention.mosaic_gpu_items import LANES, Tile
from jaxserve.pallas_kernels.paged_attention.reference import MASKED
from jaxserve.pallas_kernels.types import KVPages
from jaxserve.pallas_kernels.work_lists import FIRST, LAST, LENGTH, POSITION, ROW

LOG2E = math.log2(math.e)


def launch(
    tile: Tile, items: jax.Array, block_tables: jax.Array, first_page: jax.Array, q: jax.Array, pages: KVPages
) -> tuple[jax.Array, jax.Array]:
    """Returns values [items, kv_heads, heads, head_dim] and the log2-sum-exp2 of scores [items, kv_heads, lanes].

    q: [rows, kv_heads, heads, head_dim]. first_page: int32 scalar that is added to each entry of block_tables.
    """
    count, kv_heads = items.shape[0], pages.kv_heads
    kernel = plgpu.kernel(
        partial(_kernel, tile),
        out_type=(
            jax.ShapeDtypeStruct((count, kv_heads, tile.heads, tile.head_dim), tile.out_dtype),
            jax.ShapeDtypeStruct((count, kv_heads, tile.lanes), jnp.float32),
        ),
        scratch_types=_scratch(tile),
        grid=(kv_heads, count),
        grid_names=("head", "item"),
        num_threads=2,
        thread_name="warpgroup",
        interpret=tile.interpret,
        kernel_name="paged_decode",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            reduction_scratch_bytes=0,  # these reductions stay within a warp
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
    )
    # Copies may have at most 5 dimensions, including those that tiling adds.
    scale = [] if pages.scale is None else [pages.scale.reshape(-1, tile.page_size)]
    return kernel(
        items, block_tables, first_page[None], q, pages.data.reshape(-1, tile.page_size, tile.head_dim), *scale
    )


def _scratch(tile: Tile) -> dict[str, Any]:
    def array(*shape: int, dtype: Any = tile.dtype) -> Any:
        return plgpu.SMEM(shape, dtype, transforms=_swizzled(tile.head_dim, jnp.dtype(dtype)))

    kv = array(tile.slots, 2, tile.block, tile.head_dim)
    log = plgpu.SMEM((tile.lanes,), jnp.float32)
    # Results share their memory with keys and values: they are written after the last block was read.
    results = array(tile.lanes, tile.head_dim, dtype=tile.out_dtype), log
    pieces = max(tile.block // tile.page_size, 1)
    scratch: dict[str, Any] = {
        "q_smem": array(tile.lanes, tile.head_dim),
        "kv_smem": plgpu.RefUnion(kv, results),
        "q_full": plgpu.Barrier(num_arrivals=1),
        "full": plgpu.Barrier(num_arrivals=1 if tile.codes else pieces, num_barriers=2 * tile.slots),
        "free": plgpu.Barrier(num_arrivals=1, num_barriers=2 * tile.slots),
    }
    if tile.codes:
        scratch["codes_smem"] = array(tile.stages, 2, tile.block, tile.head_dim, dtype=tile.codes)
        scratch["scale_smem"] = plgpu.SMEM((tile.stages, 2, tile.block), jnp.float32)
        scratch["arrived"] = plgpu.Barrier(num_arrivals=2 * pieces, num_barriers=tile.stages)
    else:
        scratch["clean"] = plgpu.Barrier(num_arrivals=1)
    if tile.interpret:  # the interpreter requires both operands of a matmul in shared memory
        scratch["p_smem"] = plgpu.SMEM((tile.lanes, tile.block), tile.dtype)
    return scratch


def _swizzled(minor: int, dtype: Any) -> tuple[plgpu.TilingTransform, plgpu.SwizzleTransform] | tuple[()]:
    """The widest swizzle that rows of `minor` elements allow; rows of an odd number of 16-byte units need none."""
    swizzle = next((bytes_ for bytes_ in (128, 64, 32) if minor * dtype.itemsize % bytes_ == 0), None)
    if swizzle is None:
        return ()
    return plgpu.TilingTransform((8, swizzle // dtype.itemsize)), plgpu.SwizzleTransform(swizzle)


def _kernel(tile: Tile, items, table, first_page, q, data, *refs, kv_smem, **scratch):
    *scale, values_out, logs_out = refs
    kv_smem, (out_smem, scratch["log_smem"]) = kv_smem
    head, item, group = lax.axis_index("head"), lax.axis_index("item"), lax.axis_index("warpgroup")
    work = [items[item, column] for column in range(8)]

    @pl.when(work[LAST] > work[FIRST])
    def _():
        @pl.when(group == 1)
        def _():
            q_smem, q_full = scratch["q_smem"], scratch["q_full"]
            queries = (Span(0, tile.heads),)
            hopper_rules.fetch(q, (work[ROW], head), q_smem, queries, q_full, interpret=tile.interpret)
            bring = _fetch_codes if tile.codes else fetch
            bring(tile, work, head, q.shape[1], (table, first_page), data, *scale, kv_smem=kv_smem, **scratch)

        @pl.when(group == 0)
        def _():
            _compute(tile, work, item, head, values_out, logs_out, kv_smem, out_smem, **scratch)


def _fetch_codes(
    tile, work, head, kv_heads, table, data, scale, *, kv_smem, codes_smem, scale_smem, arrived, full, free, **_
):
    """The fetching warpgroup for codes: copies them into their ring ahead of time, then converts them into the next
    free half of a slot."""
    steps = work[LAST] - work[FIRST]

    def prepare(step):
        """Returns the pieces of a block, and starts loading their scales (too short for the copy engine)."""
        pieces = pieces_of(tile, work, table, step)
        rows = [
            scale.at[(page * 2 + half) * kv_heads + head, pl.ds(tokens.start, tokens.size)]
            for half in range(2)
            for page, tokens, _ in pieces
        ]
        return pieces, [plgpu.load(row, (), layout=plgpu.Layout.WGMMA.reduce(0), optimized=False) for row in rows]

    def copy(step, pieces, scales):
        stage = lax.rem(step, jnp.int32(tile.stages))
        targets = [(half, piece) for half in range(2) for piece in pieces]
        for (half, (page, tokens, place)), values in zip(targets, scales, strict=True):
            window = ((page * 2 + half) * kv_heads + head, tokens)
            target = codes_smem, (stage, half, place)
            hopper_rules.fetch(data, window, *target, arrived.at[stage], interpret=tile.interpret)
            scale_smem[stage, half, pl.ds(place.start, place.size)] = values

    def convert(step, _):
        stage, slot = lax.rem(step, jnp.int32(tile.stages)), lax.rem(step, jnp.int32(tile.slots))
        # Blocks of eight pages or more load their scales late: prefetching takes more than the 128 registers with which
        # two programs share a multiprocessor. Scales beyond the last step are arbitrary and not used.
        ahead_of_time = tile.block <= 4 * tile.page_size
        following = prepare(step + tile.stages) if ahead_of_time else None
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
            copy(step + tile.stages, *(following or prepare(step + tile.stages)))

    lax.fori_loop(0, jnp.minimum(steps, tile.stages), lambda step, _: copy(step, *prepare(step)), None)
    lax.fori_loop(0, steps, convert, None)
    drain(free, steps, tile.slots)


def _compute(tile, work, item, head, values_out, logs_out, kv_smem, out_smem, *,
             q_smem, log_smem, q_full, full, free, clean=None, p_smem=None, **_):  # fmt: skip
    """The computing warpgroup: 64 query rows against all blocks of the item."""
    across = partial(lax.broadcast_in_dim, broadcast_dimensions=(0,))
    lane = plgpu.broadcasted_iota(jnp.int32, (LANES,), 0, layout=plgpu.Layout.WGMMA.reduce(1))
    newest = jnp.minimum(work[POSITION] + lax.rem(lane, jnp.int32(tile.tokens)), work[LENGTH] - 1)

    def multiply(a, b):
        def accumulate(acc):
            plgpu.wgmma(acc, a, b)
            return acc[...]

        return pl.run_scoped(accumulate, plgpu.ACC((LANES, b.shape[1]), jnp.float32))

    def weigh(values, p, v):
        if tile.interpret:  # the interpreter knows neither accumulators with an initial value nor operands in registers
            p_smem[...] = p
            plgpu.commit_smem()
            return values + multiply(p_smem, v)
        return pl.run_state(lambda acc: plgpu.wgmma(acc, p, v))(plgpu.ACC.init(values))

    def step(block, state):
        values, peak, total = state
        slot = lax.rem(block - work[FIRST], jnp.int32(tile.slots))
        plgpu.barrier_wait(full.at[2 * slot])
        scores = multiply(q_smem, plgpu.transpose_ref(kv_smem.at[slot, 0], (1, 0)))
        plgpu.barrier_arrive(free.at[2 * slot])
        if tile.softcap:
            tanh = 2.0 / (1.0 + jnp.exp2(scores * (-2.0 * LOG2E * tile.scale / tile.softcap))) - 1.0
            scores = tanh * (tile.softcap * LOG2E)  # the hardware's approximate tanh is exact to 11 bits
        else:
            scores = scores * (tile.scale * LOG2E)
        key = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=plgpu.Layout.WGMMA) + block * tile.block
        seen = key <= across(newest, scores.shape)
        if tile.window:
            seen &= key > across(newest - tile.window, scores.shape)
        scores = jnp.where(seen, scores, MASKED)
        # A row whose keys were all masked so far holds meaningless sums; its first unmasked key multiplies them by 0.
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
    state = lax.fori_loop(work[FIRST], work[LAST], step, state)

    values, peak, total = state
    out_smem[...] = (values / across(total, values.shape)).astype(tile.out_dtype)
    log_smem[...] = peak + jnp.log(total) * LOG2E
    plgpu.commit_smem()
    rows, lanes = Span(0, tile.heads), Span(0, LANES)
    hopper_rules.store(out_smem, (rows,), values_out, (item, head, rows), interpret=tile.interpret)
    hopper_rules.store(log_smem, (lanes,), logs_out, (item, head, lanes), interpret=tile.interpret)
    plgpu.wait_smem_to_gmem(0)
