"""What a request's own lists let its completions draw next (host side): allowed_token_ids, bad_words, min_tokens."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

import numpy as np

from jaxserve.limits import MAX_BAD_WORD_TOKENS
from jaxserve.types import SamplingParams

_KEPT = 64  # masks of allowed_token_ids


class TokenMask:
    """What one request's lists allow. Bitmasks are int32 [words], a bit per token; they are made once per request.

    Tokens that are not in `allowed_token_ids` are never drawn. The last tokens of bad words, stop tokens before
    `min_tokens` are there, and `end_tokens` are avoided as long as any other token is left.
    """

    def __init__(self, params: SamplingParams, allowed: np.ndarray | None, end_tokens: Iterable[int], words: int):
        self._allowed = allowed
        self._min_tokens = params.min_tokens
        self._sequences = [word for word in params.bad_words if len(word) > 1]
        single = [word[0] for word in params.bad_words if len(word) == 1]
        self._unwanted = bits_of([*single, *end_tokens], words) if single or end_tokens else None

    def apply(self, mask: np.ndarray, output: np.ndarray, stop_ids: Iterable[int]) -> None:
        """Narrows `mask` to what may follow the tokens `output` of a completion that `stop_ids` would end."""
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
        if others.any():  # else the completion cannot but take an unwanted token
            mask[:] = others

    def _bad_ends(self, output: np.ndarray) -> list[int]:
        """Tokens that would complete one of the longer words after this output."""
        if not self._sequences:
            return []
        tail = output[-MAX_BAD_WORD_TOKENS:].tolist()
        return [word[-1] for word in self._sequences if tuple(tail[1 - len(word) :]) == word[:-1]]


class AllowedTokens:
    """Bitmasks of lists of allowed tokens. A list may hold the whole vocabulary, so equal lists share one."""

    def __init__(self, words: int):
        self._words = words
        self._masks: OrderedDict[tuple[int, ...], np.ndarray] = OrderedDict()

    def mask(self, ids: tuple[int, ...] | None) -> np.ndarray | None:
        """int32 [words], not to be written to; None where every token is allowed."""
        if not ids:
            return None
        found = self._masks.pop(ids, None)
        self._masks[ids] = found = bits_of(ids, self._words) if found is None else found
        if len(self._masks) > _KEPT:
            self._masks.popitem(last=False)
        return found


def bits_of(ids: Iterable[int], words: int) -> np.ndarray:
    """int32 [words] with the bit of each of the tokens set."""
    tokens = np.fromiter(ids, np.int64)
    bits = np.zeros(words * 32, bool)
    bits[tokens] = True
    return np.packbits(bits, bitorder="little").view(np.int32)
