"""Latent attention in plain XLA: the oracle of every kernel, and a backend for every device.

Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434) caches one row of rank + rope numbers per token, which all
heads share: the latent, from which keys and values are projected, and a rotated key. This is the absorbed form: the
caller first multiplies queries by the keys' projection, and afterwards multiplies results by the values' projection.
Between them is attention with one KV head: a token's key is its whole row, and its value is the latent.

Two loops, both bounded by the contents of the batch, so that padding costs nothing and temporaries stay small:

  decode rows   blocks of ROWS rows x blocks of KV_BLOCK cached tokens; one query token a row
  prompt rows   tiles of TILE query tokens of one row x blocks of KV_BLOCK cached tokens, up to the causal diagonal

Each block gathers its pages through the tables and updates a running softmax in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.pallas_kernels.kv_write import quantize
from jaxserve.pallas_kernels.paged_attention.reference import MASKED, WHOLE, Share, Softmax
from jaxserve.pallas_kernels.registry import Device, LatentProblem
from jaxserve.pallas_kernels.types import LatentPages

ROWS = 8  # decode rows per block
TILE = 32  # query tokens per tile of a prompt
KV_BLOCK = 128  # cached tokens per step of the running softmax


def why_not(device: Device, problem: LatentProblem) -> str | None:
    """Returns None: plain XLA runs every problem on every device."""
    return None


def write_latent(
    pages: LatentPages, rows: jax.Array, slots: jax.Array, first_page: jax.Array | int = 0, *, rank: int
) -> LatentPages:
    """Scatters new rows into the pages of the cache.

    Args:
      pages: donated by the caller, and returned updated.
      rows: [tokens, rank + rope], latents and rotated keys.
      slots: int32 [tokens], page * page_size + offset; -1 is padding.
      first_page: int32 scalar, the page from which slots count. Where one array holds the pages of several layers, it
        is the layer's first page. No sequence owns this page, and padding may be written to it.
      rank: size of the latent. Where pages have scales, the latent and the rotated key of a token each get the scale
        that maps its largest number to the largest code.
    """
    slots = jnp.maximum(slots, 0)
    page = slots // pages.page_size + first_page
    offset = slots % pages.page_size
    new, own = as_stored(pages, rows, rank)
    scale = pages.scale
    if scale is not None:
        scale = scale.at[page, :, offset].set(own, mode="promise_in_bounds")
    return LatentPages(pages.data.at[page, offset].set(new, mode="promise_in_bounds"), scale)


def as_stored(pages: LatentPages, rows: jax.Array, rank: int) -> tuple[jax.Array, jax.Array | None]:
    """Converts rows [tokens, rank + rope] to the pages' form [tokens, width]. Returns also their scales, float32
    [tokens, 2], or None."""
    own = None
    if pages.scale is not None:
        parts = [quantize(part, pages.data.dtype) for part in (rows[:, :rank], rows[:, rank:])]
        rows = jnp.concatenate([codes for codes, _ in parts], axis=1)
        own = jnp.stack([factor for _, factor in parts], axis=1)
    return jnp.pad(rows, ((0, 0), (0, pages.width - rows.shape[1]))).astype(pages.data.dtype), own


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
    share: Share | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Causal attention of ragged query rows over their cached latents. The new ones are already in the cache.

    Args:
      q: [tokens, heads, rank + rope], rows back to back: queries of latents, then of rotated keys.
      pages: the layer's cache.
      tables: int32 [rows, max_pages], the pages of each row in order.
      q_start: int32 [rows + 1], where each row's tokens begin; a row between equal neighbours is empty.
      kv_len: int32 [rows], cached tokens of each row, its new ones included. The last of them is its last query token.
      num_decodes: int32 scalar; this many leading rows have exactly one token each (row r is token r).
      scale: multiplies the scores. It is the model's scale, for the width of keys before absorption.
      rank: size of a latent.
      first_page: int32 scalar, the page from which tables count.
      decode_only: promises that all rows beyond num_decodes are empty.
      share: the tokens that the pages have of each sequence; None: all. kv_len counts all tokens.
      sinks: float32 [heads], logits that join the softmax's denominator; None: there are none. A share leaves them out.

    Returns:
      [tokens, heads, rank] in the queries' dtype. Padding tokens have unspecified but finite values. With a share,
      float32 [tokens, heads, rank + 1], see `Softmax.part`.
    """
    tables = tables + first_page

    def finish(state: Softmax) -> jax.Array:
        return state.result(sinks).astype(q.dtype) if share is None else state.part()

    share_of = share or WHOLE
    out = _decode_rows(q, pages, tables, kv_len, num_decodes, scale=scale, rank=rank, share=share_of, finish=finish)
    if decode_only:
        return out
    return _prompt_rows(
        out, q, pages, tables, q_start, kv_len, num_decodes, scale=scale, rank=rank, share=share_of, finish=finish
    )


