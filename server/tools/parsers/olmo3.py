"""<function_calls>, then a line of name(key=value, …) for each call, </function_calls>, as OLMo 3 writes it.

Values are JSON or literals of Python; see `pythonic`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxserve.server.tools.parsers import pythonic
from jaxserve.server.tools.syntax import Called, Syntax, one_or_more

OPENING = "<function_calls>"
CLOSING = "</function_calls>"


def matches(template: str) -> bool:
    return OPENING in template and "<functions>" in template


def syntax(functions: Sequence[Called], many: bool) -> Syntax:
    calls = f"calls: W? {one_or_more('call', 'W', many)} W? closing"
    return Syntax(f"{calls}\n{list_rules(functions, many)}", opening=OPENING, marks=(("closing", CLOSING),))


def list_rules(functions: Sequence[Called], many: bool) -> str:
    """The rules `list` for a list of calls and `call` for a call, whose values may also be words of JSON."""
    rules = pythonic.syntax(functions, many).rules.replace("calls:", "list:", 1)
    return rules.replace('"True" | "False" | "None"', '"True" | "False" | "None" | "true" | "false" | "null"')


class Parser(pythonic.Parser):
    """Reads calls between the two marks of a `block`, with any of the characters `between` before each."""

    keeps_special_tokens = True
    block = (OPENING, CLOSING)
    between = " \t\r\n,;"

    def __init__(self, tools: Mapping[str, Mapping[str, Any]]):
        super().__init__(tools)
        self.state = self.outside

    def outside(self) -> bool:
        mark = self.content_until(*self.block)
        if mark == self.block[0]:
            self._opening = mark
            self.state = self.items
        return mark is not None

    def items(self) -> bool:
        """State: before a call, or after the last one."""
        begun = self.buffer.lstrip(self.between)
        self._opening += self.buffer[: len(self.buffer) - len(begun)]
        self.buffer = begun
        closing = self.block[1]
        if len(self.buffer) < len(closing) and closing.startswith(self.buffer):
            return False
        if self.buffer.startswith(closing):
            self.buffer = self.buffer.removeprefix(closing)
            self.state = self.outside
            return bool(self.buffer)
        return super().items()

    def at_end(self) -> None:
        if self.state == self.items and self.block[1].startswith(self.buffer):
            self.buffer = ""
        super().at_end()
