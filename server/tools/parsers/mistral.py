"""[TOOL_CALLS][{"name": …, "arguments": {…}}, …], and [TOOL_CALLS]name[ARGS]{…} of the tokenizers since v11."""

from __future__ import annotations

import secrets
import string
from collections.abc import Sequence

from jaxserve.server.tools.base import ToolParser
from jaxserve.server.tools.syntax import Called, Syntax, call_object, one_or_more, quoted

OPENING = "[TOOL_CALLS]"
CALL_ID = "[CALL_ID]"
ARGS = "[ARGS]"
_ALPHANUMERIC = string.ascii_letters + string.digits


def matches(template: str) -> bool:
    return OPENING in template


def syntax(functions: Sequence[Called], many: bool) -> Syntax:
    """The rules of both forms: the list, and names before their arguments."""
    objects = one_or_more("object", 'W? "," W?', many)
    names = " | ".join(f"{quoted(function.name)} args? {function.rule}" for function in functions)
    rules = f"""
calls: "[" W? {objects} W? "]" | {one_or_more("named", "called", many)}
object: {call_object(functions, "arguments")}
named: {names}
"""
    return Syntax(rules, opening=OPENING, marks=(("args", ARGS),))


class Parser(ToolParser):
    keeps_special_tokens = True
    _in_list = False  # the calls are objects, and not names before their arguments

    def new_id(self) -> str:
        """Nine letters and digits, the only form of ids that Mistral's templates accept."""
        return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))

    def after_json(self) -> None:
        self.state = self.items if self._in_list else self.outside

    def outside(self) -> bool:
        mark = self.content_until(OPENING)
        if mark:
            self._in_list = False
            self.state = self.items
        return mark is not None

    def items(self) -> bool:
        """State: after the opening, or between the objects of a list."""
        begun = self.buffer.lstrip(" \t\r\n,")
        if self._in_list:
            self.content(self.buffer[: len(self.buffer) - len(begun)].replace(",", ""))
        self.buffer = begun
        if self.buffer.startswith("{"):
            self._in_list = True
            self.begin_json()
        elif self.buffer.startswith("]"):
            self.buffer = self.buffer[1:]
            self.state = self.outside
        elif self.buffer.startswith("["):
            if len(self.buffer) < len(OPENING) and OPENING.startswith(self.buffer):
                return False
            self._in_list = not self.buffer.startswith(OPENING)
            self.buffer = self.buffer.removeprefix("[" if self._in_list else OPENING)
        elif self.buffer:
            self.state = self.outside if self._in_list else self.function
        return bool(self.buffer)

    def function(self) -> bool:
        """State: a name before its arguments."""
        place = self.buffer.find("{")
        if place < 0:
            return False
        name = self.buffer[:place].removesuffix(ARGS).partition(CALL_ID)[0].strip()
        self.buffer = self.buffer[place:]
        self.begin_named(name)
        return True

    def at_end(self) -> None:
        if self.state == self.function:
            self.content(OPENING + self.buffer)
        super().at_end()
