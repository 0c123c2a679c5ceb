"""The other form of latent attention: keys and values of each head, projected from the cached latents on the way.

A pair of a query and a cached token costs a head 2 * (rank + rope + rank) operations in the absorbed form (2,176 in
DeepSeek-V3) and 2 * (nope + rope + v_dim) in this one (640). But a cached token must first be expanded, 2 * rank *
(nope + v_dim) operations a head (262,144), once for each tile of queries that sees it. Prompts are therefore cheaper in
this form from some 170 new tokens of a row on, decodes never. `cheaper_form` tells.

It is plain XLA by blocks: tiles of TILE query tokens of one row x blocks of cached tokens, up to the causal diagonal,
with a running softmax. No array of expanded keys or values is larger than a block. A block is a few XLA kernels: on
GPUs and TPUs, where each takes microseconds to launch, blocks should be of a thousand tokens, and products in bfloat16.
Run on CPU; compiled for H200, v5e and v6e, not yet run on them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.pallas_kernels.latent_attention.reference import KV_BLOCK, block_tokens, gather, tiles_before
from jaxserve.pallas_kernels.paged_attention.reference import MASKED, Softmax
from jaxserve.pallas_kernels.types import LatentPages

TILE = 512  # query tokens that share a block's expanded keys and values


class LatentSizes(NamedTuple):
    """Numbers of a latent, of the rotated key, of a head's key beside it, and of a head's value; as in DeepSeek-V3."""

    rank: int = 512
    rope: int = 64
    nope: int = 128
    v_dim: int = 128


DEEPSEEK_V3 = LatentSizes()


def form_operations(
    tokens: int, context: int, heads: int, sizes: LatentSizes = DEEPSEEK_V3, *, tile: int = TILE, unit: int = 1
) -> dict[str, int]:
    """Operations (a multiplication and an addition are two) of a row of `tokens` new tokens and `context` cached ones,
    the new ones included, in either form: "absorbed", with the projections of queries and results, and "expanded".

    tile: query tokens that share a block's expanded keys and values.
    unit: what the rows of a product are rounded up to by the matrix unit (64 on Hopper). The absorbed form multiplies
      tokens * heads rows, the expanded one `tokens` rows for each head.
    """
    rank, rope, nope, v_dim = sizes

    def padded(rows: int) -> int:
        return -(-rows // unit) * unit

    # What the tiles' queries see: a tile's cached tokens end with its own last one.
    tiles = [(min(start + tile, tokens) - start, start) for start in range(0, tokens, tile)]
    projections = 2 * tokens * heads * rank * (nope + v_dim)
    absorbed, expanded = projections, 0
    for new, start in tiles:
        last = context - tokens + start + new
        mean = last - (new - 1) / 2  # cached tokens that a query of the tile sees, on average
        absorbed += round(padded(new * heads) * mean) * 2 * (2 * rank + rope)
        expanded += heads * round(padded(new) * mean) * 2 * (nope + rope + v_dim)
        expanded += heads * last * 2 * rank * (nope + v_dim)
    return {"absorbed": absorbed, "expanded": expanded}


def cheaper_form(
    tokens: int, context: int, heads: int, sizes: LatentSizes = DEEPSEEK_V3, *, tile: int = TILE, unit: int = 1
) -> str:
    """Of `form_operations`, the form that takes fewer; "absorbed" where they are equal."""
    found = form_operations(tokens, context, heads, sizes, tile=tile, unit=unit)
    return min(found, key=lambda form: found[form])


def absorb(q: jax.Array, k_up: jax.Array) -> jax.Array:
    """Queries [tokens, heads, nope + rope] as latent attention takes them, [tokens, heads, rank + rope].

    k_up: [heads, nope, rank], which makes a head's keys of latents.
    """
    nope = k_up.shape[1]
    absorbed = jnp.einsum("thn,hnr->thr", q[..., :nope], k_up, preferred_element_type=jnp.float32)
    return jnp.concatenate([absorbed.astype(q.dtype), q[..., nope:]], axis=-1)


def project_values(out: jax.Array, v_up: jax.Array) -> jax.Array:
    """Results of latent attention [tokens, heads, rank] as those of the heads, [tokens, heads, v_dim].

    v_up: [heads, v_dim, rank], which makes a head's values of latents.
    """
    return jnp.einsum("thr,hvr->thv", out, v_up, preferred_element_type=jnp.float32).astype(out.dtype)


def attention_of_heads(
    attend: Callable[..., jax.Array],
    q: jax.Array,
    pages: LatentPages,
    k_up: jax.Array,
    v_up: jax.Array,
    tables: jax.Array,
    q_start: jax.Array,
    kv_len: jax.Array,
    num_decodes: jax.Array,
    *,
    scale: float,
    first_page: jax.Array | int = 0,
    decode_only: bool = False,
    expand: bool = False,
    compute_dtype: Any = jnp.float32,
    block: int = KV_BLOCK,
) -> jax.Array:
    """From heads' queries to heads' results: decodes in the absorbed form by `attend`, a backend's `latent_attention`;
    prompts so, too, or expanded.

    Args:
      q: [tokens, heads, nope + rope], not absorbed.
      k_up: [heads, nope, rank]; v_up: [heads, v_dim, rank].
      expand: has the rows from num_decodes on computed in the expanded form; `cheaper_form` tells when to.
      Others as `reference.latent_attention` and `expanded_attention`.

    Returns:
      [tokens, heads, v_dim] in the queries' type; rows of padding tokens are unspecified but finite.
    """
    tokens, rank = len(q), k_up.shape[-1]
    expand = expand and not decode_only
    options: dict[str, Any] = {"scale": scale, "first_page": first_page}
    decodes = min(tokens, len(tables)) if expand else tokens
    # Only decodes are left to `attend`: the rows behind them become empty.
    starts = jnp.minimum(q_start, num_decodes) if expand else q_start
    absorbed = attend(
        absorb(q[:decodes], k_up), pages, tables, starts, kv_len, num_decodes,
        rank=rank, decode_only=decode_only or expand, **options,
    )  # fmt: skip
    out = project_values(absorbed, v_up)
    if not expand:
        return out
    prompts = expanded_attention(
        q, pages, k_up, v_up, tables, q_start, kv_len, num_decodes, compute_dtype=compute_dtype, block=block, **options
    )
    out = jnp.pad(out, ((0, tokens - decodes), (0, 0), (0, 0)))
    return jnp.where(jnp.arange(tokens)[:, None, None] < num_decodes, out, prompts)


@partial(jax.jit, static_argnames=("scale", "compute_dtype", "block"))
def expanded_attention(
    q: jax.Array,
    pages: LatentPages,
    k_up: jax.Array,
    v_up: jax.Array,
    tables: jax.Array,
    q_start: jax.Array,
    kv_len: jax.Array,
    num_decodes: jax.Array,
    *,
    scale: float,
    first_page: jax.Array | int = 0,
    compute_dtype: Any = jnp.float32,
    block: int = KV_BLOCK,
) -> jax.Array:
    """Attention of the rows from num_decodes on, in this form; decodes are left to `latent_attention`.

    Args:
      q: [tokens, heads, nope + rope], not absorbed.
      k_up: [heads, nope, rank]; v_up: [heads, v_dim, rank].
      compute_dtype: of the operands of all products, whose sums are float32.
      block: cached tokens of a step, about; scores take 4 * TILE * block bytes a head.
      Others as `reference.latent_attention`.

    Returns:
      [tokens, heads, v_dim] in the queries' type; zeros or other finite numbers for tokens of no prompt.
    """
    tables = tables + first_page
    (num_tokens, heads, _), (_, nope, rank), v_dim = q.shape, k_up.shape, v_up.shape[1]
    width = rank + q.shape[-1] - nope
    tile, tokens = min(TILE, num_tokens), block_tokens(pages, tables, block)
    before = tiles_before(q_start, num_decodes, tile)
    padded = jnp.concatenate([q, jnp.zeros((tile, *q.shape[1:]), q.dtype)])
    k_up, v_up = k_up.astype(compute_dtype), v_up.astype(compute_dtype)
    product = partial(jnp.einsum, preferred_element_type=jnp.float32)

    def query_tile(i, out):
        row = jnp.searchsorted(before, i, side="right") - 1
        start = q_start[row] + (i - before[row]) * tile
        query = lax.dynamic_slice_in_dim(padded, start, tile).astype(compute_dtype)
        where = kv_len[row] - q_start[row + 1] + start + jnp.arange(tile)  # as in the absorbed form
        newest = jnp.minimum(where[-1], kv_len[row] - 1)

        def kv_block(index, state):
            found, position = gather(pages, rank, width, tables[row], index, block)
            found = jnp.where((position < kv_len[row])[:, None], found, 0.0).astype(compute_dtype)
            latent, shared = found[:, :rank], found[:, rank:]
            keys = product("sr,hnr->hsn", latent, k_up).astype(compute_dtype)
            values = product("sr,hvr->hsv", latent, v_up).astype(compute_dtype)
            scores = product("thn,hsn->hts", query[..., :nope], keys)
            scores += product("thp,sp->hts", query[..., nope:], shared)
            seen = (position <= where[:, None]) & (position < kv_len[row])
            scores = jnp.where(seen, scores * scale, MASKED)
            return state.update(scores, lambda p: product("hts,hsv->htv", p.astype(compute_dtype), values), axis=-1)

        state = Softmax.empty((heads, tile), v_dim)
        state = lax.fori_loop(0, newest // tokens + 1, kv_block, state)
        return lax.dynamic_update_slice_in_dim(out, state.result().swapaxes(0, 1).astype(out.dtype), start, 0)

    out = jnp.zeros((num_tokens + tile, heads, v_dim), q.dtype)
    return lax.fori_loop(0, before[-1], query_tile, out)[:num_tokens]
