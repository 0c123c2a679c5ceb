"""Products with quantized weights on CPU in C++ (`cpu_quant_matmul.cc`). Codes become floats in registers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.pallas_kernels import cpu, cpu_build
from jaxserve.pallas_kernels.quant_matmul import reference
from jaxserve.pallas_kernels.registry import Device, MatmulProblem
from jaxserve.pallas_kernels.types import QuantArray


def why_not(device: Device, problem: MatmulProblem) -> str | None:
    """Returns the reason why this backend cannot run the problem, or None where it can."""
    if device.platform != "cpu":
        return "it is for CPUs"
    if problem.x_dtype != jnp.float32:
        return f"it computes in float32, not in {problem.x_dtype}"
    if problem.codes_dtype not in (jnp.int4, jnp.int8, jnp.float8_e4m3fn):
        return f"codes must be int4, int8 or float8_e4m3fn, not {problem.codes_dtype}"
    if problem.codes_dtype == jnp.int4 and problem.inputs % 2:
        return f"the number of inputs must be even with int4 codes, not {problem.inputs}"
    if problem.block[1] < problem.inputs and problem.block[1] % 8:
        return f"groups must be multiples of 8 inputs, not {problem.block[1]}"
    if problem.partitioned:
        return "it runs on one device"
    return None if cpu_build.possible(cpu.QUANT_MATMUL) else "there is no C++ compiler (CXX)"


def quant_matmul(x: jax.Array, w: QuantArray, *, count: jax.Array | None = None) -> jax.Array:
    """x float32 [tokens, in] times the transposed weight [out, in] -> float32 [tokens, out].

    `count`, an int32 scalar, is the number of leading rows of x that matter. Other rows of the result are unspecified.
    """
    if not cpu.available(cpu.QUANT_MATMUL):  # the build failed
        return reference.quant_matmul(x, w)
    return _call("jaxserve_quant_matmul", x, w, jnp.int32(len(x)) if count is None else count)


def grouped_quant_matmul(x: jax.Array, w: QuantArray, group_sizes: jax.Array) -> jax.Array:
    """`reference.grouped_quant_matmul` for float32 x."""
    if not cpu.available(cpu.QUANT_MATMUL):
        return reference.grouped_quant_matmul(x, w, group_sizes)
    return _call("jaxserve_grouped_quant_matmul", x, w, group_sizes.astype(jnp.int32))


def _call(target: str, x: jax.Array, w: QuantArray, rows: jax.Array) -> jax.Array:
    zero = jnp.zeros(0, jnp.int8) if w.zero is None else w.zero
    bias = jnp.zeros(0, w.scale.dtype) if w.bias is None else w.bias
    x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % 8)))
    call = jax.ffi.ffi_call(target, jax.ShapeDtypeStruct((len(x), w.shape[-2]), jnp.float32))
    return call(x, w.codes, w.scale, zero, bias, rows, block=np.int64(w.block[0]), group=np.int64(w.block[1]))
