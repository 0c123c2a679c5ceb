"""The base of all parsers of tool calls: a buffer, states that consume it, and the resulting content and calls.

A parser takes text in pieces of any size, and returns content and calls as soon as they are certain. How the text is
cut into pieces does not change the joined result.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
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
    """What a parser found in a piece of text."""

    content: str = ""
    calls: list[CallDelta] = []


class ToolParser:
    """Base of the parsers. A subclass begins in the state `outside`, and may set `self.state` to others.

    A state is a method that takes text from `self.buffer`, which is not empty. It returns True if the parser shall call
    the next state at once, and False if it needs more text first. White space between content and calls is dropped.

    Attributes:
      tools: name -> JSON schema of the parameters.
    """

    keeps_special_tokens: ClassVar[bool] = False  # the format's marks may be special tokens of the tokenizer
    reads_messages: ClassVar[bool] = False  # the format is messages in channels, see `jaxserve.server.tools.messages`
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
        self._space = ""  # white space that is dropped if a call follows
        self._after_call = False
        self._out = Parsed()

    def push(self, text: str) -> Parsed:
        """Takes the next piece of text; returns what is certain now."""
        self.buffer += text
        while self.buffer and self.state():
            pass
        out, self._out = self._out, Parsed()
        return out

    def finish(self) -> Parsed:
        """Ends the text; returns what was held back."""
        self.at_end()
        if not self._after_call:
            self._out.content += self._space
        out, self._out = self._out, Parsed()
        return out

    def outside(self) -> bool:
        raise NotImplementedError

    def at_end(self) -> None:
        """Handles the end of the text: text that is not part of a call becomes content."""
        if self._scanner is not None and self._sent is None:
            self.content(self._raw)
        if self.state == self.outside:
            self.content(self.buffer)

    def new_id(self) -> str:
        return f"call_{uuid.uuid4().hex[:24]}"

    # Methods that add to the result

    def content(self, text: str) -> None:
        if self._after_call:
            text = text.lstrip()
            self._after_call = not text
        text = self._space + text
        shown = text.rstrip()
        self._space = text[len(shown) :]
        self._out.content += shown

    def begin_call(self, name: str) -> None:
        self._space, self._after_call = "", True
        self._out.calls.append(CallDelta(index=self.num_calls, id=self.new_id(), name=name))
        self.num_calls += 1

    def arguments(self, text: str) -> None:
        """Adds text to the latest call's arguments."""
        if not text:
            return
        if not self._out.calls:
            self._out.calls.append(CallDelta(index=self.num_calls - 1))
        self._out.calls[-1].arguments += text

    # States and helpers that several formats use

    def take_until(self, *marks: str) -> tuple[str, str | None]:
        """Takes the buffer up to and including the first of `marks`; returns (text before, mark). If there is no mark,
        takes all text but an end that may be the beginning of one."""
        found = [(place, mark) for mark in marks if (place := self.buffer.find(mark)) >= 0]
        if found:
            place, mark = min(found)
            before, self.buffer = self.buffer[:place], self.buffer[place + len(mark) :]
            return before, mark
        held = max((n for mark in marks for n in range(1, len(mark)) if self.buffer.endswith(mark[:n])), default=0)
        place = len(self.buffer) - held
        before, self.buffer = self.buffer[:place], self.buffer[place:]
        return before, None

    def begin_json(self, raw: str = "") -> None:
        """Makes `json_call` the next state. `raw`: the marks before the call, which become content if none follows."""
        self._scanner, self._raw, self._sent, self.state = CallScanner(), raw, None, self.json_call

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
            self._scanner, self.state = None, self.outside
            return True
        if scanner.done:
            self._scanner = None
            self.after_json()
        return scanner.done or bool(self.buffer)

    def begin_named(self, name: str) -> None:
        """Begins a call and makes `json_value` the next state, which takes its arguments, a JSON object."""
        self.begin_call(name)
        self.begin_json_value()

    def begin_json_value(self) -> None:
        """Makes `json_value` the next state, which takes the arguments of the call that has begun."""
        self._value, self.state = ValueScanner(), self.json_value

    def json_value(self) -> bool:
        """State: inside the arguments of a call whose name is known."""
        used = self._value.push(self.buffer)
        self.arguments(self.buffer[:used])
        self.buffer = self.buffer[used:]
        if self._value.done or self._value.bad:
            self.after_json()
            return True
        return False
