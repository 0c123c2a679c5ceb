"""Products of many tokens with quantized weights on NVIDIA GPUs: the weight is dequantized once, by a Triton kernel,
into a buffer that a plain product (cuBLAS, through XLA) reads. Compiled for the H200, not yet run on one.

Kernels that convert codes in registers do it anew for every tile of tokens. Dequantizing costs bytes instead: the codes
are read and two bytes a weight written, which the product reads behind its arithmetic. From some 500 tokens on, as
`pays` reckons, that is the less. Of [14336, 4096] in int4: 29 MB read and 117 written, 34 us at 4.3 TB/s (by its
machine code some 12 instructions a weight, 24 us), and at 1,024 tokens 169 us of products, where the kernel takes some
254.

The buffer lives from one product to the next. The kernel is handed x, which it does not read, so that XLA cannot
dequantize a layer before the one before it is done, and gives all layers' buffers the same memory. It is among the
temporaries that a compiled step needs, of which the engine's memory plan takes account.

Weights are rounded to the dtype of x, as they are in a checkpoint that is not quantized; the kernels round none.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jax import lax

from jaxserve.pallas_kernels import triton_compat
from jaxserve.pallas_kernels.quant_matmul import fragments
from jaxserve.pallas_kernels.types import QuantArray

FP8_SHIFT = 256.0  # of float8 codes that are moved into the bits of a float16, see `fp8_bits`
MOST_BYTES = 1 << 30  # of a buffer
ROWS, COLUMNS, WARPS = 32, 256, 4  # of the weight in a program
SHUFFLED_ROWS = 64  # of one chunk
LEAST_PIECE = 16  # inputs that a program takes at a time, at least
TWO_BYTES = (jnp.bfloat16, jnp.float16)

# Of an H200, for `pays`; other GPUs have about the same proportions. Bytes a second that it copies; operations a second
# of plain products, and of kernels that convert in registers: their tiles of 128 outputs and 128 tokens want 48 bytes a
# cycle of each multiprocessor's share of the L2 cache, of which there are some 26, and converting takes as many
# cycles as multiplying.
BANDWIDTH, MATMUL_RATE, KERNEL_RATE = 4.3e12, 0.9 * 790e12, 0.6 * 790e12


def pays(tokens: int, x_dtype: jnp.dtype, w: QuantArray, choice: int | None = None) -> bool:
    """Whether so many tokens take less time with the weight dequantized first: from 414 with int4, 497 with 8 bits.

    `choice`, from the table of measured sizes, overrules the reckoning: 1 is no, 2 is yes.
    """
    outputs, inputs = w.shape
    if x_dtype not in TWO_BYTES or 2 * outputs * inputs > MOST_BYTES or not _fits(w):
        return False
    if choice is not None:
        return choice == 2
    code_bytes = jax.dtypes.itemsize_bits(w.codes.dtype) / 8
    # Seconds for each weight. A product's reading is hidden behind its arithmetic, or the other way around.
    writing = (code_bytes + 2) / BANDWIDTH
    multiplying = max(2 / BANDWIDTH, 2 * tokens / MATMUL_RATE)
    return writing + multiplying < max(code_bytes / BANDWIDTH, 2 * tokens / KERNEL_RATE)


def _fits(w: QuantArray) -> bool:
    """Whether the kernels know the weight's form: pairs of int4 codes in bytes, groups of whole pieces."""
    if w.codes.dtype == jnp.float4_e2m1fn:
        return False
    if w.shuffled:
        return w.codes.dtype != jnp.float8_e4m3fn
    even = w.codes.dtype != jnp.int4 or w.shape[1] % 2 == 0
    return even and (w.block[1] >= w.shape[1] or w.block[1] % LEAST_PIECE == 0)


def product(x: jax.Array, w: QuantArray, dtype: jnp.dtype) -> jax.Array:
    """x [tokens, in] times the weight [out, in], transposed -> [tokens, out] in `dtype`."""
    return lax.dot_general(x, dequantize(w, x), (((1,), (1,)), ((), ())), preferred_element_type=dtype)


@triton.jit
def fp8_bits(codes):
    """float8_e4m3fn, as int8, times 2 ** -8: its bits moved to where a float16 has its own. No NaN."""
    bits = codes.to(tl.int16)
    return (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)


@triton.jit
def _value(codes, scale, zero, bias, FACTOR: tl.constexpr, HAS_ZERO: tl.constexpr, HAS_BIAS: tl.constexpr):
    """(codes - zero) * scale + bias in float32; the latter one for each row."""
    value = codes.to(tl.float32) * FACTOR
    if HAS_ZERO:
        value -= zero[:, None]
    value *= scale[:, None]
    if HAS_BIAS:
        value += bias[:, None]
    return value


