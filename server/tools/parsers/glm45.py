"""<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>…</tool_call>, as GLM-4.5 and later write it.

Line breaks may separate the parts. Values are text if their schema has type "string", otherwise JSON.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from jaxserve.server.tools.keyed import KeyedParser, arguments_syntax
from jaxserve.server.tools.syntax import Called, Syntax, one_or_more, quoted
from jaxserve.types import Grammar

OPENING = "<tool_call>"
CLOSING = "</tool_call>"
KEY = "<arg_key>"
KEY_END = "</arg_key>"
VALUE = "<arg_value>"
VALUE_END = "</arg_value>"
_NAME = re.compile(r"\s*[\w.:-]{0,128}\s*")


def matches(template: str) -> bool:
    return KEY in template and VALUE in template


def syntax(functions: Sequence[Called], many: bool) -> Syntax:
    """The rules of the format. Arguments come in the order of the schema."""
    parts: list[tuple[str, Grammar]] = []

    def before(key: str) -> str:
        return f'{quoted(f"{KEY}{key}{KEY_END}")} W? "{VALUE}"'

    bodies = [arguments_syntax(function, parts, before, VALUE_END, "argument*") for function in functions]
    named = zip(functions, bodies, strict=True)
    calls = " | ".join(f"{quoted(function.name)} W? {body}" for function, body in named)
    rules = rf"""
calls: {one_or_more("call", "W? called W?", many)}
call: ({calls}) W? closing
argument: "{KEY}" /[^<>\n]{{1,64}}/ "{KEY_END}" W? "{VALUE}" text W?
text[lazy]: /(?s:.*)<\/arg_value>/
"""
    return Syntax(rules, opening=OPENING, marks=(("closing", CLOSING),), parts=tuple(parts))


class Parser(KeyedParser):
    keeps_special_tokens = True
    opening = OPENING
    key_mark = KEY
    value_end = VALUE_END
    arguments_end = CLOSING

    def outside(self) -> bool:
        mark = self.content_until(OPENING, CLOSING)
        if mark == OPENING:
            self.state = self.function
        return mark is not None

    def function(self) -> bool:
        """State: the function's name, up to the next mark."""
        name, bracket, rest = self.buffer.partition("<")
        mark = bracket + rest
        if not _NAME.fullmatch(name) or not any(m.startswith(mark[: len(m)]) for m in (KEY, CLOSING)):
            self.content(OPENING)
            self.state = self.outside
            return True
        if not mark.startswith((KEY, CLOSING)):
            return False
        if not name.strip():
            self.content(OPENING)
            self.state = self.outside
            return True
        self.buffer = mark
        self.begin_arguments(name.strip())
        return True

    def key(self) -> bool:
        key, found, rest = self.buffer.partition(VALUE)
        if not found:
            return False
        self.buffer = rest
        self.begin_value(key.partition(KEY_END)[0].strip())
        return True
