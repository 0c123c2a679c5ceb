"""All operations between two products of a decoder layer in one launch, for NVIDIA GPUs, in Triton. Compiled for H200,
not yet run on one.

Products come as `Partials`: the kernels add the splits of a product, which saves a launch. All compute in float32 and
round where the plain operations round.

  add_norm   One program a token: the residual stream plus a layer's result, and its RMS norm. It reads and writes each
             number once; a token's numbers stay in registers between the two passes over them.
  gate       A program has 1,024 outputs of a token: activation(gate) * up, whose inputs lie in pairs.
  quantize   One program a token: attention's result, rounded to 8 bits.
Where the next product takes its inputs in 8 bits (`types.Activations`), add_norm and gate round their results in the
same launch, from the activations' dtype, as `quant_matmul.w8a8.quantize` does. A program of `gate` then needs all of a
token, unless groups have scales or the scale is given.

  rotate_and_write   One program for each new token and KV head: bias, norms and rotary positions of its queries and its
             key. The program writes key and value to their page, as codes with a scale where pages have scales.

The number of tokens is an argument, no constant, so that all programs of a process share a kernel (from jax-triton 0.4
on): compiling those of a decode step takes about 0.8 s of processor time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from jaxserve.pallas_kernels import triton_compat
from jaxserve.pallas_kernels.kv_write_triton import QUANTIZED, codes
from jaxserve.pallas_kernels.operands import Heads, Partials, Row, value_of
from jaxserve.pallas_kernels.quant_matmul import w8a8
from jaxserve.pallas_kernels.quant_matmul.w8a8 import TINY, TOPS
from jaxserve.pallas_kernels.registry import Device
from jaxserve.pallas_kernels.triton_compat import pad
from jaxserve.pallas_kernels.types import KVPages, QuantArray, QuantRows

FLOATS = ("bfloat16", "float16", "float32")
ACTIVATIONS = ("silu", "gelu", "gelu_tanh")
GATE_BLOCK = 1024  # outputs of a program of `gate`
WHOLE_GATE = 32768  # maximum of a token's outputs that one program of `gate` holds
TILE = 128  # assumed by `product`: tokens and outputs of a matmul's program, and its minimum of inputs


def why_not(device: Device, dtype: Any) -> str | None:
    """Returns the reason why a model with activations of `dtype` cannot use these kernels, or None where it can."""
    if device.platform != "gpu" or (device.capability or (0, 0)) < (8, 0):
        return "they are for NVIDIA GPUs of compute capability 8.0 or newer"
    return None if jnp.dtype(dtype).name in FLOATS else f"activations must be one of {', '.join(FLOATS)}, not {dtype}"


@triton.jit
def _added(sums, at, real, TOKENS, SIZE: tl.constexpr, PARTS: tl.constexpr, dtype: tl.constexpr):
    """The sum of partials [TOKENS, SIZE], rounded to `dtype`, in float32."""
    total = tl.load(sums + at, mask=real, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        start = tl.full([], part * SIZE, tl.int64) * TOKENS
        total += tl.load(sums + (at + start), mask=real, other=0.0).to(tl.float32)
    return total.to(dtype).to(tl.float32)


@triton.jit
def _peak(values, axis: tl.constexpr):
    """The largest magnitude; infinite if a value is NaN."""
    size = tl.where(values == values, tl.abs(values), float("inf"))
    return tl.max(size, axis)


@triton.jit
def _scale_of(peak, TOP: tl.constexpr, CEILING: tl.constexpr, TINY: tl.constexpr):
    if CEILING > 0:
        peak = tl.where(peak == float("inf"), peak, tl.minimum(peak, CEILING))
    return tl.where(peak > TINY, peak * (1.0 / TOP), 1.0)


@triton.jit
def _store(
    value, out, out_scale, given, token, first, SIZE: tl.constexpr, BLOCK: tl.constexpr, TOP: tl.constexpr,
    GROUP: tl.constexpr, STATIC: tl.constexpr, CEILING: tl.constexpr, TINY: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Stores a token's numbers [BLOCK] from `first` on as `dtype`; numbers beyond SIZE are zeros. With TOP it stores
    codes instead. Their scale is `given` (STATIC), or that of each GROUP numbers, or that of the whole token, which
    must then be in one block."""
    real = first + tl.arange(0, BLOCK) < SIZE
    at = token * SIZE + first + tl.arange(0, BLOCK)
    value = value.to(dtype)
    if TOP == 0:
        tl.store(out + at, value, mask=real)
    else:
        value = value.to(tl.float32)
        if STATIC:
            value = tl.div_rn(value, tl.load(given))
        elif GROUP:
            GROUPS: tl.constexpr = (SIZE + GROUP - 1) // GROUP
            grouped = tl.reshape(value, [BLOCK // GROUP, GROUP])
            scale = _scale_of(_peak(grouped, 1), TOP, CEILING, TINY)
            group = first // GROUP + tl.arange(0, BLOCK // GROUP)
            tl.store(out_scale + token * GROUPS + group, scale, mask=group < GROUPS)
            value = tl.reshape(tl.div_rn(grouped, scale[:, None]), [BLOCK])
        else:
            scale = _scale_of(_peak(value, 0), TOP, CEILING, TINY)
            tl.store(out_scale + token, scale)
            value = tl.div_rn(value, scale)
        tl.store(out + at, codes(value, TOP).to(out.dtype.element_ty), mask=real)


@triton.jit
def _add_norm(
    x, sums, bias, bias_row, scale, scale_row, given, total, normed, out_scale,
    TOKENS, SIZE: tl.constexpr, PARTS: tl.constexpr, HAS_BIAS: tl.constexpr, EPS: tl.constexpr,
    BLOCK: tl.constexpr, TOP: tl.constexpr, GROUP: tl.constexpr, STATIC: tl.constexpr, CEILING: tl.constexpr,
    TINY: tl.constexpr,
):  # fmt: skip
    """PARTS 0: nothing is added, and `total` is not written."""
    dtype: tl.constexpr = x.dtype.element_ty
    column = tl.arange(0, BLOCK)
    real = column < SIZE
    at = tl.program_id(0).to(tl.int64) * SIZE + column
    value = tl.load(x + at, mask=real, other=0.0).to(tl.float32)
    if PARTS:
        added = _added(sums, at, real, TOKENS, SIZE, PARTS, dtype)
        if HAS_BIAS:
            shift = tl.load(bias + tl.load(bias_row).to(tl.int64) * SIZE + column, mask=real, other=0.0).to(tl.float32)
            added = (added + shift).to(dtype).to(tl.float32)
        value = (value + added).to(dtype).to(tl.float32)
        tl.store(total + at, value.to(dtype), mask=real)
    unit = value * tl.rsqrt(tl.sum(value * value, 0) / SIZE + EPS)
    factor = tl.load(scale + tl.load(scale_row).to(tl.int64) * SIZE + column, mask=real, other=0.0)
    value = factor.to(tl.float32) * unit.to(factor.dtype).to(tl.float32)  # keeps the precision of a float32 scale
    _store(
        value, normed, out_scale, given, tl.program_id(0).to(tl.int64), 0,
        SIZE, BLOCK, TOP, GROUP, STATIC, CEILING, TINY, dtype,
    )  # fmt: skip


@triton.jit
def _quantize(
    x, given, out, out_scale,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, TOP: tl.constexpr, GROUP: tl.constexpr, STATIC: tl.constexpr,
    CEILING: tl.constexpr, TINY: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    value = tl.load(x + token * SIZE + column, mask=column < SIZE, other=0.0).to(tl.float32)
    _store(value, out, out_scale, given, token, 0, SIZE, BLOCK, TOP, GROUP, STATIC, CEILING, TINY, x.dtype.element_ty)


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
    sums, bias, given, like, out, out_scale,
    TOKENS, SIZE: tl.constexpr, PARTS: tl.constexpr, HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr, TOP: tl.constexpr, GROUP: tl.constexpr, STATIC: tl.constexpr, CEILING: tl.constexpr,
    TINY: tl.constexpr,
):  # fmt: skip
    """`like` has the dtype of the activations."""
    dtype: tl.constexpr = like.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK
    column = 2 * first + tl.arange(0, 2 * BLOCK)
    real = column < 2 * SIZE
    both = _added(sums, token * 2 * SIZE + column, real, TOKENS, 2 * SIZE, PARTS, dtype)
    if HAS_BIAS:
        both = (both + tl.load(bias + column, mask=real, other=0.0).to(tl.float32)).to(dtype).to(tl.float32)
    gate, up = tl.split(tl.reshape(both, [BLOCK, 2]))
    activated = _activated(gate, ACTIVATION).to(dtype).to(tl.float32)
    _store(activated * up, out, out_scale, given, token, first, SIZE, BLOCK, TOP, GROUP, STATIC, CEILING, TINY, dtype)


@triton.jit
def _half_norms(scales, row, is_it, half, at, DIM: tl.constexpr):
    """A half of a norm's scale [head_dim / 2] in the rows where `is_it` holds, else 0."""
    start = tl.load(row).to(tl.int64) * DIM
    factor = tl.load(scales + start + at, mask=half, other=0.0).to(tl.float32)
    return tl.where(is_it[:, None], factor[None, :], 0.0)


@triton.jit
def _rotate_and_write(
    sums, bias, cos, sin, q_norm, q_row, k_norm, k_row, slots, first_page, before, scales_before, q, data, scales,
    TOKENS, HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
    PARTS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_NORM: tl.constexpr, EPS: tl.constexpr,
    HAS_SCALES: tl.constexpr, TOP: tl.constexpr, ROWS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """`data` and `scales` alias `before` and `scales_before`. A program holds rows of a head's queries, its key and its
    value, in the two halves that the rotation pairs: [ROWS, HALF] each, of which GROUP + 2 and DIM / 2 are real."""
    dtype: tl.constexpr = q.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    row = tl.arange(0, ROWS)
    column = tl.arange(0, HALF)
    half = column < DIM // 2
    real = (row < GROUP + 2)[:, None] & half[None, :]
    within = row[:, None] * DIM + column[None, :]
    at = (token * HEADS + head) * ((GROUP + 2) * DIM) + within
    left = _added(sums, at, real, TOKENS, HEADS * (GROUP + 2) * DIM, PARTS, dtype)
    right = _added(sums, at + DIM // 2, real, TOKENS, HEADS * (GROUP + 2) * DIM, PARTS, dtype)
    if HAS_BIAS:
        of_bias = bias + head * ((GROUP + 2) * DIM) + within
        left = (left + tl.load(of_bias, mask=real, other=0.0).to(tl.float32)).to(dtype).to(tl.float32)
        right = (right + tl.load(of_bias + DIM // 2, mask=real, other=0.0).to(tl.float32)).to(dtype).to(tl.float32)
    if HAS_NORM:
        is_q = row < GROUP
        is_k = row == GROUP
        unit = tl.rsqrt((tl.sum(left * left, 1) + tl.sum(right * right, 1)) / DIM + EPS)[:, None]
        of_left = _half_norms(q_norm, q_row, is_q, half, column, DIM)
        of_left += _half_norms(k_norm, k_row, is_k, half, column, DIM)
        of_right = _half_norms(q_norm, q_row, is_q, half, column + DIM // 2, DIM)
        of_right += _half_norms(k_norm, k_row, is_k, half, column + DIM // 2, DIM)
        normed = (row <= GROUP)[:, None]
        precise: tl.constexpr = q_norm.dtype.element_ty  # with a float32 scale, only the product is rounded
        left = tl.where(normed, (of_left * (left * unit).to(precise).to(tl.float32)).to(dtype).to(tl.float32), left)
        right = tl.where(normed, (of_right * (right * unit).to(precise).to(tl.float32)).to(dtype).to(tl.float32), right)
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
    kept = (row >= GROUP) & (row < tl.where(slot >= 0, GROUP + 2, GROUP))  # padding writes no key or value
    slot = tl.maximum(slot, 0)
    page = slot // PAGE + tl.load(first_page).to(tl.int64)
    place = ((page * 2 + tl.maximum(row - GROUP, 0)) * HEADS + head) * PAGE + slot % PAGE
    left = new_left.to(tl.float32)
    right = new_right.to(tl.float32)
    if HAS_SCALES:
        peak = tl.maximum(tl.max(tl.abs(left), 1), tl.max(tl.abs(right), 1))
        scale = tl.where(peak > 1e-30, peak / TOP, 1.0)  # as `kv_write.TINY`
        left = codes(left / scale[:, None], TOP)
        right = codes(right / scale[:, None], TOP)
        tl.store(scales + place, scale, mask=kept)
    elif TOP > 0:
        left = codes(left, TOP)
        right = codes(right, TOP)
    kept = kept[:, None] & half[None, :]
    into = data + place[:, None] * DIM + column[None, :]
    tl.store(into, left.to(data.dtype.element_ty), mask=kept)
    tl.store(into + DIM // 2, right.to(data.dtype.element_ty), mask=kept)


def _row(vector: jax.Array | Row) -> tuple[jax.Array, jax.Array]:
    """Returns an array of vectors, and the index of one of them, int32 scalar."""
    return (vector.array, vector.place) if isinstance(vector, Row) else (vector, jnp.int32(0))


def _like(shape: Sequence[int], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(tuple(shape), dtype)


def rounding_reader(reader: QuantArray | None) -> QuantArray | None:
    """The reader, if a kernel here can round as it says; Triton has float8_e4m3fn from capability 8.9 on. Without it
    kernels return floats, which `quantize` rounds for the product."""
    if reader is None or reader.activations is None:
        return None
    unknown = reader.activations.dtype == "float8_e4m3fn" and triton_compat.target().capability < 89
    return None if unknown else reader


def _rounding(
    reader: QuantArray | None, tokens: int, size: int, dtype: Any
) -> tuple[jax.Array, list[jax.ShapeDtypeStruct], dict[str, Any]]:
    """Arguments for a kernel that makes the inputs [tokens, size] of a product with `reader`: the given scale, or a
    placeholder; the outputs, which are codes and scales, or floats and a placeholder; and the kernel's constants."""
    wanted = None if reader is None else reader.activations
    if reader is None or wanted is None:
        none = {"TOP": 0, "GROUP": 0, "STATIC": False, "CEILING": 0.0, "TINY": TINY}
        return jnp.zeros(1, jnp.float32), [_like((tokens, size), dtype), _like((1,), jnp.float32)], none
    static = wanted.static
    group = wanted.group or 0
    groups = 1 if static or not group else -(-size // group)
    given = reader.input_scale if static else reader.scale  # a placeholder without static scales
    outputs = [_like((tokens, size), jnp.dtype(wanted.dtype)), _like((1 if static else tokens, groups), jnp.float32)]
    constants = {"TOP": int(TOPS[wanted.dtype]), "GROUP": group, "STATIC": static, "CEILING": wanted.ceiling or 0.0}
    return given, outputs, constants | {"TINY": TINY}


def _made(reader: QuantArray | None, made: jax.Array, scale: jax.Array, dtype: Any) -> jax.Array | QuantRows:
    """Returns the result of a kernel with the outputs of `_rounding`."""
    if reader is None or reader.activations is None:
        return made
    return QuantRows(made, reader.input_scale if reader.activations.static else scale, jnp.dtype(dtype))


def quantize(x: jax.Array, w: QuantArray, axes: tuple[str | None, str | None] = (None, None)) -> QuantRows:
    """`quant_matmul.w8a8.quantize` for x [tokens, size]. `axes` as in `ops.quant_matmul`."""
    if rounding_reader(w) is None:
        return w8a8.quantize(x, w)
    (tokens, size), dtype = x.shape, x.dtype
    given, outputs, constants = _rounding(w, tokens, size, dtype)
    made, scale = triton_compat.call(
        _quantize, x, given, out=outputs, grid=(tokens,), num_warps=_warps(size), SIZE=size, BLOCK=pad(size),
        **constants,
    )  # fmt: skip
    rows = _made(w, made, scale, dtype)
    assert isinstance(rows, QuantRows)
    return rows


def _warps(size: int) -> int:
    """Warps of a program that holds a token's numbers: at most 64 numbers in each thread."""
    return 4 if size <= 2048 else max(8, pad(size) // 2048)


def add_norm(
    x: jax.Array, y: Partials | None, scale: jax.Array | Row, eps: float, reader: QuantArray | None = None
) -> tuple[jax.Array, jax.Array | QuantRows]:
    """See `Ops.add_norm`. x: [tokens, size]."""
    (tokens, size), (scales, scale_row), reader = x.shape, _row(scale), rounding_reader(reader)
    bias, bias_row = (scales, scale_row) if y is None or y.bias is None else _row(y.bias)
    given, outputs, constants = _rounding(reader, tokens, size, x.dtype)
    total, normed, of_normed = triton_compat.call(
        _add_norm, x, x if y is None else y.sums, bias, bias_row, scales, scale_row, given,
        out=[_like((1,) if y is None else x.shape, x.dtype), *outputs],
        grid=(tokens,), num_warps=4 if size <= 2048 else 8,
        TOKENS=tokens, SIZE=size, PARTS=0 if y is None else len(y.sums), HAS_BIAS=y is not None and y.bias is not None,
        EPS=eps, BLOCK=pad(size), **constants,
    )  # fmt: skip
    return x if y is None else total, _made(reader, normed, of_normed, x.dtype)


def gate(y: Partials, activation: str, dtype: Any, reader: QuantArray | None = None) -> jax.Array | QuantRows:
    """See `Ops.gated`. Sums: [splits, tokens, 2 * size]."""
    reader, (parts, tokens, double) = rounding_reader(reader), y.sums.shape
    wanted = None if reader is None else reader.activations
    size = double // 2
    block = min(GATE_BLOCK, pad(size))
    warps = 4
    if wanted is not None and wanted.group is None and not wanted.static:
        if size > WHOLE_GATE:
            return gate(y, activation, dtype)
        block = pad(size)
        warps = _warps(2 * size)
    given, outputs, constants = _rounding(reader, tokens, size, dtype)
    made, scale = triton_compat.call(
        _gate, y.sums, y.sums if y.bias is None else value_of(y.bias), given, jnp.zeros(1, dtype), out=outputs,
        grid=(tokens, -(-size // block)), num_warps=warps,
        TOKENS=tokens, SIZE=size, PARTS=parts, HAS_BIAS=y.bias is not None, ACTIVATION=activation, BLOCK=block,
        **constants,
    )  # fmt: skip
    return _made(reader, made, scale, dtype)


def rotate_and_write(
    heads: Heads, eps: float, dtype: Any, pages: KVPages, slots: jax.Array, first_page: jax.Array | int
) -> tuple[jax.Array, KVPages]:
    """See `Ops.rotate_and_write`. Writes in place."""
    sums = heads.qkv.sums
    bias = heads.qkv.sums if heads.qkv.bias is None else value_of(heads.qkv.bias)
    parts, tokens, kv_heads, rows, dim = sums.shape
    scales = pages.scale
    top = QUANTIZED.get(pages.data.dtype.name, 0)
    nothing = (slots, slots)
    norms = [nothing if norm is None else _row(norm) for norm in (heads.q_norm, heads.k_norm)]
    block = pad(rows) * pad(dim // 2)
    # Without scales, placeholders replace them: the slots as an input, and an output that nothing reads.
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


def splits(tokens: int, out: int, inputs: int) -> int:
    """Parts into which XLA's matmul splits the inputs, so that a few tokens fill the device."""
    count = 1
    programs = -(-out // TILE) * -(-tokens // TILE)
    while count * programs < triton_compat.target().cores and inputs % (2 * count * TILE) == 0:
        count *= 2
    return count


def product(x: jax.Array, w: jax.Array, axes: tuple[str | None, str | None] = (None, None)) -> jax.Array:
    """See `Ops.product`, for XLA's matmul. With few tokens the inputs are split to fill the device, as XLA would do.
    The next kernel adds the parts, which saves XLA's own launch for that."""
    tokens, (out, inputs) = len(x), w.shape
    count = splits(tokens, out, inputs)
    if count == 1:
        return jax.lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=x.dtype)[None]
    x = x.reshape(tokens, count, -1)
    w = w.reshape(out, count, -1)
    return jax.lax.dot_general(x, w, (((2,), (2,)), ((1,), (1,))), preferred_element_type=jnp.float32)
