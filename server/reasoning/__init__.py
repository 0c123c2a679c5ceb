"""Reasoning: the part of an answer between <think> and </think>, or other marks.

One module per format. Each defines `splitter(prompt)`, which returns a Splitter for an answer, where `prompt` is at
least the end of the prompt; and `matches(template)`, whether a chat template certainly uses this format. A module whose
marks are special tokens of the tokenizer sets `keeps_special_tokens`. A module whose answers are messages in channels
sets `tool_format`, the module for the calls among these messages.
"""

from __future__ import annotations

from typing import ClassVar

OPENING, CLOSING = "<think>", "</think>"


class Splitter:
    """Splits a growing text into reasoning and the rest. Drops white space around the reasoning.

    Attributes:
      openings, closings: the marks, the usual ones first.
      begins_inside: the text begins with reasoning, with or without an opening mark. If false, it begins with reasoning
        only if it begins with an opening mark.
      forced_closing: the text that closes the reasoning by force.
      reasons: the next text belongs, or may belong, to the reasoning.
      is_framed: the answer is messages in channels and begins within a header.
      passes_messages: messages that are not reasoning are returned as such, for a parser that reads messages.
    """

    openings: ClassVar[tuple[str, ...]] = (OPENING,)
    closings: ClassVar[tuple[str, ...]] = (CLOSING,)
    is_framed = passes_messages = False

    def __init__(self, inside: bool):
        self.begins_inside = inside
        self._state = "begin"  # then "inside", "closing" (in white space after the mark), "after"; or directly "after"
        self._buffer = ""
        self._begun = False  # some reasoning has been returned

    @property
    def forced_closing(self) -> str:
        return f"\n{self.closings[0]}\n\n"

    @property
    def reasons(self) -> bool:
        return self._state == "inside" or (self._state == "begin" and self.begins_inside)

    def push(self, text: str) -> tuple[str, str]:
        """Takes the next piece of text; returns (reasoning, rest) as far as both are certain."""
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
        """Ends the text; returns (reasoning, rest) that was held back."""
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
        """Takes the reasoning from the buffer, up to a closing mark or as far as it is certain."""
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
    """Whether a prompt ends with the opening mark (True) or the closing mark (False); None if with neither."""
    end = prompt.rstrip()
    if end.endswith(closing):
        return False
    return True if end.endswith(opening) else None
