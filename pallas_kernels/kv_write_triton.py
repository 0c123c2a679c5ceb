"""Writes new keys and values on NVIDIA GPUs, in Triton. Compiled for H200, not yet run on one.

Grid: (tokens,). A program reads a token's keys and values, quantizes them, and writes them to their slot.
Traffic: the new keys and values, read once and written once; nothing else of the cache.
Pipeline: none within a program, which does two loads and two stores. Many programs hide each other's latency.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from jaxserve.pallas_kernels import triton_compat
from jaxserve.pallas_kernels.triton_compat import pad
from jaxserve.pallas_kernels.types import KVPages

QUANTIZED = {"int8": 127, "float8_e4m3fn": 448}  # largest code of each type


@triton.jit
def codes(values, TOP: tl.constexpr):
    """Values of at most TOP, plus a rounding error, as codes. Where TOP is int8's they are rounded to even."""
    values = tl.minimum(tl.maximum(values, -TOP), TOP)
    if TOP == 127:
        values = (values + 12582912.0) - 12582912.0  # 1.5 * 2 ** 23: float32 has no fraction bits there
    return values


@triton.jit
def _quantized(new, TOP: tl.constexpr):
    """Values [heads, head_dim] as codes, the largest of which is TOP, and their scales."""
    amax = tl.max(tl.abs(new), 1)
    scale = tl.where(amax > 1e-30, amax / TOP, 1.0)  # as `kv_write.TINY`
    return codes(new / scale[:, None], TOP), scale


@triton.jit
def _write(
    k, v, slots, first_page, before, scales_before, data, scales,
    HAS_SCALES: tl.constexpr, TOP: tl.constexpr, HEADS: tl.constexpr, PAGE: tl.constexpr, DIM: tl.constexpr,
    HEADS_PAD: tl.constexpr, DIM_PAD: tl.constexpr,
):  # fmt: skip
    """`data` and `scales` alias `before` and `scales_before`. Slots count from the page `first_page`."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    heads = tl.where(slot >= 0, HEADS, 0)  # none for padding
    slot = tl.maximum(slot, 0)
    head = tl.arange(0, HEADS_PAD)
    dim = tl.arange(0, DIM_PAD)
    real = (head < heads)[:, None] & (dim < DIM)[None, :]
    at = token * HEADS * DIM + head[:, None] * DIM + dim[None, :]
    to = ((slot // PAGE + tl.load(first_page)) * (2 * HEADS) + head) * PAGE + slot % PAGE
    for side in tl.static_range(2):
        new = tl.load((v if side else k) + at, mask=real, other=0.0).to(tl.float32)
        place = to + side * HEADS * PAGE
        if HAS_SCALES:
            new, scale = _quantized(new, TOP)
            tl.store(scales + place, scale, mask=head < heads)
        elif TOP > 0:
            new = tl.minimum(tl.maximum(new, -TOP), TOP)
        tl.store(data + place[:, None] * DIM + dim[None, :], new.to(data.dtype.element_ty), mask=real)


@jax.jit
def write_kv(pages: KVPages, k: jax.Array, v: jax.Array, slots: jax.Array, first_page: jax.Array | int = 0) -> KVPages:
    """`kv_write.write_kv` in place. Padding is not written."""
    first_page = jnp.asarray(first_page, jnp.int32).reshape(1)
    tokens, heads, dim = k.shape
    scales = pages.scale
    arrays = [pages.data] if scales is None else [pages.data, scales]
    # Without scales, placeholders replace them: the data as an input, and an output that nothing reads.
    extra = (
        jax.ShapeDtypeStruct((1,), jnp.float32) if scales is None else jax.ShapeDtypeStruct(scales.shape, scales.dtype)
    )
    data, new_scales = triton_compat.call(
        _write, k, v, slots, first_page, pages.data, slots if scales is None else scales,
        out=[jax.ShapeDtypeStruct(pages.data.shape, pages.data.dtype), extra], grid=(tokens,),
        aliases={4 + i: i for i in range(len(arrays))}, num_warps=4,
        HAS_SCALES=scales is not None, TOP=QUANTIZED.get(pages.data.dtype.name, 0), HEADS=heads, PAGE=pages.page_size,
        DIM=dim, HEADS_PAD=pad(heads), DIM_PAD=pad(dim),
    )  # fmt: skip
    return KVPages(data, None if scales is None else new_scales)
