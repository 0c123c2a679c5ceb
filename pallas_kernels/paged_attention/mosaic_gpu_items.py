"""The sizes of the tiles of `mosaic_gpu_kernel`, and the shared memory that they need."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

LANES = 64  # query rows of a warpgroup
SHARED_MEMORY = 227 * 1024  # bytes of a multiprocessor's shared memory that programs may use
HALF_SHARED_MEMORY = 113 * 1024  # bytes for each of two programs: half of 228 KiB, less 1 KiB that each reserves


def _padded(size: int) -> int:
    return -(-size // 1024) * 1024


@dataclass(frozen=True)
class Tile:
    """The static parameters of a launch. head_dim: as padded in shared memory. heads: query heads of a KV head, at most
    `lanes / tokens`."""

    lanes: int  # query rows, a multiple of LANES
    heads: int
    tokens: int
    head_dim: int
    page_size: int
    block: int  # cached tokens per step
    dtype: Any
    out_dtype: Any
    scale: float
    window: int | None
    softcap: float | None
    interpret: Any
    codes: Any = None  # dtype of a cache with scales; None: keys and values have the queries' dtype

    @property
    def room(self) -> int:
        """Bytes that a program may use. Half the shared memory up to head_dim 128, where registers allow two programs
        of decode on a multiprocessor (one with softcap)."""
        return HALF_SHARED_MEMORY if self.head_dim <= 128 else SHARED_MEMORY

    @cached_property
    def stages(self) -> int:
        """Blocks in flight, at most six: slots of the ring of codes if the cache has scales, else of the main ring."""
        return next(stages for stages in range(6, 0, -1) if self.shared_memory(stages) <= self.room)

    def shared_memory(self, stages: int) -> int:
        """Bytes for one program, as JAX counts them: arrays begin at multiples of 1 KiB; a barrier has 8 bytes."""
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
        """Slots for blocks in the queries' dtype. A slot's keys and values are filled and freed separately."""
        return 1 if self.codes else self.stages
