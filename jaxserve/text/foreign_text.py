"""Encodes the text of users and tools so that special tokens in it count as plain text.

Each character of such text that could begin a special token is replaced by a stand-in before the chat template is
rendered, so all special tokens of the rendered text are the template's own. Then the original characters are put back.
If they form the beginning of a special token, a separator is put after its first character. The separator's tokens are
removed after encoding.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from jaxserve.text.tokenizer import Tokenizer

_PRIVATE = range(0xE000, 0xF900)  # Unicode's private use area


class ForeignText:
    """The foreign text of one prompt.

    Attributes:
      hidden: the given value (a string, or lists and mappings of strings) with stand-ins.
    """

    def __init__(self, tokenizer: Tokenizer, value: Any, escapes: bool | None = None):
        """If special tokens are not escaped, `hidden` is `value`. `escapes`: None: as the tokenizer says."""
        self._tokenizer = tokenizer
        self.hidden = value
        self._originals: dict[str, str] = {}  # stand-in -> original character
        if not (tokenizer.escape_special_tokens if escapes is None else escapes) or not tokenizer.markers:
            return
        used = {char for text in _strings(value) if not text.isascii() for char in text}
        escaped = "".join(text for text in _strings(value) if "\\u" in text).lower()
        free = (chr(code) for code in _PRIVATE if chr(code) not in used and f"\\u{code:04x}" not in escaped)
        self._separator = next(free)
        self._originals = {next(free): start for start in sorted({marker[0] for marker in tokenizer.markers})}
        self._markers = re.compile("|".join(map(re.escape, tokenizer.markers)))
        self._hide = {ord(start): stand_in for stand_in, start in self._originals.items()}
        self.hidden = self._replace(value)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Token ids of a text that was rendered from `hidden`."""
        return self._tokenizer.encode_separated(*self._separate(text), add_special_tokens)

    def plain(self, text: str) -> str:
        """A text that was rendered from `hidden`, with the original characters."""
        return text.translate({ord(stand_in): start for stand_in, start in self._originals.items()})

    def _separate(self, text: str) -> tuple[str, list[int]]:
        """The text with the original characters and separators, and the separators' positions."""
        if not self._originals:
            return text, []
        for stand_in in self._originals:  # a template may write JSON with ASCII escapes
            text = text.replace(f"\\u{ord(stand_in):04x}", stand_in)
        plain = self.plain(text)
        begins = re.finditer(f"[{''.join(self._originals)}]", text)
        cuts = [found.end() for found in begins if self._markers.match(plain, found.start())]
        parts = [plain[start:end] for start, end in zip([0, *cuts], [*cuts, None], strict=True)]
        return self._separator.join(parts), [cut + i for i, cut in enumerate(cuts)]

    def _replace(self, value: Any) -> Any:
        if isinstance(value, str):
            return value.translate(self._hide)
        if isinstance(value, Mapping):
            return {self._replace(name): self._replace(item) for name, item in value.items()}
        return [self._replace(item) for item in value] if isinstance(value, list | tuple) else value


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.items():
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)
