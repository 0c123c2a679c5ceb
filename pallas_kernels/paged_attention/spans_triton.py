"""`work_lists.equal_spans` in one launch, in Triton, where XLA takes three: two sums, and what follows from them.
Compiled for H200, not yet run on one.

A program finds a few spans; each adds up the costs of all rows for itself. The rows are numbers in registers, and a row
is found, and its numbers are picked, by comparing all pairs.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from jaxserve.pallas_kernels import triton_compat
from jaxserve.pallas_kernels.triton_compat import pad
from jaxserve.pallas_kernels.work_lists import MIN_BLOCKS

EACH = 16  # spans of a program
LEAST = 64  # rows for which a kernel is compiled; more rows are padded to a power of two


@triton.jit
def _picked(values, mine):
    return tl.sum(tl.where(mine, values[None, :], 0), 1)


@triton.jit
def _spans(
    length, out,
    ROWS, PROGRAMS, COUNTERS, HEADS: tl.constexpr, BLOCK: tl.constexpr, WINDOW: tl.constexpr, MOST: tl.constexpr,
    MIN_BLOCKS: tl.constexpr, PADDED: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    row = tl.arange(0, PADDED)
    real = row < ROWS
    tokens = tl.load(length + row, mask=real, other=0)
    # As `work_lists.cut`.
    seen = (tokens + BLOCK - 1) // BLOCK
    if WINDOW:
        seen -= tl.maximum(tokens - WINDOW, 0) // BLOCK
    wanted = tl.minimum(tl.maximum((seen + MIN_BLOCKS - 1) // MIN_BLOCKS, 1), MOST)
    each = tl.maximum((seen + wanted - 1) // wanted, 1)
    number = tl.where(real, tl.maximum((seen + each - 1) // each, 1), 0)
    # As `work_lists.equal_spans`.
    costs = seen + number
    ends = tl.cumsum(costs, 0)
    begin = tl.cumsum(number, 0) - number
    total = tl.sum(costs, 0) * HEADS
    program = tl.program_id(0) * EACH + tl.arange(0, EACH)
    target = program * (total // PROGRAMS) + tl.minimum(program, total % PROGRAMS)
    passed = (target[:, None] >= ends[None, :] * HEADS) & real[None, :]
    at = tl.minimum(tl.sum(passed.to(tl.int32), 1), ROWS - 1)
    mine = row[None, :] == at[:, None]
    cost = _picked(costs, mine)
    within = target - (_picked(ends, mine) - cost) * HEADS
    of_part = _picked(each, mine) + 1
    parts = _picked(number, mine)
    part = tl.minimum(within // (of_part * HEADS), parts - 1)
    cost = tl.minimum(of_part, cost - part * of_part)
    head = (within - part * of_part * HEADS + cost - 1) // cost
    item = (_picked(begin, mine) + part) * HEADS + head
    part = tl.where(head < HEADS, part, part + 1)
    head = tl.where(head < HEADS, head, 0)
    ended = part == parts
    part = tl.where(ended, 0, part)
    at = tl.minimum(tl.where(ended, at + 1, at), ROWS - 1)
    kept = program <= PROGRAMS
    tl.store(out + program * 5, item, mask=kept)
    tl.store(out + program * 5 + 1, at, mask=kept)
    tl.store(out + program * 5 + 2, part, mask=kept)
    tl.store(out + program * 5 + 3, head, mask=kept)
    tl.store(out + program * 5 + 4, tl.load(length + at), mask=kept)
    counter = tl.program_id(0) * PADDED + row
    tl.store(out + (PROGRAMS + 1) * 5 + counter, 0, mask=counter < COUNTERS)


def spans_and_counters(
    length: jax.Array, heads: int, programs: int, *, block: int, window: int | None, most: int
) -> jax.Array:
    """`equal_spans` of rows with `length` cached tokens, cut by `cut`, as one vector; behind it a zero for each row and
    head."""
    rows = len(length)
    padded = pad(rows, LEAST)
    (found,) = triton_compat.call(
        _spans, length, out=[jax.ShapeDtypeStruct((5 * (programs + 1) + rows * heads,), jnp.int32)],
        grid=(max(-(-(programs + 1) // EACH), -(-rows * heads // padded)),), num_warps=4,
        ROWS=rows, PROGRAMS=programs, COUNTERS=rows * heads, HEADS=heads, BLOCK=block, WINDOW=window or 0, MOST=most,
        MIN_BLOCKS=MIN_BLOCKS, PADDED=padded, EACH=EACH,
    )  # fmt: skip
    return found
