"""The random numbers by which tokens are drawn: one for each token, a function of its row's keys and its id alone.

A row draws the token with the largest sum of scaled logit and Gumbel noise (the Gumbel-max trick). So its token
depends on no sum over the vocabulary, and rows with similar distributions and the same keys draw the same token often,
as drafts of speculation need (Daliri, Musco and Suresh 2024, arXiv:2408.07978).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

SPREAD = np.uint32(0x9E3779B9)  # 2^32 by the golden ratio: neighbouring ids become far apart
MIX = np.uint32(0x7FEB352D), np.uint32(0x846CA68B)
SMALL = 1 / 64  # below it the logarithm is a series: float32 has no 1 - x that is precise enough
LARGEST = np.float32(1 - 2**-24)


def noise_bits(keys: Any, ids: Any) -> Any:
    """Random bits, uint32 [rows, n], of keys, uint32 [rows, 2], and ids, uint32 [n]; for arrays of NumPy and JAX."""
    return _mix(_mix(ids * SPREAD + keys[:, :1]) ^ keys[:, 1:])


def _mix(x: Any) -> Any:
    """Each bit of the result depends on all of x (Wellons 2018, "Prospecting for hash functions")."""
    x = (x ^ x >> 16) * MIX[0]
    x = (x ^ x >> 15) * MIX[1]
    return x ^ x >> 16


def gumbel(bits: jax.Array) -> jax.Array:
    """Standard Gumbel noise in float32 of random bits. It is finest where it is largest: up to 22.9, in steps of the
    exponentially distributed number of 2^-32."""
    x = jnp.minimum(bits.astype(jnp.float32) * np.float32(2**-32) + np.float32(2**-33), LARGEST)
    return -jnp.log(jnp.where(x < SMALL, x * (1 + x * (1 / 2 + x * (1 / 3 + x / 4))), -jnp.log(1 - x)))
