"""The base of all parsers of tool calls: a buffer, states that consume it, and the resulting content and calls.

A parser takes text in pieces of any size, and returns content and calls as soon as they are certain. How the text is
cut into pieces does not change the joined result.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import msgspec

from jaxserve.server.tools.json_scan import CallScanner, ValueScanner


class CallDelta(msgspec.Struct, kw_only=True):
    """A part of a tool call. The first part has `id` and `name`; `arguments` is the next part of their JSON text."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


class Parsed(msgspec.Struct):
    """What a parser found in a piece of text: content and calls, in the order of the text."""

    parts: list[str | CallDelta] = []

    @property
    def content(self) -> str:
        return "".join(part for part in self.parts if isinstance(part, str))

    @property
    def calls(self) -> list[CallDelta]:
        return [part for part in self.parts if isinstance(part, CallDelta)]

    def add(self, part: str | CallDelta) -> None:
        """Appends a part. It is joined with the last one if both are text, or parts of the same call."""
        last = self.parts[-1] if self.parts else None
        if isinstance(part, str) and isinstance(last, str):
            self.parts[-1] = last + part
        elif isinstance(part, CallDelta) and isinstance(last, CallDelta) and part.index == last.index:
            last.arguments += part.arguments
        elif part:
            self.parts.append(part)


