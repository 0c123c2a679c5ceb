"""Products of 8-bit inputs with 8-bit weights in Triton, on NVIDIA GPUs of compute capability 8.9 and newer (int8:
8.0). Compiled for H200, not yet run on one.

Grid (tiles of tokens, tiles of outputs, splits of the inputs). As in `triton_gpu`, a program keeps a tile of the
transposed result [outputs, tokens]. The matrix unit takes at most STEP inputs at a time. Where blocks of inputs have
scales (DeepSeek's 128), a step is a block or a part of one, and its sum is multiplied by its two scales. Otherwise the
scales of token and output multiply the result. int8 without blocks is added in int32.

Exactness: the matrix unit keeps about 14 bits of a sum of float8 products (`w8a8`). So each step's sum begins at zero
and is added in float32, as in DeepSeek's kernels. `max_num_imprecise_acc` says so; without it Triton 3.9 adds all steps
in the matrix unit for capability 8.9. What this costs, in instructions of a warp and step by the machine code for an
H200: 93 instead of 83 at 16 tokens, 131 instead of 96 at 64, 148 instead of 84 in tiles of 128 x 128. And a step waits
for its own products, instead of those of the step before.

This kernel replaces XLA's gemm where another kernel has rounded the inputs. XLA does not fuse scales into its gemm if
one custom call makes the codes and the scales (seen in jax 0.10.2); it writes float32 and reads it again.

Traffic: codes once per 128 tokens, inputs once per tile of outputs (from the L2 cache), scales 4 bytes for each block.
Pipeline: `stages` steps of both operands in flight (cp.async). Splits write float32 parts, which the next kernel or XLA
adds.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from jaxserve.pallas_kernels import triton_compat
from jaxserve.pallas_kernels.quant_matmul.triton_tiles import Tiles
from jaxserve.pallas_kernels.triton_compat import Target, pad
from jaxserve.pallas_kernels.types import QuantArray, QuantRows

STEP = 128  # most inputs that the matrix unit adds at a time


def tiles(tokens: int, outputs: int, inputs: int, step: int, target: Target) -> Tiles:
    """Sizes of a program's tile and pipeline, not tuned on a device."""
    few = tokens <= 64
    roomy = target.capability in (80, 90, 100, 103)  # other capabilities have 99 KiB of shared memory
    tile = Tiles(pad(tokens, 16), 64, 1, 4, 4) if few else Tiles(128, 128, 1, 8, 3 if roomy else 2)
    programs = -(-tokens // tile.tokens) * -(-outputs // tile.outputs)
    wanted = min(3 * target.cores // programs, inputs // (4 * step), 16)
    return tile._replace(splits=1 << (max(1, wanted).bit_length() - 1))


@triton.jit
def _matmul(
    x, x_scale, codes, scale, out,
    TOKENS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, BLOCK_OUT: tl.constexpr, STEP: tl.constexpr,
    BLOCK_IN: tl.constexpr, GIVEN: tl.constexpr, SPLITS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """x [TOKENS, INPUTS] and codes [OUTPUTS, INPUTS] with their scales; `out` is [SPLITS, TOKENS, OUTPUTS]. Each token
    and each BLOCK_OUT outputs have a scale for each BLOCK_IN inputs, which are whole steps; 0: they have one scale.
    GIVEN: all tokens share one scale."""
    STEPS: tl.constexpr = (INPUTS + STEP - 1) // STEP
    GROUPS: tl.constexpr = (INPUTS + BLOCK_IN - 1) // BLOCK_IN if BLOCK_IN else 1
    WHOLE: tl.constexpr = INPUTS % STEP == 0
    SHARE: tl.constexpr = (STEPS + SPLITS - 1) // SPLITS
    INTEGERS: tl.constexpr = codes.dtype.element_ty == tl.int8
    LONGEST: tl.constexpr = 0 if INTEGERS else STEP  # inputs of a sum in the matrix unit; integers are exact anyway
    sums: tl.constexpr = tl.int32 if INTEGERS else tl.float32
    token = tl.program_id(0) * BM + tl.arange(0, BM)
    output = tl.program_id(1) * BN + tl.arange(0, BN)
    column = tl.arange(0, STEP)
    # Beyond the edges the last row is repeated. Results there are not stored.
    real_token = tl.minimum(token, TOKENS - 1)
    real_output = tl.minimum(output, OUTPUTS - 1)
    x_row = x + real_token.to(tl.int64)[:, None] * INPUTS + column[None, :]
    codes_row = codes + real_output.to(tl.int64)[:, None] * INPUTS + column[None, :]
    x_scales = x_scale + (tl.zeros_like(real_token) if GIVEN else real_token * GROUPS)
    scales = scale + real_output // BLOCK_OUT * GROUPS
    first = tl.program_id(2) * SHARE
    acc = tl.zeros([BN, BM], tl.float32 if BLOCK_IN else sums)
    for step in range(first, tl.minimum(first + SHARE, STEPS)):
        at = step * STEP
        if WHOLE:
            left = tl.load(codes_row + at)
            right = tl.load(x_row + at)
        else:
            inside = (at + column < INPUTS)[None, :]
            left = tl.load(codes_row + at, mask=inside, other=0.0)
            right = tl.load(x_row + at, mask=inside, other=0.0)
        part = tl.dot(left, tl.trans(right), out_dtype=sums, max_num_imprecise_acc=LONGEST)
        if BLOCK_IN:
            group = at // BLOCK_IN
            of_codes = tl.load(scales + group).to(tl.float32)
            of_x = tl.load(x_scales + group)
            acc += part.to(tl.float32) * of_codes[:, None] * of_x[None, :]
        else:
            acc += part
    result = acc.to(tl.float32)
    if not BLOCK_IN:
        result = result * tl.load(x_scales)[None, :] * tl.load(scales).to(tl.float32)[:, None]
    to = (tl.program_id(2).to(tl.int64) * TOKENS + token)[:, None] * OUTPUTS + output[None, :]
    real = (token < TOKENS)[:, None] & (output < OUTPUTS)[None, :]
    tl.store(out + to, tl.trans(result).to(out.dtype.element_ty), mask=real)


@jax.jit
def quant_matmul(rows: QuantRows, w: QuantArray) -> jax.Array:
    """Rounded inputs [tokens, in] times the transposed weight [out, in] -> float32 [tokens, out]."""
    parts = _product(rows, w, jnp.dtype(jnp.float32))
    return parts[0] if len(parts) == 1 else parts.sum(0)


@jax.jit
def quant_matmul_parts(rows: QuantRows, w: QuantArray) -> jax.Array:
    """The product as `operands.Partials.sums`: float32 for each split of the inputs, or one part in the dtype of x."""
    return _product(rows, w, rows.dtype)


def _product(rows: QuantRows, w: QuantArray, dtype: jnp.dtype) -> jax.Array:
    (tokens, inputs), outputs = rows.shape, w.shape[0]
    wanted = w.activations
    assert wanted is not None
    assert (wanted.group or inputs) == min(w.block[1], inputs), (wanted, w.block)
    step = min(wanted.group or STEP, STEP)
    tile = tiles(tokens, outputs, inputs, step, triton_compat.target())
    return triton_compat.call(
        _matmul, rows.codes, rows.scale, w.codes, w.scale,
        out=[jax.ShapeDtypeStruct((tile.splits, tokens, outputs), jnp.float32 if tile.splits > 1 else dtype)],
        grid=(-(-tokens // tile.tokens), -(-outputs // tile.outputs), tile.splits),
        num_warps=tile.warps, num_stages=tile.stages,
        TOKENS=tokens, OUTPUTS=outputs, INPUTS=inputs, BLOCK_OUT=w.block[0], STEP=step,
        BLOCK_IN=wanted.group or 0, GIVEN=wanted.static, SPLITS=tile.splits, BM=tile.tokens, BN=tile.outputs,
    )[0]  # fmt: skip
