"""4-bit floats on TPU: float4_e2m1fn codes in VMEM become numbers by arithmetic.

Mosaic loads such codes and takes their bits for int4, but converts none to floats (JAX 0.10.2 and 0.11.2). A code's
bits are sign, exponent e (2) and mantissa m (1). Put at the end of a float32's exponent, with a bias, they are
u = (1 + m / 2) 2^(e - 1), which is its size but where e is 0: there it is m / 2, twice u less 1. As that is more than u
where u is more than 1, the smaller of both is right for all. (The products that `triton_fp4` needs would begin with
numbers that a TPU takes for zero.)

Estimate: 8 operations a weight beside unpacking and packing, of some 4,096 a cycle: about a third of what a v5e's
memory brings (819 GB/s), so steps of few tokens are bound by decoding.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu


def numbers(codes: jax.Array, dtype: Any) -> jax.Array:
    """Codes of any type that kernels read, as `dtype`; exact."""
    if codes.dtype != jnp.float4_e2m1fn:
        return codes.astype(dtype)
    bits = pltpu.bitcast(codes, jnp.int4).astype(jnp.int32)
    size = lax.bitcast_convert_type(((bits & 7) << 22) + (126 << 23), jnp.float32)
    size = jnp.minimum(size, size + size - 1)
    sign = lax.bitcast_convert_type(size, jnp.int32) | (bits & jnp.int32(-(2**31)))
    return lax.bitcast_convert_type(sign, jnp.float32).astype(dtype)
