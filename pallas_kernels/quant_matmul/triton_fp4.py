"""4-bit floats in Triton: float4_e2m1fn codes, in groups that share a scale, become 16-bit numbers in registers.

A code's bits are sign, exponent (2 bits) and mantissa (1 bit). Moved to the place of these fields in a bfloat16 or
float16, they are the code's value times 2 ** -126 or 2 ** -14, also for the subnormal 0.5. So no table is needed. Two
codes take two shifts, two logical operations and a product, and another product for their scale. This is exact: a code
has 2 significant bits, and a scale has 1 (e8m0) or 4 (e4m3). bfloat16 has 8, and the exponents of e8m0. float16 has 11,
and the exponents of e4m3.

Estimate: decoding takes 3 instructions a weight. The loop for up to 32 tokens has 5.6 by its machine code (int4 in
groups of 128: 3.2). An H200's multiprocessors issue 33 T instructions a second (132 x 128 x 1.98 GHz), enough for 5.9 T
weights. Memory delivers 8.1 T weights of MXFP4 (4.3 TB/s at 4.25 bits) and 7.6 T of NVFP4. So at most 73 and 78% of the
floor can be reached. One product for both factors would save half an instruction a weight, but would not be exact for
all exponents of e8m0.
"""

from __future__ import annotations

import triton
import triton.language as tl

# types of scales; 0: codes are not 4-bit floats
E8M0 = 1
E4M3 = 2
SCALES = {"float8_e8m0fnu": E8M0, "float8_e4m3fn": E4M3}


@triton.constexpr_function
def fp4_ptx(nibble: int, dtype: tl.dtype) -> str:
    """PTX that converts the `nibble`-th 4 bits of each of two int16 in $1, and multiplies them by the numbers in $2."""
    low, mask, factor, kind = (
        (6, 0x01C001C0, 0x7E807E80, "bf16x2") if dtype == tl.bfloat16 else (9, 0x0E000E00, 0x74007400, "f16x2")
    )

    def moved(by: int) -> str:
        return f"shl.b32 t, $1, {by};" if by >= 0 else f"shr.u32 t, $1, {-by};"

    body = moved(low - 4 * nibble) + f"and.b32 u, t, {mask:#010x};"
    body += moved(12 - 4 * nibble) + "lop3.b32 u, t, 0x80008000, u, 0xEA;"
    body += f"fma.rn.{kind} u, u, factor, none; fma.rn.{kind} $0, u, $2, none;"
    return f"{{ .reg .b32 t, u, factor, none; mov.b32 factor, {factor:#010x}; mov.b32 none, 0x80008000; {body} }}"


@triton.jit
def fp4_scales(
    row, start, like, KIND: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The scales of COLUMNS columns of 4 codes each, from input `start` on: [rows, COLUMNS], in the dtype that the
    pointers `like` point to. `row`: pointers to the first scale of each row, as bytes."""
    COUNT: tl.constexpr = 4 * COLUMNS // GROUP
    group = tl.minimum(start // GROUP + tl.arange(0, COUNT), GROUPS - 1)
    bits = tl.load(row[:, None] + group[None, :])
    if KIND == 1:  # e8m0 is an exponent; the smallest is subnormal
        bits = (bits.to(tl.int32) & 0xFF) << 23
        scale = tl.where(bits == 0, 0x00400000, bits).to(tl.float32, bitcast=True)
    else:  # e4m3 is moved to the bits of a float16, which has 2 ** -8 of the value
        bits = bits.to(tl.int16)
        scale = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    scale = scale.to(like.dtype.element_ty)
    scale = tl.broadcast_to(scale[:, :, None], [scale.shape[0], COUNT, COLUMNS // COUNT])
    return tl.reshape(scale, [scale.shape[0], COLUMNS])


@triton.jit
def fp4_weights(w, scale, NIBBLE: tl.constexpr, PTX: tl.constexpr):
    """Converts the NIBBLE-th of the four codes in each int16 of w, and multiplies it by its scale."""
    if PTX:
        return tl.inline_asm_elementwise(fp4_ptx(NIBBLE, scale.dtype), "=r,r,r", [w, scale], scale.dtype, True, 2)
    code = w.to(tl.int32) >> (4 * NIBBLE)
    bits = ((code & 8) << 28) | ((code & 7) << 22)  # a float32 with 2 ** -126 of the value
    value = bits.to(tl.float32, bitcast=True) * 8.507059173023462e37
    return (value * scale.to(tl.float32)).to(scale.dtype)
