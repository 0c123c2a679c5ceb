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
    rules = pythonic.syntax(functions, many).rules.replace("calls:", "list:", 1)
    rules = rules.replace('"True" | "False" | "None"', '"True" | "False" | "None" | "true" | "false" | "null"')
    calls = f"calls: W? {one_or_more('call', 'W', many)} W? closing"
    return Syntax(f"{calls}\n{rules}", opening=OPENING, marks=(("closing", CLOSING),))


class Parser(pythonic.Parser):
    keeps_special_tokens = True

    def __init__(self, tools: Mapping[str, Mapping[str, Any]]):
        super().__init__(tools)
        self.state = self.outside

    def outside(self) -> bool:
        mark = self.content_until(OPENING, CLOSING)
        if mark == OPENING:
            self._opening = mark
            self.state = self.items
        return mark is not None

    def items(self) -> bool:
        """State: before a call, or after the last one."""
        self.buffer = self.buffer.lstrip(" \t\r\n,;")
        if len(self.buffer) < len(CLOSING) and CLOSING.startswith(self.buffer):
            return False
        if self.buffer.startswith(CLOSING):
            self.buffer = self.buffer.removeprefix(CLOSING)
            self.state = self.outside
            return bool(self.buffer)
        return super().items()

    def at_end(self) -> None:
        if self.state == self.items and CLOSING.startswith(self.buffer):
            self.buffer = ""
        super().at_end()
