"""Converts a block of a weight's codes to numbers in VMEM, for the TPU's matmul.

int8, int4   Mosaic's own conversions. For 1,024 codes v5e's compiler packs 2.7 and 3.1 operations of the vector unit.
             v6e's packs 0.6 and 0.9, since it converts directly to bfloat16.
e4m3fn       Neither chip computes with fp8, but both unpack e4m3b11fnuz, another type of 8 bits. In it the same bits
             mean a sixteenth of the number, also for subnormal numbers. Two codes differ: that of -0 means NaN, and
             those of NaN mean numbers. So -0 is replaced by 0, four codes at a time in a word, and scales are
             multiplied by 16. NaN in a weight becomes 480. This takes 2.6 operations for 1,024 codes on both chips;
             Mosaic's own conversion, which keeps NaN, takes 7.9.
e2m1fn       Mosaic loads such codes, and reads their bits as int4, but does not convert them to floats (JAX 0.10.2 and
             0.11.2). A code's bits are sign, exponent e (2 bits) and mantissa m (1 bit). Moved to the end of a
             float32's exponent, with a bias, they are u = (1 + m / 2) 2^(e - 1). This is the magnitude, except where
             e is 0: there the magnitude is m / 2 = 2 u - 1. 2 u - 1 is larger than u where u is larger than 1, so the
             smaller of both is always right. Estimate: 8 operations a weight besides unpacking and packing, at about
             4,096 a cycle. That is about a third of the rate at which a v5e's memory (819 GB/s) delivers codes, so
             decoding limits steps of few tokens.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

E4M3_FACTOR = 16.0  # e4m3fn over e4m3b11fnuz, whose exponent has a bias of 11, not 7
WORDS = 32  # rows of a tile whose 8-bit codes form whole words


def factor(codes_dtype: Any) -> float:
    """The factor by which the results of `numbers` must be multiplied."""
    return E4M3_FACTOR if codes_dtype == jnp.float8_e4m3fn else 1.0


def numbers(codes: jax.Array, dtype: Any) -> jax.Array:
    """Returns codes [outs, inputs] divided by `factor`, exact in dtype, which is bfloat16 or float32."""
    if codes.dtype == jnp.float4_e2m1fn:
        return _of_fp4(codes).astype(dtype)
    if codes.dtype != jnp.float8_e4m3fn:
        return codes.astype(dtype)
    if codes.shape[0] % WORDS:  # not whole tiles, which cannot be viewed as words
        return (codes.astype(jnp.float32) / E4M3_FACTOR).astype(dtype)
    words = pltpu.bitcast(codes, jnp.int32)
    magnitude = jnp.int32(0x7F7F7F7F)
    # The highest bit of each byte of the sum says that the magnitude is not 0. Only there is the sign kept.
    words &= ((words & magnitude) + magnitude) | magnitude
    return pltpu.bitcast(words, jnp.float8_e4m3b11fnuz).astype(jnp.float32).astype(dtype)


def _of_fp4(codes: jax.Array) -> jax.Array:
    bits = pltpu.bitcast(codes, jnp.int4).astype(jnp.int32)
    size = lax.bitcast_convert_type(((bits & 7) << 22) + (126 << 23), jnp.float32)
    size = jnp.minimum(size, size + size - 1)
    sign = lax.bitcast_convert_type(size, jnp.int32) | (bits & jnp.int32(-(2**31)))
    return lax.bitcast_convert_type(sign, jnp.float32)
