"""<|tool_call_start|>[name(key="value", …), …]<|tool_call_end|>, as LFM2 writes it; see `pythonic`.

Asked for JSON, it writes {"name": …, "arguments": {…}} in the place of each call.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxserve.server.tools.parsers import olmo3
from jaxserve.server.tools.syntax import Called, Syntax

OPENING = "<|tool_call_start|>"
CLOSING = "<|tool_call_end|>"


def matches(template: str) -> bool:
    return OPENING in template or "<|tool_list_start|>" in template


def syntax(functions: Sequence[Called], many: bool) -> Syntax:
    rules = olmo3.list_rules(functions, many)
    return Syntax(f"calls: list W? closing\n{rules}", opening=OPENING, marks=(("closing", CLOSING),))


class Parser(olmo3.Parser):
    block = (OPENING, CLOSING)
    between = " \t\r\n,;[]"

    def items(self) -> bool:
        goes_on = super().items()
        if self.state == self.call and self.buffer.startswith("{"):
            self.begin_json(raw="" if self.num_calls else self._opening)
        return goes_on

    def after_json(self) -> None:
        self.state = self.items
