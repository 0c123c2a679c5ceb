"""GGUF's blocks in Triton: weights are read in the file's form and decoded in registers.

Grid (tiles of tokens, tiles of outputs, splits of the blocks). A program loops over the blocks of its outputs. For each
group that shares a scale it decodes the codes in the dtype of x, multiplies them with the group's inputs, and adds the
product times the group's factor to its float32 sums [outputs, tokens]. A constant that a type adds to a group's values
multiplies the group's sum of x, which XLA computes. Codes are exact in 16 bits.

Experts: as in `triton_gpu`. A tile of tokens has one expert, and the weights have a leading dimension of experts.

Traffic: each field of the blocks once per tile of tokens, x once per tile of outputs (from the L2 cache).
Pipeline: `num_stages` blocks in flight (cp.async).

Estimate: for four codes, two instructions extract the low bits, three add the high bits, two convert them to 16 bits
and two subtract. Packing bytes, groups' factors and their sums come on top. The table is from the machine code of the
loop for 16 tokens, with an H200's 33 T instructions a second against its 4.3 TB/s:

  instructions a weight    Q4_K 6.2, Q5_K 7.1, Q6_K 7.5, Q3_K 7.6, Q2_K 8.9, Q5_0 11.1, Q4_1 11.6, Q5_1 15.8
  of the floor, at most    Q4_K 72%, Q5_K 76%, Q6_K 84%, Q3_K 43%, Q2_K 28%, Q5_0 48%, Q4_1 41%, Q5_1 37%

Compiled for H200; not yet run on one.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from jaxserve.pallas_kernels import triton_compat
from jaxserve.pallas_kernels.quant_matmul.blocks import GROUPS, HIGH_MASK, HIGH_UP, LOW_MASK
from jaxserve.pallas_kernels.quant_matmul.triton_tiles import Tiles, expert_items, own_tile
from jaxserve.pallas_kernels.registry import MatmulProblem
from jaxserve.pallas_kernels.triton_compat import pad
from jaxserve.pallas_kernels.types import BLOCK_KINDS, BlockArray

PTX = True  # inline PTX; Triton's interpreter has none
NAMES = tuple(BLOCK_KINDS)  # a kernel gets a kind as its index here


@triton.constexpr_function
def of(field: str, kind: int, g: int = 0) -> int:
    """Returns a field of BLOCK_KINDS, or a field of a group in GROUPS."""
    name = NAMES[kind]
    if field in ("low_at", "low_shift", "high_at", "high_shift"):
        return getattr(GROUPS[name][g], field)
    if field == "low_mask":
        return LOW_MASK[name]
    if field == "high_mask":
        return HIGH_MASK[name]
    return HIGH_UP[name] if field == "high_up" else int(getattr(BLOCK_KINDS[name], field))


@triton.constexpr_function
def block_ptx(kind: int, g: int, dtype: tl.dtype) -> str:
    """PTX that converts four codes to numbers $0 and $1. $2 has their low bits in bytes, $3 the high ones."""
    name = NAMES[kind]
    group = GROUPS[name][g]
    mask = LOW_MASK[name] * 0x01010101
    body = f"shr.u32 t, $2, {group.low_shift}; and.b32 t, t, {mask:#010x};"
    if BLOCK_KINDS[name].high:
        bits = HIGH_MASK[name]
        up = HIGH_UP[name]
        shift = up - (group.high_shift if BLOCK_KINDS[name].block > 32 else 0)
        body += f"shl.b32 u, $3, {shift};" if shift >= 0 else f"shr.u32 u, $3, {-shift};"
        body += f"lop3.b32 t, u, {(bits << up) * 0x01010101:#010x}, t, 0xEA;"
    offset = BLOCK_KINDS[name].offset
    if dtype == tl.bfloat16:  # put into the low bits of 128 (bfloat16) or 1024 (float16), a code is added to it
        high = 0x43
        less = 0xC300 + offset
        subtract = "fma.rn.bf16x2 {to}, u, one, less;"
    else:
        high = 0x64
        less = 0x6400 + offset
        subtract = "sub.f16x2 {to}, u, less;"
    for i, bytes_ in enumerate(("0x4140", "0x4342")):
        body += f"prmt.b32 u, t, {high * 0x01010101:#010x}, {bytes_};" + subtract.format(to=f"${i}")
    return f"{{ .reg .b32 t, u, one, less; mov.b32 one, 0x3F803F80; mov.b32 less, {less * 0x10001:#010x}; {body} }}"


@triton.jit
def _codes(low, high, like, KIND: tl.constexpr, G: tl.constexpr, PTX: tl.constexpr):
    """A group's codes minus their offset [outputs, group], in the dtype that the pointers `like` point to. Without high
    bits, `high` is `low`."""
    if PTX:
        return tl.inline_asm_elementwise(
            block_ptx(KIND, G, like.dtype.element_ty), "=r,=r,r,r", [low, high], like.dtype.element_ty, True, 4
        )
    code = (low.to(tl.int32) >> of("low_shift", KIND, G)) & of("low_mask", KIND)
    if of("high", KIND):
        if of("block", KIND) == 32:
            bits = high.to(tl.int32)
        else:
            bits = (high.to(tl.int32) >> of("high_shift", KIND, G)) & of("high_mask", KIND)
        code |= bits << of("high_up", KIND)
    return (code - of("offset", KIND)).to(like.dtype.element_ty)


@triton.jit
def _factor(scales, factors, KIND: tl.constexpr, G: tl.constexpr):
    """A group's factor, and the constant added to its values, float32 [outputs]. The pointers are a block's."""
    factor = tl.load(factors).to(tl.float32)
    added = tl.load(factors + 1).to(tl.float32) if of("shifts", KIND) else factor
    at: tl.constexpr = 8 * (G % 4)
    kind: tl.constexpr = of("block", KIND) * 100 + of("low", KIND) + of("offset", KIND)
    if kind == 25664:  # Q2_K
        word = tl.load(scales + G // 4)
        factor *= ((word >> at) & 15).to(tl.float32)
        added *= -((word >> (at + 4)) & 15).to(tl.float32)
    elif kind == 25668:  # Q3_K
        low = (tl.load(scales + G % 8 // 4) >> (at + G // 8 * 4)) & 15
        high = (tl.load(scales + 2) >> (at + G // 4 * 2)) & 3
        factor *= ((low | (high << 4)) - 32).to(tl.float32)
    elif kind == 25760:  # Q6_K
        factor *= ((tl.load(scales + G // 4) << (24 - at)) >> 24).to(tl.float32)
    elif kind == 25728:  # Q4_K, Q5_K
        factor *= ((tl.load(scales + G // 4) >> at) & 255).to(tl.float32)
        added *= -((tl.load(scales + 2 + G // 4) >> at) & 255).to(tl.float32)
    return factor, added


@triton.jit
def _matmul(
    x, low, high, scales, factors, sums, count, items, out,
    TOKENS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, KIND: tl.constexpr, SPLITS: tl.constexpr,
    GROUPED: tl.constexpr, PTX: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """x [TOKENS, INPUTS]; `sums` over its groups [TOKENS, INPUTS / group]; `out` is [SPLITS, TOKENS, OUTPUTS]. GROUPED:
    a tile of tokens is one of `items` (`own_tile`), and weights have a leading dimension of experts."""
    BLOCK: tl.constexpr = of("block", KIND)
    GROUP: tl.constexpr = of("group", KIND)
    BLOCKS: tl.constexpr = INPUTS // BLOCK
    WORDS: tl.constexpr = of("high", KIND) // 4 if BLOCK == 32 else of("high", KIND)  # elements of `high` in a block
    expert, start, stop, live = own_tile(items, count, TOKENS, BM, GROUPED)
    token = start + tl.arange(0, BM)
    output = tl.program_id(1) * BN + tl.arange(0, BN)
    lane = tl.arange(0, GROUP)
    # Beyond the edges the last row is repeated. Results there are not stored.
    real_token = tl.minimum(token, TOKENS - 1).to(tl.int64)
    row = expert * OUTPUTS + tl.minimum(output, OUTPUTS - 1)
    x_row = x + real_token[:, None] * INPUTS + lane[None, :]
    low_row = low + (row * (BLOCKS * of("low", KIND)))[:, None] + lane[None, :]
    scale_row = scales + row * (BLOCKS * of("words", KIND))
    factor_row = factors + row * (BLOCKS * of("factors", KIND))
    sum_row = sums + real_token * (INPUTS // GROUP)

    share: tl.constexpr = (BLOCKS + SPLITS - 1) // SPLITS
    first = tl.program_id(2) * share
    end = tl.minimum(first + share, BLOCKS)
    end = tl.where(live, end, first)
    acc = tl.zeros([BN, BM], tl.float32)
    for block in range(first, end):
        for g in tl.static_range(BLOCK // GROUP):
            bits = tl.load(low_row + (block * of("low", KIND) + of("low_at", KIND, g)))
            more = bits
            if WORDS and BLOCK == 32:
                word = tl.load(high + row * BLOCKS + block)
                more = ((word[:, None] >> (lane[None, :] + of("high_shift", KIND, g))) & 1).to(tl.uint8)
            elif WORDS:
                at = block * WORDS + of("high_at", KIND, g)
                more = tl.load(high + (row * (BLOCKS * WORDS))[:, None] + lane[None, :] + at)
            left = _codes(bits, more, x_row, KIND, g, PTX)
            tokens = tl.load(x_row + (block * BLOCK + g * GROUP))
            part = tl.dot(left, tl.trans(tokens), tl.zeros([BN, BM], tl.float32), input_precision="ieee")
            factor, added = _factor(
                scale_row + block * of("words", KIND), factor_row + block * of("factors", KIND), KIND, g
            )
            acc += part * factor[:, None]
            if of("shifts", KIND):
                of_x = tl.load(sum_row + (block * (BLOCK // GROUP) + g))
                acc += added[:, None] * of_x[None, :]
    to = (tl.program_id(2).to(tl.int64) * TOKENS + token)[:, None] * OUTPUTS + output[None, :]
    tl.store(
        out + to, tl.trans(acc).to(out.dtype.element_ty), mask=(token < stop)[:, None] & (output < OUTPUTS)[None, :]
    )


def why_not(problem: MatmulProblem) -> str | None:
    """Returns why a problem with blocks cannot run on a GPU that runs Triton, or None where it can."""
    return (
        None if problem.kind in BLOCK_KINDS else f"blocks must be one of {', '.join(BLOCK_KINDS)}, not {problem.kind}"
    )


def tiles(x_dtype: jnp.dtype, tokens: int, outputs: int, inputs: int) -> Tiles:
    """Tile sizes for a product of so many tokens, or for experts with so many tokens on average. Not tuned."""
    few = tokens <= 64
    bm, bn, warps = (pad(tokens, 16), 64, 4) if few else (64, 128, 8)
    if x_dtype == jnp.float32:
        bm = pad(min(tokens, 32), 16)
        bn = 32
        warps = 4
    programs = -(-tokens // bm) * -(-outputs // bn)
    wanted = min(3 * triton_compat.target().cores // programs, inputs // 1024)
    return Tiles(bm, bn, 1 << (max(1, min(wanted, 16)).bit_length() - 1), warps, 3 if few else 2)


@partial(jax.jit, static_argnames="dtype")
def product(x: jax.Array, w: BlockArray, count: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """x [tokens, in] times w as parts [splits, tokens, out]: float32, or `dtype` for a single part. `count`: int32 [1],
    the leading rows of x that matter; tiles beyond them hold zeros."""
    return _call(x, w, tiles(x.dtype, len(x), *w.shape), count, None, dtype)


@jax.jit
def grouped_product(x: jax.Array, w: BlockArray, group_sizes: jax.Array) -> jax.Array:
    """Rows of x [tokens, in], sorted by expert, times their experts' weights [experts, out, in] as parts [splits,
    tokens, out] in float32. group_sizes: int32 [experts]; rows beyond their sum hold anything."""
    tokens, (experts, outputs, inputs) = len(x), w.shape
    tile = tiles(x.dtype, -(-tokens // experts), outputs, inputs)
    items = expert_items(group_sizes, tokens, tile.tokens)
    tile = tile._replace(splits=1 << (max(tile.splits // len(items), 1).bit_length() - 1))
    return _call(x, w, tile, group_sizes, items, jnp.dtype(jnp.float32))


def _call(
    x: jax.Array, w: BlockArray, tile: Tiles, count: jax.Array, items: jax.Array | None, dtype: jnp.dtype
) -> jax.Array:
    """Partials [splits, tokens, out]. Without `items` there is one weight, and tiles of tokens follow up to `count`."""
    (tokens, inputs), outputs, kind = x.shape, w.shape[-2], BLOCK_KINDS[w.kind]
    sums = count
    if kind.shifts:
        sums = x.astype(jnp.float32).reshape(tokens, -1, kind.group).sum(-1)
    return triton_compat.call(
        _matmul, x, w.low, *(w.low if part is None else part for part in (w.high, w.scales)), w.factors, sums, count,
        count if items is None else items,
        out=[jax.ShapeDtypeStruct((tile.splits, tokens, outputs), jnp.float32 if tile.splits > 1 else dtype)],
        grid=(-(-tokens // tile.tokens) if items is None else len(items), -(-outputs // tile.outputs), tile.splits),
        num_warps=tile.warps, num_stages=tile.stages,
        TOKENS=tokens, OUTPUTS=outputs, INPUTS=inputs, KIND=NAMES.index(w.kind), SPLITS=tile.splits,
        GROUPED=items is not None, PTX=PTX and x.dtype != jnp.float32, BM=tile.tokens, BN=tile.outputs,
    )[0]  # fmt: skip
