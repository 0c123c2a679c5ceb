"""Sizes of the TPU's attention kernel: tiles of queries, blocks of cached tokens, and the memory that they take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from pallas_kernels import tuning
from pallas_kernels.registry import AttentionProblem
from pallas_kernels.tpu_dma import LANES, SMEM_BYTES, SMEM_RESERVED, smem_bytes

TILE = 128  # most query tokens in a tile of a prompt
TILE_ELEMENTS = 4096 * LANES  # most float32 elements of a tile's result, all heads
BLOCK = 512  # cached tokens in a block, where BLOCK_BYTES allows
BLOCK_BYTES = 2 << 20
OTHER_VMEM_BYTES = 14 << 20
UNIT = 128  # most queries whose scores are computed at once; where a tile is larger, its tokens
UNITS = 4  # units of a prompt that the program treats side by side
TABLES = 3  # rows of the block tables in SMEM: the one in use, and two on their way
TABLE_CHUNK = LANES  # entries of a table that are copied at once


@dataclass(frozen=True)
class Plan:
    """What is fixed when a kernel is built."""

    tile: int  # query tokens in a tile
    queries: int  # of a head in a tile: tile * group, padded
    kv_heads: int
    head_dim: int
    page_size: int
    block_pages: int
    table_width: int
    q_dtype: Any
    kv_dtype: Any
    has_scale: bool
    scale: float
    window: int | None
    softcap: float | None
    writes: bool = False  # each item's new token is written too; of decodes

    @property
    def block_tokens(self) -> int:
        return self.block_pages * self.page_size

    @property
    def unit(self) -> int:
        """Queries of a head whose scores are asked for at once: some heads of the group, all tokens of the tile."""
        if self.tile == 1:
            return self.queries
        group = self.queries // self.tile
        return self.tile * max(
            n for n in range(1, group + 1) if group % n == 0 and n * self.tile <= max(UNIT, self.tile)
        )

    @property
    def heads_together(self) -> int:
        """Heads that the program treats side by side, so that their latencies overlap."""
        most = 8 if self.tile == 1 else max(1, UNITS * self.unit // self.queries)
        return max(n for n in range(1, most + 1) if self.kv_heads % n == 0)

    @property
    def table_entries(self) -> int:
        """Of a row of the block tables in SMEM."""
        return _round_up(self.table_width, TABLE_CHUNK)

    def smem_bytes(self, items: int, rows: int) -> int:
        """What the kernel needs: the items, the rows' bounds, and the tables; an upper estimate."""
        slots = (items,) if self.writes else ()
        return smem_bytes(items, items, rows + 1, rows, 1, 1, 1, TABLES * self.table_entries, *slots)

    def check_smem(self, items: int, rows: int) -> None:
        """Raises ValueError where that is more than there is."""
        need, limit = self.smem_bytes(items, rows), SMEM_BYTES - SMEM_RESERVED
        if need > limit:
            raise ValueError(
                f"{items} items of {rows} rows with tables of {self.table_width} pages need {need} bytes of SMEM, "
                f"which has {limit}; take larger pages, fewer rows or a shorter context"
            )

    @property
    def compute_dtype(self) -> Any:
        """Of the operands of the matrix unit."""
        return jnp.float32 if jnp.float32 in (self.q_dtype, self.kv_dtype) else jnp.bfloat16

    @property
    def vmem_bytes(self) -> int:
        """An upper estimate of what the kernel needs."""
        lanes = _round_up(self.head_dim, LANES)
        block = 2 * self.kv_heads * self.block_tokens * lanes * jnp.dtype(self.kv_dtype).itemsize
        scales = 2 * self.block_pages * _round_up(self.kv_heads, 8) * _round_up(self.page_size, LANES) * 4
        softmax = self.kv_heads * self.queries * (lanes + 3 * LANES) * 4
        blocked = 4 * self.kv_heads * _round_up(self.queries, 16) * lanes * jnp.dtype(self.q_dtype).itemsize
        temporaries = 8 * (self.queries + 2 * lanes) * max(self.block_tokens, LANES) * 4
        new = 2 * 2 * self.kv_heads * 8 * (lanes + LANES) * 4 if self.writes else 0
        needed = 2 * (block + (scales if self.has_scale else 0)) + softmax + blocked + temporaries + new
        return max(needed + (2 << 20), OTHER_VMEM_BYTES)


def _round_up(value: int, multiple: int) -> int:
    return (value + multiple - 1) // multiple * multiple


def make_plan(problem: AttentionProblem, tokens: int, table_width: int, **options: Any) -> Plan:
    """tokens: 1 for decode, otherwise the number of tokens in the batch."""
    lanes = _round_up(problem.head_dim, LANES)
    tuned = tuning.lookup(
        "prompts" if tokens > 1 else "decode", "mosaic_tpu", q=jnp.dtype(problem.q_dtype).name,
        kv=jnp.dtype(problem.kv_dtype).name, heads=problem.kv_heads, group=problem.group, head_dim=problem.head_dim,
        page_size=problem.page_size, context=table_width * problem.page_size, tokens=tokens,
    )  # fmt: skip
    tile = 1
    if tokens > 1:
        tile = min(tuned.get("tile", TILE), _round_up(tokens, 16))
        while tile > 16 and tile * problem.group * problem.kv_heads * lanes > TILE_ELEMENTS:
            tile = _round_up(tile // 2, 16)
    token_bytes = 2 * problem.kv_heads * lanes * jnp.dtype(problem.kv_dtype).itemsize
    most = max(tuned.get("block") or min(BLOCK, BLOCK_BYTES // token_bytes), LANES, problem.page_size)
    block = _round_up(min(most, _round_up(table_width * problem.page_size, LANES)), LANES)
    return Plan(
        tile=tile,
        queries=_round_up(tile * problem.group, 8),
        kv_heads=problem.kv_heads,
        head_dim=problem.head_dim,
        page_size=problem.page_size,
        block_pages=block // problem.page_size,
        table_width=table_width,
        q_dtype=jnp.dtype(problem.q_dtype),
        kv_dtype=jnp.dtype(problem.kv_dtype),
        has_scale=problem.has_scale,
        **options,
    )
