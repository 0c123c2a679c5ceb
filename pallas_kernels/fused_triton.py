"""What lies between a decoder layer's products, in one launch each, for NVIDIA GPUs, in Triton. Compiled for H200, not
yet run on.

Products come as `Parts`: the kernels add up what a product's splits left, so that no launch is spent on that. All
compute in float32 and round where the plain operations round.

  add_norm   one program a token: the residual stream plus a layer's result, and its RMS norm. Reads and writes each
             number once; a token's numbers stay in registers between the two passes over them.
  gate       programs of 1,024 outputs of a token: activation(gate) * up, whose inputs lie in pairs.
  rotate_and_write   one program for each new token and KV head: bias, norms and rotary positions of its queries and its
             key, which then goes into its page, as does the value, as codes with a scale where the pages have scales.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from pallas_kernels import triton_compat
from pallas_kernels.kv_write_triton import QUANTIZED, codes
from pallas_kernels.parts import Heads, Parts, Row, value_of
from pallas_kernels.registry import Device
from pallas_kernels.triton_compat import pad
from pallas_kernels.types import KVPages

FLOATS = ("bfloat16", "float16", "float32")
ACTIVATIONS = ("silu", "gelu", "gelu_tanh")
GATE_BLOCK = 1024  # outputs of a program of `gate`
TILE = 128  # tokens and outputs of a program of a matmul, and the least inputs, that `product` reckons with


def why_not(device: Device, dtype: Any) -> str | None:
    """The reason why a model of activations `dtype` cannot use these kernels, or None."""
    if device.platform != "gpu" or (device.capability or (0, 0)) < (8, 0):
        return "they are for NVIDIA GPUs of compute capability 8.0 or newer"
    return None if jnp.dtype(dtype).name in FLOATS else f"activations must be one of {', '.join(FLOATS)}, not {dtype}"


@triton.jit
def _added(sums, at, real, STRIDE: tl.constexpr, PARTS: tl.constexpr, dtype: tl.constexpr):
    """The sum of parts that lie STRIDE apart, rounded to `dtype`, in float32."""
    total = tl.load(sums + at, mask=real, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        total += tl.load(sums + (at + tl.full([], part, tl.int64) * STRIDE), mask=real, other=0.0).to(tl.float32)
    return total.to(dtype).to(tl.float32)


@triton.jit
def _add_norm(
    x, sums, bias, bias_row, scale, scale_row, total, normed,
    TOKENS: tl.constexpr, SIZE: tl.constexpr, PARTS: tl.constexpr, HAS_BIAS: tl.constexpr, EPS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """PARTS 0: nothing is added, and `total` is not written."""
    dtype: tl.constexpr = x.dtype.element_ty
    column = tl.arange(0, BLOCK)
    real = column < SIZE
    at = tl.program_id(0).to(tl.int64) * SIZE + column
    value = tl.load(x + at, mask=real, other=0.0).to(tl.float32)
    if PARTS:
        added = _added(sums, at, real, TOKENS * SIZE, PARTS, dtype)
        if HAS_BIAS:
            shift = tl.load(bias + tl.load(bias_row).to(tl.int64) * SIZE + column, mask=real, other=0.0).to(tl.float32)
            added = (added + shift).to(dtype).to(tl.float32)
        value = (value + added).to(dtype).to(tl.float32)
        tl.store(total + at, value.to(dtype), mask=real)
    unit = value * tl.rsqrt(tl.sum(value * value, 0) / SIZE + EPS)
    factor = tl.load(scale + tl.load(scale_row).to(tl.int64) * SIZE + column, mask=real, other=0.0).to(tl.float32)
    tl.store(normed + at, (factor * unit.to(dtype).to(tl.float32)).to(dtype), mask=real)


@triton.jit
def _activated(value, ACTIVATION: tl.constexpr):
    if ACTIVATION == "silu":
        return value * tl.sigmoid(value)
    if ACTIVATION == "gelu":
        return 0.5 * value * (1.0 + tl.erf(value * 0.7071067811865476))
    # tanh(a) = 2 sigmoid(2 a) - 1
    return value * tl.sigmoid(1.5957691216057308 * (value + 0.044715 * value * value * value))


@triton.jit
def _gate(
    sums, bias, out,
    TOKENS: tl.constexpr, SIZE: tl.constexpr, PARTS: tl.constexpr, HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = out.dtype.element_ty
    token, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK
    column = 2 * first + tl.arange(0, 2 * BLOCK)
    real = column < 2 * SIZE
    both = _added(sums, token * 2 * SIZE + column, real, 2 * TOKENS * SIZE, PARTS, dtype)
    if HAS_BIAS:
        both = (both + tl.load(bias + column, mask=real, other=0.0).to(tl.float32)).to(dtype).to(tl.float32)
    gate, up = tl.split(tl.reshape(both, [BLOCK, 2]))
    output = first + tl.arange(0, BLOCK)
    activated = _activated(gate, ACTIVATION).to(dtype).to(tl.float32)
    tl.store(out + token * SIZE + output, (activated * up).to(dtype), mask=output < SIZE)


@triton.jit
def _half_norms(scales, row, is_it, half, at, DIM: tl.constexpr):
    """A half of a norm's scale [head_dim / 2], in the rows where `is_it`, else 0."""
    start = tl.load(row).to(tl.int64) * DIM
    factor = tl.load(scales + start + at, mask=half, other=0.0).to(tl.float32)
    return tl.where(is_it[:, None], factor[None, :], 0.0)


