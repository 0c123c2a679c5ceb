"""Sizes and scratch memory of the TPU's kernel for latent attention. A plan is a plan of `paged_attention/tpu_plan.py`
with one key-value head, whose head_dim is the width of the cache's rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from jaxserve.pallas_kernels.paged_attention.tpu_plan import TABLES, Plan, _round_up
from jaxserve.pallas_kernels.registry import LatentProblem
from jaxserve.pallas_kernels.tpu_dma import LANES, OTHER_VMEM_BYTES

TILE = 1024  # most queries in a tile of a prompt; a query is one head of one token
BLOCK = 512  # cached tokens in a block
UNIT = 512  # most queries whose scores are computed at once, unless a token has more heads


@dataclass(frozen=True)
class LatentPlan(Plan):
    """The static parameters of a kernel. heads: query heads of a token, a multiple of 8; rank: size of a latent."""

    heads: int = 8
    rank: int = 128

    @property
    def unit_tokens(self) -> int:
        """The number of tokens for whose queries scores are computed at once."""
        most = max(1, UNIT // self.heads)
        return max(n for n in range(1, most + 1) if self.tile % n == 0)

    @property
    def unit(self) -> int:
        return self.unit_tokens * self.heads

    @property
    def converts(self) -> bool:
        """Whether blocks must be converted to the type that the matrix unit computes with."""
        return self.kv_dtype != self.compute_dtype

    @property
    def vmem_bytes(self) -> int:
        """An upper estimate of what the kernel needs."""
        block = self.block_tokens * self.head_dim
        needed = 2 * block * jnp.dtype(self.kv_dtype).itemsize
        needed += 2 * self.block_pages * 8 * _round_up(self.page_size, LANES) * 4 if self.has_scale else 0
        needed += block * jnp.dtype(self.compute_dtype).itemsize if self.converts else 0
        needed += self.queries * (self.rank + 2 * LANES) * 4
        rows = _round_up(self.queries, 16)
        needed += 2 * rows * (self.head_dim + self.rank) * jnp.dtype(self.q_dtype).itemsize
        # Of a unit: scores, probabilities, weighted values, and operands of the products.
        needed += self.unit * (4 * self.block_tokens + 2 * self.rank + self.head_dim) * 4
        needed += 3 * block * 4  # a block while it is converted or cleared
        return max(needed + (2 << 20), OTHER_VMEM_BYTES)


def make_plan(problem: LatentProblem, tokens: int, table_width: int, scale: float) -> LatentPlan:
    """tokens: 1 for decode, otherwise the number of tokens in the batch."""
    heads = _round_up(problem.heads, 8)
    tile = 1 if tokens == 1 else max(1, min(TILE // heads, _round_up(tokens, 8)))
    size = problem.page_size
    block = _round_up(min(max(BLOCK, size), _round_up(table_width * size, LANES)), max(LANES, size))
    return LatentPlan(
        tile=tile,
        queries=tile * heads,
        kv_heads=1,
        head_dim=problem.row_width,
        page_size=size,
        block_pages=block // size,
        table_width=table_width,
        q_dtype=jnp.dtype(problem.q_dtype),
        kv_dtype=jnp.dtype(problem.kv_dtype),
        has_scale=problem.has_scale,
        scale=scale,
        window=None,
        softcap=None,
        heads=heads,
        rank=problem.rank,
    )


class LatentRefs(NamedTuple):
    """q [queries, width] and out [queries, rank] in VMEM; in HBM the tables [rows, entries] and the pages."""

    q: Any
    tables: Any
    data: Any
    data_scale: Any
    out: Any


class LatentScratch(NamedTuple):
    """Scratch memory that keeps its contents from one grid step to the next.

    kv [2 slots, block tokens, width], kv_scale [2 slots, block pages, 2, page_size] or None.
    wide [block tokens, width]: the current block converted to the type of the computation; None if it has this type.
    values [queries, rank], peak, total [queries, LANES]: the running softmax of a tile's queries.
    table, turn, arrived, table_arrived: as in paged attention.
    """

    kv: Any
    kv_scale: Any
    wide: Any
    values: Any
    peak: Any
    total: Any
    table: Any
    turn: Any
    arrived: Any
    table_arrived: Any

    @staticmethod
    def shapes(plan: LatentPlan) -> LatentScratch:
        block = (plan.block_tokens, plan.head_dim)
        kv_scale = (2, plan.block_pages, 2, plan.page_size)
        return LatentScratch(
            kv=pltpu.VMEM((2, *block), plan.kv_dtype),
            kv_scale=pltpu.VMEM(kv_scale, jnp.float32) if plan.has_scale else None,
            wide=pltpu.VMEM(block, plan.compute_dtype) if plan.converts else None,
            values=pltpu.VMEM((plan.queries, plan.rank), jnp.float32),
            peak=pltpu.VMEM((plan.queries, LANES), jnp.float32),
            total=pltpu.VMEM((plan.queries, LANES), jnp.float32),
            table=pltpu.SMEM((TABLES * plan.table_entries,), jnp.int32),
            turn=pltpu.SMEM((1,), jnp.int32),
            arrived=pltpu.SemaphoreType.DMA((2,)),
            table_arrived=pltpu.SemaphoreType.DMA((TABLES,)),
        )
