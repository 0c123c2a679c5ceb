"""The sizes of the Hopper prompt attention kernel's tiles, and what they take of a multiprocessor."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

LANES = 64  # query rows of a warpgroup
WARPGROUPS = 2  # that compute
SHARED_MEMORY = 227 * 1024  # bytes of a multiprocessor that a program may use


def heads_of_tile(group: int) -> int:
    """How many of a KV head's query heads share a tile: as many as leave few of its 128 rows empty.

    A tile takes as many tokens of each head, a multiple of eight and at least 16, so that a few tokens fit one tile
    wherever they begin. Heads that do not share a tile read the same keys, from the L2 cache.
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
    """The static side of a launch."""

    heads: int  # of a KV head's query heads
    shares: int  # tiles that all of them take
    tokens: int  # of each head, a multiple of 8
    head_dim: int
    page_size: int
    block: int  # cached tokens of a step
    dtype: Any
    scale: float
    window: int | None
    softcap: float | None
    interpret: Any
    codes: Any = None  # dtype of a cache with scales; None: keys and values are as the queries

    @property
    def lanes(self) -> int:
        """Query rows: row i is of head i // tokens and token i % tokens. Those beyond heads x tokens are not used."""
        return WARPGROUPS * LANES

    @property
    def registers(self) -> tuple[int, int]:
        """Of a thread that fetches, and of one that computes. There are 504 for a thread of each of three warpgroups.

        As few are spilled with these as ptxas 12.9 allows.
        """
        return (120, 192) if self.codes and self.head_dim <= 128 else (72, 216)

    @cached_property
    def slots(self) -> int:
        """Blocks of keys and values as the queries are. Halves of them are freed and filled apart."""
        if self.codes:
            return 2 if self.shared_memory(2, 2) <= SHARED_MEMORY else 1
        return self.stages

    @cached_property
    def stages(self) -> int:
        """Blocks in flight, at most six: slots of the ring, or of the ring of codes where there is one."""
        return next(
            n for n in range(6, 0, -1) if self.shared_memory(n, self.slots if self.codes else n) <= SHARED_MEMORY
        )

    def shared_memory(self, stages: int, slots: int) -> int:
        """Bytes of a program, as JAX reckons: each array begins at a multiple of 1 KiB, a barrier takes eight bytes."""
        pair = 2 * self.block * self.head_dim
        arrays = [self.lanes * self.head_dim * self.dtype.itemsize, slots * pair * self.dtype.itemsize]
        if self.codes:
            arrays += [stages * pair, stages * 2 * self.block * 4]
        barriers = 1 + WARPGROUPS + 4 * slots + (stages if self.codes else 1)
        return sum(map(_padded, arrays)) + 8 * barriers