@triton.jit
def _dequantize(
    codes, scale, zero, bias, after, out,
    OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, BLOCK_OUT: tl.constexpr, GROUP: tl.constexpr, PER: tl.constexpr,
    BITS: tl.constexpr, FACTOR: tl.constexpr, HAS_ZERO: tl.constexpr, HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """A tile [ROWS, COLUMNS] of `out` [OUTPUTS, INPUTS], in pieces of PIECE inputs that share a scale.

    PER 2: int4 codes in int8, the even input in the low half. BITS: float8 codes as int8. `after` is not read.
    """
    GROUPS: tl.constexpr = (INPUTS + GROUP - 1) // GROUP
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < OUTPUTS
    first_code = row.to(tl.int64) * (INPUTS // PER)
    first = row.to(tl.int64) * INPUTS
    block = tl.minimum(row, OUTPUTS - 1) // BLOCK_OUT * GROUPS
    for piece in tl.static_range(COLUMNS // PIECE):
        start = tl.program_id(1) * COLUMNS + piece * PIECE
        group = block + tl.minimum(start // GROUP, GROUPS - 1)
        factor = tl.load(scale + group).to(tl.float32)
        less = tl.load(zero + group).to(tl.float32) if HAS_ZERO else factor
        more = tl.load(bias + group).to(tl.float32) if HAS_BIAS else factor
        packed = start // PER + tl.arange(0, PIECE // PER)
        real = inside[:, None] & (packed < INPUTS // PER)[None, :]
        read = tl.load(codes + (first_code[:, None] + packed[None, :]), mask=real, other=0.0)
        if PER == 2:
            low = _value((read << 4) >> 4, factor, less, more, FACTOR, HAS_ZERO, HAS_BIAS)
            high = _value(read >> 4, factor, less, more, FACTOR, HAS_ZERO, HAS_BIAS)
            value = tl.interleave(low.to(out.dtype.element_ty), high.to(out.dtype.element_ty))
        else:
            wide = fp8_bits(read) if BITS else read
            value = _value(wide, factor, less, more, FACTOR, HAS_ZERO, HAS_BIAS).to(out.dtype.element_ty)
        column = start + tl.arange(0, PIECE)
        real = inside[:, None] & (column < INPUTS)[None, :]
        tl.store(out + (first[:, None] + column[None, :]), value, mask=real)


@triton.jit
def _dequantize_shuffled(
    words, scale, zero, bias, after, out,
    OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, BLOCK_OUT: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr,
    HAS_ZERO: tl.constexpr, HAS_BIAS: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """A tile of ROWS and one chunk of integers in the order of `fragments`, from words int32 [OUTPUTS, INPUTS / codes
    in a word]; PIECE inputs of the chunk share a scale."""
    CHUNK: tl.constexpr = 32 * PARTS
    GROUPS: tl.constexpr = (INPUTS + GROUP - 1) // GROUP
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < OUTPUTS
    safe = tl.minimum(row, OUTPUTS - 1)
    word = tl.arange(0, 4)[None, :, None, None, None]
    part = tl.arange(0, PARTS)[None, None, :, None, None]
    thread = tl.arange(0, 4)[None, None, None, :, None]
    half = tl.arange(0, 2)[None, None, None, None, :]
    start = safe.to(tl.int64) * (INPUTS // CHUNK * 16) + tl.program_id(1) * 16
    read = tl.load(words + (start[:, None, None, None, None] + 4 * thread + word))
    codes = (read << (32 - BITS - 16 * half - BITS * part)) >> (32 - BITS)
    value = tl.reshape(codes.to(tl.float32), [ROWS, CHUNK // PIECE, PIECE])
    first = tl.program_id(1) * CHUNK + PIECE * tl.arange(0, CHUNK // PIECE)
    group = (safe // BLOCK_OUT * GROUPS)[:, None] + tl.minimum(first // GROUP, GROUPS - 1)[None, :]
    if HAS_ZERO:
        value -= tl.load(zero + group).to(tl.float32)[:, :, None]
    value *= tl.load(scale + group).to(tl.float32)[:, :, None]
    if HAS_BIAS:
        value += tl.load(bias + group).to(tl.float32)[:, :, None]
    value = tl.reshape(value.to(out.dtype.element_ty), [ROWS, CHUNK])
    column = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    tl.store(out + (row.to(tl.int64)[:, None] * INPUTS + column[None, :]), value, mask=inside[:, None])


@jax.jit
def dequantize(w: QuantArray, after: jax.Array) -> jax.Array:
    """The weight [out, in] in the dtype of `after`, once that has been computed."""
    outputs, inputs = w.shape
    codes, factor, per, bits = w.codes, 1.0, 1, False
    group = min(w.block[1], inputs)
    constants: dict[str, Any] = {
        "OUTPUTS": outputs, "INPUTS": inputs, "BLOCK_OUT": w.block[0], "GROUP": group, "num_warps": WARPS,
        "HAS_ZERO": w.zero is not None, "HAS_BIAS": w.bias is not None,
    }  # fmt: skip
    given = w.scale, w.scale if w.zero is None else w.zero, w.scale if w.bias is None else w.bias, after
    made = [jax.ShapeDtypeStruct((outputs, inputs), after.dtype)]
    if w.shuffled:
        size, width = fragments.chunk(codes.dtype), jax.dtypes.itemsize_bits(codes.dtype)
        return triton_compat.call(
            _dequantize_shuffled, fragments.words(codes), *given, out=made,
            grid=(-(-outputs // SHUFFLED_ROWS), inputs // size), BITS=width, ROWS=SHUFFLED_ROWS,
            PARTS=fragments.parts(width), PIECE=min(group & -group, size) if group < inputs else size, **constants,
        )[0]  # fmt: skip
    if codes.dtype == jnp.int4:
        per = 2
        codes = lax.bitcast_convert_type(codes.reshape(outputs, inputs // 2, 2), jnp.int8)
    elif codes.dtype == jnp.float8_e4m3fn and triton_compat.target().capability < 89:
        codes, bits, factor = lax.bitcast_convert_type(codes, jnp.int8), True, FP8_SHIFT
    return triton_compat.call(
        _dequantize, codes, *given, out=made, grid=(-(-outputs // ROWS), -(-inputs // COLUMNS)),
        PER=per, BITS=bits, FACTOR=factor, ROWS=ROWS, COLUMNS=COLUMNS,
        PIECE=COLUMNS if group == inputs else min(group & -group, COLUMNS), **constants,
    )[0]  # fmt: skip
