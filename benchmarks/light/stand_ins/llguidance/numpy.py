"""Bitmasks of tokens; nothing fills them here."""

from __future__ import annotations

from typing import Any

import numpy as np


def allocate_token_bitmask(rows: int, vocab_size: int) -> np.ndarray:
    return np.full((rows, -(-vocab_size // 32)), -1, np.int32)


def fill_next_token_bitmask(*_: Any) -> None:
    raise RuntimeError("llguidance is not installed: there are no grammars")


fill_next_token_bitmask_par = fill_next_token_bitmask
