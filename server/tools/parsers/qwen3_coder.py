"""<tool_call><function=NAME><parameter=KEY>\\nVALUE\\n</parameter></function></tool_call>, as Qwen3-Coder writes it.

Values are text if their schema has type "string". Other values are read as JSON if they are valid JSON.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from jaxserve.server.tools.keyed import KeyedParser, arguments_syntax
from jaxserve.server.tools.syntax import Called, Syntax, one_or_more, quoted
from jaxserve.types import Grammar

OPENING = "<tool_call>"
CLOSING = "</tool_call>"
FUNCTION = "<function="
FUNCTION_END = "</function>"
PARAMETER = "<parameter="
PARAMETER_END = "</parameter>"
# A value right behind the mark before it, in a template's example or where it writes calls: MiMo's format.
_COMPACT = re.compile(r"<parameter=(\w+>[^<\s\\]|' ?[+~] ?\w+ ?[+~] ?'>')")


def matches(template: str) -> bool:
    return (
        FUNCTION in template and PARAMETER in template and "seed:tool_call" not in template and not is_compact(template)
    )


def is_compact(template: str) -> bool:
    """Whether values have no line breaks around them."""
    return _COMPACT.search(template) is not None


def syntax(functions: Sequence[Called], many: bool) -> Syntax:
    return block_syntax(functions, many, OPENING, CLOSING)


def block_syntax(functions: Sequence[Called], many: bool, opening: str, closing: str) -> Syntax:
    """The rules of blocks of one call each, between two marks. Parameters come in the order of the schema; see
    `arguments_syntax`."""
    parts: list[tuple[str, Grammar]] = []

    def before(key: str) -> str:
        return quoted(f"{PARAMETER}{key}>") + " W?"

    end = quoted(PARAMETER_END)
    bodies = [arguments_syntax(function, parts, before, "parameter*", end=end) for function in functions]
    named = zip(functions, bodies, strict=True)
    calls = " | ".join(f"{quoted(f'{FUNCTION}{function.name}>')} W? {body} W? end" for function, body in named)
    rules = rf"""
calls: {one_or_more("call", "W? called W?", many)}
call: ({calls}) W? closing
end: "{FUNCTION_END}"
parameter: "{PARAMETER}" /[^<>\n]{{1,64}}/ ">" text W?
text[lazy]: /(?s:.*)<\/parameter>/
"""
    return Syntax(rules, opening=opening, marks=(("closing", closing),), parts=tuple(parts))


class Parser(KeyedParser):
    opening = FUNCTION
    key_mark = PARAMETER
    value_end = PARAMETER_END
    arguments_end = FUNCTION_END
    line_breaks = True
    block = (OPENING, CLOSING)

    def outside(self) -> bool:
        mark = self.content_until(FUNCTION, *self.block)
        if mark == FUNCTION:
            self.state = self.function
        return mark is not None

    def function(self) -> bool:
        name, found, rest = self.buffer.partition(">")
        if not found:
            return False
        self.buffer = rest
        self.begin_arguments(name.strip())
        return True

    def key(self) -> bool:
        key, found, rest = self.buffer.partition(">")
        if not found:
            return False
        self.buffer = rest
        self.begin_value(key.strip())
        return True
