"""Which tokens a program of the Triton products computes: a tile of all tokens, or a tile of one expert's tokens."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import triton
import triton.language as tl


class Tiles(NamedTuple):
    """Sizes of a program's tile, splits of the blocks, and the launch's warps and blocks in flight."""

    tokens: int
    outputs: int
    splits: int
    warps: int
    stages: int


@triton.jit
def own_tile(items, count, TOKENS: tl.constexpr, BM: tl.constexpr, GROUPED: tl.constexpr):
    """This program's expert (0 without GROUPED), the first token of its tile of BM, the end of the tokens that it
    stores, and whether it has anything to compute. `items` are those of `expert_items`; without GROUPED, tiles follow
    each other up to the token `count`."""
    if GROUPED:
        item = items + tl.program_id(0) * 3
        expert = tl.load(item).to(tl.int64)
        start = tl.load(item + 1)
        stop = tl.load(item + 2)
        live = start < stop
    else:
        expert = tl.full([], 0, tl.int64)
        start = tl.program_id(0) * BM
        stop = TOKENS
        live = start < tl.load(count)
    return expert, start, stop, live


def expert_items(group_sizes: jax.Array, tokens: int, size: int) -> jax.Array:
    """Expert, first token and end of each tile of `size` tokens, int32 [items, 3]. Tiles beyond the last are empty."""
    group_sizes = group_sizes.astype(jnp.int32)
    experts = len(group_sizes)
    ends = jnp.cumsum(group_sizes)
    count = (group_sizes + size - 1) // size
    after = jnp.cumsum(count)
    item = jnp.arange(min(tokens, tokens // size + experts), dtype=jnp.int32)
    expert = jnp.minimum(jnp.searchsorted(after, item, side="right", method="compare_all"), experts - 1)
    start = (ends - group_sizes)[expert] + (item - (after - count)[expert]) * size
    return jnp.stack([expert, start, jnp.minimum(start + size, ends[expert])], 1).astype(jnp.int32)
