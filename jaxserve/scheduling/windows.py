"""How far back the layers of a model see, and the pages that a sequence keeps for them."""

from __future__ import annotations

from typing import Any

import numpy as np


class Chunk(int):
    """The number of tokens in a chunk. A token sees itself and the earlier tokens of its own chunk (Llama 4). The
    number is a multiple of the page size (`kv_cache.fitting_page_size`). The tokens of a sequence that one step
    computes lie in one chunk."""


# For each group of layers: the number of tokens that a token sees, itself included; or its Chunk; None: it sees all.
Windows = tuple[int | Chunk | None, ...]


def chunk_of(windows: Windows) -> Chunk | None:
    """The smallest chunk of these groups of layers; None: no group sees chunks."""
    return min((window for window in windows if isinstance(window, Chunk)), default=None)


def first_needed(computed: Any, window: int | Chunk | None, page_size: int) -> Any:
    """Index of the first block that a token at position `computed` (an int or int32 [n]) or later can still see."""
    if window is None:
        return computed * 0
    if isinstance(window, Chunk):
        return computed // window * (window // page_size)
    return np.maximum(computed - window + 1, 0) // page_size


def most_pages(tokens: int, page_size: int, windows: Windows, step: int) -> list[int]:
    """The most pages that a sequence of `tokens` tokens holds at a time, for each group: pages for the window before a
    step, and for the step's own tokens. `step` is the most tokens that a step computes."""
    blocks = -(-tokens // page_size)
    return [blocks if window is None else min(blocks, -(-(window - 1 + step) // page_size) + 1) for window in windows]
