"""How a block of a weight's codes becomes numbers in VMEM, for the TPU's matmul. Each type of codes has its place here.

int8, int4   Mosaic's own conversions: v5e's compiler packs 2.7 and 3.1 operations of the vector unit for 1,024 codes,
             v6e's 0.6 and 0.9, since it converts to bfloat16 directly.
e4m3fn       neither chip computes with fp8, but both unpack another type of 8 bits, e4m3b11fnuz: the same bits mean a
             sixteenth of the number, denormal ones too, except that the code of -0 means NaN and those of NaN mean
             numbers. So -0 becomes 0, for four codes at a time in a word, and scales are multiplied by 16. Mosaic's own
             conversion, which keeps NaN, takes 7.9 operations for 1,024 codes, and this one 2.6, on both chips. NaN in
             a weight becomes 480.
e2m1fn       Mosaic loads such codes and takes their bits for int4, but converts none to floats (JAX 0.10.2 and 0.11.2).
             A code's bits are sign, exponent e (2) and mantissa m (1). Put at the end of a float32's exponent, with a
             bias, they are u = (1 + m / 2) 2^(e - 1), which is its size but where e is 0: there it is m / 2, twice u
             less 1. As that is more than u where u is more than 1, the smaller of both is right for all. Estimate: 8
             operations a weight beside unpacking and packing, of some 4,096 a cycle: about a third of what a v5e's
             memory brings (819 GB/s), so steps of few tokens are bound by decoding.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

E4M3_FACTOR = 16.0  # of e4m3fn over e4m3b11fnuz, whose exponent has a bias of 11, not 7
WORDS = 32  # codes of 8 bits in the rows of a tile


def factor(codes_dtype: Any) -> float:
    """What the results of `numbers` are still to be multiplied with."""
    return E4M3_FACTOR if codes_dtype == jnp.float8_e4m3fn else 1.0


def numbers(codes: jax.Array, dtype: Any) -> jax.Array:
    """codes [outs, inputs] over `factor`, exact in dtype, bfloat16 or float32."""
    if codes.dtype == jnp.float4_e2m1fn:
        return _of_fp4(codes).astype(dtype)
    if codes.dtype != jnp.float8_e4m3fn:
        return codes.astype(dtype)
    if codes.shape[0] % WORDS:  # not whole tiles, of which words cannot be made
        return (codes.astype(jnp.float32) / E4M3_FACTOR).astype(dtype)
    words, magnitude = pltpu.bitcast(codes, jnp.int32), jnp.int32(0x7F7F7F7F)
    # The sum's highest bit of each byte says that the magnitude is not 0; the sign stays only there.
    words &= ((words & magnitude) + magnitude) | magnitude
    return pltpu.bitcast(words, jnp.float8_e4m3b11fnuz).astype(jnp.float32).astype(dtype)


def _of_fp4(codes: jax.Array) -> jax.Array:
    bits = pltpu.bitcast(codes, jnp.int4).astype(jnp.int32)
    size = lax.bitcast_convert_type(((bits & 7) << 22) + (126 << 23), jnp.float32)
    size = jnp.minimum(size, size + size - 1)
    sign = lax.bitcast_convert_type(size, jnp.int32) | (bits & jnp.int32(-(2**31)))
    return lax.bitcast_convert_type(sign, jnp.float32)
