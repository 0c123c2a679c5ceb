"""<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>…</tool_call>, as GLM-4.5 and later, Ling 3 and
Laguna write it.

Line breaks may separate the parts. Values are text if their schema has type "string", otherwise JSON.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from jaxserve.server.tools.keyed import KeyedParser, arguments_syntax
from jaxserve.server.tools.syntax import Called, Syntax, one_or_more, quoted
from jaxserve.types import Grammar

_NAME = re.compile(r"\s*[\w.:-]{0,128}\s*")


class Marks:
    """The marks around calls, keys and values. Other families write a prefix or a suffix into each of them."""

    def __init__(self, prefix: str = "", suffix: str = ""):
        def pair(name: str) -> tuple[str, str]:
            return f"<{prefix}{name}{suffix}>", f"</{prefix}{name}{suffix}>"

        self.call, self.call_end = pair("tool_call")
        self.key, self.key_end = pair("arg_key")
        self.value, self.value_end = pair("arg_value")

    def of_arguments(self) -> tuple[tuple[str, str], ...]:
        """The marks that `named_rules` uses, see Syntax."""
        pairs = {"key": self.key, "key_end": self.key_end, "value": self.value, "value_end": self.value_end}
        return tuple(pairs.items())


GLM = Marks()


def matches(template: str) -> bool:
    return GLM.key in template and GLM.value in template and "tool_sep" not in template


def syntax(functions: Sequence[Called], many: bool) -> Syntax:
    parts: list[tuple[str, Grammar]] = []
    rules = rf"""
calls: {one_or_more("call", "W? called W?", many)}
call: named W? closing
{named_rules(functions, parts)}
"""
    marks = (("closing", GLM.call_end), *GLM.of_arguments())
    return Syntax(rules, opening=GLM.call, marks=marks, parts=tuple(parts))


def named_rules(functions: Sequence[Called], parts: list[tuple[str, Grammar]], separator: str = "") -> str:
    """The rule `named` for a function's name and its arguments, in the order of the schema, and the rules that it uses.
    `separator`: the expression for what comes between the two."""

    def before(key: str) -> str:
        return f"key {quoted(key)} key_end W? value"

    def named(function: Called) -> str:
        body = arguments_syntax(function, parts, before, "argument*", end="value_end", text="until_value_end")
        return f"{quoted(function.name)} {separator} W? {body}"

    return rf"""
named: {" | ".join(map(named, functions))}
argument: key /[^<>\n]{{1,64}}/ key_end W? value until_value_end W?
"""


class Parser(KeyedParser):
    keeps_special_tokens = True
    separators: tuple[str, ...] = ()  # marks that may come between the name and the arguments

    def __init__(self, tools: Mapping[str, Mapping[str, Any]]):
        super().__init__(tools)
        self.use(GLM)

    def use(self, marks: Marks) -> None:
        """Reads calls with these marks from now on."""
        self.marks = marks
        self.opening = marks.call
        self.key_mark = marks.key
        self.value_end = marks.value_end
        self.arguments_end = marks.call_end

    def outside(self) -> bool:
        mark = self.content_until(self.opening, self.arguments_end)
        if mark == self.opening:
            self.state = self.function
        return mark is not None

    def function(self) -> bool:
        """State: the function's name, up to the next mark."""
        name, bracket, rest = self.buffer.partition("<")
        mark = bracket + rest
        following = (*self.separators, self.key_mark, self.arguments_end)
        if not _NAME.fullmatch(name) or not any(m.startswith(mark[: len(m)]) for m in following):
            self.content(self.opening)
            self.state = self.outside
            return True
        if not mark.startswith(following):
            return False
        if not name.strip():
            self.content(self.opening)
            self.state = self.outside
            return True
        self.buffer = mark
        self.begin_arguments(name.strip())
        return True

    def key(self) -> bool:
        key, found, rest = self.buffer.partition(self.marks.value)
        if not found:
            return False
        self.buffer = rest
        self.begin_value(key.partition(self.marks.key_end)[0].strip())
        return True
