"""What one operation leaves for the next to finish, so that a GPU launches one kernel for both."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class Row(NamedTuple):
    """One of the rows of an array, which kernels read where it lies: XLA would copy it for them."""

    array: jax.Array  # [rows, size]
    place: jax.Array  # int32 scalar

    def value(self) -> jax.Array:
        return lax.dynamic_index_in_dim(self.array, self.place, keepdims=False)


def value_of(vector: jax.Array | Row) -> jax.Array:
    return vector.value() if isinstance(vector, Row) else vector


class Parts(NamedTuple):
    """A linear layer's result as parts: sums [parts, tokens, …], of which the sum over all parts, rounded to the dtype
    of the activations, and then the bias [size or …], in that dtype, make the result. One part alone may have that
    dtype itself; several are float32.
    """

    sums: jax.Array
    bias: jax.Array | Row | None = None

    def whole(self, dtype: jnp.dtype) -> jax.Array:
        """The result, [tokens, …] in `dtype`."""
        y = (self.sums[0] if len(self.sums) == 1 else self.sums.sum(0)).astype(dtype)
        return y if self.bias is None else y + value_of(self.bias)


class Heads(NamedTuple):
    """Queries, keys and values of new tokens before norms and rotary positions.

    qkv: its sums are [parts, tokens, kv_heads, group + 2, head_dim]: the group's queries, the key, the value; its bias
      has the last three of these dimensions.
    cos, sin: float32 [tokens, head_dim / 2].
    q_norm, k_norm: scales [head_dim] of RMS norms, or None.
    sinks: a logit [kv_heads, group] that joins the softmax of each query head, or None.
    """

    qkv: Parts
    cos: jax.Array
    sin: jax.Array
    q_norm: jax.Array | Row | None = None
    k_norm: jax.Array | Row | None = None
    sinks: jax.Array | Row | None = None
