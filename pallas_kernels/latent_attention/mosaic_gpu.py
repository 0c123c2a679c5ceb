"""Latent attention for Hopper GPUs (compute capability 9.0) in Pallas Mosaic GPU. Compiled for H200, not yet run on.

One kernel computes decodes and prompts. A tile is 64 queries of one row, as many as the matrix unit's tile has rows. A
query is one head of one token. Queries are contiguous in memory, so that, for example, 16 heads of four tokens fill a
tile of a prompt. XLA makes the list of items; an item is a tile and some blocks of 64 cached tokens:

  grid      (tiles of 64 heads of a decode, items); items beyond those that the batch needs leave at once
  threads   one warpgroup that fetches (TMA, page numbers from the tables) and two that compute
  pipeline  a ring of two blocks [64, 576] in shared memory (barriers `full` and `free`). A block is the keys, and its
            first 512 columns are the values
  products  each computing warpgroup makes all scores [64, 64] = Q K^T of a block and multiplies the probabilities, in
            registers, with its half of the value columns, [64, 256] += P V: accumulators of 128 registers a thread.
            The two warpgroups share nothing but the ring, and one's softmax runs beside the other's products
  parts     A decode's 16 heads fill a quarter of the tile. Long rows are split into parts of whole blocks, which XLA
            merges by their log-sum-exp; their number follows from the row's own length and from shapes
  shared    queries 72 KiB, ring 144 KiB, of 227 KiB; one program on a multiprocessor. A computing thread may have 232
            registers; 76 to 92 bytes of it are spilled (ptxas 12.9)

Estimate for a block in bfloat16 on an H200 (1,024 x 2 multiplications and additions a cycle and multiprocessor; 4.8
TB/s shared by 132 multiprocessors at 1.755 GHz are 20.7 bytes a cycle):

  bytes     64 x 576 x 2 = 73,728: 3,560 cycles from memory, less from the L2 cache
  products  scores 64 x 64 x 576, twice: 2,304 cycles; values 64 x 64 x 512: 1,024; together 3,328

So decode with up to 64 heads is bound by memory (16 heads under tensor parallelism of 8). With 128 heads the second
tile of 64 heads finds the rows in the L2 cache. There, computing the scores in both warpgroups makes products cost half
as much again as if the warpgroups shared the scores. Sharing them would need an exchange of peaks and probabilities
through shared memory in each block.

The part of a row's last page beyond the row's length may hold NaN, so the fetching warpgroup clears it before the block
is read. Prompts are not split into parts, so a few new tokens over a long context leave most of the GPU idle. Quantized
latents are computed by the Triton kernel.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxserve.pallas_kernels.latent_attention.mosaic_gpu_kernel import LANES, LatentTile, launch
from jaxserve.pallas_kernels.latent_attention.mosaic_gpu_parts import merge, most_parts
from jaxserve.pallas_kernels.latent_attention.reference import write_latent
from jaxserve.pallas_kernels.paged_attention.mosaic_gpu_prompt_tile import SHARED_MEMORY
from jaxserve.pallas_kernels.registry import Device, LatentProblem
from jaxserve.pallas_kernels.types import LatentPages
from jaxserve.pallas_kernels.work_lists import MIN_BLOCKS, POSITION, TOKEN, decode_items, up_to

__all__ = ["latent_attention", "why_not", "write_latent"]

WORKSPACE = 64 << 20  # most bytes for results of parts, which XLA reads again; each row has at least one part


def why_not(device: Device, problem: LatentProblem) -> str | None:
    """The reason why it cannot be used, or None."""
    if device.platform != "gpu" or device.capability != (9, 0):
        return "it is for NVIDIA GPUs of compute capability 9.0 (H100, H200)"
    if problem.q_dtype not in (jnp.bfloat16, jnp.float16):
        return f"queries must be bfloat16 or float16, not {problem.q_dtype}"
    if problem.has_scale or problem.kv_dtype != problem.q_dtype:
        return f"latents must be as the queries, {problem.q_dtype}, not {problem.kv_dtype}; triton takes codes"
    if problem.rank % 128 or problem.rank > 512 or problem.row_width % 64:
        return (
            "a latent must have a multiple of 128 numbers, at most 512, and a row of the cache a multiple of 64, not "
            f"{problem.rank} and {problem.row_width}"
        )
    if problem.page_size < 8 or problem.page_size & (problem.page_size - 1):
        return f"page_size must be a power of two, 8 or more, not {problem.page_size}"
    sizes = problem.rank, problem.row_width, problem.page_size, problem.q_dtype
    need = LatentTile(8, 8, *sizes, jnp.float32, 1.0, None).shared_memory()
    if need > SHARED_MEMORY:
        return f"it needs {need} bytes of shared memory, and there are {SHARED_MEMORY}"
    return None


@partial(jax.jit, static_argnames=("scale", "rank", "decode_only", "interpret"))
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
    interpret: Any = None,
) -> jax.Array:
    """As `reference.latent_attention`. `interpret`: a plgpu.InterpretGPUParams, to run on CPU."""
    tokens, heads, dim = q.shape
    padding = (0, -heads % 8), (0, pages.width - dim)
    if any(after for _, after in padding):
        q = jnp.pad(q, ((0, 0), *padding))
    sizes = {"rank": rank, "width": pages.width, "page_size": pages.page_size, "dtype": q.dtype}
    common: dict[str, Any] = sizes | {"heads": q.shape[1], "scale": scale, "interpret": interpret}
    first_page = jnp.asarray(first_page, jnp.int32)
    out = _decode(q, pages, tables, kv_len, num_decodes, first_page, common)
    out = jnp.pad(out, ((0, tokens - len(out)), (0, 0), (0, 0)))
    if not decode_only:
        found, theirs = _prompts(q, pages, tables, q_start, kv_len, num_decodes, first_page, common)
        out = jnp.where(theirs[:, None, None], found, out)
    return out[:, :heads]


def _decode(q, pages, tables, kv_len, num_decodes, first_page, common):
    """Results [rows, heads, rank] in the dtype of q. Row r's query is token r. Rows from num_decodes on are zero."""
    rows = min(len(tables), len(q))
    heads = q.shape[1]
    blocks = -(-heads // LANES)
    kept = heads if blocks == 1 else LANES
    tile = LatentTile(kept=kept, out_dtype=jnp.dtype(jnp.float32), **common)
    length = jnp.where(jnp.arange(rows) < num_decodes, kv_len[:rows], 0)
    most = -(-tables.shape[1] * tile.page_size // tile.block)
    room = max(WORKSPACE // (rows * blocks * kept * tile.rank * 4), 1)
    most = min(most_parts(blocks * rows), -(-most // MIN_BLOCKS), room)
    work = decode_items(length, tile.block, None, most)
    row = work.items[:, TOKEN]
    items = work.items.at[:, TOKEN].set(row * heads).at[:, POSITION].add(-row)
    flat = q[:rows].reshape(rows * heads, -1)
    flat = jnp.pad(flat, ((0, LANES), (0, 0)))  # every row's queries begin at a tile's first lane
    values, logs = launch(tile, blocks, items, tables, first_page, flat, pages.data)
    merged = merge(values, logs[:, :, :kept], work)  # [rows, blocks, kept, rank]
    return merged.reshape(rows, blocks * kept, -1)[:, :heads].astype(q.dtype)


def _prompts(q, pages, tables, q_start, kv_len, num_decodes, first_page, common):
    """(results [tokens, heads, rank] of the rows from num_decodes on, bool [tokens] of the tokens in these rows)."""
    tokens, heads, _ = q.shape
    flat = q.reshape(tokens * heads, -1)
    flat = jnp.pad(flat, ((0, max(LANES - len(flat), 0)), (0, 0)))
    tile = LatentTile(kept=LANES, out_dtype=q.dtype, **common)
    items, before = prompt_items(heads, tokens, tile.block, q_start, kv_len, num_decodes)
    values, _ = launch(tile, 1, items, tables, first_page, flat, pages.data)
    token = jnp.arange(tokens, dtype=jnp.int32)
    theirs = (token >= q_start[num_decodes]) & (token < q_start[-1])
    row = jnp.searchsorted(q_start, token, side="right", method="compare_all").astype(jnp.int32) - 1
    row = jnp.clip(row, 0, len(kv_len) - 1)[:, None]
    query = token[:, None] * heads + jnp.arange(heads, dtype=jnp.int32)  # [tokens, heads]
    item = before[-1] - 1 - before[row] - (query - q_start[row] * heads) // LANES
    item = jnp.clip(item, 0, len(items) - 1)
    lane = query - jnp.minimum(items[item, TOKEN], len(flat) - LANES)
    return values[item, 0, jnp.clip(lane, 0, LANES - 1)], theirs


def prompt_items(
    heads: int, tokens: int, block: int, q_start: jax.Array, kv_len: jax.Array, num_decodes: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """(items of the rows from num_decodes on, int32 [items, 8] as `launch` takes them; number of tiles before each row,
    int32 [rows + 1]). The last tiles of the last rows come first, because later tiles of a row have more cached tokens.
    Items beyond those that the batch needs have no blocks."""
    rows = len(kv_len)
    q_len = jnp.where(jnp.arange(rows) >= num_decodes, q_start[1:] - q_start[:-1], 0)
    before = jnp.concatenate([jnp.zeros(1, jnp.int32), up_to((q_len * heads + LANES - 1) // LANES)])
    index = before[-1] - 1 - jnp.arange(tokens * heads // LANES + min(rows, tokens), dtype=jnp.int32)
    row = jnp.searchsorted(before, index, side="right", method="compare_all").astype(jnp.int32) - 1
    row = jnp.clip(row, 0, rows - 1)
    query = q_start[row] * heads + (index - before[row]) * LANES
    shift = kv_len[row] - q_start[row + 1]
    newest = jnp.minimum((query + LANES - 1) // heads + shift, kv_len[row] - 1)
    last = jnp.where(index >= 0, newest // block + 1, 0)
    none = jnp.zeros_like(row)
    columns = [row, query, shift, kv_len[row], none, none, none, last]  # ROW, TOKEN, POSITION, LENGTH, FIRST … LAST
    return jnp.stack(columns, axis=1).astype(jnp.int32), before
