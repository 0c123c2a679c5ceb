"""The work of the Hopper attention kernel: its tiles' sizes, and the list of items that XLA makes of a batch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp

LANES = 64  # query rows of a warpgroup
SHARED_MEMORY = 227 * 1024  # bytes of a multiprocessor that programs may use
HALF_SHARED_MEMORY = 113 * 1024  # bytes of each of two programs: 228 KiB less 1 KiB that each reserves, halved
MIN_BLOCKS = 4  # of a part of a decode row

ROW, TOKEN, POSITION, LENGTH, FIRST, FULL_FIRST, FULL_LAST, LAST = range(8)  # columns of the list of items


def _padded(size: int) -> int:
    return -(-size // 1024) * 1024


@dataclass(frozen=True)
class Tile:
    """The static side of a launch. head_dim: as in shared memory; heads: of the group, at most `lanes / tokens`."""

    lanes: int  # query rows, a multiple of LANES
    heads: int
    tokens: int
    head_dim: int
    page_size: int
    block: int  # cached tokens of a step
    dtype: Any
    out_dtype: Any
    scale: float
    window: int | None
    softcap: float | None
    interpret: Any
    codes: Any = None  # dtype of a cache with scales; None: keys and values are as the queries

    @property
    def decode(self) -> bool:
        return self.tokens == 1

    @property
    def groups(self) -> int:
        return self.lanes // LANES

    @property
    def room(self) -> int:
        """Bytes that a program may use. Up to head_dim 128 the registers of two programs of decode fit a multiprocessor,
        and so shall their shared memory."""
        return HALF_SHARED_MEMORY if self.decode and self.head_dim <= 128 else SHARED_MEMORY

    @cached_property
    def stages(self) -> int:
        """Blocks in flight: slots of the ring, or of the ring of codes where there is one; as many as fit, up to six."""
        return next(stages for stages in range(6, 0, -1) if self.shared_memory(stages) <= self.room)

    def shared_memory(self, stages: int) -> int:
        """Bytes of a program, as JAX reckons: each array begins at a multiple of 1 KiB, a barrier takes eight bytes."""
        pair, slots = 2 * self.block * self.head_dim, 1 if self.codes else stages
        kv = slots * pair * self.dtype.itemsize
        results = self.lanes * self.head_dim * 4, self.lanes * 4
        arrays = [self.lanes * self.head_dim * self.dtype.itemsize]  # queries, and the results of prompts
        arrays += [max(kv, sum(map(_padded, results)))] if self.decode else [kv, results[1]]
        if self.codes:
            arrays += [stages * pair, stages * 2 * self.block * 4]
        barriers = 1 + 4 * slots + (stages if self.codes else 1)
        return sum(map(_padded, arrays)) + 8 * barriers

    @property
    def slots(self) -> int:
        """Blocks of keys and values as the queries are. Halves of them are freed and filled apart."""
        return 1 if self.codes else self.stages


def decode_items(length: jax.Array, block: int, window: int | None, spare: int) -> tuple[jax.Array, jax.Array]:
    """The items [rows + spare, 8], and the row of each spare one (any that no row has, where unused)."""
    rows = length.shape[0]
    first = jnp.maximum(length - window, 0) // block if window else jnp.zeros_like(length)
    last = (length + block - 1) // block
    count = last - first
    # Σ (ceil(count / part) - 1) < Σ count / part <= spare, so the spare items suffice.
    part = jnp.maximum((count.sum() + max(spare, 1) - 1) // max(spare, 1), MIN_BLOCKS) if spare else count.max() + 1
    more = jnp.maximum((count + part - 1) // part - 1, 0)
    ends = jnp.cumsum(more)
    index = jnp.arange(spare, dtype=jnp.int32)
    owner = jnp.searchsorted(ends, index, side="right").astype(jnp.int32)
    row = jnp.concatenate([jnp.arange(rows, dtype=jnp.int32), jnp.minimum(owner, rows - 1)])
    which = jnp.concatenate([jnp.zeros(rows, jnp.int32), index - (ends - more)[row[rows:]] + 1])
    begin = first[row] + which * part
    end = jnp.minimum(begin + part, last[row])
    end = jnp.where(jnp.concatenate([jnp.ones(rows, bool), owner < rows]), end, begin)
    columns = {ROW: row, TOKEN: row, POSITION: length[row] - 1, LENGTH: length[row], FIRST: begin, LAST: end}
    columns |= {FULL_FIRST: end, FULL_LAST: end}  # all blocks are masked: it costs nothing beside the traffic
    return jnp.stack([columns[i] for i in range(8)], axis=1).astype(jnp.int32), owner


def prompt_items(tile: Tile, tokens: int, q_start, kv_len, num_decodes) -> tuple[jax.Array, jax.Array]:
    """The items [count, 8], and the tiles before each row. The last tiles come first: they have most to do."""
    rows = kv_len.shape[0]
    q_len = q_start[1:] - q_start[:-1]
    tiles = jnp.where(jnp.arange(rows) >= num_decodes, (q_len + tile.tokens - 1) // tile.tokens, 0)
    before = jnp.concatenate([jnp.zeros(1, tiles.dtype), jnp.cumsum(tiles)])
    index = before[-1] - 1 - jnp.arange(min(tokens, tokens // tile.tokens + rows), dtype=jnp.int32)
    row = jnp.clip(jnp.searchsorted(before, index, side="right") - 1, 0, rows - 1)
    offset = (index - before[row]) * tile.tokens
    length = kv_len[row]
    oldest = length - q_len[row] + offset
    newest = jnp.minimum(oldest + tile.tokens, length) - 1
    last = jnp.where(index >= 0, newest // tile.block + 1, 0)
    if tile.window:
        first = jnp.minimum(jnp.maximum(oldest - tile.window + 1, 0) // tile.block, last)
        full_first = jnp.maximum(newest - tile.window + tile.block, 0) // tile.block
    else:
        first = full_first = jnp.zeros_like(last)
    full_first = jnp.minimum(full_first, last)
    full_last = jnp.clip((oldest + 1) // tile.block, full_first, last)
    columns = [row, q_start[row] + offset, oldest, length, first, full_first, full_last, last]
    return jnp.stack(columns, axis=1).astype(jnp.int32), before
