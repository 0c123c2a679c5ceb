"""<longcat_tool_call>{"name": …, "arguments": {…}}</longcat_tool_call>, as LongCat-Flash-Chat writes it, or
<longcat_tool_call>NAME<longcat_arg_key>KEY</longcat_arg_key><longcat_arg_value>VALUE</longcat_arg_value>…
</longcat_tool_call>, as later versions do; see `glm45`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxserve.server.tools.parsers import glm45
from jaxserve.server.tools.syntax import Called, Syntax, call_object, one_or_more
from jaxserve.types import Grammar

MARKS = glm45.Marks(prefix="longcat_")


def matches(template: str) -> bool:
    return MARKS.call in template


def syntax(functions: Sequence[Called], many: bool) -> Syntax:
    """The rules of both forms."""
    parts: list[tuple[str, Grammar]] = []
    rules = f"""
calls: {one_or_more("call", "W? called W?", many)}
call: (named | object) W? closing
object: {call_object(functions, "arguments")}
{glm45.named_rules(functions, parts)}
"""
    marks = (("closing", MARKS.call_end), *MARKS.of_arguments())
    return Syntax(rules, opening=MARKS.call, marks=marks, parts=tuple(parts))


class Parser(glm45.Parser):
    closing = MARKS.call_end

    def __init__(self, tools: Mapping[str, Mapping[str, Any]]):
        super().__init__(tools)
        self.use(MARKS)

    def function(self) -> bool:
        """State: the function's name, or an object with the name and the arguments."""
        if self.buffer.lstrip().startswith("{"):
            self.begin_json(raw=self.opening)
            return True
        return super().function()
