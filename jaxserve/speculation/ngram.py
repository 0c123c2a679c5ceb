"""Proposals by lookup: what followed the last tokens when they stood earlier. No weights are needed.

"ngram" looks in the sequence's own prompt and output (Saxena 2023, Prompt Lookup Decoding). "suffix" also looks in the
recent outputs of the server, of the same tenant alone (Oliaro et al. 2024, SuffixDecoding, arXiv:2411.04975).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict

import numpy as np

from jaxserve.scheduling.sequence import Sequence
from jaxserve.speculation.proposal import Method, Proposal

LENGTHS = (3, 4, 8, 16)  # equal tokens from which on a proposal is of the next kind
CHANCES: tuple[float, ...] = (
    0.5,
    0.6,
    0.75,
    0.9,
    0.95,
)  # assumed at first, by kind: a long copy goes on more often than a short one
TENANTS = 64  # tenants whose outputs are kept
REMEMBERED = 2**16  # tokens of each
BORDER = -1  # between the outputs of a tenant


def last_place(history: np.ndarray, tokens: np.ndarray, most: int) -> tuple[int, int]:
    """Where in `history` most of the last `most` of `tokens` stand, with a token behind them: (index of the last of
    them, how many). Of several such places the last. (0, 0) if not even the last token is there."""
    ends = np.flatnonzero((history[:-1] == tokens[-1]) & (history[1:] != BORDER))
    place = length = 0
    while len(ends):
        place = int(ends[-1])
        length = length + 1
        if length == min(most, len(tokens)):
            break
        ends = ends[ends >= length]
        ends = ends[history[ends - length] == tokens[-1 - length]]
    return place, length


class Ngram(Method):
    """least, most: how many of the last tokens must stand earlier, and how many are compared."""

    chances = CHANCES

    def __init__(self, least: int = 2, most: int = 16):
        self._least = least
        self._most = most

    def propose(self, seq: Sequence, tokens: np.ndarray, count: int) -> Proposal | None:
        """`count` tokens that may follow `tokens`. If fewer than that stood behind the place, the text between there
        and the end is taken to repeat itself."""
        place, length = last_place(tokens, tokens, self._most)
        if length < self._least:
            return None
        following = tokens[place + 1 + np.arange(count) % (len(tokens) - 1 - place)]
        return Proposal(following, bisect_right(LENGTHS, length))


class Suffix(Ngram):
    """Looks in a tenant's recent outputs if the sequence itself has nothing longer."""

    chances = (*CHANCES, *CHANCES)  # copies of other outputs are kinds of their own

    def __init__(self, least: int = 2, most: int = 16):
        super().__init__(least, most)
        self._outputs: OrderedDict[tuple[str, str | None], np.ndarray] = OrderedDict()

    def propose(self, seq: Sequence, tokens: np.ndarray, count: int) -> Proposal | None:
        own = super().propose(seq, tokens, count)
        outputs = self._outputs.get(_owner(seq))
        if outputs is None or (own is not None and own.kind == len(LENGTHS)):
            return own
        place, length = last_place(outputs, tokens, self._most)
        kind = bisect_right(LENGTHS, length)
        if length < self._least or (own is not None and own.kind >= kind):
            return own
        following = outputs[place + 1 : place + 1 + count]
        following = following[: int(np.argmax(following == BORDER)) if (following == BORDER).any() else None]
        return Proposal(following, len(CHANCES) + kind) if len(following) else own

    def finished(self, seq: Sequence) -> None:
        """Remembers a sequence's output, and forgets the oldest tokens and tenants beyond the limits."""
        key = _owner(seq)
        output = seq.tokens[seq.prompt_len :]
        outputs = self._outputs.pop(key, np.empty(0, np.int32))
        self._outputs[key] = np.concatenate([outputs, output, [BORDER]])[-REMEMBERED:].astype(np.int32)
        while len(self._outputs) > TENANTS:
            self._outputs.popitem(last=False)


def _owner(seq: Sequence) -> tuple[str, str | None]:
    """Requests with different salts must not learn of each other by the time that an answer takes."""
    return seq.request.tenant, seq.request.cache_salt
