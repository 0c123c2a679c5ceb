"""Paged attention on NVIDIA GPUs of compute capability 8.0 and newer, in Triton.

  decode    grid (rows, kv_heads, splits). A program reads one split of a row's pages once for all query heads of a KV
            head; these are padded to 16 rows, which costs nothing beside the reads. Each split leaves a partial softmax
            in float32, and `_combine`, grid (rows, heads), joins them. A single split stores the result itself.
  prompts   grid (tiles, kv_heads). A tile is up to 128 (token, head) pairs of one row that share a KV head. It reads
            the row's keys and values up to its last token. The longest tiles start first. Blocks below the diagonal are
            not masked.

Both loops gather BLOCK cached tokens a step through the block table, while Triton's pipeline fetches the next blocks
(cp.async, `num_stages` blocks). Running softmax: Milakov & Gimelshein 2018, arXiv:1805.02867. Splits: Dao et al. 2023,
"Flash-Decoding". Quantized data is converted exactly to the dtype of the queries; scales multiply the scores and the
probabilities.

Compiled for H200 (9.0), and a few shapes for 8.9 and 8.0; not yet run on any of them.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from jaxserve.pallas_kernels import triton_compat, tuning
from jaxserve.pallas_kernels.kv_write_triton import QUANTIZED, write_kv
from jaxserve.pallas_kernels.registry import AttentionProblem, Device
from jaxserve.pallas_kernels.triton_compat import pad
from jaxserve.pallas_kernels.types import KVPages

__all__ = ["paged_attention", "why_not", "write_kv"]

FLOATS = ("bfloat16", "float16", "float32")
MASKED = tl.constexpr(-1e30)  # finite, so that a row without visible keys stays finite
LOG2E = tl.constexpr(1.4426950408889634)


def why_not(device: Device, problem: AttentionProblem) -> str | None:
    """Returns why these kernels cannot run the problem on the device, or None where they can."""
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
        return f"keys and values must be as the queries, {q}, or int8 or float8_e4m3fn, not {kv}"
    if kv == "int8" and not problem.has_scale:
        return "int8 keys and values need scales"
    if kv == "float8_e4m3fn" and capability < (8, 9):
        return f"float8 needs compute capability 8.9 or newer, {device.kind} has {device.capability}; use int8"
    if problem.head_dim > 512 or problem.group > 64:
        return f"head_dim can be up to 512 and the group up to 64, not {problem.head_dim} and {problem.group}"
    if problem.head_dim > 256 and (q == "float32" or problem.group > 16):
        return f"head_dim {problem.head_dim} needs queries of 16 bits and a group of up to 16, not {q}, {problem.group}"
    if q == "float32" and problem.head_dim > 128 and problem.group > 32:
        return f"in float32 with head_dim {problem.head_dim} the group can be up to 32, not {problem.group}"
    return None


@triton.jit
def _update(
    peak, total, values, q, data, scales, table, head, start, begin, end, newest,
    SCALE: tl.constexpr, CAP: tl.constexpr, WINDOW: tl.constexpr, HAS_SCALES: tl.constexpr, HEADS: tl.constexpr,
    PAGE: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, MASK: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Adds the cached tokens [start, start + BLOCK) to the running softmax of queries q [M, padded head_dim].

    Only tokens in [begin, end) are read. With CAUSAL, `newest` [M] is the last position that each query sees. Without
    MASK all tokens are read and visible. Peaks are base-2 logarithms.
    """
    position = start + tl.arange(0, BLOCK)
    dim = tl.arange(0, q.shape[1])
    owned = (position >= begin) & (position < end)
    if PAGE % BLOCK == 0:
        page = tl.load(table + start // PAGE).to(tl.int64)
    elif MASK:
        page = tl.load(table + position // PAGE, mask=owned, other=0).to(tl.int64)
    else:
        page = tl.load(table + position // PAGE).to(tl.int64)
    slot = (page * (2 * HEADS) + head) * PAGE + position % PAGE  # of keys; values are HEADS * PAGE further
    at = data + slot[:, None] * DIM + dim[None, :]
    inside = (dim < DIM)[None, :]
    if MASK:
        inside = inside & owned[:, None]
    if MASK or q.shape[1] != DIM:
        k = tl.load(at, mask=inside, other=0.0)
        v = tl.load(at + HEADS * PAGE * DIM, mask=inside, other=0.0)
    else:
        k = tl.load(at)
        v = tl.load(at + HEADS * PAGE * DIM)

    scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee") * SCALE
    if HAS_SCALES:
        scores *= tl.load(scales + slot, mask=owned, other=0.0)[None, :]
    if CAP > 0:
        scores = CAP - 2 * CAP / (tl.exp2(scores * (2 * LOG2E / CAP)) + 1)  # CAP * tanh(scores / CAP)
    scores *= LOG2E
    if MASK:
        seen = owned[None, :]
        if CAUSAL:
            seen = seen & (position[None, :] <= newest[:, None])
            if WINDOW:
                seen = seen & (position[None, :] > newest[:, None] - WINDOW)
        scores = tl.where(seen, scores, MASKED)

    higher = tl.maximum(peak, tl.max(scores, 1))
    keep = tl.exp2(peak - higher)
    p = tl.exp2(scores - higher[:, None])
    if MASK:
        p = tl.where(seen, p, 0.0)
    total = total * keep + tl.sum(p, 1)
    if HAS_SCALES:
        p *= tl.load(scales + slot + HEADS * PAGE, mask=owned, other=0.0)[None, :]
    values = tl.dot(p.to(q.dtype), v.to(q.dtype), values * keep[:, None], input_precision="ieee")
    return higher, total, values


@triton.jit
def _of_layer(data, scales, first_page, HEADS: tl.constexpr, PAGE: tl.constexpr, DIM: tl.constexpr):
    """Moves `data` and `scales` to `first_page`, from which the block tables count. Layers share these arrays."""
    rows = tl.load(first_page).to(tl.int64) * (2 * HEADS * PAGE)
    return data + rows * DIM, scales + rows


@triton.jit
def _join_sink(peak, total, values, sink):
    """Adds sinks [M], natural logarithms, to the denominator."""
    sink *= LOG2E
    higher = tl.maximum(peak, sink)
    keep = tl.exp2(peak - higher)
    return total * keep + tl.exp2(sink - higher), values * keep[:, None]


@triton.jit
def _decode(
    q, data, scales, block_tables, first_page, kv_len, num_decodes, sinks, before, out, peaks, totals,
    SCALE: tl.constexpr, CAP: tl.constexpr, WINDOW: tl.constexpr, HAS_SCALES: tl.constexpr, HAS_SINKS: tl.constexpr,
    HEADS: tl.constexpr, GROUP: tl.constexpr, PAGE: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    SPLITS: tl.constexpr, GROUP_PAD: tl.constexpr, DIM_PAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """With one split `out` is as q. With more, `out` float32 [rows, kv_heads, splits, group, head_dim] holds sums of
    values weighted by exponentials relative to `peaks`; `peaks` and `totals` are [rows, kv_heads, splits, group].

    `before` is not read: it may be aliased to `out`.
    """
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    split = tl.program_id(2)
    member = tl.arange(0, GROUP_PAD)
    dim = tl.arange(0, DIM_PAD)
    real = (member < GROUP)[:, None] & (dim < DIM)[None, :]
    offset = member[:, None] * DIM + dim[None, :]
    part = (row * HEADS + head) * SPLITS + split
    if row >= tl.load(num_decodes):
        if SPLITS == 1:
            tl.store(out + part * GROUP * DIM + offset, tl.zeros([GROUP_PAD, DIM_PAD], q.dtype.element_ty), mask=real)
        return
    data, scales = _of_layer(data, scales, first_page, HEADS, PAGE, DIM)
    length = tl.load(kv_len + row)
    begin = tl.maximum(length - WINDOW, 0) if WINDOW else 0
    lowest = begin // BLOCK * BLOCK
    share = tl.cdiv(tl.cdiv(length - lowest, BLOCK), SPLITS) * BLOCK
    lowest += split * share
    end = tl.minimum(length, lowest + share)

    query = tl.load(q + (row * HEADS + head) * GROUP * DIM + offset, mask=real, other=0.0)
    peak = tl.full([GROUP_PAD], MASKED, tl.float32)
    total = tl.zeros([GROUP_PAD], tl.float32)
    values = tl.zeros([GROUP_PAD, DIM_PAD], tl.float32)
    for start in range(lowest, end, BLOCK):
        peak, total, values = _update(
            peak, total, values, query, data, scales, block_tables + row * WIDTH, head, start, begin, end, member,
            SCALE, CAP, WINDOW, HAS_SCALES, HEADS, PAGE, DIM, BLOCK, MASK=True, CAUSAL=False,
        )  # fmt: skip
    if SPLITS > 1:
        tl.store(peaks + part * GROUP + member, peak, mask=member < GROUP)
        tl.store(totals + part * GROUP + member, total, mask=member < GROUP)
        if end > lowest:
            tl.store(out + part * GROUP * DIM + offset, values, mask=real)
    else:
        if HAS_SINKS:
            sink = tl.load(sinks + head * GROUP + member, mask=member < GROUP, other=0.0)
            total, values = _join_sink(peak, total, values, sink)
        values = values / tl.maximum(total, 1e-30)[:, None]
        tl.store(out + part * GROUP * DIM + offset, values.to(q.dtype.element_ty), mask=real)


@triton.jit
def _combine(
    parts, peaks, totals, num_decodes, sinks, before, out,
    HAS_SINKS: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, SPLITS: tl.constexpr,
    SPLITS_PAD: tl.constexpr, DIM_PAD: tl.constexpr,
):  # fmt: skip
    """Joins the splits of one query head. `parts`, `peaks` and `totals` are results of `_decode`."""
    row = tl.program_id(0).to(tl.int64)
    query = tl.program_id(1)
    split = tl.arange(0, SPLITS_PAD)
    dim = tl.arange(0, DIM_PAD)
    to = out + (row * HEADS * GROUP + query) * DIM + dim
    if row >= tl.load(num_decodes):
        tl.store(to, tl.zeros([DIM_PAD], out.dtype.element_ty), mask=dim < DIM)
        return
    at = ((row * HEADS + query // GROUP) * SPLITS + split) * GROUP + query % GROUP
    total = tl.load(totals + at, mask=split < SPLITS, other=0.0)
    used = total > 0  # an empty split stores no values
    peak = tl.load(peaks + at, mask=used, other=MASKED)
    highest = tl.max(peak, 0)
    if HAS_SINKS:
        sink = tl.load(sinks + query) * LOG2E
        highest = tl.maximum(highest, sink)
    weight = tl.exp2(peak - highest)
    denominator = tl.sum(tl.where(used, total * weight, 0.0), 0)
    if HAS_SINKS:
        denominator += tl.exp2(sink - highest)
    value = tl.load(parts + at[:, None] * DIM + dim[None, :], mask=used[:, None] & (dim < DIM)[None, :], other=0.0)
    result = tl.sum(value * weight[:, None], 0) / tl.maximum(denominator, 1e-30)
    tl.store(to, result.to(out.dtype.element_ty), mask=dim < DIM)


@triton.jit
def _prompt(
    q, data, scales, block_tables, first_page, q_start, kv_len, tile_row, tile_first, sinks, before, out,
    SCALE: tl.constexpr, CAP: tl.constexpr, WINDOW: tl.constexpr, HAS_SCALES: tl.constexpr, HAS_SINKS: tl.constexpr,
    HEADS: tl.constexpr, GROUP: tl.constexpr, PAGE: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    TOKENS: tl.constexpr, PAIRS: tl.constexpr, DIM_PAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One tile. Its TOKENS query tokens x GROUP heads are padded to PAIRS rows of the products."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    row = tl.load(tile_row + tile).to(tl.int64)
    if row < 0:
        return
    data, scales = _of_layer(data, scales, first_page, HEADS, PAGE, DIM)
    first = tl.load(tile_first + tile)
    stop = tl.load(q_start + row + 1)
    length = tl.load(kv_len + row)
    pair = tl.arange(0, PAIRS)
    dim = tl.arange(0, DIM_PAD)
    token = first + pair // GROUP
    live = (pair < TOKENS * GROUP) & (token < stop)
    newest = length - stop + token
    real = live[:, None] & (dim < DIM)[None, :]
    offset = ((token.to(tl.int64) * HEADS + head) * GROUP + pair % GROUP)[:, None] * DIM + dim[None, :]
    query = tl.load(q + offset, mask=real, other=0.0)

    oldest = length - stop + first  # the last position that the tile's first token sees
    end = tl.minimum(oldest + TOKENS, length)
    begin = tl.maximum(oldest - WINDOW + 1, 0) if WINDOW else 0
    lowest = begin // BLOCK * BLOCK
    table = block_tables + row * WIDTH
    peak = tl.full([PAIRS], MASKED, tl.float32)
    total = tl.zeros([PAIRS], tl.float32)
    values = tl.zeros([PAIRS, DIM_PAD], tl.float32)
    if not WINDOW:
        diagonal = (oldest + 1) // BLOCK * BLOCK
        for start in range(0, diagonal, BLOCK):
            peak, total, values = _update(
                peak, total, values, query, data, scales, table, head, start, begin, end, newest,
                SCALE, CAP, WINDOW, HAS_SCALES, HEADS, PAGE, DIM, BLOCK, MASK=False, CAUSAL=True,
            )  # fmt: skip
        lowest = diagonal
    for start in range(lowest, end, BLOCK):
        peak, total, values = _update(
            peak, total, values, query, data, scales, table, head, start, begin, end, newest,
            SCALE, CAP, WINDOW, HAS_SCALES, HEADS, PAGE, DIM, BLOCK, MASK=True, CAUSAL=True,
        )  # fmt: skip
    if HAS_SINKS:
        sink = tl.load(sinks + head * GROUP + pair % GROUP)
        total, values = _join_sink(peak, total, values, sink)
    values = values / tl.maximum(total, 1e-30)[:, None]
    tl.store(out + offset, values.to(q.dtype.element_ty), mask=real)


def _tiles(q_start: jax.Array, num_decodes: jax.Array, tokens: int, size: int) -> tuple[jax.Array, jax.Array]:
    """Row (-1: none) and first token of each tile of `size` query tokens, for as many tiles as rows may need.

    All layers need the same tiles, so XLA computes them once a step.
    """
    rows = q_start.shape[0] - 1
    lengths = jnp.where(jnp.arange(rows) >= num_decodes, q_start[1:] - q_start[:-1], 0)
    after = jnp.cumsum((lengths + size - 1) // size)
    tile = jnp.arange(-(-tokens // size) + min(rows, tokens), dtype=jnp.int32)
    row = jnp.searchsorted(after, tile, side="right", method="compare_all").astype(jnp.int32)
    used = row < rows
    row = jnp.minimum(row, rows - 1)
    before = jnp.where(row > 0, after[jnp.maximum(row - 1, 0)], 0)
    return jnp.where(used, row, -1), (q_start[row] + (tile - before) * size).astype(jnp.int32)


def _splits(programs: int, length: int, cores: int) -> int:
    """Splits of each row: enough to occupy the device, each of at least 256 tokens. Follows from static sizes only."""
    wanted = max(1, 4 * cores // programs)
    return 1 << (min(wanted, max(1, length // 256), 64).bit_length() - 1)


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
    """Causal attention of ragged query rows over their cached keys and values. See `reference.paged_attention`."""
    tokens, heads, group, _ = q.shape
    fixed, cache, sinks = _arguments(q, pages, block_tables, kv_len, first_page, sinks, scale, window, softcap)
    rows = block_tables.shape[0]
    out = _decode_rows(q, cache, kv_len, num_decodes, sinks, fixed, rows=rows, decode_only=decode_only)
    if decode_only:
        return out

    narrow = _narrow(q)
    tuned = tuning.lookup("prompts", "triton", **tuning.of_attention(q, pages.data, block_tables), tokens=tokens)
    pairs = max(pad(group, 16), min(tuned.get("pairs", 128 // narrow), pad(tokens * group, 16)))
    tile_row, tile_first = _tiles(q_start, num_decodes, tokens, pairs // group)
    return triton_compat.call(
        _prompt, q, *cache, q_start, kv_len, tile_row, tile_first, sinks, out,
        out=[jax.ShapeDtypeStruct(q.shape, q.dtype)], grid=(tile_row.shape[0], heads), aliases={10: 0},
        num_warps=tuned.get("warps") or (8 if pairs >= 128 else 4), num_stages=tuned.get("stages", 2),
        TOKENS=pairs // group, PAIRS=pairs, BLOCK=tuned.get("block", 64 // narrow), **fixed,
    )[0]  # fmt: skip


def decode(
    q: jax.Array,
    pages: KVPages,
    block_tables: jax.Array,
    kv_len: jax.Array,
    num_decodes: jax.Array,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: jax.Array | None,
    first_page: jax.Array | int,
    decode_only: bool,
) -> jax.Array:
    """The decode rows of `paged_attention`, in the shape of q; other rows are zeros."""
    fixed, cache, sinks = _arguments(q, pages, block_tables, kv_len, first_page, sinks, scale, window, softcap)
    rows = block_tables.shape[0]
    return _decode_rows(q, cache, kv_len, num_decodes, sinks, fixed, rows=rows, decode_only=decode_only)


def _arguments(q, pages, block_tables, kv_len, first_page, sinks, scale, window, softcap):
    """What all kernels take: their constants, the arrays of the cache, and the sinks (or any array without them)."""
    _, heads, group, dim = q.shape
    fixed = {
        "SCALE": scale, "CAP": softcap or 0.0, "WINDOW": window or 0, "HAS_SCALES": pages.scale is not None,
        "HAS_SINKS": sinks is not None, "HEADS": heads, "GROUP": group, "PAGE": pages.page_size, "DIM": dim,
        "WIDTH": block_tables.shape[1], "DIM_PAD": pad(dim, 16),
    }  # fmt: skip
    first_page = jnp.asarray(first_page, jnp.int32).reshape(1)
    cache = (pages.data, pages.data if pages.scale is None else pages.scale, block_tables, first_page)
    return fixed, cache, kv_len if sinks is None else sinks.astype(jnp.float32)


def _narrow(q: jax.Array) -> int:
    """The divisor of tile sizes such that tiles fit registers and the 99 KiB of shared memory of capability 8.9."""
    return (2 if q.dtype == jnp.float32 else 1) * (4 if q.shape[-1] > 256 else 2 if q.shape[-1] > 128 else 1)


def _decode_rows(q, cache, kv_len, num_decodes, sinks, fixed, *, rows, decode_only):
    """Returns q's shape, with rows below num_decodes computed and all other rows zero."""
    tokens, heads, group, dim = q.shape
    num_decodes = jnp.asarray(num_decodes, jnp.int32).reshape(1)
    count = min(rows, tokens)
    like = jax.ShapeDtypeStruct(q.shape, q.dtype)
    # With decode_only the kernels visit every token and store zeros themselves, so no fill is needed.
    visited = tokens if decode_only else count
    before, aliased = (q, False) if decode_only else (jnp.zeros_like(q), True)
    tuned = tuning.lookup("decode", "triton", **tuning.of_attention(q, cache[0], cache[2]), rows=count)
    default = _splits(count * heads, fixed["WIDTH"] * fixed["PAGE"], triton_compat.target().cores)
    splits = tuned.get("splits", default)
    stats = jax.ShapeDtypeStruct((count, heads, splits, group), jnp.float32)
    values = like if splits == 1 else jax.ShapeDtypeStruct((*stats.shape, dim), jnp.float32)
    out, peaks, totals = triton_compat.call(
        _decode, q, *cache, kv_len, num_decodes, sinks, before,
        out=[values, stats, stats], grid=(visited if splits == 1 else count, heads, splits),
        aliases={8: 0} if splits == 1 and aliased else None,
        num_warps=tuned.get("warps", 4), num_stages=tuned.get("stages", 3 if dim <= 256 else 2),
        SPLITS=splits, GROUP_PAD=pad(group, 16),
        BLOCK=tuned.get("block", 64 // _narrow(q)), **fixed,
    )  # fmt: skip
    if splits == 1:
        return out
    return triton_compat.call(
        _combine, out, peaks, totals, num_decodes, sinks, before,
        out=[like], grid=(visited, heads * group), aliases={5: 0} if aliased else None,
        num_warps=1 if splits * fixed["DIM_PAD"] <= 2048 else 4, SPLITS=splits, SPLITS_PAD=pad(splits),
        **{name: fixed[name] for name in ("HAS_SINKS", "HEADS", "GROUP", "DIM", "DIM_PAD")},
    )[0]  # fmt: skip
