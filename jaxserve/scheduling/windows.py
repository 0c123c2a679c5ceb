"""How far back the layers of a model see, and what a sequence keeps for them."""

from __future__ import annotations

from typing import Any

import numpy as np


class Chunk(int):
    """So many tokens are a chunk: a token sees those of its own chunk that are before it, and itself (Llama 4). A
    multiple of the page size. The tokens of a sequence that one step computes lie in one chunk."""


# Of each group of layers, how many tokens back they see, a token itself included, or their chunk; None: all.
Windows = tuple[int | Chunk | None, ...]


def chunk_of(windows: Windows) -> Chunk | None:
    """The smallest chunk of these groups of layers; None: no group sees chunks."""
    return min((window for window in windows if isinstance(window, Chunk)), default=None)


def first_needed(computed: Any, window: int | Chunk | None, page_size: int) -> Any:
    """Index of the first block that tokens from the position `computed` on, an int or int32 [n], can still see."""
    if window is None:
        return computed * 0
    if isinstance(window, Chunk):
        return computed // window * (window // page_size)
    return np.maximum(computed - window + 1, 0) // page_size


def most_pages(tokens: int, page_size: int, windows: Windows, step: int) -> list[int]:
    """Pages that a sequence of so many tokens holds at a time, at most, in each group: those of the window behind a
    step, and of the step's own tokens. step: the most tokens that a step computes."""
    blocks = -(-tokens // page_size)
    return [blocks if window is None else min(blocks, -(-(window - 1 + step) // page_size) + 1) for window in windows]
