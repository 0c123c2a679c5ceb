"""Reasoning: the part of an answer between <think> and </think>, or other marks.

One file per kind of model; each defines `splitter(prompt)`, for an answer to a prompt of which at least the end is
given, and `matches(template)`, whether a chat template is certainly of this kind. Where the marks are special tokens
of the tokenizer, it sets `keeps_special_tokens`.
"""

from __future__ import annotations

from typing import ClassVar

OPENING, CLOSING = "<think>", "</think>"


class Splitter:
    """Splits a growing text into reasoning and the rest; white space around the reasoning is dropped.

    `inside`: the text begins with reasoning, whether or not it says so; otherwise only where it begins with a mark.

    Attributes:
      openings, closings: the marks, the usual ones first.
      begins_inside: the text begins with reasoning, whether or not it says so.
      reasons: what comes next is, or may be, still reasoning.
    """

    openings: ClassVar[tuple[str, ...]] = (OPENING,)
    closings: ClassVar[tuple[str, ...]] = (CLOSING,)

    def __init__(self, inside: bool):
        self.begins_inside = inside
        self._state = "begin"  # then "inside", "closing" (white space after the mark), "after"; or "after" at once
        self._buffer = ""
        self._begun = False  # some reasoning was given out

    @property
    def reasons(self) -> bool:
        return self._state == "inside" or (self._state == "begin" and self.begins_inside)

    def push(self, text: str) -> tuple[str, str]:
        """Takes the next piece of text; returns (reasoning, the rest) as far as they are certain."""
        self._buffer += text
        reasoning = ""
        if self._state == "begin":
            self._begin()
        if self._state == "inside":
            reasoning = self._read()
        if self._state == "closing":
            self._buffer = self._buffer.lstrip()
            self._state = "after" if self._buffer else "closing"
        if self._state != "after":
            return reasoning, ""
        rest, self._buffer = self._buffer, ""
        return reasoning, rest

    def finish(self) -> tuple[str, str]:
        """What was held back, at the end of the text."""
        held, self._buffer = self._buffer, ""
        if self.reasons:
            return held.rstrip() if self._begun else held.strip(), ""
        return "", held

    def _begin(self) -> None:
        start = self._buffer.lstrip()
        opening = next((mark for mark in self.openings if start.startswith(mark)), None)
        may_open = any(mark.startswith(start) for mark in self.openings)
        if opening is not None or (self.begins_inside and not may_open):
            self._state, self._buffer = "inside", start.removeprefix(opening or "")
        elif not may_open:
            self._state = "after"

    def _read(self) -> str:
        """Takes the reasoning, up to its end if that has come."""
        places = [(place, mark) for mark in self.closings if (place := self._buffer.find(mark)) >= 0]
        place, mark = min(places, default=(len(self._buffer), ""))
        text = self._buffer[:place] if self._begun else self._buffer[:place].lstrip()
        if mark:
            self._state, self._buffer = "closing", self._buffer[place + len(mark) :]
            return text.rstrip()
        held = max((n for mark in self.closings for n in range(1, len(mark)) if text.endswith(mark[:n])), default=0)
        shown = text[: len(text) - held].rstrip()
        self._buffer = text[len(shown) :]
        self._begun = self._begun or bool(shown)
        return shown


def ends_inside(prompt: str, opening: str = OPENING, closing: str = CLOSING) -> bool | None:
    """Whether a prompt ends with an opened <think>; None where it ends with neither mark."""
    end = prompt.rstrip()
    if end.endswith(closing):
        return False
    return True if end.endswith(opening) else None
