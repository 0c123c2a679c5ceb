"""Proposals by prompt lookup: what followed the last tokens when they stood earlier in the prompt or output (Saxena
2023, Prompt Lookup Decoding). No weights, no memory."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Ngram:
    """least, most: how many of the last tokens must stand earlier; more are preferred, then the latest place."""

    least: int = 2
    most: int = 4

    def propose(self, tokens: np.ndarray, count: int) -> np.ndarray:
        """Up to `count` tokens that may follow `tokens`, int32 [any]."""
        if len(tokens) <= self.least:
            return tokens[:0]
        ends, found = np.flatnonzero(tokens[:-1] == tokens[-1]), None  # places of the last token
        for length in range(1, self.most + 1):
            if length > 1:
                ends = ends[ends >= length - 1]
                ends = ends[tokens[ends - (length - 1)] == tokens[-length]]
            if not len(ends):
                break
            if length >= self.least:
                found = int(ends[-1])
        return tokens[:0] if found is None else tokens[found + 1 : found + 1 + count]
