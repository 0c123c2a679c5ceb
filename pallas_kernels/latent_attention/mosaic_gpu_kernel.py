"""The kernel for latent attention on Hopper GPUs. `mosaic_gpu`, which launches it, describes how it works."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxserve.pallas_kernels import hopper_rules
from jaxserve.pallas_kernels.hopper_rules import Span
from jaxserve.pallas_kernels.paged_attention.mosaic_gpu_fetch import clear_values, pieces_of
from jaxserve.pallas_kernels.paged_attention.reference import MASKED
from jaxserve.pallas_kernels.work_lists import FIRST, LAST, LENGTH, POSITION, TOKEN

LANES = 64  # queries of a tile: the rows of the matrix unit's tile
WARPGROUPS = 2  # computing warpgroups; a third one fetches
REGISTERS = 40, 232  # per fetching thread and per computing thread: all 64 K of a multiprocessor, for 384 threads
LOG2E = math.log2(math.e)


@dataclass(frozen=True)
class LatentTile:
    """The static parameters of a launch. kept: leading queries of a tile whose results are stored, a multiple of 8."""

    heads: int  # a multiple of 8
    kept: int
    rank: int  # a multiple of 128
    width: int  # width of a row in the cache, and of q; a multiple of 64
    page_size: int
    dtype: Any
    out_dtype: Any
    scale: float
    interpret: Any

    block: ClassVar[int] = 64  # cached tokens of a step
    slots: ClassVar[int] = 2  # blocks in flight

    @property
    def head_dim(self) -> int:
        """The columns that `clear_values` clears."""
        return self.rank

    @property
    def half(self) -> int:
        """Columns of the result of each computing warpgroup."""
        return self.rank // WARPGROUPS

    def shared_memory(self) -> int:
        """Bytes of a program by JAX's rules: each array begins at a multiple of 1 KiB, and a barrier takes 8 bytes."""
        size = jnp.dtype(self.dtype).itemsize
        ring = self.slots * self.block * self.width * size
        results = LANES * self.rank * jnp.dtype(self.out_dtype).itemsize
        arrays = [LANES * self.width * size, max(ring, results)]
        return sum(-(-array // 1024) * 1024 for array in arrays) + 8 * (3 + 2 * self.slots)


def launch(
    tile: LatentTile,
    blocks: int,
    items: jax.Array,
    tables: jax.Array,
    first_page: jax.Array,
    q: jax.Array,
    data: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Values [items, blocks, kept, rank] and log2-sum-exp2 of the scores float32 [items, blocks, LANES].

    Args:
      blocks: number of contiguous tiles of LANES queries in q that each item stands for.
      items: int32 [items, 8], with columns as in `work_lists`, except two. TOKEN is the index of the first query in q.
        POSITION is added to a token's index in q to get its position in the row.
      first_page: int32 scalar, which is added to the page numbers in the tables.
      q: [queries, width], all heads of a token, then of the next one; at least LANES of them.
      data: [pages, page_size, width].
    """
    count = items.shape[0]
    dtype = jnp.dtype(tile.dtype)

    def array(*shape: int, dtype: Any = dtype) -> Any:
        swizzle = plgpu.TilingTransform((8, 128 // jnp.dtype(dtype).itemsize)), plgpu.SwizzleTransform(128)
        return plgpu.SMEM(shape, dtype, transforms=swizzle)

    ring = array(tile.slots, tile.block, tile.width)
    scratch: dict[str, Any] = {
        "q_smem": array(LANES, tile.width),
        # Results are stored when no rows of the cache are in flight any more.
        "kv_smem": plgpu.RefUnion(ring, array(WARPGROUPS, LANES, tile.half, dtype=tile.out_dtype)),
        "q_full": plgpu.Barrier(num_arrivals=1),
        "full": plgpu.Barrier(num_arrivals=max(tile.block // tile.page_size, 1), num_barriers=tile.slots),
        "free": plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=tile.slots),
        "clean": plgpu.Barrier(num_arrivals=1),
        "done": plgpu.Barrier(num_arrivals=WARPGROUPS),
    }
    if tile.interpret:  # the interpreter wants both operands of a matmul in shared memory
        scratch["p_smem"] = plgpu.SMEM((WARPGROUPS, LANES, tile.block), dtype)
    kernel = plgpu.kernel(
        partial(_kernel, tile),
        out_type=(
            jax.ShapeDtypeStruct((count, blocks, tile.kept, tile.rank), tile.out_dtype),
            jax.ShapeDtypeStruct((count, blocks, LANES), jnp.float32),
        ),
        scratch_types=scratch,
        grid=(blocks, count),
        grid_names=("block", "item"),
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
        interpret=tile.interpret,
        kernel_name="latent_attention",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            reduction_scratch_bytes=0,  # reductions here stay within a warp
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
    )
    return kernel(items, tables, first_page[None], q, data)


def _kernel(tile: LatentTile, items, tables, first_page, q, data, values_out, logs_out, *, kv_smem, **scratch):
    ring, out_smem = kv_smem
    block = lax.axis_index("block")
    item = lax.axis_index("item")
    group = lax.axis_index("warpgroup")
    work = [items[item, column] for column in range(8)]
    first = jnp.minimum(work[TOKEN] + block * LANES, q.shape[0] - LANES)  # at q's end with queries before the tile

    @pl.when(work[LAST] > work[FIRST])
    def _():
        @pl.when(group == WARPGROUPS)
        def _():
            plgpu.set_max_registers(REGISTERS[0], action="decrease")
            queries = (Span(first, LANES, multiple=8),)
            hopper_rules.fetch(q, queries, scratch["q_smem"], (), scratch["q_full"], interpret=tile.interpret)
            _fetch(tile, work, (tables, first_page, None), data, ring, **scratch)

        for half in range(WARPGROUPS):

            @pl.when(group == half)
            def _(half=half):
                plgpu.set_max_registers(REGISTERS[1], action="increase")
                values, log = _compute(tile, work, first, half, ring, **scratch)
                # Both warpgroups must have finished reading the ring before either writes results into it.
                plgpu.barrier_arrive(scratch["done"])
                plgpu.barrier_wait(scratch["done"])
                out_smem[half] = values.astype(tile.out_dtype)
                plgpu.commit_smem()
                rows = Span(0, tile.kept)
                window = (item, block, rows, Span(half * tile.half, tile.half))
                hopper_rules.store(out_smem, (half, rows), values_out, window, interpret=tile.interpret)
                if half == 0:
                    logs_out.at[item, block][...] = log
                plgpu.wait_smem_to_gmem(0)


def _fetch(tile, work, table, data, ring, *, full, free, clean, **_):
    """The fetching warpgroup. It copies each block into the next free slot. In the last block it clears the values
    beyond the row's end, which may be NaN, because a probability of 0 times NaN is NaN."""
    steps = work[LAST] - work[FIRST]

    def fetch(step, _):
        slot = lax.rem(step, jnp.int32(tile.slots))

        @pl.when(step >= tile.slots)
        def await_slot():
            plgpu.barrier_wait(free.at[slot])
            plgpu.barrier_wait(full.at[slot])  # already complete; the wait keeps count of the phases

        for page, tokens, place in pieces_of(tile, work, table, step):
            hopper_rules.fetch(data, (page, tokens), ring, (slot, place), full.at[slot], interpret=tile.interpret)

    lax.fori_loop(0, steps, fetch, None)
    _await_last(full, steps, tile.slots)

    @pl.when(work[LENGTH] < work[LAST] * tile.block)
    def clear():
        last = lax.rem(steps - 1, jnp.int32(tile.slots))
        clear_values(tile, ring.at[last], work[LENGTH] - (work[LAST] - 1) * tile.block)
        plgpu.commit_smem()

    plgpu.barrier_arrive(clean)
    _await_last(free, steps, tile.slots)


def _await_last(barrier, steps, slots):
    """Waits for the copies that are left in a ring of slots."""

    def wait(step, _):
        plgpu.barrier_wait(barrier.at[lax.rem(step, jnp.int32(slots))])

    lax.fori_loop(jnp.maximum(steps - slots, 0), steps, wait, None)


def _compute(tile, work, first, half, ring, *, q_smem, q_full, full, free, clean, p_smem=None, **_):
    """A computing warpgroup: all scores of the tile's queries, and its half of the columns of the result."""
    across = partial(lax.broadcast_in_dim, broadcast_dimensions=(0,))
    row_layout = plgpu.Layout.WGMMA.reduce(1)
    lane = plgpu.broadcasted_iota(jnp.int32, (LANES,), 0, layout=row_layout)
    token = lax.div(lane + first, jnp.int32(tile.heads))
    newest = jnp.minimum(token + work[POSITION], work[LENGTH] - 1)
    columns = pl.ds(half * tile.half, tile.half)

    def multiply(a, b):
        def accumulate(acc):
            plgpu.wgmma(acc, a, b)
            return acc[...]

        return pl.run_scoped(accumulate, plgpu.ACC((LANES, b.shape[1]), jnp.float32))

    def weigh(values, p, v):
        if tile.interpret:  # it lacks accumulators that begin with a value, and operands in registers
            p_smem[half] = p
            plgpu.commit_smem()
            return values + multiply(p_smem.at[half], v)
        return pl.run_state(lambda acc: plgpu.wgmma(acc, p, v))(plgpu.ACC.init(values))

    def step(block, state):
        values, peak, total = state
        slot = lax.rem(block - work[FIRST], jnp.int32(tile.slots))
        plgpu.barrier_wait(full.at[slot])

        @pl.when(block == work[LAST] - 1)
        def await_zeros():
            plgpu.barrier_wait(clean)

        scores = multiply(q_smem, plgpu.transpose_ref(ring.at[slot], (1, 0))) * (tile.scale * LOG2E)
        key = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=plgpu.Layout.WGMMA) + block * tile.block
        scores = jnp.where(key <= across(newest, scores.shape), scores, MASKED)
        # While a query has seen only masked keys, its sums are meaningless. Its first visible key multiplies them by 0.
        higher = jnp.maximum(peak, scores.max(axis=1))
        keep = jnp.exp2(peak - higher)
        p = jnp.exp2(scores - across(higher, scores.shape))
        total = total * keep + p.sum(axis=1)
        values = weigh(values * across(keep, values.shape), p.astype(tile.dtype), ring.at[slot, :, columns])
        plgpu.barrier_arrive(free.at[slot])
        return values, higher, total

    state = (
        plgpu.layout_cast(jnp.zeros((LANES, tile.half), jnp.float32), plgpu.Layout.WGMMA),
        plgpu.layout_cast(jnp.full((LANES,), MASKED, jnp.float32), row_layout),
        plgpu.layout_cast(jnp.zeros((LANES,), jnp.float32), row_layout),
    )
    plgpu.barrier_wait(q_full)
    values, peak, total = lax.fori_loop(work[FIRST], work[LAST], step, state)
    return values / across(total, values.shape), peak + jnp.log(total) * LOG2E
