"""The TPU attention kernel's plan: sizes of query tiles and blocks of cached tokens, their memory, its operands and its
scratch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Unpack

import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from jaxserve.pallas_kernels import tuning
from jaxserve.pallas_kernels.registry import AttentionProblem
from jaxserve.pallas_kernels.tpu_dma import LANES, OTHER_VMEM_BYTES, SMEM_BYTES, SMEM_RESERVED, smem_bytes
from jaxserve.pallas_kernels.types import AttentionOptions

TILE = 128  # maximum of query tokens in a tile of a prompt
TILE_ELEMENTS = 4096 * LANES  # maximum of float32 elements in a tile's result, all heads
BLOCK = 512  # cached tokens in a block, unless BLOCK_BYTES allows fewer
BLOCK_BYTES = 2 << 20
UNIT = 128  # maximum of queries whose scores are computed at once; a larger tile's tokens are not divided
UNITS = 4  # units of a prompt that the program interleaves
TABLES = 3  # rows of the block tables in SMEM: the current one, and two in flight
TABLE_CHUNK = LANES  # entries of a table in one copy


@dataclass(frozen=True)
class Plan:
    """The static parameters of a kernel."""

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
    writes: bool = False  # whether each item also writes its new token; decodes only
    parts: int = 1  # heads of the pages that are a head together, one part of its head_dim each

    @property
    def block_tokens(self) -> int:
        return self.block_pages * self.page_size

    @property
    def unit(self) -> int:
        """Queries of a head whose scores are computed at once: some heads of the group, all tokens of the tile."""
        if self.tile == 1:
            return self.queries
        group = self.queries // self.tile
        return self.tile * max(
            n for n in range(1, group + 1) if group % n == 0 and n * self.tile <= max(UNIT, self.tile)
        )

    @property
    def heads_together(self) -> int:
        """Heads that the program interleaves, so that their latencies overlap."""
        most = 8 if self.tile == 1 else max(1, UNITS * self.unit // self.queries)
        return max(n for n in range(1, most + 1) if self.kv_heads % n == 0)

    @property
    def table_entries(self) -> int:
        """Entries of one row of the block tables in SMEM."""
        return _round_up(self.table_width, TABLE_CHUNK)

    def smem_bytes(self, items: int, rows: int) -> int:
        """Upper estimate of the SMEM that the kernel needs for items, rows' bounds and tables."""
        slots = (items,) if self.writes else ()
        return smem_bytes(items, items, rows + 1, rows, 1, 1, 1, TABLES * self.table_entries, *slots)

    def check_smem(self, items: int, rows: int) -> None:
        """Raises ValueError where `smem_bytes` exceeds the SMEM of the chip."""
        need = self.smem_bytes(items, rows)
        limit = SMEM_BYTES - SMEM_RESERVED
        if need > limit:
            raise ValueError(
                f"{items} items of {rows} rows with tables of {self.table_width} pages need {need} bytes of SMEM, "
                f"which has {limit}; take larger pages, fewer rows or a shorter context"
            )

    @property
    def compute_dtype(self) -> Any:
        """The dtype of the matrix unit's operands."""
        return jnp.float32 if jnp.float32 in (self.q_dtype, self.kv_dtype) else jnp.bfloat16

    @property
    def vmem_bytes(self) -> int:
        """Upper estimate of the VMEM that the kernel needs."""
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


def make_plan(
    problem: AttentionProblem,
    tokens: int,
    table_width: int,
    *,
    writes: bool = False,
    parts: int = 1,
    **options: Unpack[AttentionOptions],
) -> Plan:
    """tokens: 1 for decode, otherwise the number of tokens in the batch. writes, parts: see `Plan`."""
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
        scale=options["scale"],
        window=options["window"],
        softcap=options["softcap"],
        writes=writes,
        parts=parts,
    )


class Scalars(NamedTuple):
    """int32 operands in SMEM from the start: tile and row of each item, the number of items, the rows' bounds, the
    first page of the block tables; where items write, the slot of each item's new token, -1 where it is not kept."""

    tile: Any
    row: Any
    count: Any
    q_start: Any
    kv_len: Any
    first_page: Any
    slots: Any = None


class Refs(NamedTuple):
    """References to operands. In VMEM: q [kv_heads, queries, head_dim], and the queries' sinks [kv_heads, queries,
    LANES] or None. In HBM: the tables [rows, entries] and the pages. `tpu_write` describes `new` and `new_scale`."""

    q: Any
    tables: Any
    data: Any
    data_scale: Any
    sinks: Any
    new: Any
    new_scale: Any
    out: Any

    @classmethod
    def of(cls, plan: Plan, has_sinks: bool, refs: Iterator[Any]) -> Refs:
        """Takes the call's operands, then its results, in order. Pages that are written come twice, as an operand and
        as a result. These are one array, of which the result is used."""
        q = next(refs)
        tables = next(refs)
        data = next(refs)
        data_scale = next(refs) if plan.has_scale else None
        sinks = next(refs) if has_sinks else None
        new = next(refs) if plan.writes else None
        new_scale = next(refs) if plan.writes and plan.has_scale else None
        out = next(refs)
        if plan.writes:
            data = next(refs)
            data_scale = next(refs) if plan.has_scale else None
        return cls(q, tables, data, data_scale, sinks, new, new_scale, out)


class Scratch(NamedTuple):
    """Buffers that live across grid steps.

    kv [2 slots, 2, kv_heads * parts, block tokens, head_dim / parts].
    kv_scale [2 slots, block pages, 2, kv_heads, page_size] or None.
    values [kv_heads, m, head_dim], peak, total [kv_heads, m, LANES]: the running softmax of a tile's m queries a head.
    table [TABLES * entries] in SMEM: item i uses the (i % TABLES)th row.
    turn: the slot of the next block to compute.
    """

    kv: Any
    kv_scale: Any
    values: Any
    peak: Any
    total: Any
    table: Any
    turn: Any
    arrived: Any
    table_arrived: Any
    written: Any

    @staticmethod
    def shapes(plan: Plan) -> Scratch:
        softmax = (plan.kv_heads, plan.queries)
        heads = plan.kv_heads * plan.parts, plan.block_tokens, plan.head_dim // plan.parts
        kv_scale = (2, plan.block_pages, 2, plan.kv_heads, plan.page_size)
        return Scratch(
            kv=pltpu.VMEM((2, 2, *heads), plan.kv_dtype),
            kv_scale=pltpu.VMEM(kv_scale, jnp.float32) if plan.has_scale else None,
            values=pltpu.VMEM((*softmax, plan.head_dim), jnp.float32),
            peak=pltpu.VMEM((*softmax, LANES), jnp.float32),
            total=pltpu.VMEM((*softmax, LANES), jnp.float32),
            table=pltpu.SMEM((TABLES * plan.table_entries,), jnp.int32),
            turn=pltpu.SMEM((1,), jnp.int32),
            arrived=pltpu.SemaphoreType.DMA((2,)),
            table_arrived=pltpu.SemaphoreType.DMA((TABLES,)),
            written=pltpu.SemaphoreType.DMA if plan.writes else None,
        )
