"""Latent attention over chosen tokens in plain XLA (DeepSeek Sparse Attention, arXiv:2512.02556).

An indexer compares a few queries per token with one key per cached token, and chooses the `top_k` tokens with the
highest scores; of equal scores, the first. Each token then attends, in the absorbed form of `reference`, over the
latents that were chosen for it, and reads no others.

Loops are bounded by the contents of the batch, and temporaries do not grow with the context:

  choice     one row's query tokens (a decode's one, or TILE of a prompt) x blocks of about `top_k` index keys; the best
             so far and a block's are sorted together
  attention  TILE query tokens of any rows x blocks of KV_BLOCK of their chosen tokens, with a running softmax

A kernel would keep the scores of a block on the chip: here they are written to memory for all heads of the indexer,
4 * TILE * heads * block bytes at a time. It would also fetch chosen rows page by page while it multiplies.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.pallas_kernels.latent_attention.reference import KV_BLOCK, ROWS, block_tokens, gather, tiles_before
from jaxserve.pallas_kernels.operands import IndexInputs
from jaxserve.pallas_kernels.paged_attention.reference import MASKED, Softmax
from jaxserve.pallas_kernels.types import LatentPages

TILE = 16  # query tokens that share a block of index keys


def write_keys(index_keys: jax.Array, new: jax.Array, slots: jax.Array, first_page: jax.Array | int) -> jax.Array:
    """Scatters new keys [tokens, dim] into `LatentPages.index_keys`; `slots` and `first_page` as in `write_latent`."""
    slots = jnp.maximum(slots, 0)
    size = index_keys.shape[1]
    place = slots // size + first_page, slots % size
    return index_keys.at[place].set(new.astype(index_keys.dtype), mode="promise_in_bounds")


@partial(jax.jit, static_argnames=("top_k", "decode_only"))
def choose(
    inputs: IndexInputs,
    index_keys: jax.Array,
    tables: jax.Array,
    q_start: jax.Array,
    kv_len: jax.Array,
    num_decodes: jax.Array,
    *,
    top_k: int,
    first_page: jax.Array | int = 0,
    decode_only: bool = False,
) -> jax.Array:
    """The positions of the cached tokens that each token is to see, int32 [tokens, top_k], those with the highest
    scores first. -1 fills the places of a token that has fewer tokens to see. Tokens of padding have unspecified
    positions within their row.

    index_keys: as in `LatentPages`, the new ones included. The other arguments are those of `latent_attention`.
    """
    tables = tables + first_page
    dim = inputs.q.shape[-1]
    keys = LatentPages(index_keys)
    most = max(KV_BLOCK, top_k)

    def find(table: jax.Array, block: jax.Array) -> tuple[jax.Array, jax.Array]:
        return gather(keys, dim, dim, table, block, most)

    return best_of(
        inputs.q,
        inputs.weights,
        find,
        tables,
        q_start,
        kv_len,
        num_decodes,
        span=block_tokens(keys, tables, most),
        top_k=top_k,
        decode_only=decode_only,
    )


def best_of(
    q: jax.Array,
    weights: jax.Array,
    find: Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array]],
    tables: jax.Array,
    q_start: jax.Array,
    kv_len: jax.Array,
    num_decodes: jax.Array,
    *,
    span: int,
    top_k: int,
    rate: int = 1,
    decode_only: bool = False,
) -> jax.Array:
    """`choose` among keys that `find` finds: it gets a row of `tables` and the number of a block of `span` keys, and
    returns keys, float32 [span, dim], and their numbers, int32 [span]. There is a key for every `rate` tokens, which a
    token sees if it has seen all of these. q and weights: as in `IndexInputs`."""
    q = q.astype(jnp.float32)
    num_tokens = len(q)

    def best(q: jax.Array, weights: jax.Array, table: jax.Array, ends: jax.Array, most: jax.Array) -> jax.Array:
        """For query tokens of one row, which see `ends` [n] keys, and at most `most`: [n, top_k]."""

        def block(i, state):
            scores, places = state
            found, position = find(table, i)
            products = jax.nn.relu(jnp.einsum("nhd,sd->nhs", q, found))
            new = jnp.einsum("nhs,nh->ns", products, weights)
            new = jnp.where(position < ends[:, None], new, -jnp.inf)
            scores, order = lax.top_k(jnp.concatenate([scores, new], axis=1), top_k)
            places = jnp.concatenate([places, jnp.broadcast_to(position, new.shape)], axis=1)
            return scores, jnp.take_along_axis(places, order, axis=1)

        none = jnp.full((len(q), top_k), -jnp.inf), jnp.full((len(q), top_k), -1, jnp.int32)
        scores, places = lax.fori_loop(0, (most + span - 1) // span, block, none)
        return jnp.where(scores > -jnp.inf, places, -1)

    out = jnp.full((num_tokens, top_k), -1, jnp.int32)
    rows = min(ROWS, len(tables), num_tokens)

    def row_block(i, out):
        # The last block may overlap the one before it, as in `reference`.
        first = jnp.minimum(i * rows, min(len(tables), num_tokens) - rows)
        of_rows = partial(lax.dynamic_slice_in_dim, start_index=first, slice_size=rows)
        ends = of_rows(kv_len) // rate
        most = jnp.max(ends)
        one = jax.vmap(lambda q, weights, table, end: best(q[None], weights[None], table, end[None], most)[0])
        made = one(of_rows(q), of_rows(weights), of_rows(tables), ends)
        return lax.dynamic_update_slice_in_dim(out, made, first, 0)

    out = lax.fori_loop(0, (num_decodes + rows - 1) // rows, row_block, out)
    if decode_only:
        return out
    tile = min(TILE, num_tokens)
    before = tiles_before(q_start, num_decodes, tile)
    q, weights = (jnp.pad(x, ((0, tile), *((0, 0),) * (x.ndim - 1))) for x in (q, weights))

    def query_tile(i, out):
        row = jnp.searchsorted(before, i, side="right") - 1
        start = q_start[row] + (i - before[row]) * tile
        # Tokens beyond the row's end belong to the next row, whose own tile overwrites their results.
        where = jnp.minimum(kv_len[row] - q_start[row + 1] + start + jnp.arange(tile), kv_len[row] - 1)
        own_q, own_weights = (lax.dynamic_slice_in_dim(x, start, tile) for x in (q, weights))
        ends = (where + 1) // rate
        made = best(own_q, own_weights, tables[row], ends, ends[-1])
        return lax.dynamic_update_slice_in_dim(out, made, start, 0)

    out = jnp.pad(out, ((0, tile), (0, 0)))
    return lax.fori_loop(0, before[-1], query_tile, out)[:num_tokens]


@partial(jax.jit, static_argnames=("scale", "rank"))
def attention_over(
    q: jax.Array,
    pages: LatentPages,
    chosen: jax.Array,
    tables: jax.Array,
    q_start: jax.Array,
    *,
    scale: float,
    rank: int,
    first_page: jax.Array | int = 0,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """`reference.latent_attention` over the tokens at the positions `chosen`, as `choose` returns them."""
    tables = tables + first_page
    num_tokens, _, width = q.shape
    size = pages.page_size
    tile = min(TILE, num_tokens)
    span = min(KV_BLOCK, chosen.shape[1])
    row = jnp.searchsorted(q_start, jnp.arange(num_tokens), side="right", method="compare_all") - 1
    row = jnp.clip(row, 0, len(tables) - 1)
    chosen = jnp.pad(chosen, ((0, 0), (0, -chosen.shape[1] % span)), constant_values=-1)

    def token_tile(i, out):
        first = jnp.minimum(i * tile, num_tokens - tile)
        query, places, own = (lax.dynamic_slice_in_dim(x, first, tile) for x in (q, chosen, row))
        query = query.astype(jnp.float32) * scale
        is_real = first + jnp.arange(tile) < q_start[-1]
        places = jnp.where(is_real[:, None], places, -1)
        blocks = (jnp.max(jnp.sum(places >= 0, axis=1)) + span - 1) // span

        def block(j, state):
            place = lax.dynamic_slice_in_dim(places, j * span, span, axis=1)
            seen = place >= 0
            place = jnp.maximum(place, 0)
            found = _rows_at(pages, rank, width, tables[own[:, None], place // size], place % size)
            found = jnp.where(seen[..., None], found, 0.0)
            scores = jnp.where(seen[:, None], jnp.einsum("thd,tsd->ths", query, found), MASKED)
            return state.update(scores, lambda p: jnp.einsum("ths,tsd->thd", p, found[..., :rank]), axis=-1)

        state = lax.fori_loop(0, blocks, block, Softmax.empty(query.shape[:-1], rank))
        return lax.dynamic_update_slice_in_dim(out, state.result(sinks).astype(out.dtype), first, 0)

    out = jnp.zeros((*q.shape[:-1], rank), q.dtype)
    return lax.fori_loop(0, (q_start[-1] + tile - 1) // tile, token_tile, out)


def _rows_at(pages: LatentPages, rank: int, width: int, page: jax.Array, offset: jax.Array) -> jax.Array:
    """Rows of the cache, float32 [..., width], where page and offset are int32 [...]."""
    found = pages.data.at[page, offset].get(mode="clip")[..., :width].astype(jnp.float32)
    if pages.scale is None:
        return found
    own = pages.scale.at[page, :, offset].get(mode="clip")
    return found * jnp.where(jnp.arange(width) >= rank, own[..., 1:], own[..., :1])
