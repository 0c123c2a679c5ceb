"""Attention of patches over the patches of the same picture, or of the same window."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

QUERIES = 256  # patches whose scores exist at a time


def segment_attention(q: jax.Array, k: jax.Array, v: jax.Array, segment: jax.Array, scale: float) -> jax.Array:
    """Attention in both directions within segments.

    Args:
      q: [patches, heads, group, head_dim]; `group` queries share a key.
      k, v: [patches, heads, head_dim].
      segment: int32 [patches]. A patch attends over those with the same number. Negative: padding, of any values.
      scale: factor of the products of queries and keys.

    Returns [patches, heads, group, head_dim]. Scores and sums are float32.
    """

    v = jnp.where((segment >= 0)[:, None, None], v, 0)  # a share of 0 of what is no number would be no number

    def some(given: tuple[jax.Array, jax.Array]) -> jax.Array:
        queries, own = given
        scores = jnp.einsum("phgd,chd->hgpc", queries, k, preferred_element_type=jnp.float32) * scale
        scores = jnp.where(own[:, None] == segment, scores, -jnp.inf)
        shares = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
        return jnp.einsum("hgpc,chd->phgd", shares, v, preferred_element_type=jnp.float32).astype(q.dtype)

    count = len(q)
    if count <= QUERIES:
        return some((q, segment))
    parts = -(-count // QUERIES)
    rest = parts * QUERIES - count
    padded, own = (jnp.pad(x, ((0, rest), *((0, 0),) * (x.ndim - 1))) for x in (q, segment)) if rest else (q, segment)
    split = padded.reshape(parts, QUERIES, *q.shape[1:]), own.reshape(parts, QUERIES)
    return lax.map(some, split).reshape(-1, *q.shape[1:])[:count]
