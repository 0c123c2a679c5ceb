"""The expanded form of latent attention: each head's keys and values are projected from cached latents block by block.

For a pair of a query and a cached token, a head needs 2 * (rank + rope + rank) operations in the absorbed form (2,176
in DeepSeek-V3) and 2 * (nope + rope + v_dim) in the expanded form (640). But each cached token must first be expanded
with 2 * rank * (nope + v_dim) operations per head (262,144), once for each tile of queries that sees it. The expanded
form is therefore cheaper for prompts of about 170 and more new tokens, and never for decodes. `cheaper_form` computes
which form is cheaper. `expands_prompts` is the rule by which steps choose.

This is plain XLA by blocks: tiles of TILE query tokens of one row x blocks of cached tokens, up to the causal diagonal,
with a running softmax. No array of expanded keys or values is larger than a block. A block takes a few XLA kernels. On
GPUs and TPUs, where each takes microseconds to launch, blocks should have about a thousand tokens, and products should
be in bfloat16. It has run on CPU; it is compiled for H200, v5e and v6e, and has not run there yet.
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
    """Sizes of a latent, of the rotated key, of a head's key without it, and of a head's value."""

    rank: int = 512
    rope: int = 64
    nope: int = 128
    v_dim: int = 128


DEEPSEEK_V3 = LatentSizes()


def form_operations(
    tokens: int, context: int, heads: int, sizes: LatentSizes = DEEPSEEK_V3, *, tile: int = TILE, unit: int = 1
) -> dict[str, int]:
    """The operations for a row of `tokens` new tokens and `context` cached ones, new ones included, in both forms:
    "absorbed", with the projections of queries and results, and "expanded". A multiplication and an addition are two
    operations.

    tile: query tokens that share a block's expanded keys and values.
    unit: the matrix unit rounds the rows of a product up to a multiple of this number (64 on Hopper). The absorbed form
      multiplies tokens * heads rows, the expanded one `tokens` rows for each head.
    """
    rank, rope, nope, v_dim = sizes

    def padded(rows: int) -> int:
        return -(-rows // unit) * unit

    # The cached tokens that a tile's queries see end with the tile's own last token.
    tiles = [(min(start + tile, tokens) - start, start) for start in range(0, tokens, tile)]
    projections = 2 * tokens * heads * rank * (nope + v_dim)
    absorbed = projections
    expanded = 0
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
    """The form with fewer operations by `form_operations`; "absorbed" if both take the same number."""
    found = form_operations(tokens, context, heads, sizes, tile=tile, unit=unit)
    return min(found, key=lambda form: found[form])


def least_new_tokens(sizes: LatentSizes) -> int | None:
    """The number of new tokens from which on a tile takes fewer operations expanded, however many tokens are cached.

    For each cached token and head, a tile of n tokens saves n * 2 * (2 * rank - nope - v_dim) operations, and the
    expansion takes 2 * rank * (nope + v_dim). With DeepSeek's sizes, tiles of 171 tokens are cheaper. None: no tile is.
    """
    saved = 2 * sizes.rank - sizes.nope - sizes.v_dim
    least = sizes.rank * (sizes.nope + sizes.v_dim) // saved + 1 if saved > 0 else None
    return least if least is not None and least <= TILE else None


def expands_prompts(tokens: int, rows: int, sizes: LatentSizes, *, plain: bool) -> bool:
    """Whether a compiled step of up to `tokens` tokens in up to `rows` rows computes prompts in the expanded form.

    plain: the absorbed form is plain XLA, and no kernel.

    Kernels compute the absorbed form. The expanded form here stores the scores of each block in memory, which a kernel
    does not. These are about 16 bytes per head, query and cached token: 3.3 ps on an H200 and 10 ps on a TPU v6e by
    their data sheets, while all 2,176 operations of the absorbed form take 2.2 and 2.4 ps. On CPU the C++ kernel was
    as fast or faster for all lengths measured (benchmarks/LOG.md). Where both forms are plain XLA, the number of
    operations decides. The bucket must then have enough tokens for all its rows, because a short prompt with many
    cached tokens costs more in the expanded form.
    """
    least = least_new_tokens(sizes)
    return plain and least is not None and tokens >= rows * least


def absorb(q: jax.Array, k_up: jax.Array) -> jax.Array:
    """Converts queries [tokens, heads, nope + rope] to the absorbed form [tokens, heads, rank + rope].

    k_up: [heads, nope, rank], which projects latents to a head's keys.
    """
    nope = k_up.shape[1]
    absorbed = _per_head("thn,hnr->thr", q[..., :nope], k_up)
    return jnp.concatenate([absorbed.astype(q.dtype), q[..., nope:]], axis=-1)


def project_values(out: jax.Array, v_up: jax.Array) -> jax.Array:
    """Converts results of the absorbed form [tokens, heads, rank] to results of the heads [tokens, heads, v_dim].

    v_up: [heads, v_dim, rank], which projects latents to a head's values.
    """
    return _per_head("thr,hvr->thv", out, v_up).astype(out.dtype)


def _per_head(subscripts: str, x: jax.Array, w: jax.Array) -> jax.Array:
    """`einsum` with float32 sums. XLA:CPU has no such products of 16-bit numbers, so there the operands are widened."""

    def wide(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.einsum(subscripts, x.astype(jnp.float32), w.astype(jnp.float32))

    product = partial(jnp.einsum, subscripts, preferred_element_type=jnp.float32)
    return lax.platform_dependent(x, w, cpu=wide, default=product)


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
    """Computes heads' results from heads' queries. `attend`, a backend's `latent_attention`, computes decodes in the
    absorbed form. It also computes prompts, unless `expand` chooses the expanded form for them.

    Args:
      q: [tokens, heads, nope + rope], not absorbed.
      k_up: [heads, nope, rank]; v_up: [heads, v_dim, rank].
      expand: computes the rows from num_decodes on in the expanded form; see `expands_prompts`.
      The other arguments are those of `reference.latent_attention` and `expanded_attention`.

    Returns:
      [tokens, heads, v_dim] in the queries' type; rows of padding tokens are unspecified but finite.
    """
    tokens = len(q)
    rank = k_up.shape[-1]
    expand = expand and not decode_only
    options: dict[str, Any] = {"scale": scale, "first_page": first_page}
    decodes = min(tokens, len(tables)) if expand else tokens
    # `attend` computes decodes only: the other rows become empty.
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
    """Attention of the rows from num_decodes on in the expanded form. It does not compute decodes.

    Args:
      q: [tokens, heads, nope + rope], not absorbed.
      k_up: [heads, nope, rank]; v_up: [heads, v_dim, rank].
      compute_dtype: dtype of the operands of all products; sums are float32.
      block: approximate number of cached tokens per step; scores take 4 * TILE * block bytes per head.
      The other arguments are those of `reference.latent_attention`.

    Returns:
      [tokens, heads, v_dim] in the queries' type; zeros or other finite numbers for tokens of no prompt.
    """
    tables = tables + first_page
    (num_tokens, heads, _), (_, nope, rank), v_dim = q.shape, k_up.shape, v_up.shape[1]
    width = rank + q.shape[-1] - nope
    tile = min(TILE, num_tokens)
    tokens = block_tokens(pages, tables, block)
    before = tiles_before(q_start, num_decodes, tile)
    padded = jnp.concatenate([q, jnp.zeros((tile, *q.shape[1:]), q.dtype)])
    k_up = k_up.astype(compute_dtype)
    v_up = v_up.astype(compute_dtype)
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
            latent = found[:, :rank]
            shared = found[:, rank:]
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
