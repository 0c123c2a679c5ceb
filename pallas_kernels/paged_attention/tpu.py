"""Paged attention on TPU: one Mosaic kernel for decode rows and for tiles of prompts.

Compiled for v5e and v6e ahead of time, run in interpret mode only; not yet run on a device.

Grid: one step per item, a pair (tile of query tokens, row that has tokens in it), in the order of the tiles; only so
  many steps as the batch has items, so padding costs nothing. Decode: tiles of one token, item r is row r. Prompts:
  tiles of up to TILE tokens of all rows back to back; `_prompt_items` finds the items outside the kernel.
Memory traffic: a row's pages once per tile, from the window's oldest page to the tile's newest, each page by one DMA of
  all heads, keys and values; queries and results once. The pages stay in HBM; tables and lengths lie in SMEM.
Pipeline: blocks of several pages in two VMEM slots; while one block is computed the next one of the row, or the first
  of the next item, is on its way. The running softmax (float32) lives in VMEM for as long as the tile lasts; rows that
  share a tile share it too, as a token only ever sees its own row's keys.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.kv_write_tpu import write_kv, write_vmem_bytes
from pallas_kernels.paged_attention.tpu_plan import BLOCK, LANES, OTHER_VMEM_BYTES, TILE, Plan, make_plan
from pallas_kernels.registry import AttentionProblem, Device
from pallas_kernels.types import KVPages

__all__ = ["paged_attention", "why_not", "write_kv"]

SMEM_BYTES = 896 << 10  # of 1 MiB
VMEM_BYTES = {"TPU v5 lite": 96 << 20, "TPU v5e": 96 << 20, "TPU v6 lite": 96 << 20, "TPU v6e": 96 << 20}
MASKED = -1e30  # a score that is not seen
UNSEEN = -1e20  # largest score of a token that has seen nothing; exp(MASKED - UNSEEN) is 0


class Scalars(NamedTuple):
    """What lies in SMEM, all int32 and flat: tile and row of each item, their number, block tables, row bounds."""

    tile: Any
    row: Any
    count: Any
    tables: Any
    q_start: Any
    kv_len: Any


class Scratch(NamedTuple):
    """What lives over grid steps.

    kv [2 slots, 2, kv_heads, block tokens, head_dim], kv_scale [2 slots, block pages, 2, kv_heads, page_size] or None.
    values [kv_heads, m, head_dim], peak, total [kv_heads, m, LANES]: the running softmax of a tile's m queries a head.
    turn: the slot that the next block to compute is in.
    """

    kv: Any
    kv_scale: Any
    values: Any
    peak: Any
    total: Any
    turn: Any
    arrived: Any

    @staticmethod
    def shapes(plan: Plan) -> Scratch:
        softmax = (plan.kv_heads, plan.queries)
        kv_scale = (2, plan.block_pages, 2, plan.kv_heads, plan.page_size)
        return Scratch(
            kv=pltpu.VMEM((2, 2, plan.kv_heads, plan.block_tokens, plan.head_dim), plan.kv_dtype),
            kv_scale=pltpu.VMEM(kv_scale, jnp.float32) if plan.has_scale else None,
            values=pltpu.VMEM((*softmax, plan.head_dim), jnp.float32),
            peak=pltpu.VMEM((*softmax, LANES), jnp.float32),
            total=pltpu.VMEM((*softmax, LANES), jnp.float32),
            turn=pltpu.SMEM((1,), jnp.int32),
            arrived=pltpu.SemaphoreType.DMA((2,)),
        )


def why_not(device: Device, problem: AttentionProblem) -> str | None:
    """Why this device cannot run `paged_attention` and `write_kv` on the problem, or None."""
    if device.platform != "tpu":
        return f"Mosaic TPU kernels need a TPU, not platform {device.platform!r}"
    q_dtype, kv_dtype = str(jnp.dtype(problem.q_dtype)), str(jnp.dtype(problem.kv_dtype))
    if q_dtype not in ("bfloat16", "float32"):
        return f"queries must be bfloat16 or float32, not {q_dtype}"
    if kv_dtype not in ("bfloat16", "float32", "int8", "float8_e4m3fn"):
        return f"the KV cache must be bfloat16, float32, int8 or float8_e4m3fn, not {kv_dtype}"
    if problem.page_size not in (16, 32, 64, 128, 256):
        return f"the page size must be 16, 32, 64, 128 or 256, not {problem.page_size}"
    if jnp.dtype(kv_dtype).itemsize == 1 and problem.page_size < 32:
        return f"8-bit pages need a page size of at least 32, not {problem.page_size}"
    if problem.has_scale and problem.page_size < LANES:
        return f"scales need a page size of at least {LANES}, not {problem.page_size}, because copies move whole tiles"
    limit = VMEM_BYTES.get(device.kind, OTHER_VMEM_BYTES)
    options = {"scale": 1.0, "window": None, "softcap": None}
    need = max(make_plan(problem, tokens, BLOCK, **options).vmem_bytes for tokens in (1, TILE))
    need = max(need, write_vmem_bytes(problem.kv_heads, problem.head_dim))
    if need > limit:
        return f"the kernels need {need >> 20} MiB of VMEM, {device.kind} gives them {limit >> 20}; take smaller pages"
    return None


@partial(jax.jit, static_argnames=("scale", "window", "softcap", "decode_only"))
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
    first_page: jax.Array | int = 0,
    decode_only: bool = False,
) -> jax.Array:
    """See `reference.paged_attention`. Padding tokens are 0. Raises ValueError when the tables do not fit SMEM.

    Pages may be wider than q's head_dim, filled with 0. Where head_dim is not a multiple of 128 they should be, rounded
    up: tiles take that space anyway, and XLA's default layout of narrower pages makes it copy the cache at each call.
    """
    head_dim, block_tables = q.shape[-1], block_tables + first_page
    q = jnp.pad(q, ((0, 0),) * 3 + ((0, pages.head_dim - head_dim),))
    tokens, kv_heads, group, _ = q.shape
    rows, width = block_tables.shape
    need = 4 * (rows * (width + 4) + 2 * tokens // 16)
    if need > SMEM_BYTES:
        raise ValueError(
            f"block tables of {rows} rows x {width} pages need {need} bytes of SMEM, which has {SMEM_BYTES}; "
            "take larger pages, fewer rows or a shorter context"
        )
    problem = AttentionProblem(
        q.dtype, pages.data.dtype, kv_heads, group, pages.head_dim, pages.page_size, pages.scale is not None
    )
    options = {"scale": scale, "window": window, "softcap": softcap}
    row_arrays = (block_tables.reshape(-1), q_start, kv_len)

    decodes = min(rows, tokens)
    plan = make_plan(problem, 1, width, **options)
    item = jnp.arange(decodes, dtype=jnp.int32)
    out = _attend(plan, q[:decodes], pages, sinks, Scalars(item, item, num_decodes, *row_arrays))
    out = jnp.concatenate([out, jnp.zeros((tokens - decodes, *q.shape[1:]), q.dtype)])
    token = jnp.arange(tokens)[:, None, None, None]
    if decode_only:
        return jnp.where(token < num_decodes, out, 0)[..., :head_dim]
    plan = make_plan(problem, max(tokens, 2), width, **options)
    tile, row, count = _prompt_items(plan.tile, tokens, q_start, num_decodes)
    prompts = _attend(plan, q, pages, sinks, Scalars(tile, row, count, *row_arrays))
    return jnp.where(token < num_decodes, out, jnp.where(token < q_start[-1], prompts, 0))[..., :head_dim]


def _prompt_items(tile: int, tokens: int, q_start: jax.Array, num_decodes: jax.Array):
    """Tile and row of each pair of a tile and a prompt with tokens in it, by tile; and the number of pairs."""
    start, end = q_start[:-1], q_start[1:]
    rows = start.shape[0]
    prompt = (jnp.arange(rows) >= num_decodes) & (end > start)
    first = start // tile
    tiles = jnp.where(prompt, (end - 1) // tile - first + 1, 0)
    after = jnp.cumsum(tiles)
    item = jnp.arange((tokens + tile - 1) // tile + rows)
    row = jnp.minimum((after[None, :] <= item[:, None]).sum(1), rows - 1)
    item_tile = first[row] + item - (after - tiles)[row]
    last = (tokens - 1) // tile
    return jnp.clip(item_tile, 0, last).astype(jnp.int32), row.astype(jnp.int32), after[-1]


def _attend(plan: Plan, q: jax.Array, pages: KVPages, sinks: jax.Array | None, scalars: Scalars) -> jax.Array:
    """The kernel over the items. q [tokens, kv_heads, group, head_dim]; as q, garbage in tiles without an item."""
    tokens, kv_heads, group, head_dim = q.shape
    tiles = (tokens + plan.tile - 1) // plan.tile
    padding = plan.queries - plan.tile * group

    def to_tiles(x):
        """[tokens, kv_heads, group, n] to [tiles, kv_heads, queries, n]; a head's queries are by group, then token."""
        x = jnp.pad(x, ((0, tiles * plan.tile - x.shape[0]), (0, 0), (0, 0), (0, 0)))
        x = x.reshape(tiles, plan.tile, kv_heads, group, -1).transpose(0, 2, 3, 1, 4)
        return jnp.pad(x.reshape(tiles, kv_heads, plan.tile * group, -1), ((0, 0), (0, 0), (0, padding), (0, 0)))

    def tile_block(item, tile, *_):
        return tile[item], 0, 0, 0

    block = pl.BlockSpec((None, kv_heads, plan.queries, head_dim), tile_block)
    hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    inputs, specs = [to_tiles(q), pages.data], [block, hbm]
    if plan.has_scale:
        inputs, specs = [*inputs, pages.scale], [*specs, hbm]
    if sinks is not None:
        spread = jnp.broadcast_to(sinks.astype(jnp.float32)[:, :, None, None], (kv_heads, group, plan.tile, LANES))
        spread = spread.reshape(kv_heads, group * plan.tile, LANES)
        inputs.append(jnp.pad(spread, ((0, 0), (0, padding), (0, 0))))
        specs.append(pl.BlockSpec((kv_heads, plan.queries, LANES), lambda *_: (0, 0, 0)))

    count = jnp.asarray(scalars.count, jnp.int32)
    scalars = scalars._replace(count=count[None])
    call = pl.pallas_call(
        partial(_kernel, plan, sinks is not None),
        out_shape=jax.ShapeDtypeStruct((tiles, kv_heads, plan.queries, head_dim), q.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(count,),
            in_specs=specs,
            out_specs=block,
            scratch_shapes=[part for part in Scratch.shapes(plan) if part is not None],
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",), vmem_limit_bytes=plan.vmem_bytes),
        name=f"paged_attention_{'decode' if plan.tile == 1 else 'prompts'}",
    )
    out = call(*scalars, *inputs)
    out = out[:, :, : plan.tile * group].reshape(tiles, kv_heads, group, plan.tile, head_dim)
    return out.transpose(0, 3, 1, 2, 4).reshape(tiles * plan.tile, kv_heads, group, head_dim)[:tokens]


class Span(NamedTuple):
    """An item: its row; its tokens [begin, end); what to add to a token for its position; the positions from oldest to
    newest that any of its tokens sees (newest is -1 where nothing is cached)."""

    row: Any
    begin: Any
    end: Any
    shift: Any
    oldest: Any
    newest: Any


def _span(plan: Plan, scalars: Scalars, item: Any) -> Span:
    row = scalars.row[item]
    first = scalars.tile[item] * plan.tile
    begin = jnp.maximum(scalars.q_start[row], first)
    end = jnp.minimum(scalars.q_start[row + 1], first + plan.tile)
    shift = scalars.kv_len[row] - scalars.q_start[row + 1]
    oldest = jnp.maximum(begin + shift - plan.window + 1, 0) if plan.window else 0
    return Span(row, begin, end, shift, oldest, jnp.maximum(end + shift - 1, -1))


def _kernel(plan: Plan, has_sinks: bool, *refs: Any) -> None:
    """One item. Each item has at least one block; the one before it has started that."""
    scalars, others = Scalars(*refs[: len(Scalars._fields)]), iter(refs[len(Scalars._fields) :])
    q, data = next(others), next(others)
    data_scale = next(others) if plan.has_scale else None
    sinks = next(others) if has_sinks else None
    out, kv = next(others), next(others)
    scratch = Scratch(kv, next(others) if plan.has_scale else None, *others)

    item, items = pl.program_id(0), scalars.count[0]
    span = _span(plan, scalars, item)
    first, last = span.oldest // plan.block_tokens, jnp.maximum(span.newest, 0) // plan.block_tokens
    copies = partial(_each_copy, plan, scalars, data, data_scale, scratch)

    @pl.when(item == 0)
    def first_item():
        scratch.turn[0] = 0
        copies(span, first, 0, lambda copy: copy.start())

    tile = scalars.tile[item]

    @pl.when((item == 0) | (scalars.tile[jnp.maximum(item - 1, 0)] != tile))
    def new_tile():
        scratch.values[...] = jnp.zeros_like(scratch.values)
        scratch.peak[...] = jnp.full_like(scratch.peak, UNSEEN) if sinks is None else sinks[...]
        scratch.total[...] = jnp.full_like(scratch.total, 0.0 if sinks is None else 1.0)

    def step(block, _):
        slot = scratch.turn[0]

        @pl.when(block < last)
        def next_block():
            copies(span, block + 1, 1 - slot, lambda copy: copy.start())

        @pl.when((block == last) & (item + 1 < items))
        def next_item():
            following = _span(plan, scalars, item + 1)
            copies(following, following.oldest // plan.block_tokens, 1 - slot, lambda copy: copy.start())

        copies(span, block, slot, lambda copy: copy.wait())
        _add_block(plan, q, scratch, span, tile * plan.tile, block * plan.block_tokens, slot)
        scratch.turn[0] = 1 - slot

    lax.fori_loop(first, last + 1, step, None)

    @pl.when((item + 1 == items) | (scalars.tile[jnp.minimum(item + 1, items - 1)] != tile))
    def end_of_tile():
        def finish(head):
            total = jnp.maximum(scratch.total[head][:, :1], 1e-30)
            out[head] = (scratch.values[head] / total).astype(out.dtype)

        _each_head(plan, finish)


def _each_copy(plan: Plan, scalars: Scalars, data, data_scale, scratch: Scratch, span: Span, block, slot, act) -> None:
    """Starts or awaits the copies of a block's pages, only of those that the span's tokens see."""
    begin = jnp.maximum(block * plan.block_pages, span.oldest // plan.page_size)
    end = jnp.minimum((block + 1) * plan.block_pages, (span.newest + plan.page_size) // plan.page_size)

    def one(page, _):
        index = scalars.tables[span.row * plan.table_width + page]
        place = page - block * plan.block_pages
        where = pl.ds(pl.multiple_of(place * plan.page_size, plan.page_size), plan.page_size)
        act(pltpu.make_async_copy(data.at[index], scratch.kv.at[slot, :, :, where], scratch.arrived.at[slot]))
        if plan.has_scale:
            target = scratch.kv_scale.at[slot, place]
            act(pltpu.make_async_copy(data_scale.at[index], target, scratch.arrived.at[slot]))

    lax.fori_loop(begin, end, one, None)


def _add_block(plan: Plan, q, scratch: Scratch, span: Span, first_token, first_position, slot) -> None:
    """Adds a block of keys and values to the running softmax of all heads."""
    shape = (plan.tile, plan.block_tokens)
    token = first_token + lax.broadcasted_iota(jnp.int32, shape, 0)
    position = first_position + lax.broadcasted_iota(jnp.int32, shape, 1)
    seen = (token >= span.begin) & (token < span.end) & (position <= token + span.shift)
    if plan.window:
        seen &= position > token + span.shift - plan.window

    def filled(shape, axis):
        """What no copy has filled may be NaN, and NaN * 0 is NaN."""
        position = first_position + lax.broadcasted_iota(jnp.int32, shape, axis)
        return (position >= span.oldest) & (position <= span.newest)

    filled_rows = filled((plan.block_tokens, plan.head_dim), 0)
    filled_lanes = filled((1, plan.block_tokens), 1)
    precision = lax.Precision.HIGHEST if plan.compute_dtype == jnp.float32 else lax.Precision.DEFAULT
    dot = partial(lax.dot_general, precision=precision, preferred_element_type=jnp.float32)

    def one_head(head):
        k = scratch.kv[slot, 0, head].astype(plan.compute_dtype)
        v = scratch.kv[slot, 1, head].astype(plan.compute_dtype)
        v = jnp.where(filled_rows, v, jnp.zeros_like(v))
        scores = dot(q[head].astype(plan.compute_dtype), k, (((1,), (1,)), ((), ()))) * plan.scale
        if plan.has_scale:
            scores *= _scale_row(plan, scratch, slot, 0, head)
        if plan.softcap:
            scores = plan.softcap * jnp.tanh(scores / plan.softcap)
        scores = _mask(plan, scores, seen)
        before = scratch.peak[head][:, :1]
        peak = jnp.maximum(before, scores.max(1, keepdims=True))
        keep, p = jnp.exp(before - peak), jnp.exp(scores - peak)
        total = keep * scratch.total[head][:, :1] + p.sum(1, keepdims=True)
        if plan.has_scale:
            p *= jnp.where(filled_lanes, _scale_row(plan, scratch, slot, 1, head), 0.0)
        weighted = dot(p.astype(plan.compute_dtype), v, (((1,), (0,)), ((), ())))
        scratch.values[head] = scratch.values[head] * keep + weighted
        scratch.peak[head] = jnp.broadcast_to(peak, (plan.queries, LANES))
        scratch.total[head] = jnp.broadcast_to(total, (plan.queries, LANES))

    _each_head(plan, one_head)


def _each_head(plan: Plan, act) -> None:
    """Calls act(head). Decode: several heads side by side in the program, so that their latencies overlap."""
    most = 8 if plan.tile == 1 else 1
    together = max(n for n in range(1, most + 1) if plan.kv_heads % n == 0)

    def some(i, _):
        for head in range(together):
            act(i * together + head)

    lax.fori_loop(0, plan.kv_heads // together, some, None)


def _mask(plan: Plan, scores: jax.Array, seen: jax.Array) -> jax.Array:
    """scores [queries, block tokens], by group, then token; seen [tile, block tokens]."""
    if plan.tile == 1:
        return jnp.where(seen, scores, MASKED)
    parts = scores.reshape(-1, plan.tile, plan.block_tokens)
    return jnp.where(seen[None], parts, MASKED).reshape(scores.shape)


def _scale_row(plan: Plan, scratch: Scratch, slot, which: int, head: int) -> jax.Array:
    """float32 [1, block tokens]: what a head's keys (which = 0) or values (1) are to be multiplied with."""
    rows = [scratch.kv_scale[slot, page, which, pl.ds(head, 1)] for page in range(plan.block_pages)]
    return jnp.concatenate(rows, axis=1)
