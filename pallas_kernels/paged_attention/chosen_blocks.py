"""Grouped-query attention over chosen blocks of tokens in plain XLA (MiniMax-M3).

A choice compares a query of its own, for each head of keys and values, with one key per cached token. The score of a
block of neighbouring tokens is the best product with a token that the query may see. For each token and head of keys
and values the blocks with the highest scores are chosen, of equal scores the first; the token's own block and those
right before it come before all others. The queries of the group then attend over the tokens of these blocks, and read
no others.

Loops are bounded by the contents of the batch, and temporaries do not grow with the context:

  choice     one row's query tokens (a decode's one, or TILE of a prompt) x spans of whole blocks; the best blocks so
             far and a span's are sorted together
  attention  TILE query tokens of any rows x one chosen block of each, or several small ones, with a running softmax
"""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.pallas_kernels.latent_attention.reference import ROWS, tiles_before
from jaxserve.pallas_kernels.latent_attention.sparse import TILE
from jaxserve.pallas_kernels.operands import ChoiceInputs
from jaxserve.pallas_kernels.paged_attention.reference import KV_BLOCK, MASKED, Softmax
from jaxserve.pallas_kernels.types import KVPages


@partial(jax.jit, static_argnames=("size", "most", "local", "decode_only"))
def choose(
    inputs: ChoiceInputs,
    index_keys: jax.Array,
    tables: jax.Array,
    q_start: jax.Array,
    kv_len: jax.Array,
    num_decodes: jax.Array,
    *,
    size: int,
    most: int,
    local: int,
    first_page: jax.Array | int = 0,
    decode_only: bool = False,
) -> jax.Array:
    """The numbers of the blocks of `size` tokens that each token is to see, int32 [tokens, kv_heads, most], the best
    first. -1 fills the places of a token that has fewer blocks to see. Tokens of padding have unspecified ones.

    index_keys: as in `KVPages`, the new ones included. local: blocks up to a token's own that are chosen in any case.
    The other arguments are those of `paged_attention`.
    """
    tables = tables + first_page
    q = inputs.q.astype(jnp.float32)
    num_tokens, heads, dim = q.shape
    page_size = index_keys.shape[1]
    unit = math.lcm(size, page_size)
    span = unit * max(1, min(max(KV_BLOCK, size * most), tables.shape[1] * page_size) // unit)
    pages = span // page_size

    def best(q: jax.Array, table: jax.Array, last: jax.Array, end: jax.Array) -> jax.Array:
        """For query tokens [n] of one row, at the positions `last`, of a row of `end` tokens: [n, heads, most]."""
        own = (last // size)[:, None, None]

        def step(i, state):
            scores, blocks = state
            which = jnp.take(table, i * pages + jnp.arange(pages), mode="clip")
            keys = index_keys.at[which].get(mode="clip").reshape(span, dim).astype(jnp.float32)
            products = jnp.einsum("nhd,sd->nhs", q, keys)
            seen = i * span + jnp.arange(span) <= last[:, None, None]
            new = jnp.where(seen, products, -jnp.inf).reshape(*products.shape[:2], -1, size).max(-1)
            number = i * (span // size) + jnp.arange(span // size)
            new = jnp.where((number <= own) & (number > own - local), jnp.inf, new)
            scores, order = lax.top_k(jnp.concatenate([scores, new], axis=-1), most)
            blocks = jnp.concatenate([blocks, jnp.broadcast_to(number, new.shape)], axis=-1)
            return scores, jnp.take_along_axis(blocks, order, axis=-1)

        shape = (len(q), heads, most)
        none = jnp.full(shape, -jnp.inf), jnp.full(shape, -1, jnp.int32)
        scores, blocks = lax.fori_loop(0, (end + span - 1) // span, step, none)
        return jnp.where(scores > -jnp.inf, blocks, -1)

    out = jnp.full((num_tokens, heads, most), -1, jnp.int32)
    rows = min(ROWS, len(tables), num_tokens)

    def row_block(i, out):
        # The last block may overlap the one before it, as in `reference`.
        first = jnp.minimum(i * rows, min(len(tables), num_tokens) - rows)
        of_rows = partial(lax.dynamic_slice_in_dim, start_index=first, slice_size=rows)
        ends = of_rows(kv_len)
        longest = jnp.max(ends)
        one = jax.vmap(lambda q, table, end: best(q[None], table, end[None] - 1, longest)[0])
        return lax.dynamic_update_slice_in_dim(out, one(of_rows(q), of_rows(tables), ends), first, 0)

    out = lax.fori_loop(0, (num_decodes + rows - 1) // rows, row_block, out)
    if decode_only:
        return out
    tile = min(TILE, num_tokens)
    before = tiles_before(q_start, num_decodes, tile)
    q = jnp.pad(q, ((0, tile), (0, 0), (0, 0)))

    def query_tile(i, out):
        row = jnp.searchsorted(before, i, side="right") - 1
        start = q_start[row] + (i - before[row]) * tile
        # Tokens beyond the row's end belong to the next row, whose own tile overwrites their results.
        last = jnp.minimum(kv_len[row] - q_start[row + 1] + start + jnp.arange(tile), kv_len[row] - 1)
        made = best(lax.dynamic_slice_in_dim(q, start, tile), tables[row], last, last[-1] + 1)
        return lax.dynamic_update_slice_in_dim(out, made, start, 0)

    out = jnp.pad(out, ((0, tile), (0, 0), (0, 0)))
    return lax.fori_loop(0, before[-1], query_tile, out)[:num_tokens]


@partial(jax.jit, static_argnames=("scale", "size"))
def attention_over(
    q: jax.Array,
    pages: KVPages,
    chosen: jax.Array,
    tables: jax.Array,
    q_start: jax.Array,
    kv_len: jax.Array,
    *,
    scale: float,
    size: int,
    first_page: jax.Array | int = 0,
) -> jax.Array:
    """`reference.paged_attention` over the blocks `chosen`, as `choose` returns them."""
    tables = tables + first_page
    num_tokens, heads, _, dim = q.shape
    tile = min(TILE, num_tokens)
    together = max(1, min(KV_BLOCK // size, chosen.shape[2]))  # blocks of a step
    chosen = jnp.pad(chosen, ((0, 0), (0, 0), (0, -chosen.shape[2] % together)), constant_values=-1)
    index = jnp.arange(num_tokens)
    row = jnp.searchsorted(q_start, index, side="right", method="compare_all") - 1
    row = jnp.clip(row, 0, len(tables) - 1)
    last = kv_len[row] - q_start[row + 1] + index
    head = jnp.arange(heads)[:, None]

    def token_tile(i, out):
        first = jnp.minimum(i * tile, num_tokens - tile)
        query, blocks, own, newest = (lax.dynamic_slice_in_dim(x, first, tile) for x in (q, chosen, row, last))
        query = query.astype(jnp.float32) * scale
        is_real = first + jnp.arange(tile) < q_start[-1]
        blocks = jnp.where(is_real[:, None, None], blocks, -1)

        def block(j, state):
            which = lax.dynamic_slice_in_dim(blocks, j * together, together, axis=2)[..., None]
            place = which * size + jnp.arange(size)  # [tile, heads, together, size]
            seen = (which >= 0) & (place <= newest[:, None, None, None])
            place, seen = (x.reshape(*x.shape[:2], -1) for x in (jnp.maximum(place, 0), seen))
            page = jnp.take_along_axis(tables[own][:, None], place // pages.page_size, axis=2, mode="clip")
            k, v = (_tokens_at(pages, part, page, head, place % pages.page_size)[..., :dim] for part in (0, 1))
            scores = jnp.where(seen[:, :, None], jnp.einsum("thgd,thsd->thgs", query, k), MASKED)
            v = jnp.where(seen[..., None], v, 0.0)
            return state.update(scores, lambda p: jnp.einsum("thgs,thsd->thgd", p, v), axis=-1)

        count = jnp.max(jnp.sum(blocks >= 0, axis=2))
        state = lax.fori_loop(0, (count + together - 1) // together, block, Softmax.empty(query.shape[:-1], dim))
        return lax.dynamic_update_slice_in_dim(out, state.result().astype(out.dtype), first, 0)

    return lax.fori_loop(0, (q_start[-1] + tile - 1) // tile, token_tile, jnp.zeros_like(q))


def _tokens_at(pages: KVPages, part: int, page: jax.Array, head: jax.Array, offset: jax.Array) -> jax.Array:
    """Keys (`part` 0) or values (1) of the cache, float32 [..., head_dim]. page, head and offset are int32 [...]."""
    found = pages.data.at[page, part, head, offset].get(mode="clip").astype(jnp.float32)
    if pages.scale is None:
        return found
    return found * pages.scale.at[page, part, head, offset].get(mode="clip")[..., None]
