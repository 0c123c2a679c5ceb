"""Attention in both directions within segments, in plain XLA: the oracle of the kernels, and a backend for any device.

Blocks of QUERIES rows read blocks of as many keys, from the first to the last that may have a row of the same segment,
and update a running softmax (Milakov & Gimelshein 2018, arXiv:1805.02867) in float32. So rows of other pictures, and
padding, cost little.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.pallas_kernels.paged_attention.reference import MASKED, Softmax
from jaxserve.pallas_kernels.registry import Device, SegmentProblem

QUERIES = 256  # rows of a block


def why_not(device: Device, problem: SegmentProblem) -> str | None:
    """Returns None: plain XLA runs every problem on every device."""
    return None


def spans(segment: jax.Array, queries: int, keys: int) -> tuple[jax.Array, jax.Array]:
    """For each block of `queries` rows the first block of `keys` rows that may have a row of the same segment, and the
    one behind the last, int32 [blocks]. segment: int32 [rows], a multiple of both; negative: padding."""

    def bounds(size: int) -> tuple[jax.Array, jax.Array]:
        block = segment.reshape(-1, size)
        lowest = jnp.where(block < 0, jnp.iinfo(jnp.int32).max, block).min(axis=1)
        return lowest, block.max(axis=1)

    lowest, highest = bounds(queries)
    first, last = bounds(keys)
    meets = (lowest[:, None] <= last) & (first <= highest[:, None])
    index = jnp.arange(meets.shape[1], dtype=jnp.int32)
    begin = jnp.where(meets, index, meets.shape[1]).min(axis=1)
    end = jnp.where(meets, index + 1, 0).max(axis=1)
    return jnp.minimum(begin, end), end


def padded(
    q: jax.Array, k: jax.Array, v: jax.Array, segment: jax.Array, size: int
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """The arguments of `segment_attention` with padding behind them, up to a multiple of `size` rows."""
    rest = -len(q) % size
    if not rest:
        return q, k, v, segment
    q, k, v = (jnp.pad(x, ((0, rest), (0, 0), (0, 0))) for x in (q, k, v))
    return q, k, v, jnp.pad(segment, (0, rest), constant_values=-1)


def segment_attention(q: jax.Array, k: jax.Array, v: jax.Array, segment: jax.Array, scale: float) -> jax.Array:
    """Attention in both directions within segments.

    Args:
      q, k, v: [rows, heads, head_dim].
      segment: int32 [rows]. A row attends over those with the same number. Negative: padding, of any values.
      scale: factor of the products of queries and keys.

    Returns [rows, heads, head_dim]; padding is unspecified. Scores and sums are float32.
    """
    rows, heads, dim = q.shape
    size = min(rows, QUERIES)
    q, k, v, segment = padded(q, k, v, segment, size)
    v = jnp.where((segment >= 0)[:, None, None], v, 0)  # a share of 0 of what is no number would be no number
    by_head = [x.swapaxes(0, 1) for x in (q, k, v)]

    def block(x: jax.Array, i: jax.Array) -> jax.Array:
        return lax.dynamic_slice_in_dim(x, i * size, size, axis=-2)

    def of(i: jax.Array) -> jax.Array:
        return lax.dynamic_slice_in_dim(segment, i * size, size)

    def some(given: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        i, begin, end = given
        queries = block(by_head[0], i)
        own = of(i)

        def add(j: jax.Array, state: Softmax) -> Softmax:
            keys, values = (block(x, j) for x in by_head[1:])
            scores = jnp.einsum("hqd,hkd->hqk", queries, keys, preferred_element_type=jnp.float32) * scale
            scores = jnp.where(own[:, None] == of(j), scores, MASKED)

            def weigh(shares: jax.Array) -> jax.Array:
                shares = shares.astype(values.dtype)
                return jnp.einsum("hqk,hkd->hqd", shares, values, preferred_element_type=jnp.float32)

            return state.update(scores, weigh, axis=-1)

        state = lax.fori_loop(begin, end, add, Softmax.empty((heads, size), dim))
        return state.result().astype(q.dtype).swapaxes(0, 1)

    index = jnp.arange(len(q) // size, dtype=jnp.int32)
    return lax.map(some, (index, *spans(segment, size, size))).reshape(q.shape)[:rows]
