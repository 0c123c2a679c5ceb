"""Reasoning: the part of an answer between <think> and </think>, or other marks.

One module per format. Each defines `splitter(prompt)`, which returns a Splitter for an answer, where `prompt` is at
least the end of the prompt; and `matches(template)`, whether a chat template certainly uses this format. A module
whose answers are messages in channels sets `tool_format`, the module for the calls among these messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from jaxserve.text.detokenizer import StopStrings

OPENING = "<think>"
CLOSING = "</think>"


class Splitter:
    """Splits a growing text into reasoning and the rest. Drops white space around the reasoning.

    Attributes:
      openings, closings: the marks, the usual ones first.
      followers: marks of what may follow the reasoning without a closing mark. They belong to the rest.
      wrappings: pairs of marks, one of which may be around the rest; see `Unwrapper`.
      begins_inside: the text begins with reasoning, with or without an opening mark. If false, it begins with reasoning
        only if it begins with an opening mark.
      forced_closing: the text that closes the reasoning by force.
      reasons: the next text belongs, or may belong, to the reasoning.
      is_framed: the answer is messages in channels and begins within a header.
      passes_messages: messages that are not reasoning are returned as such, for a parser that reads messages.
    """

    openings: ClassVar[tuple[str, ...]] = (OPENING,)
    closings: ClassVar[tuple[str, ...]] = (CLOSING,)
    followers: ClassVar[tuple[str, ...]] = ()
    wrappings: ClassVar[tuple[tuple[str, str], ...]] = ()
    is_framed = passes_messages = False

    def __init__(self, inside: bool):
        self.begins_inside = inside
        self._state = "begin"  # then "inside", "closing" (in white space after the mark), "after"; or directly "after"
        self._buffer = ""
        self._begun = False  # some reasoning has been returned
        self._unwrapper = Unwrapper(self.wrappings) if self.wrappings else None

    @property
    def marks(self) -> tuple[str, ...]:
        """Every text that the splitter looks for. Those that are special tokens must be in the text."""
        pairs = (mark for pair in self.wrappings for mark in pair)
        return (*self.openings, *self.closings, *self.followers, *pairs)

    @property
    def forced_closing(self) -> str:
        return f"\n{self.closings[0]}\n\n"

    @property
    def reasons(self) -> bool:
        return self._state == "inside" or (self._state == "begin" and self.begins_inside)

    def stop_strings(self, stops: Sequence[str]) -> StopStrings:
        """A request's stop strings, as they are looked for in answers of this format."""
        return StopStrings(stops)

    def push(self, text: str) -> tuple[str, str]:
        """Takes the next piece of text; returns (reasoning, rest) as far as both are certain."""
        reasoning, rest = self._split(text)
        return reasoning, self._unwrapper.push(rest) if self._unwrapper else rest

    def _split(self, text: str) -> tuple[str, str]:
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
        rest = self._buffer
        self._buffer = ""
        return reasoning, rest

    def finish(self, is_cut: bool = False) -> tuple[str, str]:
        """Ends the text; returns (reasoning, rest) that was held back. If the limit of tokens cut the text (`is_cut`),
        half a mark is neither."""
        held = _without_mark(self._buffer, is_cut)
        self._buffer = ""
        if self.reasons:
            return held.rstrip() if self._begun else held.strip(), ""
        return "", self._unwrapper.push(held) + self._unwrapper.finish(is_cut) if self._unwrapper else held

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
        marks = (*self.closings, *self.followers)
        places = [(place, mark) for mark in marks if (place := self._buffer.find(mark)) >= 0]
        place, mark = min(places, default=(len(self._buffer), ""))
        text = self._buffer[:place] if self._begun else self._buffer[:place].lstrip()
        if mark:
            self._state = "closing"
            self._buffer = self._buffer[place + (len(mark) if mark in self.closings else 0) :]
            return text.rstrip()
        held = max((n for mark in marks for n in range(1, len(mark)) if text.endswith(mark[:n])), default=0)
        shown = text[: len(text) - held].rstrip()
        self._buffer = text[len(shown) :]
        self._begun = self._begun or bool(shown)
        return shown


class Unwrapper:
    """Removes marks around a growing text, and the white space inside them. A text that does not begin with an opening
    mark is returned as it is.

    `pairs`: the opening marks and their closing marks.
    """

    def __init__(self, pairs: Sequence[tuple[str, str]]):
        self._pairs = pairs
        self._closing: str | None = None  # the mark that is due
        self._state = "begin"  # then "opened" (in white space), "inside", "closed" (in white space), "plain"
        self._buffer = ""

    def push(self, text: str) -> str:
        self._buffer += text
        if self._state == "begin":
            self._begin()
        if self._state == "opened" and (rest := self._buffer.lstrip()):
            self._state = "inside"
            self._buffer = rest
        shown = self._inside() if self._state == "inside" else ""
        if self._state == "closed" and (rest := self._buffer.lstrip()):
            self._state = "plain"
            self._buffer = rest
        if self._state == "plain":
            shown = shown + self._buffer
            self._buffer = ""
        return shown

    def finish(self, is_cut: bool = False) -> str:
        """Ends the text; returns what was held back; see Splitter.finish."""
        held = _without_mark(self._buffer, is_cut)
        self._buffer = ""
        return held if self._state in ("begin", "inside") else ""

    def _begin(self) -> None:
        start = self._buffer.lstrip()
        for opening, closing in self._pairs:
            if start.startswith(opening):
                self._state, self._buffer, self._closing = "opened", start.removeprefix(opening), closing
                return
        if not any(opening.startswith(start) for opening, _ in self._pairs):
            self._state = "plain"

    def _inside(self) -> str:
        """Takes the text from the buffer, up to the closing mark or as far as it is certain."""
        assert self._closing is not None
        before, found, after = self._buffer.partition(self._closing)
        if found:
            self._state = "closed"
            self._buffer = after
            return before.rstrip()
        held = max((n for n in range(1, len(self._closing)) if before.endswith(self._closing[:n])), default=0)
        shown = before[: len(before) - held].rstrip()
        self._buffer = before[len(shown) :]
        return shown


def _without_mark(held: str, is_cut: bool) -> str:
    """A text that was held back: white space, and half a mark, which is left out if the text was cut."""
    return held[: len(held) - len(held.lstrip())] if is_cut else held


def ends_inside(prompt: str, opening: str = OPENING, closing: str = CLOSING) -> bool | None:
    """Whether a prompt ends with the opening mark (True) or the closing mark (False); None if with neither."""
    end = prompt.rstrip()
    if end.endswith(closing):
        return False
    return True if end.endswith(opening) else None