def block_tokens(pages: LatentPages, tables: jax.Array, most: int = KV_BLOCK) -> int:
    """Cached tokens in a block of `gather`: whole pages of about `most` tokens, no more than a row has."""
    return min(max(most // pages.page_size, 1), tables.shape[-1]) * pages.page_size


def gather(
    pages: LatentPages,
    rank: int,
    width: int,
    table: jax.Array,
    block: jax.Array,
    most: int = KV_BLOCK,
    share: Share = WHOLE,
) -> tuple[jax.Array, jax.Array]:
    """Gathers one block for each row of the table: rows of the cache, float32 [..., block tokens, width], and their
    positions. Positions that an earlier block had are replaced by the largest int32."""
    size = pages.page_size
    count = block_tokens(pages, table, most) // size
    # dynamic_slice clamps at the end of the table, and the positions follow the clamped start.
    start = jnp.minimum(block * count, table.shape[-1] - count)
    chosen = lax.dynamic_slice_in_dim(table, start, count, axis=-1)
    place = start * size + jnp.arange(count * size)
    position = jnp.where(place < block * count * size, jnp.iinfo(jnp.int32).max, share.position(place))
    found = pages.data.at[chosen].get(mode="clip")[..., :width].astype(jnp.float32)
    if pages.scale is not None:
        own = pages.scale.at[chosen].get(mode="clip")  # [..., count, 2, page_size]
        part = jnp.arange(width) >= rank
        found *= jnp.where(part, own[..., 1, :, None], own[..., 0, :, None])
    return found.reshape(*found.shape[:-3], count * size, width), position


def _decode_rows(q, pages, tables, kv_len, num_decodes, *, scale, rank, share: Share, finish: Callable):
    """Returns what `finish` makes of a running softmax for each token. Row r's only query is token r. Tokens after the
    last block of decodes: zeros."""
    rows = min(ROWS, tables.shape[0], q.shape[0])
    width = q.shape[-1]
    span = block_tokens(pages, tables) * share.count

    def row_block(i, out):
        # The last block may overlap the one before it. It then computes those rows again, with equal results.
        first_row = jnp.minimum(i * rows, min(tables.shape[0], q.shape[0]) - rows)
        query = lax.dynamic_slice_in_dim(q, first_row, rows).astype(jnp.float32) * scale
        table = lax.dynamic_slice_in_dim(tables, first_row, rows)
        length = lax.dynamic_slice_in_dim(kv_len, first_row, rows)

        def kv_block(block, state):
            found, position = gather(pages, rank, width, table, block, share=share)
            seen = position < length[:, None]
            found = jnp.where(seen[..., None], found, 0.0)
            scores = jnp.where(seen[:, None], jnp.einsum("rhd,rsd->rhs", query, found), MASKED)
            return state.update(scores, lambda p: jnp.einsum("rhs,rsd->rhd", p, found[..., :rank]), axis=-1)

        last = (jnp.max(length) + span - 1) // span
        state = lax.fori_loop(0, last, kv_block, Softmax.empty(query.shape[:-1], rank))
        return lax.dynamic_update_slice_in_dim(out, finish(state), first_row, 0)

    made = jax.eval_shape(lambda: finish(Softmax.empty(q.shape[:-1], rank)))
    return lax.fori_loop(0, (num_decodes + rows - 1) // rows, row_block, jnp.zeros(made.shape, made.dtype))


def _prompt_rows(out, q, pages, tables, q_start, kv_len, num_decodes, *, scale, rank, share: Share, finish: Callable):
    num_tokens, _, width = q.shape
    tile = min(TILE, num_tokens)
    span = block_tokens(pages, tables) * share.count
    before = tiles_before(q_start, num_decodes, tile)
    padded = jnp.concatenate([q, jnp.zeros((tile, *q.shape[1:]), q.dtype)])

    def query_tile(i, out):
        row = jnp.searchsorted(before, i, side="right") - 1
        start = q_start[row] + (i - before[row]) * tile
        query = lax.dynamic_slice_in_dim(padded, start, tile).astype(jnp.float32) * scale
        # Position of each query token. Tokens beyond the row's end belong to the next row, whose own tile runs later
        # and overwrites their results.
        where = kv_len[row] - q_start[row + 1] + start + jnp.arange(tile)
        newest = jnp.minimum(where[-1], kv_len[row] - 1)

        def kv_block(block, state):
            found, position = gather(pages, rank, width, tables[row], block, share=share)
            found = jnp.where((position < kv_len[row])[:, None], found, 0.0)
            seen = (position <= where[:, None]) & (position < kv_len[row])
            scores = jnp.where(seen[:, None], jnp.einsum("thd,sd->ths", query, found), MASKED)
            return state.update(scores, lambda p: jnp.einsum("ths,sd->thd", p, found[:, :rank]), axis=-1)

        state = lax.fori_loop(0, newest // span + 1, kv_block, Softmax.empty(query.shape[:-1], rank))
        return lax.dynamic_update_slice_in_dim(out, finish(state), start, 0)

    out = jnp.concatenate([out, jnp.zeros((tile, *out.shape[1:]), out.dtype)])
    return lax.fori_loop(0, before[-1], query_tile, out)[:num_tokens]


def tiles_before(q_start: jax.Array, num_decodes: jax.Array, tile: int) -> jax.Array:
    """Int32 [rows + 1]: tiles of `tile` query tokens of all prompts before each row; the last is the total."""
    q_len = q_start[1:] - q_start[:-1]
    tiles = jnp.where(jnp.arange(len(q_len)) >= num_decodes, (q_len + tile - 1) // tile, 0)
    return jnp.concatenate([jnp.zeros(1, tiles.dtype), jnp.cumsum(tiles)])
