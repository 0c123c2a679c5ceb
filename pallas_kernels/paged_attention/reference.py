"""Paged attention in plain XLA: the oracle of every kernel, and a backend for every device.

Two loops, both bounded by the contents of the batch, so that padding costs nothing and temporaries stay small:

  decode rows   blocks of ROWS rows x blocks of KV_BLOCK cached tokens; one query token a row
  prompt rows   tiles of TILE query tokens of one row x blocks of KV_BLOCK cached tokens, up to the causal diagonal

Each block gathers its pages through the block table and updates a running softmax (Milakov & Gimelshein 2018,
arXiv:1805.02867) in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.pallas_kernels.registry import AttentionProblem, Device
from jaxserve.pallas_kernels.types import KVPages

ROWS = 8  # decode rows per block
TILE = 64  # query tokens per tile of a prompt
KV_BLOCK = 128  # cached tokens per step of the running softmax
MASKED = -1e30  # finite, so that a row without visible keys stays finite


@partial(jax.tree_util.register_dataclass, data_fields=["index"], meta_fields=["count"])
@dataclass(frozen=True)
class Share:
    """The tokens of a sequence that a device has: one in `count`, from number `index` (int32 scalar) on."""

    index: jax.Array | int = 0
    count: int = 1

    def position(self, place: jax.Array) -> jax.Array:
        """The position in the sequence of the device's token at `place`."""
        return place if self.count == 1 else place * self.count + self.index


WHOLE = Share()


class Softmax(NamedTuple):
    """A running softmax: largest score, sum of exponentials, weighted values. All are float32."""

    peak: jax.Array
    total: jax.Array
    values: jax.Array

    def update(self, scores: jax.Array, weigh: Callable[[jax.Array], jax.Array], axis: int) -> Softmax:
        """Adds scores with keys along `axis`. `weigh` turns probabilities of the scores' shape into weighted values."""
        peak = jnp.maximum(self.peak, scores.max(axis))
        keep = jnp.exp(self.peak - peak)
        probabilities = jnp.where(scores > MASKED / 2, jnp.exp(scores - jnp.expand_dims(peak, axis)), 0.0)
        return Softmax(
            peak,
            self.total * keep + probabilities.sum(axis),
            self.values * keep[..., None] + weigh(probabilities),
        )

    def result(self, sinks: jax.Array | None = None) -> jax.Array:
        """Returns weighted values over the sum of exponentials. Sinks are broadcast and added to the sum."""
        if sinks is None:
            return self.values / jnp.maximum(self.total, 1e-30)[..., None]
        peak = jnp.maximum(self.peak, sinks)
        keep = jnp.exp(self.peak - peak)
        return self.values * (keep / (self.total * keep + jnp.exp(sinks - peak)))[..., None]

    def part(self) -> jax.Array:
        """Returns weighted values over the sum of exponentials, and behind them the logarithm of this sum, with which
        `token_shares` merges parts of a softmax. A part without scores has the logarithm MASKED."""
        total = jnp.maximum(self.total, 1e-30)
        log = jnp.where(self.total > 0, self.peak + jnp.log(total), MASKED)
        return jnp.concatenate((self.values / total[..., None], log[..., None]), axis=-1)

    @staticmethod
    def empty(shape: tuple[int, ...], head_dim: int) -> Softmax:
        return Softmax(
            jnp.full(shape, MASKED, jnp.float32),
            jnp.zeros(shape, jnp.float32),
            jnp.zeros((*shape, head_dim), jnp.float32),
        )


def why_not(device: Device, problem: AttentionProblem) -> str | None:
    """Returns None: plain XLA runs every problem on every device."""
    return None


