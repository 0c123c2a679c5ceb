"""{"name": …, "parameters": {…}} as the whole answer, or several separated by `;`, as Llama 3.1 and later write it.

Llama 4 may write its marks around the object, or around a text before it.

An object whose name is not that of a tool in the request is ordinary content.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxserve.server.tools.base import ToolParser
from jaxserve.server.tools.syntax import Called, Syntax, call_object, one_or_more

TAG = "<|python_tag|>"
TAGS = (TAG, "<|python_start|>", "<|python_end|>")


def matches(template: str) -> bool:
    """Whether the template writes calls as JSON; one for Llama 4 may instead show calls as Python."""
    return any(tag in template for tag in TAGS) and '"parameters"' in template and "[func_name1(" not in template


def syntax(functions: Sequence[Called], many: bool) -> Syntax:
    calls = one_or_more("call", 'W? ";" W?', many)
    return Syntax(f"calls: {calls}\ncall: {call_object(functions, 'parameters')}", opening=TAG, start="{")


class Parser(ToolParser):
    keeps_special_tokens = True

    def __init__(self, tools: Mapping[str, Mapping[str, Any]]):
        super().__init__(tools)
        self.state = self.between  # an answer may begin with a call

    def accepts(self, name: str) -> bool:
        return name in self.tools

    def after_json(self) -> None:
        self.state = self.between

    def between(self) -> bool:
        """State: at a place where a call may begin."""
        space = self.buffer[: len(self.buffer) - len(self.buffer.lstrip(" \t\r\n;"))]
        self.content(space.replace(";", "") if self.num_calls else space)
        self.buffer = self.buffer[len(space) :]
        if self.buffer.startswith("{"):
            self.begin_json()
        elif self.buffer:
            self.state = self.outside
        return bool(self.buffer)

    def at_cut(self) -> None:
        """An object that was cut is content, too, unless it begins as a call does."""
        if self._scanner is not None and self._sent is None:
            begun = "".join(self._raw.split())
            calls = ['{"parameters":', '{"arguments":', '{"type":"function",']
            calls += [f'{{"name":"{name}"' for name in self.tools]
            if not any(call.startswith(begun) or begun.startswith(call) for call in calls):
                self.content(self._raw)
        super().at_cut()

    def outside(self) -> bool:
        mark = self.content_until(*TAGS)
        if mark:
            self.state = self.between
        return mark is not None
