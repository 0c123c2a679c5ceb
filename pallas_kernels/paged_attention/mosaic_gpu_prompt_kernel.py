"""The Hopper prompt attention kernel. `mosaic_gpu_prompt` launches it and explains it."""

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
from jaxserve.pallas_kernels.paged_attention.mosaic_gpu_fetch import code_width, fetch, fetch_codes
from jaxserve.pallas_kernels.paged_attention.mosaic_gpu_prompt_tile import LANES, WARPGROUPS, PromptTile
from jaxserve.pallas_kernels.types import KVPages
from jaxserve.pallas_kernels.work_lists import FIRST, FULL_FIRST, FULL_LAST, LAST, LENGTH, OLDEST, POSITION, SLOT, TOKEN

LOG2E = math.log2(math.e)
# Score of a masked key, a power of two, so that its product with any factor is exact. Compilers fuse this product with
# the subtraction of the peak. So the exponent of a row whose keys are all masked would be the product's rounding error,
# of about 1e21, and its probabilities 0 or infinite.
MASKED = -(2.0**100)


def launch(
    tile: PromptTile,
    slots: int,
    items: jax.Array,
    block_tables: jax.Array,
    first_page: jax.Array,
    q: jax.Array,
    pages: KVPages,
) -> list[jax.Array]:
    """Computes all items. Items with a SLOT leave their values in the last result, other items in the first.

    Args:
      slots: how many slots there are; 0: no item has one, and there is no third result.
      q: [tokens, kv_heads, group, head_dim].
      first_page: int32 scalar that is added to each entry of block_tables.

    Returns:
      values [items, kv_heads * shares, lanes, head_dim] in q's dtype; log2-sum-exp2 of the scores [items, kv_heads *
      shares, lanes]; values float32 [slots, kv_heads * shares, lanes, head_dim]. Partials that no item fills are
      undefined.
    """
    count = items.shape[0]
    programs = pages.kv_heads * tile.shares
    out_type = [
        jax.ShapeDtypeStruct((count, programs, tile.lanes, tile.head_dim), tile.dtype),
        jax.ShapeDtypeStruct((count, programs, tile.lanes), jnp.float32),
    ]
    if slots:
        out_type.append(jax.ShapeDtypeStruct((slots, programs, tile.lanes, tile.head_dim), jnp.float32))
    kernel = plgpu.kernel(
        partial(_kernel, tile, bool(slots)),
        out_type=out_type,
        scratch_types=_scratch(tile),
        grid=(programs, count),
        grid_names=("head", "item"),
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
        interpret=tile.interpret,
        kernel_name="paged_prompts",
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


def _scratch(tile: PromptTile) -> dict[str, Any]:
    def array(*shape: int, dtype: Any = tile.dtype, widest: int = 128) -> Any:
        return plgpu.SMEM(shape, dtype, transforms=_swizzled(tile.head_dim, jnp.dtype(dtype), widest))

    pieces = max(tile.block // tile.page_size, 1)
    scratch: dict[str, Any] = {
        "q_smem": array(tile.lanes, tile.head_dim),
        "kv_smem": array(tile.slots, 2, tile.block, tile.head_dim),
        "q_full": plgpu.Barrier(num_arrivals=tile.heads),
        "full": plgpu.Barrier(num_arrivals=1 if tile.codes else pieces, num_barriers=2 * tile.slots),
        "free": plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=2 * tile.slots),
        "turn": plgpu.Barrier(num_arrivals=1, num_barriers=WARPGROUPS),
    }
    if tile.codes:
        codes = tile.stages, 2, tile.block, tile.head_dim
        scratch["codes_smem"] = array(*codes, dtype=tile.codes, widest=code_width(tile))
        scratch["scale_smem"] = plgpu.SMEM((tile.stages, 2, tile.block), jnp.float32)
        scratch["arrived"] = plgpu.Barrier(num_arrivals=2 * pieces, num_barriers=tile.stages)
    else:
        scratch["clean"] = plgpu.Barrier(num_arrivals=1)
    if tile.interpret:  # the interpreter requires both operands of a matmul in shared memory
        scratch["p_smem"] = plgpu.SMEM((tile.lanes, tile.block), tile.dtype)
    return scratch


def _swizzled(minor: int, dtype: Any, widest: int) -> tuple[plgpu.TilingTransform, plgpu.SwizzleTransform] | tuple[()]:
    """The widest swizzle that rows of `minor` elements allow; rows of an odd number of 16-byte units need none."""
    allowed = (bytes_ for bytes_ in (128, 64, 32) if bytes_ <= widest and minor * dtype.itemsize % bytes_ == 0)
    swizzle = next(allowed, None)
    if swizzle is None:
        return ()
    return plgpu.TilingTransform((8, swizzle // dtype.itemsize)), plgpu.SwizzleTransform(swizzle)


def _kernel(tile: PromptTile, has_slots: bool, items, table, first_page, q, data, *refs, **scratch):
    scale, outs = (refs[:1], refs[1:]) if tile.codes else ((), refs)
    program = lax.axis_index("head")
    item = lax.axis_index("item")
    group = lax.axis_index("warpgroup")
    work = [items[item, column] for column in range(SLOT)]
    shares = jnp.int32(tile.shares)
    head = lax.div(program, shares)
    share = lax.rem(program, shares)

    @pl.when(work[LAST] > work[FIRST])
    def _():
        @pl.when(group == WARPGROUPS)
        def _():
            plgpu.set_max_registers(tile.registers[0], action="decrease")
            tokens = Span(work[TOKEN], tile.tokens, multiple=8)
            for i in range(tile.heads):
                place = (Span(i * tile.tokens, tile.tokens),)
                window = (tokens, head, share * tile.heads + i)
                hopper_rules.fetch(q, window, scratch["q_smem"], place, scratch["q_full"], interpret=tile.interpret)
            bring = fetch_codes if tile.codes else fetch
            pages = table, first_page, items[item, OLDEST] if tile.window else None
            bring(tile, work, head, q.shape[1], pages, data, *scale, **scratch)

        @pl.when(group < WARPGROUPS)
        def _():
            plgpu.set_max_registers(tile.registers[1], action="increase")
            values, log = _compute(tile, work, group, **scratch)
            slot = items[item, SLOT] if has_slots else None  # read here and not earlier, to save registers
            _leave(tile, slot, (item, program), group, values, log, outs, scratch["q_smem"])


def _across(rows: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return lax.broadcast_in_dim(rows, shape, (0,))


def _factor(tile: PromptTile) -> float:
    """What scores are multiplied with before the exponential."""
    return 1.0 if tile.softcap else tile.scale * LOG2E


def _softmax(tile: PromptTile, work, newest, block, scores, peak, total, masked):
    """One step of the running softmax. Returns probabilities, peak, total, and the factor for the values so far.

    Peaks are of scores times log2(e), so that the exponentials are powers of two.
    """
    factor = _factor(tile)
    if tile.softcap:
        tanh = 2.0 / (1.0 + jnp.exp2(scores * (-2.0 * LOG2E * tile.scale / tile.softcap))) - 1.0
        scores = tanh * (tile.softcap * LOG2E)  # the hardware's approximate tanh is exact to 11 bits
    if masked:
        key = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=plgpu.Layout.WGMMA) + block * tile.block
        seen = key <= _across(newest, scores.shape)
        if tile.window:
            seen &= key > _across(newest - tile.window, scores.shape)
        scores = jnp.where(seen, scores, MASKED)
    # A row whose keys were all masked so far holds finite sums of them; its first unmasked key multiplies them by 0.
    higher = jnp.maximum(peak, scores.max(axis=1) * factor)
    keep = jnp.exp2(peak - higher)
    p = jnp.exp2(scores * factor - _across(higher, scores.shape))
    return p, higher, total * keep + p.sum(axis=1), keep


def _compute(tile: PromptTile, work, group, *, q_smem, kv_smem, q_full, full, free, turn, clean=None, p_smem=None, **_):
    """A computing warpgroup: 64 query rows against all blocks of the item. Returns values, and log2 of their weights'
    sum.

    The products Q K^T of one block and P V of the block before it are issued together. The tensor cores work on the
    second while this warpgroup turns the scores of the first into exponentials. `turn` makes it wait until the other
    warpgroup has issued its products.
    """
    lanes = pl.ds(group * LANES, LANES)
    q_mine = q_smem.at[lanes]
    lane = plgpu.broadcasted_iota(jnp.int32, (LANES,), 0, layout=plgpu.Layout.WGMMA.reduce(1)) + group * LANES
    newest = jnp.minimum(work[POSITION] + lax.rem(lane, jnp.int32(tile.tokens)), work[LENGTH] - 1)
    softmax = partial(_softmax, tile, work, newest)

    def slot_of(block):
        return lax.rem(block - work[FIRST], jnp.int32(tile.slots))

    def issue_scores(acc, block):
        plgpu.wgmma(acc, q_mine, plgpu.transpose_ref(kv_smem.at[slot_of(block), 0], (1, 0)))

    def begin_values(acc, values, p):
        """Starts the accumulator with `values`; where it cannot, it starts with zeros."""
        if tile.interpret:  # the interpreter knows neither accumulators with an initial value nor operands in registers
            p_smem[lanes, :] = p
            plgpu.commit_smem()
        else:
            acc[...] = values

    def issue_values(acc, block, p):
        plgpu.wgmma(acc, p_smem.at[lanes] if tile.interpret else p, kv_smem.at[slot_of(block), 1])

    def finished(acc, values):
        """Waits for all products, and returns the new values."""
        product = lax.optimization_barrier(acc[...])
        return values + product if tile.interpret else product

    scores_acc = plgpu.ACC((LANES, tile.block), jnp.float32)
    values_acc = plgpu.ACC((LANES, tile.head_dim), jnp.float32)

    def begin(peak, total):
        """Computes the first block, which is always masked."""

        def run(acc):
            issue_scores(acc, work[FIRST])
            plgpu.barrier_arrive(turn.at[1 - group])
            return acc[...]

        plgpu.barrier_wait(full.at[2 * slot_of(work[FIRST])])
        plgpu.barrier_wait(turn.at[group])
        scores = pl.run_scoped(run, scores_acc)
        plgpu.barrier_arrive(free.at[2 * slot_of(work[FIRST])])
        p, peak, total, _ = softmax(work[FIRST], scores, peak, total, masked=True)
        return p.astype(tile.dtype), peak, total

    def step(block, state, masked):
        """Computes the scores of `block`, and adds the values of the block before it."""

        def run(scores_acc, values_acc):
            values, p, peak, total = state
            begin_values(values_acc, values, p)
            issue_scores(scores_acc, block)
            issue_values(values_acc, block - 1, p)
            plgpu.barrier_arrive(turn.at[1 - group])
            scores = lax.optimization_barrier(plgpu.wgmma_accumulator_load(scores_acc, wait_n=1))
            plgpu.barrier_arrive(free.at[2 * slot_of(block)])
            following, peak, total, keep = softmax(block, scores, peak, total, masked)
            values = finished(values_acc, values)
            plgpu.barrier_arrive(free.at[2 * slot_of(block - 1) + 1])
            # After the product: these probabilities take the registers of p, which the product reads until it ends.
            following = lax.optimization_barrier(following).astype(tile.dtype)
            return values * _across(keep, values.shape), following, peak, total

        plgpu.barrier_wait(full.at[2 * slot_of(block - 1) + 1])
        plgpu.barrier_wait(full.at[2 * slot_of(block)])
        plgpu.barrier_wait(turn.at[group])
        return pl.run_scoped(run, scores_acc, values_acc)

    def end(values, p):
        """Adds the values of the last block. Tokens beyond the row's end are zeros once `clean` has completed."""

        def run(acc):
            begin_values(acc, values, p)
            issue_values(acc, work[LAST] - 1, p)

            @pl.when(group == 0)
            def let_the_second_end():
                plgpu.barrier_arrive(turn.at[1])

            return finished(acc, values)

        plgpu.barrier_wait(full.at[2 * slot_of(work[LAST] - 1) + 1])
        if clean is not None:
            plgpu.barrier_wait(clean)
        plgpu.barrier_wait(turn.at[group])
        values = pl.run_scoped(run, values_acc)
        plgpu.barrier_arrive(free.at[2 * slot_of(work[LAST] - 1) + 1])
        return values

    @pl.when(group == 1)
    def let_the_first_begin():
        plgpu.barrier_arrive(turn.at[0])

    row_layout = plgpu.Layout.WGMMA.reduce(1)
    values = plgpu.layout_cast(jnp.zeros((LANES, tile.head_dim), jnp.float32), plgpu.Layout.WGMMA)
    peak = plgpu.layout_cast(jnp.full((LANES,), MASKED * _factor(tile), jnp.float32), row_layout)
    total = plgpu.layout_cast(jnp.zeros((LANES,), jnp.float32), row_layout)
    plgpu.barrier_wait(q_full)
    state = (values, *begin(peak, total))
    second = work[FIRST] + 1
    if tile.window:
        state = lax.fori_loop(second, work[FULL_FIRST], partial(step, masked=True), state)
    unmasked = jnp.maximum(work[FULL_FIRST], second)
    state = lax.fori_loop(unmasked, work[FULL_LAST], partial(step, masked=False), state)
    state = lax.fori_loop(jnp.maximum(work[FULL_LAST], second), work[LAST], partial(step, masked=True), state)
    values, p, peak, total = state
    values = end(values, p)
    return values / _across(total, values.shape), peak + jnp.log(total) * LOG2E


def _leave(tile: PromptTile, slot, place, group, values, log, outs, q_smem):
    """Writes results to global memory: float32 for items with a slot, otherwise in the queries' dtype."""
    lanes = pl.ds(group * LANES, LANES)
    outs[1].at[(*place, lanes)][...] = log

    def as_queries():
        q_smem[lanes] = values.astype(tile.dtype)  # this warpgroup's queries are no longer needed
        plgpu.commit_smem()
        mine = Span(group * LANES, LANES, multiple=LANES)
        hopper_rules.store(q_smem, (mine,), outs[0], (*place, mine), interpret=tile.interpret)
        plgpu.wait_smem_to_gmem(0)

    if slot is None:
        as_queries()
        return
    pl.when(slot < 0)(as_queries)

    @pl.when(slot >= 0)
    def _():
        outs[2].at[(slot, place[1], lanes)][...] = values
