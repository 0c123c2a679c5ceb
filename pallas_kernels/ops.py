"""Dense operations in plain XLA, and the set of those that a model runs with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp


def matmul(x: jax.Array, w: jax.Array, count: jax.Array | None = None) -> jax.Array:
    """x [tokens, in] times w [out, in], transposed -> float32 [tokens, out].

    `count`, an int32 scalar, says how many leading rows matter; what the others hold is unspecified.
    """
    return jax.lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """x [..., size] over the root of its mean square, times scale [size]; computed in float32.

    Zhang & Sennrich 2019, arXiv:1910.07467.
    """
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return scale * wide.astype(x.dtype)


@dataclass(frozen=True)
class Ops:
    """Implementations with the signatures of the functions above."""

    matmul: Callable[..., jax.Array] = matmul
    rms_norm: Callable[..., jax.Array] = rms_norm
