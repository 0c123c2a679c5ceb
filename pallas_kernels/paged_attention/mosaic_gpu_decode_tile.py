"""The sizes of the Hopper decode kernel, and the shared memory that they need."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from jaxserve.pallas_kernels.paged_attention.mosaic_gpu_prompt_tile import SHARED_MEMORY

HALF_SHARED_MEMORY = 113 * 1024  # bytes for each of two programs: half of 228 KiB, less 1 KiB that each reserves


@dataclass(frozen=True)
class DecodeTile:
    """The static parameters of a decode launch. See `mosaic_gpu_decode`."""

    kv_heads: int
    group: int  # query heads of a KV head
    stride: int  # rows of q from one KV head's queries to the next one's
    head_dim: int  # a multiple of 64
    page_size: int
    dtype: Any
    scale: float
    window: int | None
    softcap: float | None
    interpret: Any
    codes: Any = None  # dtype of a cache with scales; None: keys and values have the queries' dtype
    most_parts: int = 1  # of a row

    block: ClassVar[int] = 64  # cached tokens of a step: the rows of the matrix unit's tile
    scratch: ClassVar[int] = 1024  # bytes through which warps exchange the largest scores of their keys

    @property
    def columns(self) -> int:
        """Rows of q that are copied for an item. They begin at a multiple of eight; the group may begin anywhere."""
        return -(-(self.group + 8 - math.gcd(self.stride, 8)) // 8) * 8

    @property
    def programs(self) -> int:
        """Programs that share a multiprocessor: two, as long as each has room for three blocks."""
        return 2 if self.head_dim <= 128 else 1

    @cached_property
    def slots(self) -> int:
        """Blocks of keys and values in flight, at most six."""
        room = HALF_SHARED_MEMORY if self.programs == 2 else SHARED_MEMORY
        return next(slots for slots in range(6, 0, -1) if self.shared_memory(slots) <= room)

    def shared_memory(self, slots: int) -> int:
        """Bytes for one program, as JAX counts them: arrays begin at multiples of 1 KiB; a barrier has 8 bytes."""
        size = self.dtype.itemsize
        one = self.block * self.head_dim  # elements of a block of keys, or of values
        arrays = [2 * self.columns * self.head_dim * size, self.columns * self.head_dim * size]  # queries, results
        arrays += [self.columns * self.block * size, 4, self.scratch]
        arrays += [slots * 2 * one, slots * 2 * self.block * 4, one * size] if self.codes else [slots * 2 * one * size]
        return sum(-(-array // 1024) * 1024 for array in arrays) + 8 * (4 + 4 * slots)