class _Masking(NamedTuple):
    """The settings that turn products of queries and keys into scores."""

    scale: float
    window: int | None
    softcap: float | None

    def cap(self, scores: jax.Array) -> jax.Array:
        return scores if self.softcap is None else self.softcap * jnp.tanh(scores / self.softcap)


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
    share: Share | None = None,
    limits: jax.Array | None = None,
) -> jax.Array:
    """Causal attention of ragged query rows over their cached keys and values. The new ones are already in the cache.

    Args:
      q: [tokens, kv_heads, group, head_dim], rows back to back.
      pages: the layer's cache. Its head_dim may be larger than q's; the additional dimensions are ignored. Where it has
        more heads than q, several neighbouring heads are the parts of one. What no row owns may be anything, also NaN:
        places beyond a row's end, pages before its window, and those of no row.
      block_tables: int32 [rows, max_pages], the pages of each row in order.
      q_start: int32 [rows + 1], where each row's tokens begin; a row between equal neighbours is empty.
      kv_len: int32 [rows], cached tokens of each row, its new ones included. The last of them is its last query token.
      num_decodes: int32 scalar; this many leading rows have exactly one token each (row r is token r).
      scale: multiplies the scores.
      window: a token sees at most this many tokens back, itself included; None: all.
      softcap: scores become softcap * tanh(scores / softcap) (Gemma 2, arXiv:2408.00118).
      sinks: float32 [kv_heads, group], logits that join the softmax's denominator (gpt-oss, arXiv:2508.10925).
      first_page: int32 scalar that is added to each entry of block_tables. Where one array holds the pages of several
        layers, it is the layer's first page.
      decode_only: promises that all rows beyond num_decodes are empty.
      share: the tokens that the pages have of each sequence; None: all. kv_len counts all tokens.
      limits: int32 [tokens], the last position that a token sees, where that is behind its own; else anything before.
        Decodes have none.

    Returns:
      Shape and dtype of q. Padding tokens have unspecified but finite values. With a share, float32 [tokens, kv_heads,
      group, head_dim + 1], see `Softmax.part`; sinks are then left to whoever merges parts.
    """
    masking = _Masking(scale, window, softcap)
    block_tables = block_tables + first_page

    def finish(state: Softmax, sinks: jax.Array | None) -> jax.Array:
        return state.result(sinks).astype(q.dtype) if share is None else state.part()

    keys = _Keys(pages, block_tables, share or WHOLE)
    out = _decode_rows(q, keys, kv_len, num_decodes, sinks, masking, finish)
    if decode_only:
        return out
    return _prompt_rows(out, q, keys, q_start, kv_len, num_decodes, sinks, masking, finish, limits)


