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
_BEGINNING = 1024  # bytes of a LongString's value, at least
_MOST_STRUCTS = 4096  # in which strings are looked for
_NESTED = list, msgspec.Struct


class LongString(str):
    """A string in the pieces in which it came. Its value is only its beginning, which is the first piece."""

    __slots__ = ("pieces",)
    pieces: tuple[bytes, ...]

    @classmethod
    def of(cls, pieces: Sequence[bytes]) -> LongString:
        """`pieces`: of UTF-8, none of which ends within a character."""
        first = b""
        count = 0
        while len(first) < _BEGINNING and count < len(pieces):
            first += pieces[count]
            count += 1
        made = cls(first.decode())
        made.pieces = (first, *pieces[count:])
        return made


def whole(text: str) -> str:
    return b"".join(text.pieces).decode() if isinstance(text, LongString) else text


def behind(beginning: str, text: str) -> str:
    """A text behind another one."""
    return LongString.of((beginning.encode(), *text.pieces)) if isinstance(text, LongString) else beginning + text


def pieces_of(text: str) -> tuple[bytes, ...]:
    """The UTF-8 of a text, in pieces."""
    return text.pieces if isinstance(text, LongString) else (text.encode(),)


def for_json(value: Any) -> str:
    """What msgspec encodes in the place of a LongString."""
    if isinstance(value, LongString):
        return whole(value)
    raise TypeError(f"{type(value).__name__} cannot be encoded")


class Cutter:
    """JSON text as it grows, without what was put aside.

    Attributes:
      aside: what was put aside: for each mark, pieces that are ASCII and lie within one string.
    """

    def __init__(self, text: bytes = b"") -> None:
        """`text`: its beginning, of which nothing is put aside."""
        self.aside: list[list[bytes]] = []
        self._mark = secrets.token_hex(16)  # no client can know it
        self._text = [text]
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
            self._text.append(f"{self._mark}-{len(self.aside)}.".encode())
            self.aside.append(self._run)
        else:
            self._text += self._run
        self._run = []
        self._size = 0

    def text(self) -> bytes:
        """The JSON text so far, with a mark for each run that is aside."""
        if self._run:
            self._close()
        if len(self._text) > 1:
            self._text = [b"".join(self._text)]
        return self._text[0]

    def whole(self) -> bytes:
        """The body as it came."""
        parts: list[bytes] = []
        for i, part in enumerate(re.split(rf"{self._mark}-(\d+)\.".encode(), self.text())):
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
                left += [x for x in one if isinstance(x, _NESTED)]
            elif isinstance(one, msgspec.Struct):
                structs += 1
                for name in getattr(one, "long_fields", ()):
                    text = getattr(one, name)
                    if isinstance(text, str) and (count := text.count(self._mark)):
                        found += count
                        setattr(one, name, self._restored(text))
                left += [x for name in one.__struct_fields__ if isinstance(x := getattr(one, name), _NESTED)]
        return found == len(self.aside)

    def _restored(self, text: str) -> LongString:
        pieces: list[bytes] = []
        for i, part in enumerate(re.split(rf"{self._mark}-(\d+)\.", text)):
            pieces += self.aside[int(part)] if i % 2 else [part.encode()]
        return LongString.of(pieces)