@triton.jit
def _rotate_and_write(
    sums, bias, cos, sin, q_norm, q_row, k_norm, k_row, slots, first_page, before, scales_before, q, data, scales,
    TOKENS: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
    PARTS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_NORM: tl.constexpr, EPS: tl.constexpr,
    HAS_SCALES: tl.constexpr, TOP: tl.constexpr, ROWS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """`data` and `scales` are the memory of `before` and `scales_before`. A program holds rows of a head's queries, its
    key and its value, in halves that the rotation pairs: [ROWS, HALF] each, of which GROUP + 2 and DIM / 2 are real."""
    dtype: tl.constexpr = q.dtype.element_ty
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, column = tl.arange(0, ROWS), tl.arange(0, HALF)
    half = column < DIM // 2
    real = (row < GROUP + 2)[:, None] & half[None, :]
    within = row[:, None] * DIM + column[None, :]
    at = (token * HEADS + head) * ((GROUP + 2) * DIM) + within
    left = _added(sums, at, real, TOKENS * HEADS * (GROUP + 2) * DIM, PARTS, dtype)
    right = _added(sums, at + DIM // 2, real, TOKENS * HEADS * (GROUP + 2) * DIM, PARTS, dtype)
    if HAS_BIAS:
        of_bias = bias + head * ((GROUP + 2) * DIM) + within
        left = (left + tl.load(of_bias, mask=real, other=0.0).to(tl.float32)).to(dtype).to(tl.float32)
        right = (right + tl.load(of_bias + DIM // 2, mask=real, other=0.0).to(tl.float32)).to(dtype).to(tl.float32)
    if HAS_NORM:
        is_q, is_k = row < GROUP, row == GROUP
        unit = tl.rsqrt((tl.sum(left * left, 1) + tl.sum(right * right, 1)) / DIM + EPS)[:, None]
        of_left = _half_norms(q_norm, q_row, is_q, half, column, DIM)
        of_left += _half_norms(k_norm, k_row, is_k, half, column, DIM)
        of_right = _half_norms(q_norm, q_row, is_q, half, column + DIM // 2, DIM)
        of_right += _half_norms(k_norm, k_row, is_k, half, column + DIM // 2, DIM)
        normed = (row <= GROUP)[:, None]
        left = tl.where(normed, (of_left * (left * unit).to(dtype).to(tl.float32)).to(dtype).to(tl.float32), left)
        right = tl.where(normed, (of_right * (right * unit).to(dtype).to(tl.float32)).to(dtype).to(tl.float32), right)
    angle = token * (DIM // 2) + column
    turned = (row <= GROUP)[:, None]
    c = tl.where(turned, tl.load(cos + angle, mask=half, other=1.0)[None, :], 1.0)
    s = tl.where(turned, tl.load(sin + angle, mask=half, other=0.0)[None, :], 0.0)
    new_left = (left * c - right * s).to(dtype)
    new_right = (right * c + left * s).to(dtype)

    queries = real & (row < GROUP)[:, None]
    to = (token * HEADS + head) * (GROUP * DIM) + within
    tl.store(q + to, new_left, mask=queries)
    tl.store(q + to + DIM // 2, new_right, mask=queries)

    slot = tl.load(slots + token).to(tl.int64)
    kept = (row >= GROUP) & (row < tl.where(slot >= 0, GROUP + 2, GROUP))  # padding writes nothing
    slot = tl.maximum(slot, 0)
    page = slot // PAGE + tl.load(first_page).to(tl.int64)
    place = ((page * 2 + tl.maximum(row - GROUP, 0)) * HEADS + head) * PAGE + slot % PAGE
    left, right = new_left.to(tl.float32), new_right.to(tl.float32)
    if HAS_SCALES:
        peak = tl.maximum(tl.max(tl.abs(left), 1), tl.max(tl.abs(right), 1))
        scale = tl.where(peak > 0, peak / TOP, 1.0)
        left, right = codes(left / scale[:, None], TOP), codes(right / scale[:, None], TOP)
        tl.store(scales + place, scale, mask=kept)
    elif TOP > 0:
        left, right = codes(left, TOP), codes(right, TOP)
    kept = kept[:, None] & half[None, :]
    into = data + place[:, None] * DIM + column[None, :]
    tl.store(into, left.to(data.dtype.element_ty), mask=kept)
    tl.store(into + DIM // 2, right.to(data.dtype.element_ty), mask=kept)


def _row(vector: jax.Array | Row) -> tuple[jax.Array, jax.Array]:
    """An array of vectors, and which of them, int32 scalar."""
    return (vector.array, vector.place) if isinstance(vector, Row) else (vector, jnp.int32(0))


def _like(shape: Sequence[int], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(tuple(shape), dtype)


def add_norm(x: jax.Array, y: Parts | None, scale: jax.Array | Row, eps: float) -> tuple[jax.Array, jax.Array]:
    """As `Ops.add_norm`, for x [tokens, size]."""
    (tokens, size), (scales, scale_row) = x.shape, _row(scale)
    bias, bias_row = (scales, scale_row) if y is None or y.bias is None else _row(y.bias)
    total, normed = triton_compat.call(
        _add_norm, x, x if y is None else y.sums, bias, bias_row, scales, scale_row,
        out=[_like((1,) if y is None else x.shape, x.dtype), _like(x.shape, x.dtype)],
        grid=(tokens,), num_warps=4 if size <= 2048 else 8,
        TOKENS=tokens, SIZE=size, PARTS=0 if y is None else len(y.sums), HAS_BIAS=y is not None and y.bias is not None,
        EPS=eps, BLOCK=pad(size),
    )  # fmt: skip
    return x if y is None else total, normed


def gate(y: Parts, activation: str, dtype: Any) -> jax.Array:
    """As `Ops.gated`, for sums [parts, tokens, 2 * size]."""
    parts, tokens, double = y.sums.shape
    block = min(GATE_BLOCK, pad(double // 2))
    return triton_compat.call(
        _gate, y.sums, y.sums if y.bias is None else value_of(y.bias), out=[_like((tokens, double // 2), dtype)],
        grid=(tokens, -(-double // (2 * block))), num_warps=4,
        TOKENS=tokens, SIZE=double // 2, PARTS=parts, HAS_BIAS=y.bias is not None, ACTIVATION=activation, BLOCK=block,
    )[0]  # fmt: skip


def rotate_and_write(
    heads: Heads, eps: float, dtype: Any, pages: KVPages, slots: jax.Array, first_page: jax.Array | int
) -> tuple[jax.Array, KVPages]:
    """As `Ops.rotate_and_write`, in place."""
    sums, bias = heads.qkv.sums, heads.qkv.sums if heads.qkv.bias is None else value_of(heads.qkv.bias)
    parts, tokens, kv_heads, rows, dim = sums.shape
    scales, top = pages.scale, QUANTIZED.get(pages.data.dtype.name, 0)
    nothing = (slots, slots)
    norms = [nothing if norm is None else _row(norm) for norm in (heads.q_norm, heads.k_norm)]
    block = pad(rows) * pad(dim // 2)
    # Without scales the place of theirs is taken by the slots, and by an output that nobody reads.
    q, data, new_scales = triton_compat.call(
        _rotate_and_write, sums, bias, heads.cos, heads.sin, *norms[0], *norms[1], slots,
        jnp.asarray(first_page, jnp.int32), pages.data, slots if scales is None else scales,
        out=[_like((tokens, kv_heads, rows - 2, dim), dtype), _like(pages.data.shape, pages.data.dtype),
             _like((1,), jnp.float32) if scales is None else _like(scales.shape, scales.dtype)],
        grid=(tokens, kv_heads), aliases={10: 1} if scales is None else {10: 1, 11: 2},
        num_warps=1 if block <= 512 else 4 if block > 2048 else 2,
        TOKENS=tokens, HEADS=kv_heads, GROUP=rows - 2, DIM=dim, PAGE=pages.page_size, PARTS=parts,
        HAS_BIAS=heads.qkv.bias is not None, HAS_NORM=heads.q_norm is not None, EPS=eps,
        HAS_SCALES=scales is not None, TOP=top, ROWS=pad(rows), HALF=pad(dim // 2),
    )  # fmt: skip
    return q, KVPages(data, None if scales is None else new_scales)


def product(x: jax.Array, w: jax.Array) -> jax.Array:
    """As `Ops.product`, of XLA's matmul: with few tokens the inputs are split, as XLA itself would do, so that the
    device is full; what adds up the parts is the next kernel instead of one for that alone."""
    tokens, (out, inputs) = len(x), w.shape
    splits, programs = 1, -(-out // TILE) * -(-tokens // TILE)
    while splits * programs < triton_compat.target().cores and inputs % (2 * splits * TILE) == 0:
        splits *= 2
    if splits == 1:
        return jax.lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=x.dtype)[None]
    x, w = x.reshape(tokens, splits, -1), w.reshape(out, splits, -1)
    return jax.lax.dot_general(x, w, (((2,), (2,)), ((1,), (1,))), preferred_element_type=jnp.float32)
