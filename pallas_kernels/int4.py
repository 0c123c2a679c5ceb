"""int4 numbers of bytes that hold two of them each."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels import cpu


def int4_of_bytes(data: jax.Array) -> jax.Array:
    """uint8 [out, n] -> int4 [out, 2 n] by bitcast: the even column is a byte's low half.

    XLA computes that bit by bit on CPU, for ten times as long as copying takes; there it is a kernel, where there are
    kernels.
    """
    shape = data.shape[0], 2 * data.shape[1]
    if cpu.available(cpu.QUANT_MATMUL):
        return jax.ffi.ffi_call("jaxserve_int4_of_bytes", jax.ShapeDtypeStruct(shape, jnp.int4))(data)
    return jax.lax.bitcast_convert_type(data, jnp.int4).reshape(shape)
