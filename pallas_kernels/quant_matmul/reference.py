"""Products with quantized weights in plain XLA: the oracle of the kernels, and the fallback without one.

XLA writes the operands of a dot to memory. So a weight is dequantized in blocks of rows of at most BLOCK_BYTES, and the
whole weight is never dequantized at once. Where a row has one scale, the codes are converted to the dtype of x, which
holds every code exactly, and the scale multiplies the product.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.pallas_kernels.quant_matmul import blocks
from jaxserve.pallas_kernels.quant_matmul.fragments import in_order
from jaxserve.pallas_kernels.registry import Device, MatmulProblem
from jaxserve.pallas_kernels.types import BlockArray, QuantArray

BLOCK_BYTES = 16 << 20  # of dequantized rows at a time, in float32


def why_not(device: Device, problem: MatmulProblem) -> str | None:
    return None


def expand(values: jax.Array, block: tuple[int, int], shape: tuple[int, ...]) -> jax.Array:
    """Repeats values per block [..., ceil(out / rows), ceil(in / inputs)] to one per weight, float32 [..., out, in]."""
    values = values.astype(jnp.float32)
    for axis, size in ((-2, block[0]), (-1, block[1])):
        repeated = values if values.shape[axis] == shape[axis] else jnp.repeat(values, size, axis)
        values = lax.slice_in_dim(repeated, 0, shape[axis], axis=axis)
    return values


def per_row(w: QuantArray) -> QuantArray:
    """Returns an equal weight with blocks of one row."""

    def spread(values):
        return None if values is None else jnp.repeat(values, w.block[0], -2)[..., : w.shape[-2], :]

    return replace(w, scale=spread(w.scale), zero=spread(w.zero), bias=spread(w.bias), block=(1, w.block[1]))


def dequantize(w: QuantArray | BlockArray) -> jax.Array:
    """Returns the weight [..., out, in] in float32."""
    if isinstance(w, BlockArray):
        return blocks.dequantize(w)
    w = in_order(w)
    codes = w.codes.astype(jnp.float32)
    if w.zero is not None:
        codes = codes - expand(w.zero, w.block, w.shape)
    values = codes * expand(w.scale, w.block, w.shape)
    if w.bias is not None:
        values = values + expand(w.bias, w.block, w.shape)
    return values if w.gain is None else values * w.gain


def quant_matmul(x: jax.Array, w: QuantArray | BlockArray, *, count: jax.Array | None = None) -> jax.Array:
    """x [tokens, in] times the transposed weight [out, in] -> float32 [tokens, out]. `count` is ignored."""
    out, inputs = w.shape
    step = max(BLOCK_BYTES // (4 * inputs), 1)
    if step >= out:
        return _product(x, w)
    if step < w.block[0] and isinstance(w, QuantArray):
        w = per_row(w)
    step = step // w.block[0] * w.block[0]
    whole = out // step

    def block(i):
        return _product(x, _rows(w, i * step, step))

    y = lax.map(block, jnp.arange(whole)).transpose(1, 0, 2).reshape(len(x), whole * step)
    if whole * step == out:
        return y
    return jnp.concatenate([y, _product(x, _rows(w, whole * step, out - whole * step))], axis=1)


def grouped_quant_matmul(x: jax.Array, w: QuantArray | BlockArray, group_sizes: jax.Array) -> jax.Array:
    """Multiplies each expert's tokens by the expert's weight. Weights are dequantized one at a time.

    Args:
      x: [tokens, in], sorted by expert.
      w: [experts, out, in]; all its arrays have the leading dimension of experts.
      group_sizes: int32 [experts], tokens of each expert. Tokens beyond their sum belong to no expert.

    Returns:
      float32 [tokens, out], zero for tokens without an expert.
    """
    last = jnp.cumsum(group_sizes)
    token = jnp.arange(len(x))

    def expert(y, of_expert):
        weight, end, size = of_expert
        mine = (token >= end - size) & (token < end)
        return lax.cond(size > 0, lambda: jnp.where(mine[:, None], quant_matmul(x, weight), y), lambda: y), None

    start = jnp.zeros((len(x), w.shape[-2]), jnp.float32)
    return lax.scan(expert, start, (w, last, group_sizes))[0]


def _rows(w: QuantArray | BlockArray, start: jax.Array | int, size: int) -> QuantArray | BlockArray:
    """Returns rows [start, start + size). `start` must be the first row of a block."""
    if isinstance(w, BlockArray):
        return jax.tree.map(lambda field: lax.dynamic_slice_in_dim(field, start, size), w)
    first = start // w.block[0]
    blocks = -(-size // w.block[0])

    def cut(values):
        return None if values is None else lax.dynamic_slice_in_dim(values, first, blocks)

    codes, gain = (
        None if values is None else lax.dynamic_slice_in_dim(values, start, size) for values in (w.codes, w.gain)
    )
    return replace(w, codes=codes, scale=cut(w.scale), zero=cut(w.zero), bias=cut(w.bias), gain=gain)


def _product(x: jax.Array, w: QuantArray | BlockArray) -> jax.Array:
    if (
        isinstance(w, BlockArray)
        or w.block[1] < w.shape[1]
        or not (w.zero is None and w.bias is None and w.gain is None)
    ):
        return _dot(x.astype(jnp.float32), dequantize(w))
    return _dot(x, in_order(w).codes.astype(x.dtype)) * expand(w.scale, w.block, (w.shape[0], 1)).T


def _dot(x: jax.Array, w: jax.Array) -> jax.Array:
    contract_last = (((1,), (1,)), ((), ()))
    return lax.dot_general(x, w, contract_last, lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
