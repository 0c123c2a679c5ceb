"""Scatter of new keys and values into the pages of the cache."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def write_kv(pages: jax.Array, k: jax.Array, v: jax.Array, slots: jax.Array) -> jax.Array:
    """Writes k, v [tokens, kv_heads, head_dim] at slots [tokens] (page * page_size + offset) of the cache.

    pages: [pages, page_size, 2, kv_heads, head_dim], donated by the caller and returned updated. Padding tokens carry
    slots of page 0, which nobody owns.
    """
    page_size = pages.shape[1]
    new = jnp.stack([k, v], axis=1).astype(pages.dtype)
    return pages.at[slots // page_size, slots % page_size].set(new, mode="promise_in_bounds")
