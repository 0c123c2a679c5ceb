"""Latent attention on NVIDIA GPUs of compute capability 8.0 and newer, in Triton.

  decode    grid (rows, blocks of heads, splits). A program reads its share of one row's cached tokens once, for up to
            64 heads. Each share leaves a partial softmax in float32; `_combine`, grid (rows, heads), joins them. If
            there is only one share, the program stores the result directly.
  prompts   grid (tiles,). A tile is up to 64 queries of one row. A query is one head of one token; queries are
            contiguous in memory, so that any number of heads fills a tile. The longest tiles start first. Blocks below
            the diagonal need no mask.
  write     grid (tokens,). A program quantizes a token's row and writes it to its slot; padding writes nothing.

Both attention loops gather BLOCK rows of the cache a step through the tables, and Triton's pipeline fetches the next
ones meanwhile (cp.async). A block in shared memory serves both products: transposed as keys, as it is as values.
Quantized data is exact in the type of the queries; a token's scales multiply its two parts of the scores, the latent's
also the probabilities. Running softmax: Milakov & Gimelshein 2018, arXiv:1805.02867; splits: Dao et al. 2023,
"Flash-Decoding".

For 64 heads, a cached token takes 2 x 64 x (576 + 512) = 139,264 operations and 1,152 bytes in bfloat16: 121 operations
per byte. An H200's matrix units (990 TFLOP/s) and memory (4.8 TB/s) balance at 206. With 16 heads (tensor parallelism
of 8) decode is bound by memory. With 128 heads, in two blocks, the second block finds the rows in the L2 cache, and
decode is bound by arithmetic.

Compiled for H200 (9.0), and a few shapes for 8.9 and 8.0; not run on any of them yet.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from jaxserve.pallas_kernels import triton_compat
from jaxserve.pallas_kernels.kv_write_triton import QUANTIZED, codes
from jaxserve.pallas_kernels.paged_attention.triton_gpu import FLOATS, LOG2E, MASKED, _splits, _tiles
from jaxserve.pallas_kernels.registry import Device, LatentProblem
from jaxserve.pallas_kernels.triton_compat import pad
from jaxserve.pallas_kernels.types import LatentPages


def why_not(device: Device, problem: LatentProblem) -> str | None:
    """Why these kernels cannot run the problem on the device; None: they can."""
    q = problem.q_dtype.name
    kv = problem.kv_dtype.name
    if device.platform != "gpu":
        return f"it is for NVIDIA GPUs, not {device.platform}"
    capability = device.capability or (0, 0)
    if capability < (8, 0):
        return f"it needs compute capability 8.0 or newer, {device.kind} has {device.capability}"
    if q not in FLOATS:
        return f"queries must be one of {', '.join(FLOATS)}, not {q}"
    if kv not in QUANTIZED and kv != q:
        return f"latents must be as the queries, {q}, or int8 or float8_e4m3fn, not {kv}"
    if kv in QUANTIZED and not problem.has_scale:
        return f"{kv} latents need scales"
    if kv == "float8_e4m3fn" and capability < (8, 9):
        return f"float8 needs compute capability 8.9 or newer, {device.kind} has {device.capability}; use int8"
    if problem.rank > 512 or problem.rope > 128:
        return f"a latent can have up to 512 numbers and a rotated key 128, not {problem.rank} and {problem.rope}"
    return None


@triton.jit
def _update(
    peak, total, values, latent_q, key_q, data, scales, table, start, end, newest,
    SCALE: tl.constexpr, HAS_SCALES: tl.constexpr, PAGE: tl.constexpr, ROW: tl.constexpr, RANK: tl.constexpr,
    ROPE: tl.constexpr, BLOCK: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """Adds the cached tokens [start, start + BLOCK) to the running softmax of queries latent_q [M, padded rank] and
    key_q [M, padded rope].

    Only tokens before `end` are read; `newest` [M] is the last position that each query sees. Without MASK all are read
    and seen. Peaks are in units of log 2.
    """
    position = start + tl.arange(0, BLOCK)
    at = tl.arange(0, latent_q.shape[1])
    key_at = tl.arange(0, key_q.shape[1])
    owned = position < end
    if PAGE % BLOCK == 0:
        page = tl.load(table + start // PAGE).to(tl.int64)
    elif MASK:
        page = tl.load(table + position // PAGE, mask=owned, other=0).to(tl.int64)
    else:
        page = tl.load(table + position // PAGE).to(tl.int64)
    rows = data + (page * PAGE + position % PAGE)[:, None] * ROW
    if MASK or latent_q.shape[1] != RANK:
        latent = tl.load(rows + at[None, :], mask=owned[:, None] & (at < RANK)[None, :], other=0.0)
    else:
        latent = tl.load(rows + at[None, :])
    if MASK or key_q.shape[1] != ROPE:
        key = tl.load(rows + RANK + key_at[None, :], mask=owned[:, None] & (key_at < ROPE)[None, :], other=0.0)
    else:
        key = tl.load(rows + RANK + key_at[None, :])
    latent = latent.to(latent_q.dtype)

    scores = tl.dot(latent_q, tl.trans(latent), input_precision="ieee")
    of_keys = tl.dot(key_q, tl.trans(key.to(key_q.dtype)), input_precision="ieee")
    if HAS_SCALES:
        own = scales + page * (2 * PAGE) + position % PAGE
        factor = tl.load(own, mask=owned, other=0.0)
        scores *= factor[None, :]
        of_keys *= tl.load(own + PAGE, mask=owned, other=0.0)[None, :]
    scores = (scores + of_keys) * (SCALE * LOG2E)
    if MASK:
        seen = owned[None, :] & (position[None, :] <= newest[:, None])
        scores = tl.where(seen, scores, MASKED)

    higher = tl.maximum(peak, tl.max(scores, 1))
    keep = tl.exp2(peak - higher)
    p = tl.exp2(scores - higher[:, None])
    if MASK:
        p = tl.where(seen, p, 0.0)
    total = total * keep + tl.sum(p, 1)
    if HAS_SCALES:
        p *= factor[None, :]
    values = tl.dot(p.to(latent_q.dtype), latent, values * keep[:, None], input_precision="ieee")
    return higher, total, values


@triton.jit
def _queries(q, query, live, RANK: tl.constexpr, ROPE: tl.constexpr, RANK_PAD: tl.constexpr, ROPE_PAD: tl.constexpr):
    """The two parts of queries [M], which are numbered by token and head. Queries that are not live are zero."""
    at = tl.arange(0, RANK_PAD)
    key_at = tl.arange(0, ROPE_PAD)
    begin = q + query.to(tl.int64)[:, None] * (RANK + ROPE)
    latent_q = tl.load(begin + at[None, :], mask=live[:, None] & (at < RANK)[None, :], other=0.0)
    key_q = tl.load(begin + RANK + key_at[None, :], mask=live[:, None] & (key_at < ROPE)[None, :], other=0.0)
    return latent_q, key_q


@triton.jit
def _of_layer(data, scales, first_page, PAGE: tl.constexpr, ROW: tl.constexpr):
    """`data` and `scales` from the first page of the layer on: tables count from it, and arrays hold several layers."""
    tokens = tl.load(first_page).to(tl.int64) * PAGE
    return data + tokens * ROW, scales + 2 * tokens


@triton.jit
def _decode(
    q, data, scales, tables, first_page, kv_len, num_decodes, before, out, peaks, totals,
    SCALE: tl.constexpr, HAS_SCALES: tl.constexpr, HEADS: tl.constexpr, PAGE: tl.constexpr, ROW: tl.constexpr,
    RANK: tl.constexpr, ROPE: tl.constexpr, WIDTH: tl.constexpr, SPLITS: tl.constexpr, TILE: tl.constexpr,
    RANK_PAD: tl.constexpr, ROPE_PAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """With one split `out` is the result. With more, `out` float32 [rows, splits, heads, rank] has the sums of values
    of each split, weighted by exponentials relative to `peaks`; `peaks` and `totals` are [rows, splits, heads].

    `before` is not read; it may share its memory with `out`.
    """
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(2)
    head = tl.program_id(1) * TILE + tl.arange(0, TILE)
    at = tl.arange(0, RANK_PAD)
    live = head < HEADS
    to = (row * SPLITS + split) * HEADS + head
    real = live[:, None] & (at < RANK)[None, :]
    if row >= tl.load(num_decodes):
        if SPLITS == 1:
            nothing = tl.zeros([TILE, RANK_PAD], q.dtype.element_ty)
            tl.store(out + to[:, None] * RANK + at[None, :], nothing, mask=real)
        return
    data, scales = _of_layer(data, scales, first_page, PAGE, ROW)
    length = tl.load(kv_len + row)
    share = tl.cdiv(tl.cdiv(length, BLOCK), SPLITS) * BLOCK
    lowest = split * share
    end = tl.minimum(length, lowest + share)

    latent_q, key_q = _queries(q, row * HEADS + head, live, RANK, ROPE, RANK_PAD, ROPE_PAD)
    newest = tl.zeros([TILE], tl.int32) + length
    peak = tl.full([TILE], MASKED, tl.float32)
    total = tl.zeros([TILE], tl.float32)
    values = tl.zeros([TILE, RANK_PAD], tl.float32)
    for start in range(lowest, end, BLOCK):
        peak, total, values = _update(
            peak, total, values, latent_q, key_q, data, scales, tables + row * WIDTH, start, end, newest,
            SCALE, HAS_SCALES, PAGE, ROW, RANK, ROPE, BLOCK, MASK=True,
        )  # fmt: skip
    if SPLITS > 1:
        tl.store(peaks + to, peak, mask=live)
        tl.store(totals + to, total, mask=live)
        if end > lowest:
            tl.store(out + to[:, None] * RANK + at[None, :], values, mask=real)
    else:
        values = values / tl.maximum(total, 1e-30)[:, None]
        tl.store(out + to[:, None] * RANK + at[None, :], values.to(q.dtype.element_ty), mask=real)


@triton.jit
def _combine(
    parts, peaks, totals, num_decodes, before, out,
    HEADS: tl.constexpr, RANK: tl.constexpr, SPLITS: tl.constexpr, SPLITS_PAD: tl.constexpr, RANK_PAD: tl.constexpr,
):  # fmt: skip
    """Joins the splits of one head. `parts`, `peaks` and `totals` are results of `_decode`."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    split = tl.arange(0, SPLITS_PAD)
    at = tl.arange(0, RANK_PAD)
    to = out + (row * HEADS + head) * RANK + at
    if row >= tl.load(num_decodes):
        tl.store(to, tl.zeros([RANK_PAD], out.dtype.element_ty), mask=at < RANK)
        return
    of = (row * SPLITS + split) * HEADS + head
    total = tl.load(totals + of, mask=split < SPLITS, other=0.0)
    used = total > 0  # an empty split has stored no values
    peak = tl.load(peaks + of, mask=used, other=MASKED)
    weight = tl.exp2(peak - tl.max(peak, 0))
    denominator = tl.sum(tl.where(used, total * weight, 0.0), 0)
    value = tl.load(parts + of[:, None] * RANK + at[None, :], mask=used[:, None] & (at < RANK)[None, :], other=0.0)
    result = tl.sum(value * weight[:, None], 0) / tl.maximum(denominator, 1e-30)
    tl.store(to, result.to(out.dtype.element_ty), mask=at < RANK)


