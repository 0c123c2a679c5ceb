"""The sizes of the Hopper prompt attention kernel's tiles, and the shared memory and registers that they need."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

LANES = 64  # query rows of a warpgroup
WARPGROUPS = 2  # that compute
SHARED_MEMORY = 227 * 1024  # bytes of a multiprocessor that a program may use


def heads_of_tile(group: int) -> int:
    """How many of a KV head's query heads share a tile, such that few of its 128 rows stay empty.

    A tile has the same number of tokens of each head: a multiple of eight, at least 16, so that a few tokens fit one
    tile wherever they begin. Tiles of other heads read the same keys from the L2 cache.
    """

    def rows(heads: int) -> int:
        return heads * (tokens_of_tile(heads))

    allowed = [heads for heads in range(1, group + 1) if group % heads == 0 and tokens_of_tile(heads) >= 16]
    full = [heads for heads in allowed if rows(heads) >= 7 / 8 * WARPGROUPS * LANES]
    return max(full)


def tokens_of_tile(heads: int) -> int:
    return WARPGROUPS * LANES // heads // 8 * 8


def _padded(size: int) -> int:
    return -(-size // 1024) * 1024


@dataclass(frozen=True)
class PromptTile:
    """The static parameters of a launch."""

    heads: int  # query heads of a KV head in one tile
    shares: int  # tiles that a KV head's query heads take
    tokens: int  # tokens of each head in a tile, a multiple of 8
    head_dim: int
    page_size: int
    block: int  # cached tokens per step
    dtype: Any
    scale: float
    window: int | None
    softcap: float | None
    interpret: Any
    codes: Any = None  # dtype of a cache with scales; None: keys and values have the queries' dtype

    @property
    def lanes(self) -> int:
        """Query rows: row i is head i // tokens, token i % tokens. Rows beyond heads x tokens are not used."""
        return WARPGROUPS * LANES

    @property
    def registers(self) -> tuple[int, int]:
        """Registers of a fetching thread and of a computing one. Their sum over three warpgroups is at most 504.

        These numbers give the fewest spills with ptxas 12.9.
        """
        return (120, 192) if self.codes and self.head_dim <= 128 else (72, 216)

    @cached_property
    def slots(self) -> int:
        """Slots for blocks in the queries' dtype. A slot's keys and values are filled and freed separately."""
        if self.codes:
            return 2 if self.shared_memory(2, 2) <= SHARED_MEMORY else 1
        return self.stages

    @cached_property
    def stages(self) -> int:
        """Blocks in flight, at most six: slots of the ring of codes if the cache has scales, else of the main ring."""
        return next(
            n for n in range(6, 0, -1) if self.shared_memory(n, self.slots if self.codes else n) <= SHARED_MEMORY
        )

    def shared_memory(self, stages: int, slots: int) -> int:
        """Bytes for one program, as JAX counts them: arrays begin at multiples of 1 KiB; a barrier has 8 bytes."""
        pair = 2 * self.block * self.head_dim
        arrays = [self.lanes * self.head_dim * self.dtype.itemsize, slots * pair * self.dtype.itemsize]
        if self.codes:
            arrays += [stages * pair, stages * 2 * self.block * 4]
        barriers = 1 + WARPGROUPS + 4 * slots + (stages if self.codes else 1)
        return sum(map(_padded, arrays)) + 8 * barriers
