"""<|tools_prefix|>[{"NAME": {…}}, …]<|tools_suffix|>, as Apertus writes it."""

from __future__ import annotations

import re
from collections.abc import Sequence

from jaxserve.server.tools.json_list import JSONListParser
from jaxserve.server.tools.syntax import Called, Syntax, one_or_more, quoted

OPENING = "<|tools_prefix|>"
CLOSING = "<|tools_suffix|>"
_HEAD = re.compile(r'\{\s*"([\w.-]{1,128})"\s*:\s*(?=\{)')
_HEAD_BEGUN = re.compile(r'\{\s*("[\w.-]{0,128}("\s*(:\s*)?)?)?')


def matches(template: str) -> bool:
    return OPENING in template


def syntax(functions: Sequence[Called], many: bool) -> Syntax:
    names = " | ".join(f'{quoted(quoted(function.name))} W? ":" W? {function.rule}' for function in functions)
    rules = f"""
calls: "[" W? {one_or_more("object", 'W? "," W?', many)} W? "]" W? closing
object: "{{" W? ({names}) W? "}}"
"""
    return Syntax(rules, opening=OPENING, marks=(("closing", CLOSING),))


class Parser(JSONListParser):
    keeps_special_tokens = True
    openings = (OPENING,)
    closings = (CLOSING,)

    def begin_json(self, raw: str = "") -> None:
        self.state = self.head

    def head(self) -> bool:
        """State: an object, up to the arguments."""
        if (found := _HEAD.match(self.buffer)) is not None:
            self.buffer = self.buffer[found.end() :]
            self._before = ""
            self.begin_named(found[1])
            return True
        if _HEAD_BEGUN.fullmatch(self.buffer):
            return False
        self._give_up()
        return True

    def after_json(self) -> None:
        self.state = self.tail

    def tail(self) -> bool:
        """State: after the arguments, up to the object's end."""
        self.buffer = self.buffer.lstrip()
        if not self.buffer:
            return False
        self.buffer = self.buffer.removeprefix("}")
        self.state = self.items
        return True

    def at_end(self) -> None:
        if self.state == self.head:
            self._give_up()
        super().at_end()