class _Keys(NamedTuple):
    """Where the keys and values of a layer are, and which tokens they belong to."""

    pages: KVPages
    tables: jax.Array
    share: Share

    @property
    def block(self) -> int:
        """Keys in a block of `_gather`."""
        return min(max(KV_BLOCK // self.pages.page_size, 1), self.tables.shape[1]) * self.pages.page_size

    @property
    def span(self) -> int:
        """Positions in a sequence that a block stretches over."""
        return self.block * self.share.count


def _gather(
    pages: KVPages, shape: tuple[int, ...], table: jax.Array, block: jax.Array, share: Share = WHOLE
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """One block of each table row: keys and values, float32 [..., kv_heads, KV_BLOCK, head_dim], and positions.
    `shape`: of the queries."""
    _, heads, _, head_dim = shape
    page_size = pages.page_size
    width = table.shape[-1]
    count = min(max(KV_BLOCK // page_size, 1), width)
    # dynamic_slice clamps at the end of the table. The positions follow the clamped start, and the caller masks keys
    # that an earlier block has seen, through `first`.
    start = jnp.minimum(block * count, width - count)
    chosen = lax.dynamic_slice_in_dim(table, start, count, axis=-1)
    place = start * page_size + jnp.arange(count * page_size)
    position = jnp.where(place < block * count * page_size, jnp.iinfo(jnp.int32).max, share.position(place))

    def tokens(which: int) -> jax.Array:
        found = pages.data.at[chosen, which].get(mode="clip")
        if (parts := pages.kv_heads // heads) > 1:
            found = found.reshape(*found.shape[:-3], heads, parts, *found.shape[-2:]).swapaxes(-3, -2)
            found = found.reshape(*found.shape[:-2], -1)
        found = found[..., :head_dim].astype(jnp.float32)
        if pages.scale is not None:
            found *= pages.scale.at[chosen, which].get(mode="clip")[..., None]
        found = jnp.moveaxis(found, -4, -3)  # [..., kv_heads, count, page_size, head_dim]
        return found.reshape(*found.shape[:-3], count * page_size, found.shape[-1])

    return tokens(0), tokens(1), position


def _decode_rows(q, keys: _Keys, kv_len, num_decodes, sinks, masking: _Masking, finish: Callable):
    """Attention of the decode rows. Row r's only query is token r. `finish` makes the result of a running softmax."""
    most = min(keys.tables.shape[0], q.shape[0])
    head_dim = q.shape[-1]
    window = masking.window
    rows = min(ROWS, most)
    span = keys.span

    def row_block(i, out):
        # The last block may overlap the one before it. It then computes those rows again, with equal results.
        first_row = jnp.minimum(i * rows, most - rows)
        query = lax.dynamic_slice_in_dim(q, first_row, rows).astype(jnp.float32) * masking.scale
        table = lax.dynamic_slice_in_dim(keys.tables, first_row, rows)
        length = lax.dynamic_slice_in_dim(kv_len, first_row, rows)
        oldest = jnp.maximum(length - window, 0) if window else jnp.zeros_like(length)

        def kv_block(block, state):
            k, v, position = _gather(keys.pages, q.shape, table, block, keys.share)
            seen = (position < length[:, None]) & (position >= oldest[:, None])
            seen = seen[:, None, :]
            scores = masking.cap(jnp.einsum("rkgd,rksd->rkgs", query, k))
            v = jnp.where(seen[..., None], v, 0.0)
            scores = jnp.where(seen[:, :, None], scores, MASKED)
            return state.update(scores, lambda p: jnp.einsum("rkgs,rksd->rkgd", p, v), axis=-1)

        first = jnp.min(jnp.where(length > 0, oldest, jnp.iinfo(jnp.int32).max)) // span
        last = (jnp.max(length) + span - 1) // span
        state = lax.fori_loop(first, last, kv_block, Softmax.empty(query.shape[:-1], head_dim))
        return lax.dynamic_update_slice_in_dim(out, finish(state, sinks), first_row, 0)

    made = jax.eval_shape(lambda x: finish(Softmax.empty(x.shape[:-1], head_dim), sinks), q)
    return lax.fori_loop(0, (num_decodes + rows - 1) // rows, row_block, jnp.zeros(made.shape, made.dtype))


def _prompt_rows(out, q, keys: _Keys, q_start, kv_len, num_decodes, sinks, masking: _Masking, finish: Callable, limits):
    num_tokens, _, _, head_dim = q.shape
    tile = min(TILE, num_tokens)
    window = masking.window
    span = keys.span
    num_rows = keys.tables.shape[0]
    q_len = q_start[1:] - q_start[:-1]
    tiles = jnp.where(jnp.arange(num_rows) >= num_decodes, (q_len + tile - 1) // tile, 0)
    tiles_before = jnp.concatenate([jnp.zeros(1, tiles.dtype), jnp.cumsum(tiles)])
    padded = jnp.concatenate([q, jnp.zeros((tile, *q.shape[1:]), q.dtype)])
    limits = None if limits is None else jnp.pad(limits, (0, tile))

    def query_tile(i, out):
        row = jnp.searchsorted(tiles_before, i, side="right") - 1
        start = q_start[row] + (i - tiles_before[row]) * tile
        query = lax.dynamic_slice_in_dim(padded, start, tile).astype(jnp.float32) * masking.scale
        # Position of each query token. Tokens beyond the row's end belong to the next row, whose own tile runs later
        # and overwrites their results.
        where = kv_len[row] - q_start[row + 1] + start + jnp.arange(tile)
        last = where if limits is None else jnp.maximum(where, lax.dynamic_slice_in_dim(limits, start, tile))
        newest = jnp.minimum(where[-1] if limits is None else last.max(), kv_len[row] - 1)
        oldest = jnp.maximum(where[0] - window + 1, 0) if window else 0

        def kv_block(block, state):
            k, v, position = _gather(keys.pages, q.shape, keys.tables[row], block, keys.share)
            seen = (position <= last[:, None]) & (position < kv_len[row])
            if window:
                seen &= position > where[:, None] - window
            scores = masking.cap(jnp.einsum("tkgd,ksd->kgts", query, k))
            owned = (position < kv_len[row]) & (position >= oldest)
            v = jnp.where(owned[:, None], v, 0.0)
            scores = jnp.where(seen, scores, MASKED)
            return state.update(scores, lambda p: jnp.einsum("kgts,ksd->kgtd", p, v), axis=-1)

        shape = (q.shape[1], q.shape[2], tile)
        state = lax.fori_loop(oldest // span, newest // span + 1, kv_block, Softmax.empty(shape, head_dim))
        result = finish(state, None if sinks is None else sinks[..., None]).transpose(2, 0, 1, 3)
        return lax.dynamic_update_slice_in_dim(out, result, start, 0)

    out = jnp.concatenate([out, jnp.zeros((tile, *out.shape[1:]), out.dtype)])
    return lax.fori_loop(0, tiles_before[-1], query_tile, out)[:num_tokens]
