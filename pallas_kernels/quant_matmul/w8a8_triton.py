"""Products of 8-bit inputs and weights whose scales belong to blocks of inputs (DeepSeek's 128), on NVIDIA GPUs of
compute capability 8.9 and newer (int8: 8.0), in Triton. Compiled for H200, not yet run on.

Grid (tiles of tokens, tiles of outputs, splits of the inputs). As in `triton_gpu` a program keeps a tile of the
transposed result [outputs, tokens] in float32. For each block of inputs it takes one product of 8-bit operands on
the matrix unit, whose sum begins at zero, multiplies it by the block's two scales and adds it in float32. So the matrix unit
adds up 128 numbers at most (Hopper's keeps some 14 bits of sums of float8).

Traffic: codes once per 128 tokens, inputs once per tile of outputs (from the L2 cache), scales 4 bytes for each block.
Pipeline: `STAGES` blocks of both operands in flight (cp.async). Splits write float32 parts for the next kernel, or XLA.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from pallas_kernels import triton_compat
from pallas_kernels.triton_compat import Target, pad
from pallas_kernels.types import QuantArray, QuantRows


class Tiles(NamedTuple):
    tokens: int
    outputs: int
    splits: int
    warps: int
    stages: int


def tiles(tokens: int, outputs: int, inputs: int, group: int, target: Target) -> Tiles:
    """Sizes of a program's tile and pipeline; not tuned on a device."""
    few = tokens <= 64
    tile = Tiles(pad(tokens, 16), 64, 1, 4, 4) if few else Tiles(128, 128, 1, 8, 3)
    if group > 128:
        tile = tile._replace(stages=2)
    programs = -(-tokens // tile.tokens) * -(-outputs // tile.outputs)
    wanted = min(3 * target.cores // programs, inputs // (4 * group), 16)
    return tile._replace(splits=1 << (max(1, wanted).bit_length() - 1))


@triton.jit
def _matmul(
    x, x_scale, codes, scale, out,
    TOKENS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, BLOCK_OUT: tl.constexpr, GROUP: tl.constexpr,
    SPLITS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """x [TOKENS, INPUTS] and its scales [TOKENS, GROUPS]; codes [OUTPUTS, INPUTS] and theirs [blocks, GROUPS]; `out` is
    [SPLITS, TOKENS, OUTPUTS]."""
    GROUPS: tl.constexpr = (INPUTS + GROUP - 1) // GROUP
    WHOLE: tl.constexpr = INPUTS % GROUP == 0
    SHARE: tl.constexpr = (GROUPS + SPLITS - 1) // SPLITS
    sums: tl.constexpr = tl.int32 if codes.dtype.element_ty == tl.int8 else tl.float32
    token = tl.program_id(0) * BM + tl.arange(0, BM)
    output = tl.program_id(1) * BN + tl.arange(0, BN)
    column = tl.arange(0, GROUP)
    # What lies beyond the edges repeats the last row, and is not stored.
    real_token, real_output = tl.minimum(token, TOKENS - 1), tl.minimum(output, OUTPUTS - 1)
    x_row = x + real_token.to(tl.int64)[:, None] * INPUTS + column[None, :]
    codes_row = codes + real_output.to(tl.int64)[:, None] * INPUTS + column[None, :]
    x_scales, scales = x_scale + real_token * GROUPS, scale + real_output // BLOCK_OUT * GROUPS
    first = tl.program_id(2) * SHARE
    acc = tl.zeros([BN, BM], tl.float32)
    for group in range(first, tl.minimum(first + SHARE, GROUPS)):
        at = group * GROUP
        if WHOLE:
            left, right = tl.load(codes_row + at), tl.load(x_row + at)
        else:
            inside = (at + column < INPUTS)[None, :]
            left, right = tl.load(codes_row + at, mask=inside, other=0.0), tl.load(x_row + at, mask=inside, other=0.0)
        part = tl.dot(left, tl.trans(right), out_dtype=sums).to(tl.float32)
        acc += part * tl.load(scales + group).to(tl.float32)[:, None] * tl.load(x_scales + group)[None, :]
    to = (tl.program_id(2).to(tl.int64) * TOKENS + token)[:, None] * OUTPUTS + output[None, :]
    real = (token < TOKENS)[:, None] & (output < OUTPUTS)[None, :]
    tl.store(out + to, tl.trans(acc).to(out.dtype.element_ty), mask=real)


@jax.jit
def quant_matmul(rows: QuantRows, w: QuantArray) -> jax.Array:
    """Rounded inputs [tokens, in] times the weight [out, in], transposed -> float32 [tokens, out]."""
    parts = _product(rows, w, jnp.dtype(jnp.float32))
    return parts[0] if len(parts) == 1 else parts.sum(0)


@jax.jit
def quant_matmul_parts(rows: QuantRows, w: QuantArray) -> jax.Array:
    """The same as `parts.Parts.sums`: float32 of each split of the inputs, or one part in the dtype of x."""
    return _product(rows, w, rows.dtype)


def _product(rows: QuantRows, w: QuantArray, dtype: jnp.dtype) -> jax.Array:
    (tokens, inputs), outputs = rows.shape, w.shape[0]
    group = w.block[1]
    assert w.activations is not None
    assert w.activations.group == group, (w.activations, w.block)
    tile = tiles(tokens, outputs, inputs, group, triton_compat.target())
    return triton_compat.call(
        _matmul, rows.codes, rows.scale, w.codes, w.scale,
        out=[jax.ShapeDtypeStruct((tile.splits, tokens, outputs), jnp.float32 if tile.splits > 1 else dtype)],
        grid=(-(-tokens // tile.tokens), -(-outputs // tile.outputs), tile.splits),
        num_warps=tile.warps, num_stages=tile.stages,
        TOKENS=tokens, OUTPUTS=outputs, INPUTS=inputs, BLOCK_OUT=w.block[0], GROUP=group, SPLITS=tile.splits,
        BM=tile.tokens, BN=tile.outputs,
    )[0]  # fmt: skip
