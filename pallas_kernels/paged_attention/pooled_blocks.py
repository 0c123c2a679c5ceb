"""The choice of blocks of tokens by the means of their keys, in plain XLA (Qwen4-Exp). The attention over these blocks
is that of `chosen_blocks`.

A token's key lies in the pages until its block is complete. Then the mean of the block's keys, normed and turned, takes
the place of the last of them. So a step reads one key for each complete block, and the keys of tokens only where it
completes their block, wherever prompts are cut and whoever shares a prefix.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.pallas_kernels.latent_attention import sparse
from jaxserve.pallas_kernels.operands import PooledInputs
from jaxserve.pallas_kernels.paged_attention.reference import KV_BLOCK


def _places(tokens: int, q_start: jax.Array, kv_len: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(row of each token of the batch, position in the row's sequence), int32 [tokens] each."""
    index = jnp.arange(tokens)
    row = jnp.searchsorted(q_start, index, side="right", method="compare_all").astype(jnp.int32) - 1
    row = jnp.clip(row, 0, len(kv_len) - 1)
    return row, jnp.maximum(kv_len[row] - q_start[row + 1] + index, 0)


@partial(jax.jit, static_argnames=("size", "eps", "decode_only"))
def write_keys(
    inputs: PooledInputs,
    index_keys: jax.Array,
    slots: jax.Array,
    tables: jax.Array,
    q_start: jax.Array,
    kv_len: jax.Array,
    *,
    size: int,
    eps: float,
    first_page: jax.Array | int = 0,
    decode_only: bool = False,
) -> jax.Array:
    """The pages of keys with those of new tokens, and of the blocks of `size` tokens that these complete.

    index_keys: as in `KVPages`. slots: as in `kv_write.write_kv`; -1 for tokens that are not kept. eps: of the norm of
    means. The other arguments are those of `paged_attention`.
    """
    index_keys = sparse.write_keys(index_keys, inputs.key, slots, first_page)
    num = len(slots)
    page_size = index_keys.shape[1]
    row, position = _places(num, q_start, kv_len)
    ends = (slots >= 0) & ((position + 1) % size == 0)
    most = num if decode_only else min(num, num // size + len(tables))
    which = jnp.nonzero(ends, size=most, fill_value=num)[0]
    token = jnp.minimum(which, num - 1)
    at = jnp.maximum(position[token][:, None] - jnp.arange(size), 0)
    page = first_page + jnp.take_along_axis(tables[row[token]], at // page_size, axis=1, mode="clip")
    found = index_keys.at[page, at % page_size].get(mode="clip").astype(jnp.float32)
    mean = jnp.mean(found, axis=1).astype(inputs.key.dtype).astype(jnp.float32)
    normed = mean * lax.rsqrt(jnp.mean(jnp.square(mean), axis=-1, keepdims=True) + eps)
    normed = normed * inputs.scale.astype(jnp.float32)
    cos, sin = inputs.cos[token], inputs.sin[token]
    turned, rest = jnp.split(normed, [2 * cos.shape[1]], axis=-1)
    first, second = jnp.split(turned, 2, axis=-1)
    made = jnp.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)
    own = jnp.where(which < num, slots[token], -1)
    return sparse.write_keys(index_keys, made, own, first_page)


@partial(jax.jit, static_argnames=("size", "most", "decode_only"))
def choose(
    inputs: PooledInputs,
    index_keys: jax.Array,
    tables: jax.Array,
    q_start: jax.Array,
    kv_len: jax.Array,
    num_decodes: jax.Array,
    *,
    size: int,
    most: int,
    first_page: jax.Array | int = 0,
    decode_only: bool = False,
) -> jax.Array:
    """The numbers of the blocks of `size` tokens that each token is to see, int32 [tokens, most + 1]: the block that is
    not complete, if there is one, and the `most` complete ones with the highest scores. -1 fills the places of a token
    that has fewer blocks to see. Tokens of padding have unspecified ones.

    index_keys: as `write_keys` returns them. The other arguments are those of `paged_attention`.
    """
    tables = tables + first_page
    page_size = index_keys.shape[1]
    span = max(1, min(max(KV_BLOCK, most), tables.shape[1] * page_size // size))

    def find(table: jax.Array, block: jax.Array) -> tuple[jax.Array, jax.Array]:
        number = block * span + jnp.arange(span)
        last = (number + 1) * size - 1
        page = jnp.take(table, last // page_size, mode="clip")
        return index_keys.at[page, last % page_size].get(mode="clip").astype(jnp.float32), number

    weights = jnp.ones(inputs.q.shape[:2], jnp.float32)
    how: Any = {"span": span, "top_k": most, "rate": size, "decode_only": decode_only}
    best = sparse.best_of(inputs.q, weights, find, tables, q_start, kv_len, num_decodes, **how)
    _, position = _places(len(inputs.q), q_start, kv_len)
    seen = (position + 1)[:, None]
    none = jnp.full_like(seen, -1)
    is_open = seen % size > 0
    with_open = jnp.concatenate([seen // size, best], axis=1)
    return jnp.where(is_open, with_open, jnp.concatenate([best, none], axis=1))
