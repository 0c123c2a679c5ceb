"""LoRA adapters on NVIDIA GPUs, in Triton: two launches for a product. Compiled for H200, not yet run on one.

Shrink. Grid: (tiles of tokens, places, parts x pieces of the inputs). A program multiplies the tokens of its tile that
  use its place with a piece of A. The tokens need not be sorted: those of other adapters are zero in the product, and a
  program whose tile has none of its own ends after it has read the tile's places.
Expand. Grid: (tiles of tokens, places, blocks of outputs). A program adds up the pieces in their order, multiplies the
  sums with a block of B, and adds the products to y.

Traffic: the matrices of an adapter, padded with zeros to the pool's rank, once for each tile with one of its tokens. A
  decode step of up to 64 tokens has one tile, so it reads the adapters in the batch once, however many are in the pool.
  x once per adapter of a tile, y once in and out, the low-rank sums once for each block of outputs. The ranks are not
  read: XLA would launch a copy of each product's ranks.
Pipeline: `num_stages` steps of STEP inputs in flight while one is computed.

Many adapters in one batch were described by Punica (arXiv:2310.18547) and S-LoRA (arXiv:2311.03285).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from jaxserve.pallas_kernels import triton_compat
from jaxserve.pallas_kernels.lora import reference
from jaxserve.pallas_kernels.lora.stacks import AdapterStack
from jaxserve.pallas_kernels.registry import Device
from jaxserve.pallas_kernels.triton_compat import pad

MOST_PARTS = 3
TILES = (16, 32, 64)  # tokens of a tile
STEP = 128  # inputs of a step
BLOCK = 128  # outputs of a program
# least inputs of a piece, and most pieces, for one tile of tokens
PIECE = 1024
MOST_PIECES = 8
DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)


def why_not(device: Device) -> str | None:
    """Returns the reason why `device` cannot use the kernels, or None where it can."""
    if device.platform != "gpu" or (device.capability or (0, 0)) < (8, 0):
        return "they are for NVIDIA GPUs of compute capability 8.0 or newer"
    return None


@triton.jit
def _tokens(place, count, at, ROWS: tl.constexpr):
    """The rows of this program's tile, and which of them use the place `at`."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # times OUTPUTS they exceed int32
    return rows, tl.load(place + rows, mask=rows < tl.load(count), other=-1) == at


