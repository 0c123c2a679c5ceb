"""Quantized matmul on NVIDIA GPUs of compute capability 8.0 and newer, in Triton.

Grid (tiles of tokens, tiles of outputs, splits of the inputs). A program keeps a tile of the transposed result
[outputs, tokens] in float32. So the weights, converted in registers, are the left operand of the matrix unit, and the
tokens its narrow side. A program reads each code once (int4 packed, two or four in each element), in pieces that lie
within a group. Codes are exact in the dtype of x. Scales multiply the product of each group; zeros and biases multiply
the group's sum of x:

  out += scale * (codes @ x) + (bias - zero * scale) * sum(x)

4-bit floats are multiplied by their scales in registers (`triton_fp4`), and a row's gain multiplies its sum.

Traffic: codes and scales once per 128 tokens, x once per tile of outputs (from the L2 cache). Where the tiles alone
would leave the device idle, static sizes decide a number of splits. They write float32 partials, which XLA adds.
Pipeline: `stages` steps of codes and x in flight (cp.async).
From about 500 tokens on, weights are dequantized first (`dequantized`).
Experts: XLA lists the tiles of tokens, each of one expert. A program stores only rows of its own expert.

Compiled for H200 (9.0), and a few shapes for 8.9 and 8.0; not yet run on any of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jax import lax

from jaxserve.pallas_kernels import triton_compat, tuning
from jaxserve.pallas_kernels.quant_matmul import dequantized, triton_blocks
from jaxserve.pallas_kernels.quant_matmul.dequantized import FP8_SHIFT, fp8_bits
from jaxserve.pallas_kernels.quant_matmul.triton_fp4 import E8M0, SCALES, fp4_scales, fp4_weights
from jaxserve.pallas_kernels.quant_matmul.triton_tiles import expert_items, own_tile
from jaxserve.pallas_kernels.registry import Device, MatmulProblem
from jaxserve.pallas_kernels.triton_compat import Target, pad
from jaxserve.pallas_kernels.types import BlockArray, QuantArray

FLOATS = ("bfloat16", "float16", "float32")
FLOAT4 = "float4_e2m1fn"
CODES = ("int4", "int8", "float8_e4m3fn", FLOAT4)
PTX = True  # inline PTX where it is faster; Triton's interpreter has none


class Tiles(NamedTuple):
    """Sizes of a program's tile and pipeline. A product has `inputs` of one group; `step` are fetched at once."""

    tokens: int
    outputs: int
    inputs: int
    step: int
    splits: int
    warps: int
    stages: int


def why_not(device: Device, problem: MatmulProblem) -> str | None:
    """Returns why this kernel cannot run the problem on the device, or None where it can."""
    x = problem.x_dtype.name
    codes = problem.codes_dtype.name
    if device.platform != "gpu":
        return f"it is for NVIDIA GPUs, not {device.platform}"
    if (device.capability or (0, 0)) < (8, 0):
        return f"it needs compute capability 8.0 or newer, {device.kind} has {device.capability}"
    if x not in FLOATS:
        return f"x must be one of {', '.join(FLOATS)}, not {x}"
    if problem.kind:
        return triton_blocks.why_not(problem)
    if codes not in CODES:
        return f"codes must be one of {', '.join(CODES)}, not {codes}"
    if codes == "int4" and problem.inputs % 2:
        return f"int4 codes need an even number of inputs, not {problem.inputs}"
    if codes == FLOAT4:
        return _why_not_fp4(problem)
    if problem.shuffled:
        return "codes are in the order of Hopper's kernel"
    least = _least_step(codes)
    if problem.block[1] < problem.inputs and problem.block[1] % least:
        return f"groups of {codes} codes must be multiples of {least} inputs, not {problem.block[1]}"
    shifted = problem.has_zero or problem.has_bias
    if x == "float32" and codes == "int4" and shifted and problem.block[1] >= problem.inputs:
        return "Triton 3.9 fails to compile products of float32 with int4 codes that all share a zero or bias"
    return None


def _why_not_fp4(problem: MatmulProblem) -> str | None:
    scale = None if problem.scale_dtype is None else problem.scale_dtype.name
    if scale not in SCALES:
        return f"scales of {FLOAT4} codes must be one of {', '.join(SCALES)}, not {scale}"
    if problem.block not in ((1, 8), (1, 16), (1, 32)) or problem.inputs % 4 or problem.has_zero or problem.has_bias:
        return f"{FLOAT4} codes must lie in groups of 8, 16 or 32, of a multiple of 4 inputs, without zeros and biases"
    if SCALES[scale] == E8M0 and problem.x_dtype.name == "float16":
        return "float16 has not the exponents of float8_e8m0fnu scales"
    return None


