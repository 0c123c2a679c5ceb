"""Decode attention for Hopper GPUs in Pallas Mosaic GPU, in one launch. Compiled for H200, not yet run on one.

It takes head_dim 64, 128, 192 and 256; `mosaic_gpu` has another kernel for other sizes. Each cached token is read once,
so the traffic is the size of the cached keys and values. Everything else is arranged so that this traffic never waits:

  items     A row's cached tokens are cut into parts of whole blocks (`work_lists.cut`). Where the cuts are depends on
            the row's length and on shapes that all batches of a model share, so that a row's result is bitwise
            independent of the other rows and of the batch's size. An item is one part of a row for one KV head.
  programs  Two for each multiprocessor up to head_dim 128, otherwise one. Once a step, XLA divides the list of items
            among the programs by blocks (`work_lists.equal_spans`). The list itself is never written: a program is
            told its first item, and finds each next one from the lengths of the rows. A program has two warpgroups: one
            fetches its span of items (TMA), one computes. Their ring of blocks continues across items, so that the next
            item's keys are on their way while the last item's blocks are computed.
  products  Keys are the rows of the matrix unit's tile; the queries of a group are its eight columns: scores
            [64 keys, 8 heads] = K Q^T and values [head_dim, 8 heads] += V^T P. Queries as rows would be mostly padding,
            as a tile has at least 64 rows. The four warps find the largest score of a block through shared memory. Each
            thread sums the probabilities of its own keys; the sums are added at the end of an item. P passes through
            1 KiB of shared memory, because the matrix unit reads its second operand only from there.
  codes     Keys are converted to the queries' dtype in registers, as the first operand. Values are converted in shared
            memory, because their rows are the columns of that operand. Scales are applied in float32: those of keys to
            the scores, those of values to the probabilities. The fetching warpgroup loads the scales one block ahead
            with ordinary loads, as they are too short for the copy engine.
  queries   A copy takes eight rows of q or more and begins at a multiple of eight (see `hopper_rules`), so the group's
            queries lie somewhere among the copied ones. Results for the other rows are computed but not stored. XLA
            pads the queries only where a batch has fewer than 24 or not a multiple of eight, and for some sizes of
            groups with codes.
  merge     A row of one part is stored at once, in the queries' dtype. Those of other rows go to global memory in
            float32. The program that finishes last for a row and head (`_arrive`) reads them in the row's order and
            stores the result, so that its bits do not depend on which program was last. A part costs 8 KiB of traffic
            (a block has 32 KiB), which the L2 cache should hold. The workspace has 4 KiB for each part that any row may
            have: 17 MB for 32 rows, 134 MB for 256.

Registers of a thread with both JAX versions, head_dim up to 128, with and without softcap, sinks and window: 88 to 127
for groups of up to 16; 128 with codes. Nothing spills, so two programs share a multiprocessor. Codes with groups of
more than 8 take 155 registers, which leaves room for one program.

Estimates for an H200, before any measurement. Shapes of Llama-3-8B: 8 KV heads of 128, groups of 4, bfloat16. Assumed:
copies at 4.3 TB/s; 0.6 us for a dependent read of memory; 1.2 us at the start without traffic (span and table, one read
before the other; the launch is not counted); 3 us at the end (last products, partial results and fence,
addition, merge, store); at most 70 GB/s into one multiprocessor; 0.7 us for a block's products and softmax in one
program, so that two programs compute three times as fast as a multiprocessor's blocks arrive.

  64 rows x 4,096   1,074 MB, 250 us at the rate of a copy. 8,192 items of four blocks each, 31 or 32 for a program
                    (97%), and 6% more traffic to L2. Estimate: 262 us, 95%.
  16 rows x 1,024   67 MB, 15.6 us at the rate of a copy. 512 items for 264 programs: at most two, 1.94 on average.
                    Estimate: 16.1 us and 4.2 us for start and end, 77%; the target is 88%.
  1 row x 1,024     4.2 MB, 1.0 us at the rate of a copy. 32 items on as many multiprocessors, four blocks each.
                    Estimate: 1.9 us and 4.2 us, 16%. Latency dominates: the target of 70% is out of reach for a kernel
                    that must read a table before the keys.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxserve.pallas_kernels import lowered_kernels
from jaxserve.pallas_kernels.paged_attention.mosaic_gpu_decode_kernel import LOG2E, kernel
from jaxserve.pallas_kernels.paged_attention.mosaic_gpu_decode_tile import DecodeTile
from jaxserve.pallas_kernels.types import KVPages
from jaxserve.pallas_kernels.work_lists import MIN_BLOCKS, cut, equal_spans

spans_triton: Any
try:  # needs jax-triton
    from jaxserve.pallas_kernels.paged_attention import spans_triton
except ImportError:
    spans_triton = None

MULTIPROCESSORS = 132  # of an H100 or H200
MOST_PARTS = 32  # of a row, since one program merges them
WORKSPACE = 256 << 20  # bytes; upper limit of the partial results


def decode(
    q: jax.Array,
    pages: KVPages,
    block_tables: jax.Array,
    kv_len: jax.Array,
    num_decodes: jax.Array,
    *,
    rows: int,
    first_page: jax.Array,
    parallel: int | None,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: jax.Array | None,
    interpret: Any,
) -> jax.Array:
    """Returns [rows, kv_heads, group, head_dim] in q's dtype. Row r is token r; rows from num_decodes on are zeros.

    parallel: how many programs a long row should keep busy, where that was measured.
    """
    _, kv_heads, group, head_dim = q.shape
    codes = None if pages.scale is None else pages.data.dtype
    stride, q = _queries(q, rows, codes)
    tile = DecodeTile(
        kv_heads, group, stride, head_dim, pages.page_size, q.dtype, scale, window, softcap, interpret, codes
    )
    most = most_parts(tile, rows, block_tables.shape[1], parallel)
    tile = replace(tile, most_parts=most)
    length = jnp.where(jnp.arange(rows) < num_decodes, kv_len[:rows], 0)
    count = programs_of(tile, rows * most * kv_heads)
    arrays = {
        # The kernel adds to the counters and resets them to zero before it ends, although they are in an input. This
        # array is made once a step. As an output it would have to be cleared in each layer.
        "spans": _spans_and_counters(tile, length, count, most),
        "length": length,
        "table": block_tables,
        "first_page": first_page[None],
        "q": q,
        # Copies may have at most 5 dimensions, including those that tiling adds.
        "data": pages.data.reshape(-1, tile.page_size, head_dim),
    }
    if pages.scale is not None:
        arrays["scale"] = pages.scale.reshape(-1, tile.page_size)
    if sinks is not None:
        arrays["sinks"] = _per_row(tile, sinks.astype(jnp.float32) * LOG2E, q.shape[0])
    launch = partial(_launch, tile, count, tuple(arrays))
    out = lowered_kernels.traced_once(launch, *arrays.values())
    return out.reshape(rows, kv_heads, group, head_dim)


def _launch(tile: DecodeTile, count: int, names: tuple[str, ...], *given: jax.Array) -> jax.Array:
    arrays = dict(zip(names, given, strict=True))
    rows = len(arrays["length"])
    most = tile.most_parts
    items = rows * most * tile.kv_heads if most > 1 else 1
    results = {
        "out": jax.ShapeDtypeStruct((rows * tile.kv_heads * tile.group, tile.head_dim), tile.dtype),
        "values": jax.ShapeDtypeStruct((items, tile.head_dim, tile.columns), jnp.float32),
        "sums": jax.ShapeDtypeStruct((items, 2, tile.columns), jnp.float32),
    }
    launch = plgpu.kernel(
        partial(kernel, tile, (*arrays, *results)),
        out_type=tuple(results.values()),
        scratch_types=_scratch(tile),
        grid=(count,),
        grid_names=("program",),
        num_threads=2,
        thread_name="warpgroup",
        interpret=tile.interpret,
        kernel_name="paged_decode",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            reduction_scratch_bytes=tile.scratch,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
    )
    return launch(*arrays.values())[0]


def _spans_and_counters(tile: DecodeTile, length: jax.Array, programs: int, most: int) -> jax.Array:
    """See `spans_triton.spans_and_counters`."""
    if tile.interpret is None and spans_triton is not None:
        options = {"block": tile.block, "window": tile.window, "most": most}
        return spans_triton.spans_and_counters(length, tile.kv_heads, programs, **options)
    spans = equal_spans(length, cut(length, tile.block, tile.window, most), tile.kv_heads, programs)
    return jnp.concatenate([spans.reshape(-1), jnp.zeros(len(length) * tile.kv_heads, jnp.int32)])


def programs_of(tile: DecodeTile, items: int) -> int:
    """How many programs are launched for so many items."""
    return min(tile.programs * MULTIPROCESSORS, items)


def most_parts(tile: DecodeTile, rows: int, pages: int, parallel: int | None = None) -> int:
    """How many parts a row may have: enough that the heads of one long row keep all multiprocessors busy.

    This does not depend on `rows`, so that a row has the same parts in every batch, unless the workspace would exceed
    its limit: beyond 512 rows with 8 KV heads of 128 and groups of 4.
    """
    blocks = -(-pages * tile.page_size // tile.block)
    wanted = max(parallel // tile.kv_heads, 1) if parallel else max(MULTIPROCESSORS // tile.kv_heads, 4)
    room = max(WORKSPACE // (rows * tile.kv_heads * tile.head_dim * tile.columns * 4), 1)
    return min(wanted, MOST_PARTS, -(-blocks // MIN_BLOCKS), room)


def _queries(q: jax.Array, rows: int, codes: Any) -> tuple[int, jax.Array]:
    """Returns the rows of q from one KV head's queries to the next one's, and q as [heads of all rows, head_dim].

    Groups of 3, 5, 6 and 7 are padded to 8 with codes: they would need 16 columns otherwise, whose registers leave room
    for only one program on a multiprocessor.
    """
    tokens, kv_heads, group, head_dim = q.shape
    heads = tokens * kv_heads * group
    if heads % 8 == 0 and heads >= 24 and (codes is None or group > 8 or 8 % group == 0):
        least = max(rows * kv_heads * group, 24)
        return group, lowered_kernels.first_rows(q.reshape(-1, head_dim), least + -least % 8)
    stride = -(-group // 8) * 8
    return stride, jnp.pad(q[:rows], [(0, 0), (0, 0), (0, stride - group), (0, 0)]).reshape(-1, head_dim)


def _per_row(tile: DecodeTile, sinks: jax.Array, heads: int) -> jax.Array:
    """Repeats the sinks [kv_heads, group] for each row of q."""
    sinks = jnp.pad(sinks.reshape(tile.kv_heads, tile.group), [(0, 0), (0, tile.stride - tile.group)])
    return jnp.broadcast_to(sinks.reshape(-1), (heads // sinks.size, sinks.size)).reshape(-1)


def _scratch(tile: DecodeTile) -> dict[str, Any]:
    def array(*shape: int, dtype: Any = tile.dtype) -> Any:
        return plgpu.SMEM(shape, dtype, transforms=_swizzled(shape[-1], jnp.dtype(dtype)))

    pieces = max(tile.block // tile.page_size, 1)
    scratch = {
        "q_smem": array(2, tile.columns, tile.head_dim),
        "kv_smem": array(tile.slots, 2, tile.block, tile.head_dim, dtype=tile.codes or tile.dtype),
        "p_smem": array(1, tile.columns, tile.block),
        "out_smem": plgpu.SMEM((1, tile.columns, tile.head_dim), tile.dtype),
        "arrived_smem": plgpu.SMEM((1,), jnp.int32),
        "q_full": plgpu.Barrier(num_arrivals=1, num_barriers=2),
        "q_free": plgpu.Barrier(num_arrivals=1, num_barriers=2),
        "full": plgpu.Barrier(num_arrivals=pieces + (1 if tile.codes else 0), num_barriers=2 * tile.slots),
        "free": plgpu.Barrier(num_arrivals=1, num_barriers=2 * tile.slots),
    }
    if tile.codes:
        scratch["scale_smem"] = plgpu.SMEM((tile.slots, 2, tile.block), jnp.float32)
        scratch["v_smem"] = array(1, tile.block, tile.head_dim)
        if tile.interpret:  # the interpreter requires both operands of a matmul in shared memory
            scratch["k_smem"] = array(1, tile.block, tile.head_dim)
    return scratch


def _swizzled(minor: int, dtype: Any) -> tuple[plgpu.TilingTransform, plgpu.SwizzleTransform]:
    """Returns the transforms of the widest swizzle for rows of `minor` elements, a multiple of 64."""
    swizzle = next(bytes_ for bytes_ in (128, 64) if minor * dtype.itemsize % bytes_ == 0)
    return plgpu.TilingTransform((8, swizzle // dtype.itemsize)), plgpu.SwizzleTransform(swizzle)
