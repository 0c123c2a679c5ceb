"""Products of 8-bit weights with inputs that are rounded to 8 bits (`Activations`), on the matrix unit's 8-bit types.

  int8 x int8 -> int32, exact; float8_e4m3fn x float8_e4m3fn -> float32. The scales of token and output multiply sums.
  With blocks of inputs (DeepSeek's 128), each block's sum is multiplied by its scales, and these are added in float32.

Without blocks a product is one `dot_general`. In programs compiled for an H200 it becomes a Triton gemm for int8, which
reads the 8-bit operands directly and applies the scales to its result, and a call of cuBLASLt for float8. For v5e and
v6e, with int8, it becomes one convolution s8 x s8 -> s32. GPUs use the kernel of `w8a8_triton` with blocks, and where
another kernel has rounded the inputs. Devices without such products (`why_not`) multiply weights with inputs that are
not rounded. If a user insists, inputs are rounded and converted back to floats (`emulated`).

Exactness of float8: Hopper's matrix unit keeps about 14 bits of a sum (DeepSeek-V3, arXiv:2412.19437). Sums of 14,336
normally distributed products are then off by 0.003 of their size, of numbers of one sign by 0.2. Kernels that promote,
that is add sums of 128 products in float32, are off by 0.0001 and 0.0006. The check at start allows 0.0059 with
bfloat16 (`selfcheck.MATMUL_TOLERANCE`). XLA's own Triton gemm never promotes, whatever the precision (by XLA's
source). cuBLASLt promotes unless it may accumulate fast, which XLA allows by default. The algorithm ANY_F8_ANY_F8_F32
excludes both. An H200 found what this predicts, to five digits (`tests/kernels/test_w8a8.py`), in products of XLA that
did not promote and in `w8a8_triton`, which does.

A token's codes depend only on that token, not on the number of rows. So does its product, up to the order of the sums.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.pallas_kernels.quant_matmul import reference
from jaxserve.pallas_kernels.registry import Device, MatmulProblem
from jaxserve.pallas_kernels.types import Activations, QuantArray, QuantRows

TOPS = {"int8": 127.0, "float8_e4m3fn": 448.0}  # largest code of each type
CONTRACT = (((1,), (1,)), ((), ()))
PROMOTED = lax.DotAlgorithmPreset.ANY_F8_ANY_F8_F32
TINY = 1e-30  # a token (or group) whose largest magnitude is smaller counts as zero
BLOCKS = (32, 64, 128, 256)  # numbers of inputs that may share a scale in `w8a8_triton`


def unreadable(w: QuantArray) -> str | None:
    """Returns why no device can round the inputs of this weight's products as it says. None: some device can, or the
    weight does not ask for it."""
    wanted = w.activations
    if wanted is None:
        return None
    codes = jnp.dtype(w.codes.dtype).name
    if codes != wanted.dtype:
        return f"weights are {codes}"
    if w.zero is not None or w.bias is not None or w.order is not None:
        return "weights have zero points, biases or an order of columns"
    grouped = w.block[1] < w.shape[1]
    if grouped != (wanted.group is not None) or (grouped and w.block[1] != wanted.group):
        inputs = "all inputs" if wanted.group is None else f"{wanted.group} inputs"
        return f"activations share a scale over {inputs}, weights over {w.block[1]}"
    return None


def why_not(device: Device, problem: MatmulProblem) -> str | None:
    """Returns why a device has no products of this kind, or None where it has."""
    wanted = problem.activations
    if wanted is None:
        return "activations are not to be rounded"
    if device.platform == "gpu":
        least = (8, 0) if wanted.dtype == "int8" else (8, 9)
        if (device.capability or (0, 0)) < least:
            return f"{wanted} needs compute capability {least[0]}.{least[1]} or newer, not {device.capability}"
        if wanted.group is not None and wanted.group not in BLOCKS:
            return f"groups of activations must be one of {BLOCKS}, not {wanted.group}"
        if wanted.group is not None and importlib.util.find_spec("jax_triton") is None:
            return "jax_triton is not installed, which blocks need"
        return None
    if device.platform == "tpu":
        if wanted.dtype != "int8":
            return "this TPU's matrix unit has int8, but no float8"
        return None if wanted.group is None else "there is no kernel for blocks on TPUs"
    instead = "; inputs of panels are rounded to int8 in blocks of 32" if wanted.dtype == "int8" else ""
    return f"there are no products of {wanted} on CPUs{instead}"


def native(device: Device, x_dtype: jnp.dtype, w: QuantArray) -> str | None:
    """Returns why a device cannot follow `w.activations` natively, or None where it can."""
    return unreadable(w) or why_not(device, MatmulProblem.of(jax.ShapeDtypeStruct((1, 1), x_dtype), w))


def ignored(w: QuantArray) -> QuantArray:
    """Returns an equal weight whose products do not round their inputs."""
    return replace(w, activations=None, input_scale=None)


def scales(x: jax.Array, wanted: Activations) -> jax.Array:
    """Dynamic scales of x [tokens, in], float32 [tokens, groups]. They are infinite where x is not finite, so that the
    product shows it."""
    tokens, inputs = x.shape
    group = wanted.group or inputs
    size = jnp.abs(x.astype(jnp.float32))
    size = jnp.where(jnp.isnan(size), jnp.inf, size)
    size = jnp.pad(size, ((0, 0), (0, -inputs % group))).reshape(tokens, -1, group).max(-1)
    if wanted.ceiling is not None:
        size = jnp.where(jnp.isinf(size), size, jnp.minimum(size, wanted.ceiling))
    return jnp.where(size > TINY, size * (1.0 / TOPS[wanted.dtype]), 1.0)


def quantize(x: jax.Array, w: QuantArray) -> QuantRows:
    """Rounds x [tokens, in] as `w.activations` says. Codes are rounded to even and saturated."""
    wanted = w.activations
    assert wanted is not None
    scale = w.input_scale if wanted.static else scales(x, wanted)
    return QuantRows(codes(x, scale, wanted), scale, x.dtype)


def codes(x: jax.Array, scale: jax.Array, wanted: Activations) -> jax.Array:
    """Divides x by its scales and rounds to even."""
    top = TOPS[wanted.dtype]
    spread = scale if wanted.group is None else jnp.repeat(scale, wanted.group, 1)[:, : x.shape[1]]
    values = jnp.clip(x.astype(jnp.float32) / spread, -top, top)
    if wanted.dtype == "int8":  # casting NaN would be undefined; its scale is infinite, which is enough
        return jnp.where(jnp.isnan(values), 0.0, jnp.round(values)).astype(jnp.int8)
    return values.astype(jnp.float8_e4m3fn)


def dequantize(rows: QuantRows, group: int | None = None) -> jax.Array:
    """Returns the values of rounded inputs, float32 [tokens, in]. group: inputs that share a scale; None: the scales
    divide the inputs evenly."""
    inputs = rows.shape[1]
    values = _rounded(rows.codes).astype(jnp.float32)
    groups = rows.scale.shape[1]
    if groups == 1:
        return values * rows.scale
    return values * jnp.repeat(rows.scale, group or inputs // groups, 1)[:, :inputs]


def quant_matmul(rows: QuantRows, w: QuantArray) -> jax.Array:
    """Rounded inputs [tokens, in] times the transposed weight [out, in] -> float32 [tokens, out]."""
    if w.activations is not None and w.activations.group is not None:
        from jaxserve.pallas_kernels.quant_matmul import w8a8_triton

        return w8a8_triton.quant_matmul(rows, w)
    sums = _integers(rows.codes, w.codes) if rows.codes.dtype == jnp.int8 else _floats(rows.codes, w.codes)
    # With this order of factors XLA:GPU applies both scales within its gemm.
    return sums.astype(jnp.float32) * rows.scale * reference.expand(w.scale, w.block, (w.shape[0], 1)).T


def _integers(x: jax.Array, w: jax.Array) -> jax.Array:
    return lax.dot_general(x, w, CONTRACT, preferred_element_type=jnp.int32)


def _floats(x: jax.Array, w: jax.Array) -> jax.Array:
    """Products of float8, with sums that are promoted. `PROMOTED` exists only on NVIDIA GPUs, and there XLA refuses it
    for one token. With the highest precision it multiplies one token in float32, without the matrix unit."""
    plainly = partial(lax.dot_general, dimension_numbers=CONTRACT, preferred_element_type=jnp.float32)
    precision = PROMOTED if len(x) > 1 else lax.Precision.HIGHEST
    return lax.platform_dependent(x, w, cuda=partial(plainly, precision=precision), default=plainly)


def _rounded(codes: jax.Array) -> jax.Array:
    """The codes, for conversion to wider floats. Without the barrier XLA:GPU removes a conversion to float8 and back,
    and inputs are not rounded."""
    return lax.optimization_barrier(codes)


def quant_matmul_parts(rows: QuantRows, w: QuantArray) -> jax.Array:
    """The product on GPUs as `operands.Partials.sums`: float32 for each split, or one in the dtype of x."""
    from jaxserve.pallas_kernels.quant_matmul import w8a8_triton

    return w8a8_triton.quant_matmul_parts(rows, w)


def emulated(rows: QuantRows, w: QuantArray, multiply: Callable[[jax.Array, QuantArray], jax.Array]) -> jax.Array:
    """The product on devices without 8-bit products, equal up to the rounding of float32 sums. `multiply` takes float
    inputs. 16-bit floats hold all codes exactly, but not all values, so with blocks the product is plain XLA."""
    if rows.scale.shape[1] == 1:
        return multiply(_rounded(rows.codes).astype(rows.dtype), ignored(w)) * rows.scale
    return reference.quant_matmul(dequantize(rows, w.block[1]), ignored(w))
