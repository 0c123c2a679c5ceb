"""<minimax:tool_call><invoke name="NAME"><parameter name="KEY">VALUE</parameter>…</invoke>…</minimax:tool_call>, as
MiniMax-M2 writes it.

Line breaks may stand between the marks. Values are text if their schema has type "string", otherwise JSON.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxserve.server.tools.keyed import KeyedParser, arguments_syntax
from jaxserve.server.tools.syntax import Called, Syntax, one_or_more, quoted
from jaxserve.types import Grammar

OPENING = "<minimax:tool_call>"
CLOSING = "</minimax:tool_call>"
INVOKE = '<invoke name="'
INVOKE_END = "</invoke>"
PARAMETER = '<parameter name="'
PARAMETER_END = "</parameter>"
NAME_END = '">'


def matches(template: str) -> bool:
    return "minimax:tool_call" in template


def syntax(functions: Sequence[Called], many: bool) -> Syntax:
    """The rules of the format. Parameters come in the order of the schema."""
    parts: list[tuple[str, Grammar]] = []

    def before(key: str) -> str:
        return quoted(f"{PARAMETER}{key}{NAME_END}")

    bodies = [arguments_syntax(function, parts, before, PARAMETER_END, "parameter*") for function in functions]
    named = zip(functions, bodies, strict=True)
    calls = " | ".join(f"{quoted(INVOKE + function.name + NAME_END)} W? {body}" for function, body in named)
    rules = rf"""
calls: W? {one_or_more("call", "W?", many)} W? closing
call: ({calls}) W? {quoted(INVOKE_END)}
parameter: {quoted(PARAMETER)} /[^<>"\n]{{1,64}}/ {quoted(NAME_END)} text W?
text[lazy]: /(?s:.*)<\/parameter>/
"""
    return Syntax(rules, opening=OPENING, marks=(("closing", CLOSING),), parts=tuple(parts))


class Parser(KeyedParser):
    keeps_special_tokens = True
    opening = INVOKE
    key_mark = PARAMETER
    value_end = PARAMETER_END
    arguments_end = INVOKE_END

    def outside(self) -> bool:
        mark = self.content_until(OPENING, CLOSING, INVOKE)
        if mark == INVOKE:
            self.state = self.function
        return mark is not None

    def function(self) -> bool:
        name, found, rest = self.buffer.partition(NAME_END)
        if not found:
            return False
        self.buffer = rest
        self.begin_arguments(name.strip())
        return True

    def key(self) -> bool:
        key, found, rest = self.buffer.partition(NAME_END)
        if not found:
            return False
        self.buffer = rest
        self.begin_value(key.strip())
        return True
