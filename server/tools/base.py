"""What parsers of tool calls share: a buffer, states that consume it, and the content and calls that come out.

A parser sees text in pieces of any size and gives content and calls as soon as they are certain; how the text was cut
into pieces makes no difference to their sum.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import msgspec

from jaxserve.server.tools.json_scan import CallScanner, ValueScanner


class CallDelta(msgspec.Struct, kw_only=True):
    """What a tool call gained: `id` and `name` once, at its beginning, and JSON text of the arguments."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


class Parsed(msgspec.Struct):
    content: str = ""
    calls: list[CallDelta] = []


class ToolParser:
    """Base of the parsers. A subclass begins in the state `outside`, and may set `self.state` to others.

    A state is a method that consumes a part of `self.buffer`, which is not empty, and returns True, or returns False
    when it needs more text. White space between content and calls is dropped.

    Attributes:
      tools: name -> JSON schema of the parameters.
    """

    keeps_special_tokens: ClassVar[bool] = False  # the format's marks may be special tokens of the tokenizer
    closing: ClassVar[str] = ""  # the mark after a JSON call, which may stand in place of its last brace

    def __init__(self, tools: Mapping[str, Mapping[str, Any]]):
        self.tools = tools
        self.buffer = ""
        self.state: Callable[[], bool] = self.outside
        self.num_calls = 0
        self._raw = ""  # of the call that is being read, for the case that it turns out to be none
        self._scanner: CallScanner | None = None
        self._value = ValueScanner()
        self._sent: int | None = None  # characters of its arguments that are out; None: it has not begun
        self._space = ""  # white space that may stand before a call
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
        """What was held back, at the end of the text."""
        self.at_end()
        if not self._after_call:
            self._out.content += self._space
        out, self._out = self._out, Parsed()
        return out

    def outside(self) -> bool:
        raise NotImplementedError

    def at_end(self) -> None:
        """The text is over: what was not taken for a call is content."""
        if self._scanner is not None and self._sent is None:
            self.content(self._raw)
        if self.state == self.outside:
            self.content(self.buffer)

    def new_id(self) -> str:
        return f"call_{uuid.uuid4().hex[:24]}"

    # What comes out

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
        """More of the latest call's arguments."""
        if not text:
            return
        if not self._out.calls:
            self._out.calls.append(CallDelta(index=self.num_calls - 1))
        self._out.calls[-1].arguments += text

    # States and steps that several formats use

    def take_until(self, *marks: str) -> tuple[str, str | None]:
        """Takes the buffer up to the first of `marks`, and that with it; returns both. Without one, it takes what
        cannot be the beginning of a mark."""
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
        """The state `json_call` is next; `raw` are the marks before it, which are content if no call follows."""
        self._scanner, self._raw, self._sent, self.state = CallScanner(), raw, None, self.json_call

    def accepts(self, name: str) -> bool:
        """Whether an object with this name is taken for a call."""
        return True

    def after_json(self) -> None:
        """Sets the state that follows a call."""
        self.state = self.outside

    def json_call(self) -> bool:
        """Inside of {"name": …, "arguments": …}, or before it."""
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
        """Begins a call whose arguments, a JSON object, come next; the state `json_value` takes them."""
        self.begin_call(name)
        self._value, self.state = ValueScanner(), self.json_value

    def json_value(self) -> bool:
        """Inside of the arguments of a call whose name is known."""
        used = self._value.push(self.buffer)
        self.arguments(self.buffer[:used])
        self.buffer = self.buffer[used:]
        if self._value.done or self._value.bad:
            self.after_json()
            return True
        return False
