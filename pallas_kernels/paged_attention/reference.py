"""Paged attention in plain XLA: the oracle of every kernel, and the path that runs on CPU.

Two loops, both bounded by what the batch holds, so that padding costs nothing and memory stays small:

  decode rows   blocks of ROWS rows x blocks of KV_BLOCK cached tokens; one query token a row
  prompt rows   tiles of TILE query tokens of one row x blocks of KV_BLOCK cached tokens, up to the causal diagonal

Each block gathers its pages through the block table and updates a running softmax (Milakov & Gimelshein 2018,
arXiv:1805.02867), in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

ROWS = 8  # decode rows per block
TILE = 64  # query tokens per tile of a prompt
KV_BLOCK = 128  # cached tokens per step of the running softmax
MASKED = -1e30  # finite, so that a row that sees nothing stays finite


class Softmax(NamedTuple):
    """A running softmax: largest score, sum of exponentials, weighted values; all float32."""

    peak: jax.Array
    total: jax.Array
    values: jax.Array

    def update(self, scores: jax.Array, weigh: Callable[[jax.Array], jax.Array], axis: int) -> Softmax:
        """Adds scores with keys along `axis`; `weigh` turns probabilities of their shape into weighted values."""
        peak = jnp.maximum(self.peak, scores.max(axis))
        keep = jnp.exp(self.peak - peak)
        probabilities = jnp.where(scores > MASKED / 2, jnp.exp(scores - jnp.expand_dims(peak, axis)), 0.0)
        return Softmax(
            peak,
            self.total * keep + probabilities.sum(axis),
            self.values * keep[..., None] + weigh(probabilities),
        )

    def result(self) -> jax.Array:
        return self.values / jnp.maximum(self.total, 1e-30)[..., None]

    @staticmethod
    def empty(shape: tuple[int, ...], head_dim: int) -> Softmax:
        return Softmax(
            jnp.full(shape, MASKED, jnp.float32),
            jnp.zeros(shape, jnp.float32),
            jnp.zeros((*shape, head_dim), jnp.float32),
        )


@partial(jax.jit, static_argnames=("scale", "window", "decode_only"))
def paged_attention(
    q: jax.Array,
    pages: jax.Array,
    block_tables: jax.Array,
    q_start: jax.Array,
    kv_len: jax.Array,
    num_decodes: jax.Array,
    *,
    scale: float,
    window: int | None = None,
    decode_only: bool = False,
) -> jax.Array:
    """Causal attention of ragged query rows over their cached keys and values, the new ones already written.

    Args:
      q: [tokens, kv_heads, group, head_dim], rows back to back.
      pages: [pages, page_size, 2, kv_heads, head_dim].
      block_tables: int32 [rows, max_pages], the pages of each row in order.
      q_start: int32 [rows + 1], where each row's tokens begin; equal neighbours are an empty row.
      kv_len: int32 [rows], cached tokens of each row, its new ones included; its last query token is the last of them.
      num_decodes: int32 scalar; so many leading rows have exactly one token each (row r is token r).
      scale: multiplies the scores.
      window: a token sees at most so many tokens back, itself included; None sees all.
      decode_only: promises that all rows beyond num_decodes are empty.

    Returns:
      As q; rows of padding tokens are unspecified but finite.
    """
    out = _decode_rows(q, pages, block_tables, kv_len, num_decodes, scale=scale, window=window)
    if decode_only:
        return out
    return _prompt_rows(out, q, pages, block_tables, q_start, kv_len, num_decodes, scale=scale, window=window)


def _gather(pages: jax.Array, table: jax.Array, block: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Keys and values [..., KV_BLOCK, kv_heads, head_dim] of one block of each table row, and its first position."""
    page_size = pages.shape[1]
    width = table.shape[-1]
    count = min(max(KV_BLOCK // page_size, 1), width)
    # dynamic_slice clamps at the end of the table; the positions follow the clamped start, and keys that an earlier
    # block has seen are masked by the caller through `first`.
    start = jnp.minimum(block * count, width - count)
    chosen = lax.dynamic_slice_in_dim(table, start, count, axis=-1)
    kv = pages.at[chosen].get(mode="clip")
    kv = kv.reshape(*table.shape[:-1], count * page_size, *pages.shape[2:])
    position = start * page_size + jnp.arange(count * page_size)
    position = jnp.where(position < block * count * page_size, jnp.iinfo(jnp.int32).max, position)
    return kv[..., 0, :, :], kv[..., 1, :, :], position


def _block_tokens(pages: jax.Array, block_tables: jax.Array) -> int:
    page_size = pages.shape[1]
    return min(max(KV_BLOCK // page_size, 1), block_tables.shape[1]) * page_size


def _decode_rows(q, pages, block_tables, kv_len, num_decodes, *, scale, window):
    """Row r's single query is token r."""
    rows, head_dim = min(ROWS, block_tables.shape[0], q.shape[0]), q.shape[-1]
    tokens = _block_tokens(pages, block_tables)

    def row_block(i, out):
        # The last block may overlap the one before it; it then computes those rows again, with the same result.
        first_row = jnp.minimum(i * rows, min(block_tables.shape[0], q.shape[0]) - rows)
        query = lax.dynamic_slice_in_dim(q, first_row, rows).astype(jnp.float32) * scale
        table = lax.dynamic_slice_in_dim(block_tables, first_row, rows)
        length = lax.dynamic_slice_in_dim(kv_len, first_row, rows)
        oldest = jnp.maximum(length - window, 0) if window else jnp.zeros_like(length)

        def kv_block(block, state):
            k, v, position = _gather(pages, table, block)
            seen = (position < length[:, None]) & (position >= oldest[:, None])
            seen = seen[:, :, None, None]
            scores = jnp.einsum("rkgd,rskd->rskg", query, k.astype(jnp.float32))
            v = jnp.where(seen, v.astype(jnp.float32), 0.0)
            scores = jnp.where(seen, scores, MASKED)
            return state.update(scores, lambda p: jnp.einsum("rskg,rskd->rkgd", p, v), axis=1)

        first = jnp.min(jnp.where(length > 0, oldest, jnp.iinfo(jnp.int32).max)) // tokens
        last = (jnp.max(length) + tokens - 1) // tokens
        state = lax.fori_loop(first, last, kv_block, Softmax.empty(query.shape[:-1], head_dim))
        return lax.dynamic_update_slice_in_dim(out, state.result().astype(out.dtype), first_row, 0)

    return lax.fori_loop(0, (num_decodes + rows - 1) // rows, row_block, jnp.zeros_like(q))


def _prompt_rows(out, q, pages, block_tables, q_start, kv_len, num_decodes, *, scale, window):
    num_tokens, _, _, head_dim = q.shape
    tile = min(TILE, num_tokens)
    tokens = _block_tokens(pages, block_tables)
    num_rows = block_tables.shape[0]
    q_len = q_start[1:] - q_start[:-1]
    tiles = jnp.where(jnp.arange(num_rows) >= num_decodes, (q_len + tile - 1) // tile, 0)
    tiles_before = jnp.concatenate([jnp.zeros(1, tiles.dtype), jnp.cumsum(tiles)])
    padded = jnp.concatenate([q, jnp.zeros((tile, *q.shape[1:]), q.dtype)])

    def query_tile(i, out):
        row = jnp.searchsorted(tiles_before, i, side="right") - 1
        start = q_start[row] + (i - tiles_before[row]) * tile
        query = lax.dynamic_slice_in_dim(padded, start, tile).astype(jnp.float32) * scale
        # Position of each query token; those beyond the row's end belong to the next row, whose own tile comes later
        # and overwrites what this one leaves there.
        where = kv_len[row] - q_start[row + 1] + start + jnp.arange(tile)
        newest = jnp.minimum(where[-1], kv_len[row] - 1)
        oldest = jnp.maximum(where[0] - window + 1, 0) if window else 0

        def kv_block(block, state):
            k, v, position = _gather(pages, block_tables[row], block)
            seen = (position <= where[:, None]) & (position < kv_len[row])
            if window:
                seen &= position > where[:, None] - window
            scores = jnp.einsum("tkgd,skd->kgts", query, k.astype(jnp.float32))
            owned = (position < kv_len[row]) & (position >= oldest)
            v = jnp.where(owned[:, None, None], v.astype(jnp.float32), 0.0)
            scores = jnp.where(seen, scores, MASKED)
            return state.update(scores, lambda p: jnp.einsum("kgts,skd->kgtd", p, v), axis=-1)

        shape = (q.shape[1], q.shape[2], tile)
        state = lax.fori_loop(oldest // tokens, newest // tokens + 1, kv_block, Softmax.empty(shape, head_dim))
        result = state.result().transpose(2, 0, 1, 3).astype(out.dtype)
        return lax.dynamic_update_slice_in_dim(out, result, start, 0)

    out = jnp.concatenate([out, jnp.zeros((tile, *out.shape[1:]), out.dtype)])
    return lax.fori_loop(0, tiles_before[-1], query_tile, out)[:num_tokens]
