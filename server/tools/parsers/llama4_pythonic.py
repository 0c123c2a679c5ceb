"""[name(key="value", …), …], also between <|python_start|> and <|python_end|>, as Llama 4 writes it."""

from __future__ import annotations

from collections.abc import Sequence

from jaxserve.server.tools.parsers import pythonic
from jaxserve.server.tools.syntax import Called, Syntax

START = "<|python_start|>"
END = "<|python_end|>"


def matches(template: str) -> bool:
    return "<|header_start|>" in template and "[func_name1(" in template


def syntax(functions: Sequence[Called], many: bool) -> Syntax:
    rules = pythonic.syntax(functions, many).rules.replace("calls:", "list:", 1)
    return Syntax(f"calls: list end?\n{rules}", opening=START, start="[", marks=(("end", END),))


class Parser(pythonic.Parser):
    keeps_special_tokens = True

    def opening(self) -> bool:
        begun = self.buffer.lstrip()
        if len(begun) < len(START) and START.startswith(begun):
            return False
        if begun.startswith(START):
            self.buffer = begun.removeprefix(START)
            return bool(self.buffer)
        return super().opening()

    def outside(self) -> bool:
        mark = self.content_until(START, END)
        if mark == START:
            self.state = self.opening
        return mark is not None