class ToolParser:
    """Base of the parsers. A subclass begins in the state `outside`, and may set `self.state` to others.

    A state is a method that takes text from `self.buffer`, which is not empty. It returns True if the parser shall call
    the next state at once, and False if it needs more text first.

    White space between two texts is kept, also where calls stand between them. White space between two marks belongs to
    the format. In an answer with calls, white space that no text precedes, or that no text follows, is dropped: it is
    what templates write around calls.

    Attributes:
      tools: name -> JSON schema of the parameters.
    """

    keeps_special_tokens: ClassVar[bool] = False  # the format's marks may be special tokens of the tokenizer
    reads_messages: ClassVar[bool] = (
        False  # the format is messages in channels, see `jaxserve.server.tools.channel_messages`
    )
    closing: ClassVar[str] = ""  # the mark after a JSON call; models sometimes omit the brace before it

    def __init__(self, tools: Mapping[str, Mapping[str, Any]]):
        self.tools = tools
        self.buffer = ""
        self.state: Callable[[], bool] = self.outside
        self.num_calls = 0
        self._raw = ""  # text of the current JSON call, which becomes content if it turns out to be no call
        self._scanner: CallScanner | None = None
        self._value = ValueScanner()
        self._sent: int | None = None  # characters of the current call's arguments returned so far; None: no call
        self._has_text = False  # some content has been returned
        self._space = ""  # white space after that content, which is held back until more follows
        self._gap: str | None = None  # white space since the last mark; None: no mark since the last content
        self._last = ""  # the character before the buffer, if it is content
        self._out = Parsed()

    def push(self, text: str) -> Parsed:
        """Takes the next piece of text; returns what is certain now."""
        self.buffer += text
        while self.buffer and self.state():
            pass
        out = self._out
        self._out = Parsed()
        return out

    def finish(self, is_cut: bool = False) -> Parsed:
        """Ends the text; returns what was held back.

        `is_cut`: the limit of tokens cut the text. Then half a mark is dropped, and so is a call whose arguments have
        not begun. Arguments that have begun stay as they are.
        """
        if is_cut:
            self.at_cut()
        else:
            self.at_end()
        if self._gap is None or not self.num_calls:
            self._out.add(self._space + (self._gap or ""))
        out = self._out
        self._out = Parsed()
        return out

    def outside(self) -> bool:
        raise NotImplementedError

    def at_end(self) -> None:
        """Handles the end of the text: text that is not part of a call becomes content."""
        if self._scanner is not None and self._sent is None:
            self.content(self._raw)
        if self.state == self.outside:
            self.content(self.buffer)

    def at_cut(self) -> None:
        """Handles the end of a text that was cut: what is unfinished is dropped."""
        if self.state == self.outside and self.buffer[:1].isalnum() and self._last.isalnum():
            self.content(self.buffer)  # the end of a word, which is no mark

    def new_id(self) -> str:
        return f"call_{uuid.uuid4().hex[:24]}"

    # Methods that add to the result

    def content(self, text: str) -> None:
        self._last = text[-1:] or self._last
        begun = text.lstrip()
        space = text[: len(text) - len(begun)]
        if self._gap is None:
            self._space += space
        else:
            self._gap += space
        if not begun:
            return
        if self._has_text or not self.num_calls:
            self._out.add(self._space + (self._gap or ""))
        shown = begun.rstrip()
        self._out.add(shown)
        self._space = begun[len(shown) :]
        self._has_text = True
        self._gap = None

    def begin_call(self, name: str) -> None:
        self._gap = ""
        self._out.add(CallDelta(index=self.num_calls, id=self.new_id(), name=name))
        self.num_calls += 1

    def arguments(self, text: str) -> None:
        """Adds text to the latest call's arguments."""
        if text:
            self._out.add(CallDelta(index=self.num_calls - 1, arguments=text))

    # States and helpers that several formats use

    def take_until(self, *marks: str) -> tuple[str, str | None]:
        """Takes the buffer up to and including the first of `marks`; returns (text before, mark). If there is no mark,
        takes all text but an end that may be the beginning of one."""
        found = [(place, mark) for mark in marks if (place := self.buffer.find(mark)) >= 0]
        if found:
            place, mark = min(found)
            before = self.buffer[:place]
            self.buffer = self.buffer[place + len(mark) :]
            return before, mark
        place = len(self.buffer) - begun_mark(self.buffer, marks)
        before = self.buffer[:place]
        self.buffer = self.buffer[place:]
        return before, None

    def content_until(self, *marks: str) -> str | None:
        """Takes the buffer as `take_until` does, the text as content; returns the mark."""
        before, mark = self.take_until(*marks)
        self.content(before)
        if mark is not None:
            self._gap = self._last = ""
        return mark

    def begin_json(self, raw: str = "") -> None:
        """Makes `json_call` the next state. `raw`: the marks before the call, which become content if none follows."""
        self._scanner = CallScanner()
        self._raw = raw
        self._sent = None
        self.state = self.json_call

    def accepts(self, name: str) -> bool:
        """Whether an object with this name is taken for a call."""
        return True

    def after_json(self) -> None:
        """Sets the state that follows a call."""
        self.state = self.outside

    def json_call(self) -> bool:
        """State: before or inside {"name": …, "arguments": …}."""
        scanner = self._scanner
        assert scanner is not None
        used = scanner.push(self.buffer)
        if self._sent is None:
            self._raw += self.buffer[:used]
        self.buffer = self.buffer[used:]
        if scanner.unclosed and self.closing and self.closing.startswith(self.buffer[: len(self.closing)]):
            if len(self.buffer) < len(self.closing):
                return False
            scanner.close()
        accepted = scanner.name is not None and self.accepts(scanner.name)
        if accepted and scanner.arguments:
            if self._sent is None:
                self.begin_call(scanner.name or "")
                self._sent = 0
            self.arguments(scanner.arguments[self._sent :])
            self._sent = len(scanner.arguments)
        if scanner.bad or (scanner.name is not None and not accepted):
            if self._sent is None:
                self.content(self._raw)
            self._scanner = None
            self.state = self.outside
            return True
        if scanner.done:
            self._scanner = None
            self.after_json()
        return scanner.done or bool(self.buffer)

    def begin_named(self, name: str) -> None:
        """Begins a call and makes `json_value` the next state, which takes its arguments, a JSON object."""
        self.begin_call(name)
        self._value = ValueScanner()
        self.state = self.json_value

    def json_value(self) -> bool:
        """State: inside the arguments of a call whose name is known."""
        used = self._value.push(self.buffer)
        self.arguments(self.buffer[:used])
        self.buffer = self.buffer[used:]
        if self._value.done or self._value.bad:
            self.after_json()
            return True
        return False


def begun_mark(text: str, marks: Iterable[str]) -> int:
    """How many characters at the end of a text may be the beginning of a mark."""
    return max((n for mark in marks for n in range(1, len(mark)) if text.endswith(mark[:n])), default=0)
