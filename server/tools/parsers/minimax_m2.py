"""<minimax:tool_call><invoke name="NAME"><parameter name="KEY">VALUE</parameter>…</invoke>…</minimax:tool_call>, as
MiniMax-M2 writes it.

Line breaks may stand between the marks. Values are text if their schema has type "string", otherwise JSON.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxserve.server.tools.keyed import KeyedParser, arguments_syntax
from jaxserve.server.tools.syntax import Called, Syntax, one_or_more, quoted
from jaxserve.types import Grammar

OPENING = "<minimax:tool_call>"
CLOSING = "</minimax:tool_call>"
NAME_END = '">'


class Marks:
    """The marks around calls and parameters. Other families write a prefix into each of them."""

    def __init__(self, prefix: str = ""):
        self.invoke, self.invoke_end = f'<{prefix}invoke name="', f"</{prefix}invoke>"
        self.parameter, self.parameter_end = f'<{prefix}parameter name="', f"</{prefix}parameter>"


MINIMAX = Marks()


def matches(template: str) -> bool:
    return "minimax:tool_call" in template


def syntax(functions: Sequence[Called], many: bool) -> Syntax:
    parts: list[tuple[str, Grammar]] = []
    rules = f"""
calls: W? {one_or_more("invoke", "W?", many)} W? closing
{invoke_rules(functions, parts, MINIMAX)}
"""
    return Syntax(rules, opening=OPENING, marks=(("closing", CLOSING),), parts=tuple(parts))


def invoke_rules(
    functions: Sequence[Called],
    parts: list[tuple[str, Grammar]],
    marks: Marks,
    name_ends: Callable[[Any], str] = lambda schema: NAME_END,
) -> str:
    """The rule `invoke` for a call with its parameters, in the order of the schema, and the rules that it uses.
    `name_ends(schema)`: the text between the name of a parameter of this schema and its value."""

    def body(function: Called) -> str:
        def before(key: str) -> str:
            return quoted(f"{marks.parameter}{key}{name_ends(function.properties[key])}")

        return arguments_syntax(function, parts, before, "parameter*", end=quoted(marks.parameter_end))

    def call(function: Called) -> str:
        return f"{quoted(marks.invoke + function.name + NAME_END)} W? {body(function)}"

    any_end = " | ".join(sorted({quoted(name_ends({"type": kind})) for kind in ("string", "object")}))
    end = marks.parameter_end.replace("/", r"\/")
    return rf"""
invoke: ({" | ".join(map(call, functions))}) W? {quoted(marks.invoke_end)}
parameter: {quoted(marks.parameter)} /[^<>"\n]{{1,64}}/ ({any_end}) text W?
text[lazy]: /(?s:.*){end}/
"""


class Parser(KeyedParser):
    """Reads calls between marks. A subclass may have other `marks` and, as `around`, other marks without meaning."""

    keeps_special_tokens = True
    marks = MINIMAX
    around: tuple[str, ...] = (OPENING, CLOSING)

    def __init__(self, tools: Mapping[str, Mapping[str, Any]]):
        super().__init__(tools)
        self.opening = self.marks.invoke
        self.key_mark = self.marks.parameter
        self.value_end = self.marks.parameter_end
        self.arguments_end = self.marks.invoke_end

    def outside(self) -> bool:
        mark = self.content_until(self.opening, *self.around)
        if mark == self.opening:
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
        self.begin_parameter(key)
        return True

    def begin_parameter(self, key: str) -> None:
        """Begins the value of a parameter. `key`: the text between the quotation marks around its name."""
        self.begin_value(key.strip())
