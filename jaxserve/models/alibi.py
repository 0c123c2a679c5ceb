"""Attention with linear biases (ALiBi, Press et al. 2022, arXiv:2108.12409): the score of a query and a key falls with
their distance, by a slope for each head.

A softmax does not change with a number that all scores of a query share, so the slope may multiply the key's position
instead of the distance. Every head of queries and keys gets two more channels, whose product is this bias, and any
kernel of attention computes it. Keys hold the two digits of their position to the base 256, both of which bfloat16
holds exactly.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

BASE = 256
CHANNELS = 2


def with_positions(
    heads: jax.Array, slopes: tuple[float, ...], scale: float, positions: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Adds the channels to heads [tokens, kv_heads, group + 2, head_dim], a group's queries, its key and its value.

    Args:
      slopes: of all query heads.
      scale: factor of the products of queries and keys.
      positions: int32 [tokens].

    Returns:
      The heads, and the cosines and sines of a rotation that leaves them as they are.
    """
    tokens, kv_heads, rows, dim = heads.shape
    digits = jnp.stack(jnp.divmod(positions, BASE), axis=-1)[:, None, None]
    queries = (
        jnp.asarray(slopes, jnp.float32).reshape(1, kv_heads, rows - 2, 1) * jnp.array([BASE, 1], jnp.float32) / scale
    )
    parts = [jnp.broadcast_to(part, (tokens, kv_heads, part.shape[2], CHANNELS)) for part in (queries, digits)]
    more = jnp.concatenate([part.astype(heads.dtype) for part in (*parts, jnp.zeros_like(parts[1]))], axis=2)
    angles = (tokens, (dim + CHANNELS) // 2)
    return jnp.concatenate([heads, more], axis=-1), jnp.ones(angles), jnp.zeros(angles)
