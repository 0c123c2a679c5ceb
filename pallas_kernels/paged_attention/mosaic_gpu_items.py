"""The sizes of the Hopper attention kernel's tiles, and what they take of a multiprocessor."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

LANES = 64  # query rows of a warpgroup
SHARED_MEMORY = 227 * 1024  # bytes of a multiprocessor that programs may use
HALF_SHARED_MEMORY = 113 * 1024  # bytes of each of two programs: 228 KiB less 1 KiB that each reserves, halved


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
    def room(self) -> int:
        """Bytes that a program may use. Up to head_dim 128 a multiprocessor has registers for two programs of decode
        (for one with softcap), and its shared memory is halved."""
        return HALF_SHARED_MEMORY if self.head_dim <= 128 else SHARED_MEMORY

    @cached_property
    def stages(self) -> int:
        """Blocks in flight, at most six: slots of the ring, or of the ring of codes where there is one."""
        return next(stages for stages in range(6, 0, -1) if self.shared_memory(stages) <= self.room)

    def shared_memory(self, stages: int) -> int:
        """Bytes of a program, as JAX reckons: each array begins at a multiple of 1 KiB, a barrier takes eight bytes."""
        pair, slots = 2 * self.block * self.head_dim, 1 if self.codes else stages
        kv = slots * pair * self.dtype.itemsize
        results = self.lanes * self.head_dim * 4, self.lanes * 4
        arrays = [self.lanes * self.head_dim * self.dtype.itemsize]  # queries
        arrays.append(max(kv, sum(map(_padded, results))))
        if self.codes:
            arrays += [stages * pair, stages * 2 * self.block * 4]
        barriers = 1 + 4 * slots + (stages if self.codes else 1)
        return sum(map(_padded, arrays)) + 8 * barriers

    @property
    def slots(self) -> int:
        """Blocks of keys and values as the queries are. Halves of them are freed and filled apart."""
        return 1 if self.codes else self.stages
