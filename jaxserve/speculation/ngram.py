"""Proposals by prompt lookup: what followed the last tokens when they stood earlier in the prompt or output (Saxena
2023, Prompt Lookup Decoding). No weights, no memory."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from jaxserve.speculation.proposal import Proposal


@dataclass(frozen=True)
class Ngram:
    """least, most: how many of the last tokens must stand earlier. More are preferred, then the latest place.

    The kind of a proposal says how many of them did, because a long copy goes on more often than a short one.
    """

    least: int = 2
    most: int = 16
    chances: ClassVar = (0.5, 0.6, 0.75, 0.9, 0.95)  # assumed at first, by kind
    lengths: ClassVar = (3, 4, 8, 16)  # tokens from which on a copy is of the next kind

    def propose(self, tokens: np.ndarray, count: int) -> Proposal | None:
        """`count` tokens that may follow `tokens`. If fewer than that stood behind the place, the text between there
        and the end is taken to repeat itself."""
        if len(tokens) <= self.least:
            return None
        ends = np.flatnonzero(tokens[:-1] == tokens[-1])  # places of the last token
        found = length = 0
        while len(ends) and length < self.most:
            found, length = int(ends[-1]), length + 1
            ends = ends[ends >= length]
            ends = ends[tokens[ends - length] == tokens[-1 - length]]
        if length < self.least:
            return None
        following = tokens[found + 1 + np.arange(count) % (len(tokens) - 1 - found)]
        return Proposal(following, bisect_right(self.lengths, length))
