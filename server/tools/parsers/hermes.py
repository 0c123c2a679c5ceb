"""<tool_call>{"name": …, "arguments": {…}}</tool_call>, as Hermes 2 Pro and Qwen 2.5 and 3 write it."""

from __future__ import annotations

from collections.abc import Sequence

from jaxserve.server.tools.base import ToolParser
from jaxserve.server.tools.syntax import Called, Syntax, call_object, one_or_more

OPENING = "<tool_call>"
CLOSING = "</tool_call>"


def matches(template: str) -> bool:
    """The quotes may be escaped, within a text of the template."""
    shows = any(key in template for key in ('"arguments"', r"\"arguments\""))
    return OPENING in template and shows and "<function=" not in template


def syntax(functions: Sequence[Called], many: bool) -> Syntax:
    call = f"call: {call_object(functions, 'arguments')} W? closing"
    rules = f"calls: {one_or_more('call', 'W? called W?', many)}\n{call}"
    return Syntax(rules, opening=OPENING, marks=(("closing", CLOSING),))


class Parser(ToolParser):
    closing = CLOSING

    def outside(self) -> bool:
        mark = self.content_until(OPENING, CLOSING)
        if mark == OPENING:
            self.begin_json(raw=mark)
        return mark is not None
