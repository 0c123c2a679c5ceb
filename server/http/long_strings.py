"""Long strings of a body, such as pictures in base64, which are never put together.

While a body arrives, `Cutter` puts what comes inside a long string aside, and leaves a mark in the JSON. Once that is
decoded, `claim` gives the fields that may hold data their `LongString`s: those that a Struct names as `long_fields`.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from typing import Any

import msgspec

LONG = 2**17  # bytes of a string that are put aside, at least
_MOST_STRUCTS = 4096  # in which strings are looked for
_NESTED = list, msgspec.Struct
_TOKEN = f"{secrets.token_hex(16)}-"  # no client can know it
_MARK = re.compile(rf"{_TOKEN}(\d+)\.")
_BYTES_MARK = re.compile(_MARK.pattern.encode())


class LongString(str):
    """A string in the pieces in which it came. Its value is only its beginning, until the first mark."""

    __slots__ = ("pieces",)
    pieces: tuple[bytes, ...]

    @classmethod
    def of(cls, beginning: str, pieces: Sequence[bytes]) -> LongString:
        made = cls(beginning)
        made.pieces = tuple(pieces)
        return made

    @property
    def whole(self) -> str:
        return b"".join(self.pieces).decode()


def behind(beginning: str, text: str) -> str:
    """A text behind another one."""
    if isinstance(text, LongString):
        return LongString.of(beginning + text, (beginning.encode(), *text.pieces))
    return beginning + text


def pieces_of(text: str) -> tuple[bytes, ...]:
    """The UTF-8 of a text, in pieces."""
    return text.pieces if isinstance(text, LongString) else (text.encode(),)


def for_json(value: Any) -> str:
    """What msgspec encodes in the place of a LongString."""
    if isinstance(value, LongString):
        return value.whole
    raise TypeError(f"{type(value).__name__} cannot be encoded")


class Cutter:
    """JSON text as it grows, without what was put aside.

    Attributes:
      aside: what was put aside: for each mark, pieces that are ASCII and lie within one string.
    """

    def __init__(self) -> None:
        self.aside: list[list[bytes]] = []
        self._text: list[bytes] = []
        self._run: list[bytes] = []
        self._size = 0  # of the run

    def add(self, piece: bytes, within: bool) -> None:
        """`within`: the piece lies within one string, without an escape."""
        if within and piece.isascii():
            self._run.append(piece)
            self._size += len(piece)
            return
        self._close()
        self._text.append(piece)

    def _close(self) -> None:
        if self._size >= LONG:
            self._text.append(f"{_TOKEN}{len(self.aside)}.".encode())
            self.aside.append(self._run)
        else:
            self._text += self._run
        self._run = []
        self._size = 0

    def text(self) -> bytes:
        """The JSON text so far, with a mark for each run that is aside."""
        self._close()
        self._text = [b"".join(self._text)]
        return self._text[0]

    def whole(self) -> bytes:
        """The body as it came."""
        parts: list[bytes] = []
        for i, part in enumerate(_BYTES_MARK.split(self.text())):
            parts += self.aside[int(part)] if i % 2 else [part]
        return b"".join(parts)

    def claim(self, value: Any) -> bool:
        """Replaces the strings with marks in decoded JSON, in the fields that may hold them. Returns whether these were
        all; if not, the body must be decoded as a whole."""
        found = structs = 0
        left = [value]
        while left and structs < _MOST_STRUCTS:
            one = left.pop()
            if isinstance(one, list):
                left += one
            elif isinstance(one, msgspec.Struct):
                structs += 1
                for name in getattr(one, "long_fields", ()):
                    text = getattr(one, name)
                    if isinstance(text, str) and (marks := _MARK.findall(text)):
                        found += len(marks)
                        setattr(one, name, self._restored(text))
                left += [x for name in one.__struct_fields__ if isinstance(x := getattr(one, name), _NESTED)]
        return found == len(self.aside)

    def _restored(self, text: str) -> LongString:
        beginning, *rest = _MARK.split(text)
        pieces = [beginning.encode()]
        for i, part in enumerate(rest):
            pieces += [part.encode()] if i % 2 else self.aside[int(part)]
        return LongString.of(beginning, pieces)
