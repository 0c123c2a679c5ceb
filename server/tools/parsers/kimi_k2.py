"""Calls of Kimi K2, whose ids hold the names:

<|tool_calls_section_begin|><|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{…}<|tool_call_end|>…
<|tool_calls_section_end|>

The ids are kept, because the template writes them into later prompts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxserve.server.tools.base import ToolParser
from jaxserve.server.tools.syntax import Called, Syntax, one_or_more, quoted

CALLS = "<|tool_calls_section_begin|>"
CALLS_END = "<|tool_calls_section_end|>"
CALL = "<|tool_call_begin|>"
ARGUMENTS = "<|tool_call_argument_begin|>"
CALL_END = "<|tool_call_end|>"
FUNCTIONS = "functions."


def matches(template: str) -> bool:
    return CALLS in template or ("<|im_middle|>" in template and "tool_declare" in template)


def syntax(functions: Sequence[Called], many: bool) -> Syntax:
    names = " | ".join(f"{quoted(f'{FUNCTIONS}{f.name}:')} NUMBER argument {f.rule}" for f in functions)
    rules = rf"""
calls: {one_or_more("call", "W?", many)} W? all_end
call: begin ({names}) call_end
NUMBER: /[0-9]{{1,4}}/
"""
    marks = (("begin", CALL), ("argument", ARGUMENTS), ("call_end", CALL_END), ("all_end", CALLS_END))
    return Syntax(rules, opening=CALLS, marks=marks)


class Parser(ToolParser):
    keeps_special_tokens = True

    def __init__(self, tools: Mapping[str, Mapping[str, Any]]):
        super().__init__(tools)
        self._id = self._name = ""  # of the current call
        self._ids: set[str] = set()

    def new_id(self) -> str:
        """The id that the model wrote, unless an earlier call of the answer has it."""
        found = self._id if self._id and self._id not in self._ids else super().new_id()
        self._ids.add(found)
        return found

    def outside(self) -> bool:
        mark = self.content_until(CALLS, CALLS_END, CALL, CALL_END)
        if mark == CALL:
            self.state = self.head
        return mark is not None

    def head(self) -> bool:
        """State: the call's id, and the mark before its arguments."""
        head, mark, rest = self.buffer.partition(ARGUMENTS)
        if not mark:
            return False
        self._id = head.strip()
        self.buffer = rest
        name, colon, number = self._id.rpartition(":")
        name = name if colon and number.isdecimal() else self._id
        self._name = name.removeprefix(FUNCTIONS)
        self.state = self.before_value
        return True

    def before_value(self) -> bool:
        """State: after the mark, up to the arguments; a call without any ends here."""
        self.buffer = self.buffer.lstrip()
        if not self.buffer or (len(self.buffer) < len(CALL_END) and CALL_END.startswith(self.buffer)):
            return False
        if self.buffer.startswith(CALL_END):
            self._begin_empty()
            self.state = self.outside
        else:
            self.begin_named(self._name)
        return True

    def _begin_empty(self) -> None:
        self.begin_call(self._name)
        self.arguments("{}")

    def after_json(self) -> None:
        self.state = self.tail

    def tail(self) -> bool:
        """State: after the arguments, up to a mark."""
        _, mark = self.take_until(CALL, CALL_END, CALLS_END)
        if mark is not None:
            self.state = self.head if mark == CALL else self.outside
        return mark is not None

    def at_end(self) -> None:
        if self.state == self.head:
            self.content(CALL + self.buffer)
        elif self.state == self.before_value:
            self._begin_empty()
        super().at_end()
