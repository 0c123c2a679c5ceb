"""Masks of the next token by a request's token lists (host side): allowed_token_ids, bad_words and min_tokens."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

import numpy as np

from jaxserve.limits import MAX_BAD_WORD_TOKENS
from jaxserve.types import SamplingParams

_MAX_KEPT = 64  # masks of allowed_token_ids


class TokenMask:
    """The mask of one request's completions. Bitmasks are int32 [words] with a bit per token.

    Only `allowed_token_ids` are ever sampled. Three kinds of tokens are unwanted, and are sampled only if no other
    token is left: the last token of a bad word, a stop token before `min_tokens`, and `end_tokens`.
    """

    def __init__(self, params: SamplingParams, allowed: np.ndarray | None, end_tokens: Iterable[int], words: int):
        self._allowed = allowed
        self._min_tokens = params.min_tokens
        self._sequences = [word for word in params.bad_words if len(word) > 1]
        single = [word[0] for word in params.bad_words if len(word) == 1]
        self._unwanted = bits_of([*single, *end_tokens], words) if single or end_tokens else None

    def apply(self, mask: np.ndarray, output: np.ndarray, stop_ids: Iterable[int]) -> None:
        """Clears the bits in `mask` of tokens that may not follow `output`; `stop_ids` would end the completion."""
        if self._allowed is not None:
            mask &= self._allowed
        unwanted = self._bad_ends(output)
        if len(output) < self._min_tokens:
            unwanted += stop_ids
        if self._unwanted is None and not unwanted:
            return
        others = mask.copy() if self._unwanted is None else mask & ~self._unwanted
        if unwanted:
            others &= ~bits_of(unwanted, len(mask))
        if others.any():  # otherwise only unwanted tokens are left
            mask[:] = others

    def _bad_ends(self, output: np.ndarray) -> list[int]:
        """Tokens that would complete a bad word of several tokens after this output."""
        if not self._sequences:
            return []
        tail = output[-MAX_BAD_WORD_TOKENS:].tolist()
        return [word[-1] for word in self._sequences if tuple(tail[1 - len(word) :]) == word[:-1]]


class AllowedTokens:
    """A cache of bitmasks by list of allowed tokens, as a list may hold the whole vocabulary."""

    def __init__(self, words: int):
        self._words = words
        self._masks: OrderedDict[tuple[int, ...], np.ndarray] = OrderedDict()

    def mask(self, ids: tuple[int, ...] | None) -> np.ndarray | None:
        """int32 [words], shared and read-only; None where every token is allowed."""
        if not ids:
            return None
        found = self._masks.pop(ids, None)
        self._masks[ids] = found = bits_of(ids, self._words) if found is None else found
        if len(self._masks) > _MAX_KEPT:
            self._masks.popitem(last=False)
        return found


def bits_of(ids: Iterable[int], words: int) -> np.ndarray:
    """int32 [words] with the bit of each of the tokens set."""
    tokens = np.fromiter(ids, np.int64)
    bits = np.zeros(words * 32, bool)
    bits[tokens] = True
    return np.packbits(bits, bitorder="little").view(np.int32)