def _least_step(codes: str) -> int:
    return 32 if codes == "int4" else 16  # the matrix unit takes 16 inputs at a time; a byte has two int4


def tiles(x_dtype: str, codes: str, tokens: int, outputs: int, inputs: int, group: int, target: Target) -> Tiles:
    """Tile sizes for a problem, not tuned on a device."""
    grouped = group < inputs and codes != FLOAT4
    within = group & -group if grouped else 128  # the largest power of two that divides the group
    if x_dtype == "float32":
        piece = 64 if codes == FLOAT4 else min(within, 32)
        tile = Tiles(pad(min(tokens, 32), 16), 32, piece, piece, 1, 4, 2)
    elif tokens <= 64:
        # About 40 KiB of codes in flight on each multiprocessor keep the memory busy.
        step = 256 if codes in ("int4", FLOAT4) and tokens <= 32 else 64 if codes in FLOATS else 128
        tile = Tiles(pad(tokens, 16), 64, min(within, 128), step, 1, 4, 4)
    else:
        # Capabilities 8.6, 8.9 and 12.0 have 99 KiB of shared memory, the others at least 163.
        roomy = target.capability in (80, 90, 100, 103)
        step = 128 if grouped and roomy else 64
        tile = Tiles(128, 128, min(within, step), step, 1, 8, 3 if roomy else 2)
    tuned = {**_tuned(x_dtype, codes, tokens, outputs, inputs, group)}
    tuned.pop("dequantize", None)
    tile = tile._replace(**tuned)
    tile = tile._replace(inputs=min(tile.inputs, tile.step))
    if "splits" in tuned:
        return tile
    programs = -(-tokens // tile.tokens) * -(-outputs // tile.outputs)
    wanted = min(3 * target.cores // programs, inputs // (4 * tile.step))
    return tile._replace(splits=1 << (max(1, min(wanted, 16)).bit_length() - 1))


def _tuned(x_dtype: str, codes: str, tokens: int, outputs: int, inputs: int, group: int) -> Mapping[str, int]:
    """The sizes that were measured for a problem."""
    group = group if group < inputs else 0
    return tuning.lookup(
        "matmul", "triton", x=x_dtype, codes=codes, group=group, out=outputs, inputs=inputs, tokens=tokens
    )


@triton.constexpr_function
def nibble_ptx(nibble: int, per: int, dtype: tl.dtype) -> str:
    """PTX that converts the `nibble`-th 4 bits of int16 (per 4) or int8 (per 2) in a register to bfloat16 or float16.

    It takes 1.5 instructions a code; a plain shift and conversion take five or more. With an offset of 8 a code is 0 to
    15. Put into the low bits of the float 128 (bfloat16) or 1024 (float16) it is added to it; 8 more is subtracted.
    """
    if dtype == tl.bfloat16:  # 128 + 8; by a product with one, as sub.bf16x2 needs sm_90
        high = 0x43
        less = "0xC308C308"
        subtract = "fma.rn.bf16x2 {to}, {of}, one, less;"
    else:  # 1024 + 8
        high = 0x64
        less = "0x64086408"
        subtract = "sub.f16x2 {to}, {of}, less;"
    if per == 4:
        mask = 0x000F000F
        offset = high << 24 | 0x080000 | high << 8 | 0x08
        body = f"shr.u32 t, $1, {4 * nibble}; lop3.b32 t, t, {mask:#010x}, {offset:#010x}, 0x6A;"
        body += subtract.format(to="$0", of="t")
    else:
        body = f"shr.u32 t, $2, {4 * nibble}; lop3.b32 t, t, 0x0F0F0F0F, 0x08080808, 0x6A;"
        for i, bytes_ in enumerate(("0x4140", "0x4342")):
            body += f"prmt.b32 u, t, {high * 0x01010101:#010x}, {bytes_};" + subtract.format(to=f"${i}", of="u")
    return f"{{ .reg .b32 t, u, one, less; mov.b32 one, 0x3F803F80; mov.b32 less, {less}; {body} }}"


@triton.jit
def _nibble(w, like, NIBBLE: tl.constexpr, PER: tl.constexpr, PTX: tl.constexpr):
    """The NIBBLE-th of each PER int4 codes of w, in the dtype that the pointers `like` point to."""
    if PTX:
        return tl.inline_asm_elementwise(
            nibble_ptx(NIBBLE, PER, like.dtype.element_ty),
            "=r,r" if PER == 4 else "=r,=r,r",
            [w],
            like.dtype.element_ty,
            True,
            8 // PER,
        )
    return ((w << (4 * (PER - 1 - NIBBLE))) >> (4 * (PER - 1))).to(like.dtype.element_ty)


@triton.jit
def _shift(factor, zero, bias, at, HAS_ZERO: tl.constexpr, HAS_BIAS: tl.constexpr):
    """The factor of a sum of x: bias - zero * scale."""
    shift = tl.zeros_like(factor)
    if HAS_BIAS:
        shift += tl.load(bias + at).to(tl.float32)
    if HAS_ZERO:
        shift -= tl.load(zero + at).to(tl.float32) * factor
    return shift


@triton.jit
def _piece(
    acc, sums, x_row, codes_row, scale_row, scale, zero, bias, start, column,
    TOKENS: tl.constexpr, INPUTS: tl.constexpr, STEP: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
    PER: tl.constexpr, BITS: tl.constexpr, PTX: tl.constexpr, FP4: tl.constexpr,
    HAS_ZERO: tl.constexpr, HAS_BIAS: tl.constexpr, FACTOR: tl.constexpr,
):  # fmt: skip
    """Adds the products of the inputs from `start`, which lie in one group, to acc [outputs, tokens]. Adds the sums of
    x to `sums` [tokens], which the end of each group resets."""
    COLUMNS: tl.constexpr = INPUTS // PER
    WHOLE: tl.constexpr = INPUTS % STEP == 0
    SHIFTED: tl.constexpr = HAS_ZERO or HAS_BIAS
    dtype: tl.constexpr = x_row.dtype.element_ty
    at = start // PER
    inside = (at + column < COLUMNS)[None, :]
    w = tl.load(codes_row + at) if WHOLE else tl.load(codes_row + at, mask=inside, other=0.0)
    if FP4:
        scales = fp4_scales(scale + scale_row, start, x_row, FP4, GROUP, GROUPS, column.shape[0])
    part = tl.zeros_like(acc) if GROUP and not FP4 else acc
    for nibble in tl.static_range(PER):
        x_at = x_row + (nibble * TOKENS * COLUMNS + at)
        tokens = tl.load(x_at) if WHOLE else tl.load(x_at, mask=inside, other=0.0)
        if FP4:
            left = fp4_weights(w, scales, nibble, PTX)
        elif PER > 1:
            left = _nibble(w, x_row, nibble, PER, PTX)
        elif BITS:
            left = fp8_bits(w).to(dtype)
        else:
            left = w.to(dtype)
        part = tl.dot(left, tl.trans(tokens), part, input_precision="ieee")
        if SHIFTED:
            sums += tl.sum(tokens.to(tl.float32), 1)
    if GROUP and not FP4:
        group = scale_row + tl.minimum(start // GROUP, GROUPS - 1)
        factor = tl.load(scale + group).to(tl.float32)
        acc += part * (factor * FACTOR)[:, None]
        if SHIFTED:
            acc += _shift(factor, zero, bias, group, HAS_ZERO, HAS_BIAS)[:, None] * sums[None, :]
            sums = tl.zeros_like(sums)
    else:
        acc = part
    return acc, sums


@triton.jit
def _matmul(
    x, codes, scale, zero, bias, gain, count, items, out,
    TOKENS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, BLOCK_OUT: tl.constexpr, GROUP: tl.constexpr,
    PER: tl.constexpr, BITS: tl.constexpr, PTX: tl.constexpr, FP4: tl.constexpr, HAS_ZERO: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_GAIN: tl.constexpr, FACTOR: tl.constexpr, SPLITS: tl.constexpr, GROUPED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """PER 2 or 4: int4 codes in int8 or int16 [OUTPUTS, INPUTS / PER], with x [PER, TOKENS, INPUTS / PER]: first the
    inputs of the first of each PER codes, then of the second, and so on. BITS: float8 codes as int8. FP4: the type of
    scales of 4-bit floats, in int16. GROUP 0: all inputs share a scale. `out` is [SPLITS, TOKENS, OUTPUTS]. GROUPED: a
    tile of tokens is one of `items` [tiles, 3]: expert, first token, end; weights have a leading dimension of
    experts."""
    COLUMNS: tl.constexpr = INPUTS // PER
    SHIFTED: tl.constexpr = HAS_ZERO or HAS_BIAS
    GROUPS: tl.constexpr = (INPUTS + GROUP - 1) // GROUP if GROUP else 1
    expert, start, stop, live = own_tile(items, count, TOKENS, BM, GROUPED)
    if GROUPED:
        codes += expert * OUTPUTS * COLUMNS
        blocks = expert * ((OUTPUTS + BLOCK_OUT - 1) // BLOCK_OUT * GROUPS)
        scale = scale + blocks
        zero = zero + blocks
        bias = bias + blocks
        gain = gain + expert * OUTPUTS
    token = start + tl.arange(0, BM)
    output = tl.program_id(1) * BN + tl.arange(0, BN)
    column = tl.arange(0, BK // PER)
    # Beyond the edges the last row is repeated. Results there are not stored.
    x_row = x + tl.minimum(token, TOKENS - 1).to(tl.int64)[:, None] * COLUMNS + column[None, :]
    codes_row = codes + tl.minimum(output, OUTPUTS - 1).to(tl.int64)[:, None] * COLUMNS + column[None, :]
    scale_row = tl.minimum(output, OUTPUTS - 1) // BLOCK_OUT * GROUPS

    share: tl.constexpr = (INPUTS + STEP * SPLITS - 1) // (STEP * SPLITS) * STEP
    first = tl.program_id(2) * share
    end = tl.minimum(first + share, INPUTS)
    end = tl.where(live, end, first)
    acc = tl.zeros([BN, BM], tl.float32)
    sums = tl.zeros([BM], tl.float32)
    for at in range(first, end, STEP):
        for piece in tl.static_range(STEP // BK):
            acc, sums = _piece(
                acc, sums, x_row, codes_row, scale_row, scale, zero, bias, at + piece * BK, column,
                TOKENS, INPUTS, STEP, GROUP, GROUPS, PER, BITS, PTX, FP4, HAS_ZERO, HAS_BIAS, FACTOR,
            )  # fmt: skip
    if not GROUP:
        factor = tl.load(scale + scale_row).to(tl.float32)
        acc *= (factor * FACTOR)[:, None]
        if SHIFTED:
            acc += _shift(factor, zero, bias, scale_row, HAS_ZERO, HAS_BIAS)[:, None] * sums[None, :]
    if HAS_GAIN:
        acc *= tl.load(gain + tl.minimum(output, OUTPUTS - 1))[:, None]
    to = (tl.program_id(2).to(tl.int64) * TOKENS + token)[:, None] * OUTPUTS + output[None, :]
    tl.store(
        out + to, tl.trans(acc).to(out.dtype.element_ty), mask=(token < stop)[:, None] & (output < OUTPUTS)[None, :]
    )


@partial(jax.jit, static_argnames="direct")
def quant_matmul(
    x: jax.Array, w: QuantArray | BlockArray, *, count: jax.Array | None = None, direct: bool = False
) -> jax.Array:
    """x [tokens, in] times the transposed weight [out, in] -> float32 [tokens, out].

    `count`, an int32 scalar, is the number of leading rows of x that matter. Tiles beyond hold zeros (of either sign)
    or biases. `direct`: no weight is dequantized first.
    """
    return _sum(_product(x, w, count, jnp.float32, direct))


@partial(jax.jit, static_argnames="direct")
def quant_matmul_parts(
    x: jax.Array, w: QuantArray | BlockArray, *, count: jax.Array | None = None, direct: bool = False
) -> jax.Array:
    """The product as `operands.Partials.sums`: float32 for each split of the inputs, or one part in the dtype of x."""
    return _product(x, w, count, x.dtype, direct)


def _product(
    x: jax.Array, w: QuantArray | BlockArray, count: jax.Array | None, dtype: jnp.dtype, direct: bool
) -> jax.Array:
    """x times w as parts [splits, tokens, out]: float32, or `dtype` for a single part."""
    tokens, inputs = x.shape
    count = jnp.asarray(tokens if count is None else count, jnp.int32).reshape(1)
    if isinstance(w, BlockArray):
        return triton_blocks.product(x, w, count, jnp.dtype(dtype))
    measured = _tuned(x.dtype.name, w.codes.dtype.name, tokens, w.shape[0], inputs, w.block[1])
    if not direct and dequantized.pays(tokens, x.dtype, w, measured.get("dequantize")):
        return dequantized.product(x, w, dtype)[None]
    tile = tiles(x.dtype.name, w.codes.dtype.name, tokens, w.shape[0], inputs, w.block[1], triton_compat.target())
    return _call(x, w, tile, count, None, dtype)


@jax.jit
def grouped_quant_matmul(x: jax.Array, w: QuantArray | BlockArray, group_sizes: jax.Array) -> jax.Array:
    """As `reference.grouped_quant_matmul`: rows of x, sorted by expert, each times its expert's weight.

    A tile has tokens of one expert, and room for the average number of tokens of an expert.
    """
    (tokens, inputs), (experts, outputs, _) = x.shape, w.shape
    share = -(-tokens // experts)
    target = triton_compat.target()
    if isinstance(w, BlockArray):
        y = _sum(triton_blocks.grouped_product(x, w, group_sizes))
    else:
        tile = tiles(x.dtype.name, w.codes.dtype.name, share, outputs, inputs, w.block[1], target)
        items = expert_items(group_sizes, tokens, tile.tokens)
        tile = tile._replace(splits=1 << (max(tile.splits // len(items), 1).bit_length() - 1))
        y = _sum(_call(x, w, tile, group_sizes, items, jnp.float32))
    return jnp.where((jnp.arange(tokens) < group_sizes.sum())[:, None], y, 0.0)


def _sum(parts: jax.Array) -> jax.Array:
    return parts[0] if len(parts) == 1 else parts.sum(0)


def _call(
    x: jax.Array, w: QuantArray, tile: Tiles, count: jax.Array, items: jax.Array | None, dtype: jnp.dtype
) -> jax.Array:
    """Partials [splits, tokens, out]: float32, or `dtype` for a single part. Without `items` there is one weight, and
    tiles of tokens follow each other up to `count`."""
    (tokens, inputs), outputs = x.shape, w.shape[-2]
    kind = w.codes.dtype.name
    group = w.block[1]
    codes = w.codes
    scale = w.scale
    factor = 1.0
    per = 1
    bits = False
    fp4 = 0
    group = group if kind == FLOAT4 or group < inputs else 0
    if kind == FLOAT4:
        fp4 = SCALES[scale.dtype.name]
        scale = lax.bitcast_convert_type(scale, jnp.int8)
    if kind in ("int4", FLOAT4):
        # No copy: XLA packs int4 arrays, low half first. The producer of x reorders it, or a small copy does.
        per = 4 if fp4 or (tile.inputs >= 64 and inputs % 4 == 0) else 2
        codes = codes.reshape(*codes.shape[:-1], inputs // per, per)
        codes = lax.bitcast_convert_type(codes, jnp.int16 if per == 4 else jnp.int8)
        x = x.reshape(tokens, inputs // per, per).transpose(2, 0, 1)
    elif kind == "float8_e4m3fn" and triton_compat.target().capability < 89:
        codes = lax.bitcast_convert_type(codes, jnp.int8)
        bits = True
        factor = FP8_SHIFT
    return triton_compat.call(
        _matmul, x, codes, scale, *(scale if part is None else part for part in (w.zero, w.bias, w.gain)), count,
        count if items is None else items,
        out=[jax.ShapeDtypeStruct((tile.splits, tokens, outputs), jnp.float32 if tile.splits > 1 else dtype)],
        grid=(-(-tokens // tile.tokens) if items is None else len(items), -(-outputs // tile.outputs), tile.splits),
        num_warps=tile.warps, num_stages=tile.stages,
        TOKENS=tokens, OUTPUTS=outputs, INPUTS=inputs, BLOCK_OUT=w.block[0], GROUP=group,
        PER=per, BITS=bits, PTX=PTX and x.dtype != jnp.float32, FP4=fp4, HAS_ZERO=w.zero is not None,
        HAS_BIAS=w.bias is not None, HAS_GAIN=w.gain is not None, FACTOR=factor, SPLITS=tile.splits,
        GROUPED=items is not None,
        BM=tile.tokens, BN=tile.outputs, BK=tile.inputs, STEP=tile.step,
    )[0]  # fmt: skip
