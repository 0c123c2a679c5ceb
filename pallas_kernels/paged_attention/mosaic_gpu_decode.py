"""Decode attention for Hopper GPUs in Pallas Mosaic GPU: one launch, from queries to results. Compiled for, not yet
run on. For head_dim 64, 128, 192 and 256; `mosaic_gpu` has another kernel for the others.

The traffic is that of the cache, as each cached token is read once; all else is arranged so that it never waits:

  items     A row's cached tokens are cut into parts of whole blocks (`work_lists.decode_items`), by its own length and
            by shapes that all batches of a model share, so that its result does not depend on the other rows, nor on
            how many there is room for, to the last bit. An item is a part of a row for one KV head.
  programs  Two for each multiprocessor up to head_dim 128, else one. XLA makes the list of items once a step, and deals
            it to the programs by blocks (`work_lists.equal_spans`). A program walks through its span with two
            warpgroups: one fetches (TMA), one computes. Their ring of blocks goes on across items, so that the next
            item's keys are on their way while they compute with the last one's.
  products  The keys are the rows of the matrix unit's tile, the queries of a group its eight columns: scores [64 keys,
            8 heads] = K Q^T and values [head_dim, 8 heads] += V^T P. With queries as rows, 64 of them at least, most
            were padding. The peak over the keys of a block crosses the four warps through shared memory; each thread
            carries sums along for keys of its own, which meet at the end of an item. P goes through shared memory,
            1 KiB, because the matrix unit takes its second operand from there alone.
  codes     Keys become numbers of the queries' type in registers, the first operand. Values, whose rows are the columns
            of that operand, go through shared memory as numbers. Scales are applied in float32, those of keys to the
            scores, those of values to the probabilities. The fetcher reads them, too short for its engine, a block
            ahead of time.
  queries   are copied as they are: eight of them or more, from a multiple of eight on (see `hopper_rules`), with the
            group's somewhere among them. What is computed for the others is not stored. Only where the batch's queries
            are not a multiple of eight in number, or too few, or some sizes of groups meet codes, does XLA pad them.
  merge     Where a row is in one part, its result is stored at once, in the queries' type. Parts of other rows are
            written to global memory in float32; the program that comes last of a row and head (`_arrive`) reads them
            again, in the order of the row, and stores the result, whose bits do not depend on which program that was.
            What it costs: 8 KiB of traffic for each part (a block has 32 KiB), which the L2 cache should hold, and a
            workspace of 4 KiB for each part that any row might have (17 MB for 32 rows, 134 MB for 256).

Registers with both JAX versions: 88 to 127 (head_dim up to 128, softcap, sinks, window, groups of up to 16), with codes
128, none spilled, so that two programs share a multiprocessor. With codes and groups of more than 8 it is 155, and one.

Estimates for an H200, before any measurement: Llama-3-8B's shapes (8 KV heads of 128, groups of 4, bfloat16), copies at
4.3 TB/s. Assumed: 0.6 us for a dependent read of memory; a beginning of 1.8 us in which nothing arrives (span, item,
table, each read before the next; a launch itself is not counted); an end of 3 us (last products, partial results and
fence, addition, merge, store); 70 GB/s into one multiprocessor at most; 0.7 us for a block's products and softmax in
one program, so that two programs compute at three times the rate at which a multiprocessor's blocks arrive.

  64 rows x 4,096   1,074 MB, 250 us at a copy's rate. 8,192 items of four blocks each, 31 or 32 for a program: 97%; 6%
                    more traffic to L2 beside it. 262 us: 95%.
  16 rows x 1,024   67 MB, 15.6 us. 512 items for 264 programs, two where 1.94 is the average: 16.1 us, and 4.8 for
                    beginning and end: 75%, less than the 88% that are the target.
  1 row x 1,024     4.2 MB, 1.0 us. 32 items on as many multiprocessors, four blocks each: 1.9 us, and 4.8: 15%. Latency
                    is all of it; the target of 70% is out of reach for a kernel that reads a table before the keys.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxserve.pallas_kernels.paged_attention.mosaic_gpu_decode_kernel import LOG2E, kernel
from jaxserve.pallas_kernels.paged_attention.mosaic_gpu_decode_tile import DecodeTile
from jaxserve.pallas_kernels.types import KVPages
from jaxserve.pallas_kernels.work_lists import MIN_BLOCKS, decode_items, equal_spans

MULTIPROCESSORS = 132  # of an H100 or H200
MOST_PARTS = 32  # of a row: one program merges them
WORKSPACE = 256 << 20  # bytes of partial results, at most


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
    """[rows, kv_heads, group, head_dim] as q, of which row r is token r. Rows from num_decodes on: zeros.

    parallel: how many programs a long row should keep busy, where that was measured.
    """
    _, kv_heads, group, head_dim = q.shape
    codes = None if pages.scale is None else pages.data.dtype
    stride, q = _queries(q, rows, codes)
    tile = DecodeTile(
        kv_heads, group, stride, head_dim, pages.page_size, q.dtype, scale, window, softcap, interpret, codes
    )
    length = jnp.where(jnp.arange(rows) < num_decodes, kv_len[:rows], 0)
    most = most_parts(tile, rows, block_tables.shape[1], parallel)
    work = decode_items(length, tile.block, window, most)
    count = programs_of(tile, rows * most * kv_heads)
    arrays = {
        "items": work.items,
        "spans": equal_spans(work, kv_heads, count),
        "table": block_tables,
        "first_page": first_page[None],
        # The kernel writes to what is an argument: sums that are zeros again when it ends, so that all that XLA can see
        # is an array of zeros, which it makes once a step. As an output it would have to be cleared for each layer.
        "counters": jnp.zeros((rows * kv_heads,), jnp.int32),
        "q": q,
        # A copy may have 5 dimensions, those of tiles included.
        "data": pages.data.reshape(-1, tile.page_size, head_dim),
    }
    if pages.scale is not None:
        arrays["scale"] = pages.scale.reshape(-1, tile.page_size)
    if sinks is not None:
        arrays["sinks"] = _per_row(tile, sinks.astype(jnp.float32) * LOG2E, q.shape[0])
    pairs = rows * most * kv_heads if most > 1 else 1
    results = {
        "out": jax.ShapeDtypeStruct((rows * kv_heads * group, head_dim), q.dtype),
        "values": jax.ShapeDtypeStruct((pairs, head_dim, tile.columns), jnp.float32),
        "sums": jax.ShapeDtypeStruct((pairs, 2, tile.columns), jnp.float32),
    }
    launch = plgpu.kernel(
        partial(kernel, tile, (*arrays, *results)),
        out_type=tuple(results.values()),
        scratch_types=_scratch(tile),
        grid=(count,),
        grid_names=("program",),
        num_threads=2,
        thread_name="warpgroup",
        interpret=interpret,
        kernel_name="paged_decode",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            reduction_scratch_bytes=tile.scratch,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
    )
    out, *_ = launch(*arrays.values())
    return out.reshape(rows, kv_heads, group, head_dim)


def programs_of(tile: DecodeTile, pairs: int) -> int:
    """How many programs are launched for a list of so many items and heads."""
    return min(tile.programs * MULTIPROCESSORS, pairs)


def most_parts(tile: DecodeTile, rows: int, pages: int, parallel: int | None = None) -> int:
    """How many parts a row may be in: as many as let one long row's heads keep each multiprocessor busy.

    Not of `rows`, so that a row has the same parts in every batch, unless the workspace would not do: with 8 KV heads
    of 128 and groups of 4, beyond 512 rows.
    """
    blocks = -(-pages * tile.page_size // tile.block)
    wanted = max(parallel // tile.kv_heads, 1) if parallel else max(MULTIPROCESSORS // tile.kv_heads, 4)
    room = max(WORKSPACE // (rows * tile.kv_heads * tile.head_dim * tile.columns * 4), 1)
    return min(wanted, MOST_PARTS, -(-blocks // MIN_BLOCKS), room)


def _queries(q: jax.Array, rows: int, codes: Any) -> tuple[int, jax.Array]:
    """q as [heads of all rows, head_dim], and how many rows of it lie between the queries of two KV heads.

    With codes, 16 columns take registers for one program on a multiprocessor: groups of 3, 5, 6 and 7 are padded to 8.
    """
    tokens, kv_heads, group, head_dim = q.shape
    heads = tokens * kv_heads * group
    if heads % 8 == 0 and heads >= 24 and (codes is None or group > 8 or 8 % group == 0):
        return group, q.reshape(-1, head_dim)
    stride = -(-group // 8) * 8
    return stride, jnp.pad(q[:rows], [(0, 0), (0, 0), (0, stride - group), (0, 0)]).reshape(-1, head_dim)


def _per_row(tile: DecodeTile, sinks: jax.Array, heads: int) -> jax.Array:
    """The sinks [kv_heads, group] for each row of q."""
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
        if tile.interpret:  # the interpreter wants both operands of a matmul in shared memory
            scratch["k_smem"] = array(1, tile.block, tile.head_dim)
    return scratch


def _swizzled(minor: int, dtype: Any) -> tuple[plgpu.TilingTransform, plgpu.SwizzleTransform]:
    """The widest swizzle that rows of `minor` elements, a multiple of 64, allow."""
    swizzle = next(bytes_ for bytes_ in (128, 64) if minor * dtype.itemsize % bytes_ == 0)
    return plgpu.TilingTransform((8, swizzle // dtype.itemsize)), plgpu.SwizzleTransform(swizzle)
