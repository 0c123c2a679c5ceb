"""Products of many tokens with quantized weights on NVIDIA GPUs. A Triton kernel dequantizes the weight once into a
buffer that a plain product (cuBLAS, through XLA) reads. Compiled for the H200, not yet run on one.

Kernels that convert codes in registers convert them again for every tile of tokens. Dequantizing first costs traffic
instead: the codes are read once and 2 bytes a weight are written. The product's own reads overlap with its arithmetic.
By the estimate of `pays`, this is faster from about 500 tokens on. Example: [14336, 4096] in int4 takes 29 MB of reads
and 117 MB of writes, 34 us at 4.3 TB/s (about 12 instructions a weight by the machine code, 24 us). At 1,024 tokens
the products take 169 us, and the kernel that converts in registers about 254 us.

The buffer lives from one product to the next. The kernel has x as an operand, which it does not read. So XLA cannot
dequantize a layer before the layer before it is done, and gives all layers' buffers the same memory. The buffer is one
of a compiled step's temporaries, which the engine's memory plan counts.

Weights are rounded to the dtype of x, like those of checkpoints that are not quantized. The other kernels round none.
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

FP8_SHIFT = 256.0  # undoes the factor of `fp8_bits`
MOST_BYTES = 1 << 30  # bytes; upper limit of the buffer
# a program's tile of the weight, and its warps
ROWS = 32
COLUMNS = 256
WARPS = 4
SHUFFLED_ROWS = 64  # rows of a program's tile of shuffled codes, which is one chunk wide
LEAST_PIECE = 16  # minimum of inputs that a program converts at a time
TWO_BYTES = (jnp.bfloat16, jnp.float16)

# Rates of an H200, for `pays`; other GPUs have similar proportions. Bytes per second of a copy; operations per second
# of plain products, and of kernels that convert in registers. These kernels' tiles of 128 outputs and 128 tokens need
# 48 bytes a cycle of a multiprocessor's share of the L2 cache, which is about 26, and converting takes as many cycles
# as multiplying.
BANDWIDTH = 4.3e12
MATMUL_RATE = 0.9 * 790e12
KERNEL_RATE = 0.6 * 790e12


def pays(tokens: int, x_dtype: jnp.dtype, w: QuantArray, choice: int | None = None) -> bool:
    """Whether dequantizing first is faster for `tokens` tokens: from 414 with int4, from 497 with 8 bits.

    `choice`, from the table of measured sizes, overrides the estimate: 1 is no, 2 is yes.
    """
    if not fits(x_dtype, w):
        return False
    if choice is not None:
        return choice == 2
    code_bytes = jax.dtypes.itemsize_bits(w.codes.dtype) / 8
    # Seconds for each weight. A product's reads and its arithmetic overlap.
    writing = (code_bytes + 2) / BANDWIDTH
    multiplying = max(2 / BANDWIDTH, 2 * tokens / MATMUL_RATE)
    return writing + multiplying < max(code_bytes / BANDWIDTH, 2 * tokens / KERNEL_RATE)


def fits(x_dtype: jnp.dtype, w: QuantArray) -> bool:
    """Whether the kernels support the weight's form: pairs of int4 codes in bytes, groups of whole pieces."""
    outputs, inputs = w.shape
    if x_dtype not in TWO_BYTES or 2 * outputs * inputs > MOST_BYTES or w.codes.dtype == jnp.float4_e2m1fn:
        return False
    if w.shuffled:
        return w.codes.dtype != jnp.float8_e4m3fn
    even = w.codes.dtype != jnp.int4 or inputs % 2 == 0
    return even and (w.block[1] >= inputs or w.block[1] % LEAST_PIECE == 0)


def product(x: jax.Array, w: QuantArray, dtype: jnp.dtype) -> jax.Array:
    """x [tokens, in] times the transposed weight [out, in] -> [tokens, out] in `dtype`."""
    return lax.dot_general(x, dequantize(w, x), (((1,), (1,)), ((), ())), preferred_element_type=dtype)


@triton.jit
def fp8_bits(codes):
    """Moves the bits of float8_e4m3fn, given as int8, to their place in a float16. Result: value * 2 ** -8. No NaN."""
    bits = codes.to(tl.int16)
    return (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)


@triton.jit
def _value(codes, scale, zero, bias, FACTOR: tl.constexpr, HAS_ZERO: tl.constexpr, HAS_BIAS: tl.constexpr):
    """(codes - zero) * scale + bias in float32. scale, zero and bias have one value for each row."""
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
    """Dequantizes a tile [ROWS, COLUMNS] of `out` [OUTPUTS, INPUTS], in pieces of PIECE inputs that share a scale.

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
    """Dequantizes a tile of ROWS and one chunk of integers in the order of `fragments`. words: int32 [OUTPUTS, INPUTS /
    codes in a word]. PIECE inputs of the chunk share a scale."""
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
    """Returns the weight [out, in] in the dtype of `after`. XLA runs this after it has computed `after`."""
    outputs, inputs = w.shape
    codes = w.codes
    factor = 1.0
    per = 1
    bits = False
    group = min(w.block[1], inputs)
    constants: dict[str, Any] = {
        "OUTPUTS": outputs, "INPUTS": inputs, "BLOCK_OUT": w.block[0], "GROUP": group, "num_warps": WARPS,
        "HAS_ZERO": w.zero is not None, "HAS_BIAS": w.bias is not None,
    }  # fmt: skip
    given = w.scale, w.scale if w.zero is None else w.zero, w.scale if w.bias is None else w.bias, after
    made = [jax.ShapeDtypeStruct((outputs, inputs), after.dtype)]
    if w.shuffled:
        size = fragments.chunk(codes.dtype)
        width = jax.dtypes.itemsize_bits(codes.dtype)
        return triton_compat.call(
            _dequantize_shuffled, fragments.words(codes), *given, out=made,
            grid=(-(-outputs // SHUFFLED_ROWS), inputs // size), BITS=width, ROWS=SHUFFLED_ROWS,
            PARTS=fragments.parts(width), PIECE=min(group & -group, size) if group < inputs else size, **constants,
        )[0]  # fmt: skip
    if codes.dtype == jnp.int4:
        per = 2
        codes = lax.bitcast_convert_type(codes.reshape(outputs, inputs // 2, 2), jnp.int8)
    elif codes.dtype == jnp.float8_e4m3fn and triton_compat.target().capability < 89:
        codes = lax.bitcast_convert_type(codes, jnp.int8)
        bits = True
        factor = FP8_SHIFT
    return triton_compat.call(
        _dequantize, codes, *given, out=made, grid=(-(-outputs // ROWS), -(-inputs // COLUMNS)),
        PER=per, BITS=bits, FACTOR=factor, ROWS=ROWS, COLUMNS=COLUMNS,
        PIECE=COLUMNS if group == inputs else min(group & -group, COLUMNS), **constants,
    )[0]  # fmt: skip
