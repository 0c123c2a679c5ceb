"""Matrix multiplication in plain XLA: what every other implementation must equal."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def matmul(x: jax.Array, w: jax.Array, count: jax.Array | None = None) -> jax.Array:
    """x [tokens, in] times w [out, in], transposed -> float32 [tokens, out]. Only the first `count` rows matter."""
    return jax.lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