@triton.jit
def _prompt(
    q, data, scales, tables, first_page, q_start, kv_len, tile_row, tile_first, before, out,
    SCALE: tl.constexpr, HAS_SCALES: tl.constexpr, HEADS: tl.constexpr, PAGE: tl.constexpr, ROW: tl.constexpr,
    RANK: tl.constexpr, ROPE: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr, RANK_PAD: tl.constexpr,
    ROPE_PAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Computes one tile. Its TILE queries, which are numbered by token and head, begin at tile_first."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    row = tl.load(tile_row + tile).to(tl.int64)
    if row < 0:
        return
    data, scales = _of_layer(data, scales, first_page, PAGE, ROW)
    first = tl.load(tile_first + tile)
    stop = tl.load(q_start + row + 1)
    length = tl.load(kv_len + row)
    query = first + tl.arange(0, TILE)
    at = tl.arange(0, RANK_PAD)
    token = query // HEADS
    live = token < stop
    newest = length - stop + token
    latent_q, key_q = _queries(q, query, live, RANK, ROPE, RANK_PAD, ROPE_PAD)

    oldest = length - stop + first // HEADS  # the last position that the tile's first query sees
    end = tl.minimum(length - stop + (first + TILE - 1) // HEADS + 1, length)
    table = tables + row * WIDTH
    peak = tl.full([TILE], MASKED, tl.float32)
    total = tl.zeros([TILE], tl.float32)
    values = tl.zeros([TILE, RANK_PAD], tl.float32)
    diagonal = (oldest + 1) // BLOCK * BLOCK
    for start in range(0, diagonal, BLOCK):
        peak, total, values = _update(
            peak, total, values, latent_q, key_q, data, scales, table, start, end, newest,
            SCALE, HAS_SCALES, PAGE, ROW, RANK, ROPE, BLOCK, MASK=False,
        )  # fmt: skip
    for start in range(diagonal, end, BLOCK):
        peak, total, values = _update(
            peak, total, values, latent_q, key_q, data, scales, table, start, end, newest,
            SCALE, HAS_SCALES, PAGE, ROW, RANK, ROPE, BLOCK, MASK=True,
        )  # fmt: skip
    values = values / tl.maximum(total, 1e-30)[:, None]
    to = out + query.to(tl.int64)[:, None] * RANK + at[None, :]
    tl.store(to, values.to(q.dtype.element_ty), mask=live[:, None] & (at < RANK)[None, :])


class Sizes(NamedTuple):
    """Sizes of a kernel: queries in a tile, cached tokens in a block, warps of a program, blocks in flight."""

    tile: int
    block: int
    warps: int
    stages: int


def sizes_of(queries: int, dtype: jnp.dtype, has_scale: bool, capability: int) -> Sizes:
    """The sizes for `queries` queries that share a row's cached tokens, which have `dtype` or are codes (`has_scale`).

    Accumulators of 64 queries x 512 numbers take half of eight warps' registers. With these sizes at most 88 bytes per
    thread are spilled, in prompts. With 512 + 64 numbers in 16 bits, shared memory is up to 148 KB on 9.0 and up to
    76 KB elsewhere; GPUs of capability 8.6 and 8.9 have 99 KB.
    """
    roomy = capability in (90, 100, 103)
    most = 64 if roomy else 32
    if dtype == jnp.float32:
        tile = min(pad(queries, 16), most // 2)
        return Sizes(tile, 16, 8 if tile > 16 else 4, 2 if roomy else 1)
    tile = min(pad(queries, 16), most)
    wide = roomy and (tile == 16 or (tile == 32 and not has_scale))
    return Sizes(tile, 64 if wide else 32, 8, 3 if tile == 64 and not has_scale else 2)


@partial(jax.jit, static_argnames=("scale", "rank", "decode_only"))
def latent_attention(
    q: jax.Array,
    pages: LatentPages,
    tables: jax.Array,
    q_start: jax.Array,
    kv_len: jax.Array,
    num_decodes: jax.Array,
    *,
    scale: float,
    rank: int,
    first_page: jax.Array | int = 0,
    decode_only: bool = False,
) -> jax.Array:
    """As `reference.latent_attention`."""
    (tokens, heads, dim), (rows, width) = q.shape, tables.shape
    fixed: dict[str, Any] = {
        "SCALE": scale, "HAS_SCALES": pages.scale is not None, "HEADS": heads, "PAGE": pages.page_size,
        "ROW": pages.width, "RANK": rank, "ROPE": dim - rank, "WIDTH": width, "RANK_PAD": pad(rank, 16),
        "ROPE_PAD": pad(dim - rank, 16),
    }  # fmt: skip
    first_page = jnp.asarray(first_page, jnp.int32).reshape(1)
    cache = (pages.data, pages.data if pages.scale is None else pages.scale, tables, first_page)
    num_decodes = jnp.asarray(num_decodes, jnp.int32).reshape(1)
    out = _decode_rows(q, cache, kv_len, num_decodes, fixed, rows=rows, decode_only=decode_only)
    if decode_only:
        return out
    sizes = sizes_of(tokens * heads, q.dtype, pages.scale is not None, triton_compat.target().capability)
    tile_row, tile_first = _tiles(q_start * heads, num_decodes, tokens * heads, sizes.tile)
    return triton_compat.call(
        _prompt, q, *cache, q_start, kv_len, tile_row, tile_first, out,
        out=[jax.ShapeDtypeStruct(out.shape, out.dtype)], grid=(tile_row.shape[0],), aliases={9: 0},
        num_warps=sizes.warps, num_stages=sizes.stages, TILE=sizes.tile, BLOCK=sizes.block, **fixed,
    )[0]  # fmt: skip


def _decode_rows(q, cache, kv_len, num_decodes, fixed, *, rows, decode_only):
    """Results [tokens, heads, rank] of the rows below num_decodes; all other rows are zero."""
    (tokens, heads, _), rank = q.shape, fixed["RANK"]
    count = min(rows, tokens)
    like = jax.ShapeDtypeStruct((tokens, heads, rank), q.dtype)
    # With decode_only the kernels visit every token and store the zeros, so that no fill is needed.
    visited = tokens if decode_only else count
    before, aliased = (q, False) if decode_only else (jnp.zeros(like.shape, q.dtype), True)
    target = triton_compat.target()
    sizes = sizes_of(heads, q.dtype, fixed["HAS_SCALES"], target.capability)
    blocks = -(-heads // sizes.tile)
    splits = _splits(count * blocks, fixed["WIDTH"] * fixed["PAGE"], target.cores)
    stats = jax.ShapeDtypeStruct((count, splits, heads), jnp.float32)
    values = like if splits == 1 else jax.ShapeDtypeStruct((*stats.shape, rank), jnp.float32)
    out, peaks, totals = triton_compat.call(
        _decode, q, *cache, kv_len, num_decodes, before,
        out=[values, stats, stats], grid=(visited if splits == 1 else count, blocks, splits),
        aliases={7: 0} if splits == 1 and aliased else None,
        num_warps=sizes.warps, num_stages=sizes.stages, SPLITS=splits, TILE=sizes.tile, BLOCK=sizes.block, **fixed,
    )  # fmt: skip
    if splits == 1:
        return out
    return triton_compat.call(
        _combine, out, peaks, totals, num_decodes, before,
        out=[like], grid=(visited, heads), aliases={4: 0} if aliased else None,
        num_warps=4, SPLITS=splits, SPLITS_PAD=pad(splits),
        **{name: fixed[name] for name in ("HEADS", "RANK", "RANK_PAD")},
    )[0]  # fmt: skip


@triton.jit
def _write_part(new, part, to, scale_to, live, TOP: tl.constexpr, HAS_SCALES: tl.constexpr):
    """Writes a part of a row to `to` where `live`, with its scale if there is one; other numbers of `new` are zero."""
    if HAS_SCALES:
        amax = tl.max(tl.abs(new), 0)
        scale = tl.where(amax > 1e-30, amax / TOP, 1.0)  # as `kv_write.TINY`
        tl.store(scale_to, scale)
        new = codes(new / scale, TOP)
    tl.store(to + part, new.to(to.dtype.element_ty), mask=live)


@triton.jit
def _write(
    rows, slots, first_page, before, scales_before, data, scales,
    HAS_SCALES: tl.constexpr, TOP: tl.constexpr, PAGE: tl.constexpr, ROW: tl.constexpr, RANK: tl.constexpr,
    ROPE: tl.constexpr, RANK_PAD: tl.constexpr, REST_PAD: tl.constexpr,
):  # fmt: skip
    """`data` and `scales` share their memory with `before` and `scales_before`. Slots count from page `first_page`."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    if slot < 0:
        return
    page = slot // PAGE + tl.load(first_page)
    to = data + (page * PAGE + slot % PAGE) * ROW
    own = scales + page * (2 * PAGE) + slot % PAGE
    new = rows + token * (RANK + ROPE)
    at = tl.arange(0, RANK_PAD)
    _write_part(tl.load(new + at, mask=at < RANK, other=0.0).to(tl.float32), at, to, own, at < RANK, TOP, HAS_SCALES)
    rest = tl.arange(0, REST_PAD)
    key = tl.load(new + RANK + rest, mask=rest < ROPE, other=0.0).to(tl.float32)
    _write_part(key, rest, to + RANK, own + PAGE, rest < ROW - RANK, TOP, HAS_SCALES)


@partial(jax.jit, static_argnames="rank")
def write_latent(
    pages: LatentPages, rows: jax.Array, slots: jax.Array, first_page: jax.Array | int = 0, *, rank: int
) -> LatentPages:
    """As `reference.write_latent`, in place; padding is not written."""
    tokens, dim = rows.shape
    scales = pages.scale
    first_page = jnp.asarray(first_page, jnp.int32).reshape(1)
    arrays = [pages.data] if scales is None else [pages.data, scales]
    # Without scales, the slots take their place as an argument, and an unused output takes their place as a result.
    extra = jax.ShapeDtypeStruct((1,) if scales is None else scales.shape, jnp.float32)
    data, new_scales = triton_compat.call(
        _write, rows, slots, first_page, pages.data, slots if scales is None else scales,
        out=[jax.ShapeDtypeStruct(pages.data.shape, pages.data.dtype), extra], grid=(tokens,),
        aliases={3 + i: i for i in range(len(arrays))}, num_warps=4,
        HAS_SCALES=scales is not None, TOP=QUANTIZED.get(pages.data.dtype.name, 0), PAGE=pages.page_size,
        ROW=pages.width, RANK=rank, ROPE=dim - rank, RANK_PAD=pad(rank), REST_PAD=pad(pages.width - rank),
    )  # fmt: skip
    return LatentPages(data, None if scales is None else new_scales)
