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
    """Reads calls whose arguments follow a mark. A subclass may have other marks: before a call, before its arguments
    and after it; and others `around` the calls, which have no meaning."""

    keeps_special_tokens = True
    call_mark = CALL
    arguments_mark = ARGUMENTS
    call_end = CALL_END
    around: tuple[str, ...] = (CALLS, CALLS_END)

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
        mark = self.content_until(self.call_mark, self.call_end, *self.around)
        if mark == self.call_mark:
            self.state = self.head
        return mark is not None

    def head(self) -> bool:
        """State: the call's id, and the mark before its arguments."""
        head, mark, rest = self.buffer.partition(self.arguments_mark)
        if not mark:
            return False
        self._id, self._name = self.read_head(head)
        self.buffer = rest
        self.state = self.before_value
        return True

    def read_head(self, head: str) -> tuple[str, str]:
        """The id and the function's name, from the text before the arguments."""
        name, colon, number = head.strip().rpartition(":")
        name = name if colon and number.isdecimal() else head.strip()
        return head.strip(), name.removeprefix(FUNCTIONS)

    def before_value(self) -> bool:
        """State: after the mark, up to the arguments; a call without any ends here."""
        self.buffer = self.buffer.lstrip()
        if not self.buffer or (len(self.buffer) < len(self.call_end) and self.call_end.startswith(self.buffer)):
            return False
        if self.buffer.startswith(self.call_end):
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
        _, mark = self.take_until(self.call_mark, self.call_end, *self.around)
        if mark is not None:
            self.state = self.head if mark == self.call_mark else self.outside
        return mark is not None

    def at_end(self) -> None:
        if self.state == self.head:
            self.content(self.call_mark + self.buffer)
        elif self.state == self.before_value:
            self._begin_empty()
        super().at_end()