@triton.jit
def _shrink(
    x, a, place, count, low,
    TOKENS: tl.constexpr, INPUTS: tl.constexpr, PARTS: tl.constexpr, RANK: tl.constexpr, PIECE: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """low: float32 [pieces, TOKENS, PARTS, WIDTH], of which only the rows with an adapter are written."""
    at = tl.program_id(1).to(tl.int64)
    part = tl.program_id(2) % PARTS
    piece = tl.program_id(2) // PARTS
    rows, mine = _tokens(place, count, at, ROWS)
    if tl.max(mine.to(tl.int32), 0) > 0:
        column = tl.arange(0, WIDTH)
        sums = tl.zeros([ROWS, WIDTH], tl.float32)
        for first in tl.range(0, PIECE, STEP, num_stages=3):
            k = piece * PIECE + first + tl.arange(0, STEP)
            left = tl.load(x + rows[:, None] * INPUTS + k[None, :], mask=mine[:, None] & (k < INPUTS)[None, :], other=0)
            to = a + ((at * PARTS + part) * RANK + column)[None, :] * INPUTS + k[:, None]
            right = tl.load(to, mask=(column < RANK)[None, :] & (k < INPUTS)[:, None], other=0)
            sums = tl.dot(left, right.to(left.dtype), sums, input_precision="ieee")
        to = low + ((piece * TOKENS + rows[:, None]) * PARTS + part) * WIDTH + column[None, :]
        tl.store(to, sums, mask=mine[:, None])


@triton.jit
def _expand(
    before, x, low, b, place, count, y,
    TOKENS: tl.constexpr, OUTPUTS: tl.constexpr, PARTS: tl.constexpr, RANK: tl.constexpr, FIRST: tl.constexpr,
    SECOND: tl.constexpr, PERIOD: tl.constexpr, PIECES: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """`y` aliases `before`. Of each PERIOD outputs FIRST belong to the first part, then SECOND to the second one."""
    at = tl.program_id(1).to(tl.int64)
    rows, mine = _tokens(place, count, at, ROWS)
    if tl.max(mine.to(tl.int32), 0) > 0:
        n = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
        column = tl.arange(0, WIDTH)
        turn = n % PERIOD
        owner = (turn >= FIRST).to(tl.int32) + (turn >= FIRST + SECOND).to(tl.int32)
        real = mine[:, None] & (n < OUTPUTS)[None, :]
        sums = tl.load(y + rows[:, None] * OUTPUTS + n[None, :], mask=real, other=0).to(tl.float32)
        for part in tl.static_range(PARTS):
            theirs = (owner == part) & (n < OUTPUTS)
            if tl.max(theirs.to(tl.int32), 0) > 0:
                left = tl.zeros([ROWS, WIDTH], tl.float32)
                for piece in tl.static_range(PIECES):
                    of_piece = low + ((piece * TOKENS + rows[:, None]) * PARTS + part) * WIDTH + column[None, :]
                    left += tl.load(of_piece, mask=mine[:, None], other=0)
                to = b + (at * RANK + column)[:, None] * OUTPUTS + n[None, :]
                right = tl.load(to, mask=(column < RANK)[:, None] & theirs[None, :], other=0).to(x.dtype.element_ty)
                sums = tl.dot(left.to(right.dtype), right, sums, input_precision="ieee")
        tl.store(y + rows[:, None] * OUTPUTS + n[None, :], sums.to(y.dtype.element_ty), mask=real)


def add_adapters(
    y: jax.Array,
    x: jax.Array,
    stack: AdapterStack,
    place: jax.Array,
    count: jax.Array | None = None,
    axes: tuple[str | None, str | None] = (None, None),
) -> jax.Array:
    """See `reference.add_adapters`, which is called for what the kernels do not support. The matrices become the dtype
    of x where they are multiplied."""
    if stack.parts > MOST_PARTS or any(array.dtype not in DTYPES for array in (y, x, stack.a)):
        return reference.add_adapters(y, x, stack, place, count, axes)
    (tokens, inputs), outputs, (places, rank, _), parts = x.shape, y.shape[1], stack.b.shape, stack.parts
    rows = next((rows for rows in TILES if tokens <= rows), TILES[-1])
    tiles = triton.cdiv(tokens, rows)
    width = pad(rank, 16)
    pieces = 1 if tiles > 1 else min(triton.cdiv(inputs, PIECE), MOST_PIECES)
    piece = triton.cdiv(triton.cdiv(inputs, pieces), STEP) * STEP
    counted = jnp.reshape(jnp.int32(tokens) if count is None else count, 1)
    sizes: dict[str, Any] = {"TOKENS": tokens, "PARTS": parts, "RANK": rank, "ROWS": rows, "WIDTH": width}
    [low] = triton_compat.call(
        _shrink, x, stack.a, place, counted,
        out=[jax.ShapeDtypeStruct((pieces, tokens, parts, width), jnp.float32)],
        grid=(tiles, places, parts * pieces), INPUTS=inputs, PIECE=piece, STEP=STEP, **sizes,
    )  # fmt: skip
    first, second = (*stack.widths, sum(stack.widths))[:2]
    return triton_compat.call(
        _expand, y, x, low, stack.b, place, counted, out=[jax.ShapeDtypeStruct(y.shape, y.dtype)],
        aliases={0: 0}, grid=(tiles, places, triton.cdiv(outputs, BLOCK)), OUTPUTS=outputs, FIRST=first, SECOND=second,
        PERIOD=sum(stack.widths), PIECES=pieces, BLOCK=BLOCK, **sizes,
    )[0]  # fmt: skip
