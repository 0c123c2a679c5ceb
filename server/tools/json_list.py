"""Calls as a list of JSON objects after a mark, which several formats use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from jaxserve.server.tools.base import ToolParser
from jaxserve.server.tools.syntax import Called, Syntax, call_object, one_or_more


def list_syntax(
    functions: Sequence[Called], many: bool, opening: str, bracket: str = '"["', closing: str = ""
) -> Syntax:
    """The syntax of a list of objects after `opening`. `bracket`: the expression for the list's opening bracket.
    `closing`: the mark after the list; "" if there is none."""
    objects = one_or_more("object", 'W? "," W?', many)
    end = " W? closing" if closing else ""
    rules = f'calls: {bracket} W? {objects} W? "]"{end}\nobject: {call_object(functions, "arguments")}'
    return Syntax(rules, opening=opening, marks=(("closing", closing),) if closing else ())


class JSONListParser(ToolParser):
    """Reads `OPENING [{"name": …, "arguments": {…}}, …]`, and a single object without the list.

    Attributes:
      openings: the marks before a list.
      closings: the marks after a list, which are dropped.
    """

    openings: ClassVar[tuple[str, ...]]
    closings: ClassVar[tuple[str, ...]] = ()
    _before = ""  # text since the opening, which becomes content if no call follows

    def outside(self) -> bool:
        mark = self.content_until(*self.openings, *self.closings)
        if mark in self.openings:
            self._before = mark
            self.state = self.items
        return mark is not None

    def items(self) -> bool:
        """State: after the opening, or between the objects of a list."""
        place = len(self.buffer) - len(self.buffer.lstrip(" \t\r\n,["))
        self._before = self._before + self.buffer[:place]
        self.buffer = self.buffer[place:]
        if self.buffer.startswith("{"):
            self.begin_json(raw=self._before)
        elif self.buffer.startswith("]"):
            self.buffer = self.buffer[1:]
            self.state = self.outside
        elif self.buffer:
            self._give_up()
        return bool(self.buffer)

    def after_json(self) -> None:
        self._before = ""
        self.state = self.items

    def _give_up(self) -> None:
        self.content(self._before)
        self._before = ""
        self.state = self.outside

    def at_end(self) -> None:
        if self.state == self.items and self._before.strip(" \t\r\n,["):
            self._give_up()
        super().at_end()
