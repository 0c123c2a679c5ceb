"""Calls of gpt-oss, which are messages: <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}<|call|>

See `jaxserve.server.tools.channel_messages`. The texts of all other messages are content, those of the analysis channel
too: `jaxserve.server.reasoning.harmony` takes these out before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxserve.server.tools.base import ToolParser
from jaxserve.server.tools.channel_messages import FUNCTIONS, Joined, MessageReader, Part, matches
from jaxserve.server.tools.json_scan import ValueScanner
from jaxserve.server.tools.syntax import Called, Syntax, one_or_more, quoted

__all__ = ["Parser", "matches", "syntax"]


def syntax(functions: Sequence[Called], many: bool) -> Syntax:
    """The rules of messages that call the functions. The marks are those of `channel_messages.FRAME`."""

    def call(function: Called) -> str:
        to = quoted(f" to={FUNCTIONS}{function.name}")
        return f'({to} channel "commentary" | channel "commentary" {to}) type? message {function.rule}'

    rules = f"""
calls: {one_or_more("call", 'end begin "assistant"', many)}
call: {" | ".join(map(call, functions))}
"""
    return Syntax(rules)


class Parser(ToolParser):
    keeps_special_tokens = True
    reads_messages = True

    def __init__(self, tools: Mapping[str, Mapping[str, Any]]):
        super().__init__(tools)
        self._reader, self._joined = MessageReader(), Joined()
        self._is_begun = self._is_json = False  # the current call has begun; its arguments begin as JSON does

    def outside(self) -> bool:
        text = self.buffer
        self.buffer = ""
        self._take(self._reader.push(text))
        return False

    def _take(self, parts: Sequence[Part]) -> None:
        for part in parts:
            if part.message.function is None:
                self.content(self._joined.add(part))
            else:
                self._call(part, part.message.function)

    def _call(self, part: Part, name: str) -> None:
        """Adds a part of a call's arguments, up to the end of the JSON value. An empty text stands for no arguments."""
        if part.begins:
            self._value = ValueScanner()
            self._is_begun = False
        text = part.text
        if not self._is_begun:
            text = text.lstrip() or "{}" * part.ends
            if not text:
                return
            self.begin_call(name)
            self._is_begun, self._is_json = True, text.startswith("{")
        if self._is_json and text:
            text = text[: self._value.push(text)] if not (self._value.done or self._value.bad) else ""
        self.arguments(text)

    def at_end(self) -> None:
        self._take(self._reader.finish())

    def at_cut(self) -> None:
        self._take(self._reader.finish(is_cut=True))
