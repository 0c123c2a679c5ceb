"""Attention over a window of tokens and over compressed entries, in plain XLA (DeepSeek-V4).

Pages hold rows of numbers (`RowPages`). A token has a few rows: its key, which is also its value, and then what it adds
to entries. They lie in pages that are freed behind the window. An entry is made in the step that computes its last
token, and lies where this token would be among pages that are never freed. So a step finds in pages all that it needs
of earlier tokens, wherever prompts are cut and whoever shares a prefix, and no state is beside them.

Loops are bounded by the contents of the batch. Of the context only the numbers of rows that a token sees are ever
whole, 4 bytes each.

A kernel would read the rows of neighbouring tokens' windows once, and not once for each token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.pallas_kernels.latent_attention.sparse import best_of
from jaxserve.pallas_kernels.operands import CompressedHeads, EntryInputs
from jaxserve.pallas_kernels.paged_attention.reference import KV_BLOCK, MASKED, Softmax
from jaxserve.pallas_kernels.types import RowPages

TILE = 16  # tokens whose attention is computed together, and entries that are made together
KEY = 1  # rows of a key


@dataclass(frozen=True)
class RowLayout:
    """The rows in pages of `page_size` tokens. A part of a page has the tokens of one layer, or the entries of as many
    layers as `shares` says.

    token_rows: rows of a token; a layer may use fewer.
    """

    page_size: int
    token_rows: int
    shares: int

    def of_token(self, page: jax.Array, position: jax.Array) -> jax.Array:
        """The first row of the token at a position, which lies in this page."""
        return (page * self.page_size + position % self.page_size) * self.token_rows

    def of_entry(self, page: jax.Array, last: jax.Array, rate: int, rows: int) -> jax.Array:
        """The first of the `rows` rows of an entry of `rate` tokens, the last of which would lie in this page."""
        return page * (self.page_size * self.token_rows // self.shares) + last % self.page_size // rate * rows


@dataclass(frozen=True)
class Compression:
    """The entries of a layer, see `spec.CompressionSpec`. eps: of their norm. top_k: how many a token sees of those
    that an indexer prefers; None: it sees all."""

    rate: int
    series: int
    eps: float
    top_k: int | None = None


class Places(NamedTuple):
    """Where the tokens of a batch are, and where their pages.

    row, position: int32 [tokens], in the batch, and in the row's sequence.
    complete: int32 [tokens], the entries whose tokens a token has seen.
    tables, entry_tables: int32 [rows, blocks], the pages of tokens, and of entries.
    """

    row: jax.Array
    position: jax.Array
    complete: jax.Array
    tables: jax.Array
    entry_tables: jax.Array

    def pages(self, tables: jax.Array, position: jax.Array, size: int) -> jax.Array:
        """The pages of positions [tokens, n] in the tokens' sequences. Those before the first count as the first."""
        return tables[self.row[:, None], jnp.clip(position // size, 0, tables.shape[1] - 1)]

    def of(self, token: jax.Array) -> Places:
        """Those of some of the tokens."""
        return self._replace(row=self.row[token], position=self.position[token], complete=self.complete[token])


def turned(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """x [tokens, ..., dim] with its last channels turned, each with its neighbour; cos and sin are [tokens, pairs]."""
    shape = (x.shape[0],) + (1,) * (x.ndim - 2) + (cos.shape[-1],)
    cos = cos.reshape(shape)
    sin = sin.reshape(shape)
    plain, last = jnp.split(x, [x.shape[-1] - 2 * cos.shape[-1]], axis=-1)
    pairs = last.astype(jnp.float32).reshape(*last.shape[:-1], -1, 2)
    first = pairs[..., 0]
    second = pairs[..., 1]
    made = jnp.stack([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return jnp.concatenate([plain, made.reshape(last.shape).astype(x.dtype)], axis=-1)


@partial(jax.jit, static_argnames=("layout", "window", "scale", "compression", "decode_only"))
def attend(
    heads: CompressedHeads,
    pages: tuple[RowPages, ...],
    where: tuple[jax.Array, ...],
    of_entries: tuple[jax.Array, ...] | None,
    *,
    layout: RowLayout,
    window: int,
    scale: float,
    compression: Compression | None,
    decode_only: bool = False,
) -> tuple[jax.Array, tuple[RowPages, ...]]:
    """Writes the rows of new tokens, makes the entries that they complete, and attends.

    Args:
      pages: the array that has the layer's tokens, and behind it the one that has its entries, if it is another.
      where: (slots, tables, q_start, kv_len, num_decodes, first page) of tokens, see `paged_attention.reference` and
        `kv_write.write_kv`.
      of_entries: the same of entries, of which tables and first page are read; None: the layer has none.
      window: tokens that a token sees, itself included.

    Returns:
      [tokens, heads, dim], and the pages.
    """
    slots, _, q_start, kv_len, num_decodes, first_page = where
    places = _places(where, of_entries, compression)
    flat = [page.data.reshape(-1, page.data.shape[-1]) for page in pages]
    at = (jnp.maximum(slots, 0) + first_page * layout.page_size) * layout.token_rows
    flat[0] = _put(flat[0], _token_rows(heads, flat[0].shape[1]), at)
    within = places.position[:, None] - jnp.arange(window)  # the newest first
    page = places.pages(places.tables, within, layout.page_size)
    parts = [(0, jnp.where(within >= 0, layout.of_token(page, within), -1))]
    if compression is not None:
        assert of_entries is not None
        flat[-1] = _with_entries(flat, heads, slots, places, of_entries[-1], layout, compression, decode_only)
        of_batch = q_start, kv_len, num_decodes
        parts.append((-1, _seen_entries(flat[-1], heads, places, of_batch, layout, compression, decode_only)))
    seen = [(flat[i], rows) for i, rows in parts]
    out = _over(heads.q, seen, heads.sinks, q_start[-1], scale)
    return out, tuple(RowPages(x.reshape(page.data.shape)) for x, page in zip(flat, pages, strict=True))


def _places(where: tuple, of_entries: tuple | None, compression: Compression | None) -> Places:
    slots, tables, q_start, kv_len, _, first_page = where
    index = jnp.arange(len(slots))
    row = jnp.searchsorted(q_start, index, side="right", method="compare_all").astype(jnp.int32) - 1
    row = jnp.clip(row, 0, len(kv_len) - 1)
    position = jnp.maximum(kv_len[row] - q_start[row + 1] + index, 0)
    tables = tables + first_page
    entry_tables = tables if of_entries is None else of_entries[1] + of_entries[-1]
    complete = position if compression is None else (position + 1) // compression.rate
    return Places(row, position, complete, tables, entry_tables)


def _rows(numbers: jax.Array, width: int) -> jax.Array:
    """Numbers [n, any] as rows [n, rows, width], which end with zeros."""
    padded = jnp.pad(numbers, ((0, 0), (0, -numbers.shape[1] % width)))
    return padded.reshape(len(numbers), -1, width)


def _put(flat: jax.Array, rows: jax.Array, at: jax.Array) -> jax.Array:
    """Writes rows [n, rows, width] to the array [any, width], from each of the rows `at` [n] on."""
    place = at[:, None] + jnp.arange(rows.shape[1])
    return flat.at[place].set(rows.astype(flat.dtype), mode="promise_in_bounds")


def _numbers(flat: jax.Array, at: jax.Array, first: int, count: int) -> jax.Array:
    """`count` numbers behind the `first` rows from each of the rows `at` on; float32 [..., count]."""
    rows = first + jnp.arange(-(-count // flat.shape[1]))
    found = flat.at[at[..., None] + rows].get(mode="clip").astype(jnp.float32)
    return found.reshape(*at.shape, -1)[..., :count]


def _inputs(heads: CompressedHeads) -> list[EntryInputs]:
    """What a token adds to entries, and to the keys of an indexer."""
    return [some for some in (heads.entries, heads.keys) if some is not None]


def _token_rows(heads: CompressedHeads, width: int) -> jax.Array:
    """The rows of new tokens, [tokens, rows, width]."""
    rows = [_rows(heads.row, width)]
    if inputs := _inputs(heads):
        rows.append(_rows(jnp.concatenate([some.both for some in inputs], axis=-1), width))
    return jnp.concatenate(rows, axis=1)


def _with_entries(
    flat: list[jax.Array], heads: CompressedHeads, slots: jax.Array, places: Places, null: jax.Array,
    layout: RowLayout, compression: Compression, decode_only: bool,
) -> jax.Array:  # fmt: skip
    """The last array, with the entries whose last tokens are among the new ones. `null` is a page that no sequence
    owns."""
    rate = compression.rate
    span = rate * compression.series
    num = len(slots)
    most = num if decode_only else min(num, num // rate + len(places.tables))
    ends = (slots >= 0) & ((places.position + 1) % rate == 0)
    which = jnp.nonzero(ends, size=most, fill_value=num)[0]
    tile = min(TILE, most)
    which = jnp.pad(which, (0, -most % tile), constant_values=num)
    inputs = _inputs(heads)
    sizes = [some.both.shape[1] for some in inputs]

    def make(i: jax.Array, held: jax.Array) -> jax.Array:
        token = lax.dynamic_slice_in_dim(which, i * tile, tile)
        is_real = token < num
        token = jnp.minimum(token, num - 1)
        own = places.of(token)
        last = own.position[:, None]
        at = last - jnp.arange(span)[::-1]
        read = held if len(flat) == 1 else flat[0]
        rows = layout.of_token(own.pages(own.tables, at, layout.page_size), at)
        found = jnp.split(_numbers(read, rows, KEY, sum(sizes)), sizes[:-1], axis=-1)
        made = [_entry(some, x, at >= 0, token, compression) for some, x in zip(inputs, found, strict=True)]
        new = jnp.concatenate([_rows(one, held.shape[1]) for one in made], axis=1)
        page = jnp.where(is_real, own.pages(own.entry_tables, last, layout.page_size)[:, 0], null)
        return _put(held, new, layout.of_entry(page, own.position, rate, new.shape[1]))

    return lax.fori_loop(0, (jnp.sum(ends) + tile - 1) // tile, make, flat[-1])


def _entry(
    given: EntryInputs, found: jax.Array, known: jax.Array, token: jax.Array, compression: Compression
) -> jax.Array:
    """Entries [n, dim] from what their tokens have in pages, [n, span, any], as far as `known` [n, span]."""
    dim = given.scale.shape[0]
    index = jnp.arange(found.shape[1])
    values, gates = jnp.split(found, 2, axis=-1)
    gates = gates + given.bias[index % compression.rate]
    if compression.series == 2:
        is_own = (index >= compression.rate)[:, None]
        values = jnp.where(is_own, values[..., dim:], values[..., :dim])
        gates = jnp.where(is_own, gates[..., dim:], gates[..., :dim])
    shares = jax.nn.softmax(jnp.where(known[..., None], gates, -jnp.inf), axis=1)
    entry = jnp.sum(jnp.where(known[..., None], values, 0.0) * shares, axis=1)
    entry = entry * lax.rsqrt(jnp.mean(jnp.square(entry), axis=-1, keepdims=True) + compression.eps) * given.scale
    return turned(entry, given.cos[token], given.sin[token])


def _seen_entries(
    flat: jax.Array, heads: CompressedHeads, places: Places, of_batch: tuple, layout: RowLayout,
    compression: Compression, decode_only: bool,
) -> jax.Array:  # fmt: skip
    """The first rows of the entries that each token sees, int32 [tokens, most]; -1 fills them up."""
    rate = compression.rate
    size = layout.page_size
    width = flat.shape[1]
    longest = max(places.entry_tables.shape[1] * size // rate, 1)  # entries of the longest sequence
    rows = sum(-(-some.scale.shape[0] // width) for some in _inputs(heads))
    top_k = compression.top_k

    def first(count: int) -> jax.Array:
        entry = jnp.arange(count)
        return jnp.where(entry < places.complete[:, None], entry, -1)

    def best() -> jax.Array:
        assert heads.keys is not None
        assert heads.index_q is not None
        assert heads.index_weights is not None
        assert top_k is not None
        dim = heads.keys.scale.shape[0]
        span = min(max(KV_BLOCK, top_k), longest)

        def find(table: jax.Array, block: jax.Array) -> tuple[jax.Array, jax.Array]:
            entry = block * span + jnp.arange(span)
            last = (entry + 1) * rate - 1
            page = table[jnp.minimum(last // size, len(table) - 1)]
            return _numbers(flat, layout.of_entry(page, last, rate, rows), KEY, dim), entry

        return best_of(
            heads.index_q,
            heads.index_weights,
            find,
            places.entry_tables,
            *of_batch,
            span=span,
            top_k=top_k,
            rate=rate,
            decode_only=decode_only,
        )

    if top_k is None or top_k >= longest:
        seen = first(longest)
    else:
        seen = lax.cond(jnp.max(of_batch[1]) // rate <= top_k, partial(first, top_k), best)
    last = (seen + 1) * rate - 1
    page = places.pages(places.entry_tables, last, size)
    return jnp.where(seen >= 0, layout.of_entry(page, last, rate, rows), -1)


def _over(
    q: jax.Array, seen: Sequence[tuple[jax.Array, jax.Array]], sinks: jax.Array, count: jax.Array, scale: float
) -> jax.Array:
    """Attention of queries [tokens, heads, dim], of which `count` matter, over rows of arrays. seen: arrays, and for
    each the rows that each token sees, int32 [tokens, most]; those that are -1 come last."""
    num_tokens, _, dim = q.shape
    tile = min(TILE, num_tokens)

    def token_tile(i: jax.Array, out: jax.Array) -> jax.Array:
        first = jnp.minimum(i * tile, num_tokens - tile)
        query = lax.dynamic_slice_in_dim(q, first, tile).astype(jnp.float32) * scale
        is_real = (first + jnp.arange(tile) < count)[:, None]
        state = Softmax.empty(query.shape[:-1], dim)
        for flat, rows in seen:
            own = jnp.where(is_real, lax.dynamic_slice_in_dim(rows, first, tile), -1)
            state = _over_rows(state, query, flat, own)
        return lax.dynamic_update_slice_in_dim(out, state.result(sinks).astype(out.dtype), first, 0)

    return lax.fori_loop(0, (count + tile - 1) // tile, token_tile, jnp.zeros_like(q))


def _over_rows(state: Softmax, query: jax.Array, flat: jax.Array, rows: jax.Array) -> Softmax:
    """The softmax with the rows [tile, most] that each token sees."""
    span = min(KV_BLOCK, rows.shape[1])
    rows = jnp.pad(rows, ((0, 0), (0, -rows.shape[1] % span)), constant_values=-1)
    blocks = (jnp.max(jnp.sum(rows >= 0, axis=1)) + span - 1) // span

    def block(i: jax.Array, state: Softmax) -> Softmax:
        own = lax.dynamic_slice_in_dim(rows, i * span, span, axis=1)
        is_seen = own >= 0
        found = _numbers(flat, jnp.maximum(own, 0), 0, query.shape[-1])
        found = jnp.where(is_seen[..., None], found, 0.0)
        scores = jnp.where(is_seen[:, None], jnp.einsum("thd,tsd->ths", query, found), MASKED)
        return state.update(scores, lambda p: jnp.einsum("ths,tsd->thd", p, found), axis=-1)

    return lax.fori_loop(0, blocks, block, state)
