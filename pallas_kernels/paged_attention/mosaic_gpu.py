"""Paged attention for Hopper GPUs (compute capability 9.0) in Pallas Mosaic GPU. Compiled for, not yet run on.

One kernel, launched once for decode rows and once for prompts. XLA makes a list of work items from the batch (columns:
ROW …), each of them one tile of query rows against some blocks of one row's cached tokens:

  grid      (kv_heads, items); items beyond those that the batch needs leave at once
  threads   one warpgroup that fetches, and one (decode) or two (prompts) that compute 64 query rows each
  pipeline  the fetcher reads page numbers from the block table and copies a block of keys and values, several pages
            or a part of one, into a ring of shared memory slots (TMA; barriers `full` and `free`); the others compute
            scores = Q K^T and values += P V with wgmma, a running softmax in float32 between them, P in registers

  decode    A tile is one token's group of heads, padded to 64 rows: the matrix unit has time to spare, as each cached
            token is read once (the traffic is that of the cache). Long rows are split into several items, so that few
            rows, or one very long one among many, still fill the GPU; the parts are merged in XLA by their
            log-sum-exp. Results are float32.
  prompts   A tile is 128 query rows: (heads of the group) x (tokens, a multiple of 8), so that a block of keys serves
            all heads. Cached tokens are read once per tile, up to the causal diagonal; only blocks on its border are
            masked. XLA gathers the tiles' results back to tokens.

What lies in a row's last page beyond its length may be NaN: the fetcher clears such values before they are used.
Compiled for H200 without register spills worth the name; not yet run on. JAX's own causal kernel refuses CUDA 12.8 and
12.9, whose ptxas miscompiles it; whether these are affected is unknown.
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

from pallas_kernels import tuning
from pallas_kernels.paged_attention.mosaic_gpu_items import (
    FIRST,
    FULL_FIRST,
    FULL_LAST,
    LANES,
    LAST,
    LENGTH,
    MIN_BLOCKS,
    POSITION,
    ROW,
    TOKEN,
    Tile,
    decode_items,
    prompt_items,
)
from pallas_kernels.registry import AttentionProblem, Device
from pallas_kernels.types import KVPages

MASKED = -1e30  # finite, so that a row that sees nothing stays finite
LOG2E = math.log2(math.e)
PARALLEL = 4 * 132  # items that decode aims at, over all heads: four for each multiprocessor of an H200


def why_not(device: Device, problem: AttentionProblem) -> str | None:
    """The reason why it cannot be used, or None."""
    if device.platform != "gpu" or device.capability != (9, 0):
        return "it is for NVIDIA GPUs of compute capability 9.0 (H100, H200)"
    if problem.has_scale or problem.kv_dtype not in (jnp.bfloat16, jnp.float16):
        return f"the cache must be bfloat16 or float16, not {problem.kv_dtype}"
    if problem.q_dtype != problem.kv_dtype:
        return f"queries and cache must have one dtype, not {problem.q_dtype} and {problem.kv_dtype}"
    if problem.head_dim % 16 or not 32 <= problem.head_dim <= 256:
        return f"head_dim must be a multiple of 16 from 32 to 256, not {problem.head_dim}"
    if problem.group > 16:
        return f"at most 16 query heads may share a KV head, not {problem.group}"
    if problem.page_size < 8 or problem.page_size & (problem.page_size - 1):
        return f"page_size must be a power of two, 8 or more, not {problem.page_size}"
    return None


@partial(jax.jit, static_argnames=("scale", "window", "softcap", "decode_only", "interpret"))
def paged_attention(
    q: jax.Array,
    pages: KVPages,
    block_tables: jax.Array,
    q_start: jax.Array,
    kv_len: jax.Array,
    num_decodes: jax.Array,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
    decode_only: bool = False,
    interpret: Any = None,
) -> jax.Array:
    """As `reference.paged_attention`. `interpret`: a plgpu.InterpretGPUParams, to run on CPU."""
    args = (q, pages.data, block_tables, q_start, kv_len, num_decodes)
    options = {"scale": scale, "window": window, "softcap": softcap, "sinks": sinks, "interpret": interpret}
    decoded = _decode(*args, **options)
    rows = decoded.shape[0]
    decoded = jnp.pad(decoded, [(0, q.shape[0] - rows), (0, 0), (0, 0), (0, 0)])
    return decoded if decode_only else _prompts(decoded, *args, **options)


def _decode(q, data, block_tables, q_start, kv_len, num_decodes, *, sinks, interpret, scale, window, softcap):
    """[rows, kv_heads, group, head_dim] as q; row r's query is token r."""
    del q_start
    rows, (_, kv_heads, group, head_dim) = min(block_tables.shape[0], q.shape[0]), q.shape
    heads = -(-group // 8) * 8
    tile = Tile(LANES, heads, 1, head_dim, data.shape[3], 64, q.dtype, jnp.dtype(jnp.float32),
                scale, window, softcap, interpret)  # fmt: skip
    length = jnp.where(jnp.arange(rows) < num_decodes, kv_len[:rows], 0)
    most = -(-block_tables.shape[1] * tile.page_size // tile.block)
    tuned = tuning.lookup("decode", "mosaic_gpu", **tuning.of_attention(q, data, block_tables), rows=rows)
    spare = min(-(-tuned.get("parallel", PARALLEL) // kv_heads), rows * (-(-most // MIN_BLOCKS) - 1))
    items, owner = decode_items(length, tile.block, window, spare)
    padded = jnp.pad(q[:rows], [(0, 0), (0, 0), (0, heads - group), (0, 0)])
    values, logs = _launch(tile, items, block_tables, padded, data)
    values, logs = values[:, :, :group], logs[:, :, :group]

    logs = jnp.where((items[:, LAST] > items[:, FIRST])[:, None, None], logs, MASKED)
    return _merge(values, logs, owner, rows, sinks).astype(q.dtype)


def _merge(values: jax.Array, logs: jax.Array, owner: jax.Array, rows: int, sinks: jax.Array | None) -> jax.Array:
    """Item r < rows is the first part of row r; a spare one after them is another part of its owner's."""
    values = jnp.where(logs[..., None] > MASKED / 2, values, 0.0)  # what no program wrote may be anything
    mine = (owner[None] == jnp.arange(rows)[:, None])[:, :, None, None]  # [rows, spare, 1, 1]
    other = jnp.where(mine, logs[None, rows:], MASKED)  # [rows, spare, kv_heads, group]
    peak = jnp.maximum(logs[:rows], jnp.max(other, axis=1, initial=MASKED))
    if sinks is not None:
        peak = jnp.maximum(peak, sinks * LOG2E)
    first = jnp.exp2(logs[:rows] - peak)
    other = jnp.where(mine, jnp.exp2(other - peak[:, None]), 0.0)
    total = first + other.sum(1) + (0.0 if sinks is None else jnp.exp2(sinks * LOG2E - peak))
    weighted = first[..., None] * values[:rows]
    if owner.size:
        weighted += jnp.einsum("rtkg,tkgd->rkgd", other, values[rows:], precision=lax.Precision.HIGHEST)
    return weighted / total[..., None]


def _prompts(out, q, data, block_tables, q_start, kv_len, num_decodes, *, sinks, interpret, scale, window, softcap):
    """`out` with the tokens of the rows from num_decodes on filled in."""
    tokens, kv_heads, group, head_dim = q.shape
    tuned = tuning.lookup("prompts", "mosaic_gpu", **tuning.of_attention(q, data, block_tables), tokens=tokens)
    block = tuned.get("block") or (128 if head_dim <= 128 else 64)
    tile = Tile(2 * LANES, group, 2 * LANES // group // 8 * 8, head_dim, data.shape[3], block,
                q.dtype, q.dtype, scale, window, softcap, interpret)  # fmt: skip
    items, before = prompt_items(tile, tokens, q_start, kv_len, num_decodes)
    padded = jnp.pad(q, [(0, max(tile.tokens - tokens, 0)), (0, 0), (0, 0), (0, 0)])
    values, logs = _launch(tile, items, block_tables, padded, data)

    token = jnp.arange(tokens, dtype=jnp.int32)
    row = jnp.clip(jnp.searchsorted(q_start, token, side="right") - 1, 0, kv_len.shape[0] - 1)
    offset = token - q_start[row]
    item = jnp.clip(before[-1] - 1 - before[row] - offset // tile.tokens, 0, items.shape[0] - 1)
    shape = (items.shape[0], kv_heads, group, tile.tokens)
    used = group * tile.tokens
    chosen = values[:, :, :used].reshape(*shape, head_dim)[item, :, :, offset % tile.tokens]
    if sinks is not None:
        log = logs[:, :, :used].reshape(shape)[item, :, :, offset % tile.tokens]
        chosen = (chosen.astype(jnp.float32) * jax.nn.sigmoid(log / LOG2E - sinks)[..., None]).astype(q.dtype)
    theirs = (row >= num_decodes) & (token < q_start[-1])
    return jnp.where(theirs[:, None, None, None], chosen, out)


def _swizzled(minor: int, dtype: Any) -> tuple[plgpu.TilingTransform, plgpu.SwizzleTransform]:
    """The widest swizzle that rows of `minor` elements allow."""
    swizzle = next(bytes_ for bytes_ in (128, 64, 32) if minor * dtype.itemsize % bytes_ == 0)
    return plgpu.TilingTransform((8, swizzle // dtype.itemsize)), plgpu.SwizzleTransform(swizzle)


def _launch(tile: Tile, items: jax.Array, block_tables: jax.Array, q: jax.Array, data: jax.Array):
    """Values [items, kv_heads, lanes or heads, head_dim] and log2-sum-exp2 of the scores [items, kv_heads, lanes]."""
    count, kv_heads = items.shape[0], data.shape[2]
    pieces = max(tile.block // tile.page_size, 1)
    swizzled: dict[str, Any] = {"transforms": _swizzled(tile.head_dim, tile.dtype)}
    scratch: dict[str, Any] = {
        "q_smem": plgpu.SMEM((tile.lanes, tile.head_dim), tile.dtype, **swizzled),
        "kv_smem": plgpu.SMEM((tile.stages, 2, tile.block, tile.head_dim), tile.dtype, **swizzled),
        "log_smem": plgpu.SMEM((tile.lanes,), jnp.float32),
        "q_full": plgpu.Barrier(num_arrivals=1 if tile.decode else tile.heads),
        "full": plgpu.Barrier(num_arrivals=2 * pieces, num_barriers=tile.stages),
        "free": plgpu.Barrier(num_arrivals=tile.groups, num_barriers=tile.stages),
        "clean": plgpu.Barrier(num_arrivals=1),
    }
    if tile.decode:
        transforms = _swizzled(tile.head_dim, tile.out_dtype)
        scratch["out_smem"] = plgpu.SMEM((tile.lanes, tile.head_dim), tile.out_dtype, transforms=transforms)
    if tile.interpret:  # the interpreter wants both operands of a matmul in shared memory
        scratch["p_smem"] = plgpu.SMEM((tile.lanes, tile.block), tile.dtype)
    lanes_out = tile.heads if tile.decode else tile.lanes
    kernel = plgpu.kernel(
        partial(_kernel, tile),
        out_type=(
            jax.ShapeDtypeStruct((count, kv_heads, lanes_out, tile.head_dim), tile.out_dtype),
            jax.ShapeDtypeStruct((count, kv_heads, tile.lanes), jnp.float32),
        ),
        scratch_types=scratch,
        grid=(kv_heads, count),
        grid_names=("head", "item"),
        num_threads=tile.groups + 1,
        thread_name="warpgroup",
        interpret=tile.interpret,
        kernel_name="paged_decode" if tile.decode else "paged_prompts",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            reduction_scratch_bytes=128,  # our reductions stay within a warp
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
    )
    # A copy may have 5 dimensions, those of tiles included.
    return kernel(items, block_tables, q, data.reshape(-1, tile.page_size, tile.head_dim))


def _kernel(tile: Tile, items, table, q, data, values_out, logs_out, **scratch):
    head, item, group = lax.axis_index("head"), lax.axis_index("item"), lax.axis_index("warpgroup")
    work = [items[item, column] for column in range(8)]

    @pl.when(work[LAST] > work[FIRST])
    def _():
        @pl.when(group == tile.groups)
        def _():
            if not tile.decode:
                plgpu.set_max_registers(40, action="decrease")
            _fetch(tile, work, head, table, q, data, **scratch)

        @pl.when(group < tile.groups)
        def _():
            if not tile.decode:
                plgpu.set_max_registers(232, action="increase")
            _compute(tile, work, item, head, group, values_out, logs_out, **scratch)


def _fetch(tile, work, head, table, q, data, *, q_smem, kv_smem, q_full, full, free, clean, **_):
    """The fetching warpgroup: the queries, then block after block into the next free slot."""
    if tile.decode:
        plgpu.copy_gmem_to_smem(q.at[work[TOKEN], head], q_smem.at[pl.ds(0, tile.heads)], q_full)
    else:
        for i in range(tile.heads):
            lanes = pl.ds(i * tile.tokens, tile.tokens)
            plgpu.copy_gmem_to_smem(q.at[pl.ds(work[TOKEN], tile.tokens), head, i], q_smem.at[lanes], q_full)

    kv_heads = q.shape[1]
    steps = work[LAST] - work[FIRST]
    piece = min(tile.page_size, tile.block)

    def copy(step, slot):
        # Pages that begin beyond the row's end are not the row's: the last one it has stands in for them.
        places = [(work[FIRST] + step) * tile.block + i * piece for i in range(tile.block // piece)]
        places = [jnp.minimum(place, lax.div(work[LENGTH] - 1, jnp.int32(piece)) * piece) for place in places]
        numbers = [table[work[ROW], lax.div(place, jnp.int32(tile.page_size))] for place in places]
        for which in range(2):
            for i, (place, page) in enumerate(zip(places, numbers, strict=True)):
                tokens = pl.ds(lax.rem(place, jnp.int32(tile.page_size)), piece)
                to = kv_smem.at[slot, which, pl.ds(i * piece, piece)]
                plgpu.copy_gmem_to_smem(data.at[(page * 2 + which) * kv_heads + head, tokens], to, full.at[slot])

    def fetch(step, _):
        slot = lax.rem(step, jnp.int32(tile.stages))

        @pl.when(step >= tile.stages)
        def await_slot():
            plgpu.barrier_wait(free.at[slot])
            plgpu.barrier_wait(full.at[slot])  # long since: it keeps count of the phases for the last wait

        copy(step, slot)

    def drain(barrier):
        def wait(step, _):
            plgpu.barrier_wait(barrier.at[lax.rem(step, jnp.int32(tile.stages))])

        lax.fori_loop(jnp.maximum(steps - tile.stages, 0), steps, wait, None)

    lax.fori_loop(0, steps, fetch, None)
    drain(full)

    @pl.when(work[LENGTH] < work[LAST] * tile.block)
    def clear():
        last = lax.rem(steps - 1, jnp.int32(tile.stages))
        _clear_values(tile, kv_smem.at[last, 1], work[LENGTH] - (work[LAST] - 1) * tile.block)
        plgpu.commit_smem()

    plgpu.barrier_arrive(clean)
    drain(free)


def _clear_values(tile: Tile, v_smem, valid):
    """Zeros from row `valid` on: a probability of 0 times NaN would be NaN. In small pieces, for want of registers."""
    width = tile.head_dim if tile.head_dim % 64 else 64
    for top in range(0, tile.block, LANES):
        row = plgpu.broadcasted_iota(jnp.int32, (LANES, width), 0, layout=plgpu.Layout.WGMMA) + top
        for left in range(0, tile.head_dim, width):
            part = v_smem.at[pl.ds(top, LANES), pl.ds(left, width)]
            part[...] = jnp.where(row < valid, plgpu.load(part, (), layout=plgpu.Layout.WGMMA), 0)


def _compute(tile, work, item, head, group, values_out, logs_out, *,
             q_smem, kv_smem, log_smem, q_full, full, free, clean, out_smem=None, p_smem=None):  # fmt: skip
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
        slot = lax.rem(block - work[FIRST], jnp.int32(tile.stages))
        plgpu.barrier_wait(full.at[slot])
        scores = multiply(q_mine, plgpu.transpose_ref(kv_smem.at[slot, 0], (1, 0)))
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
        p = p.astype(tile.dtype)

        @pl.when(block == work[LAST] - 1)
        def _():
            plgpu.barrier_wait(clean)

        values = weigh(values * across(keep, values.shape), p, kv_smem.at[slot, 1])
        plgpu.barrier_arrive(free.at[slot])
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
