"""<tool_call>{"name": …, "arguments": {…}}</tool_call>, as Hermes 2 Pro and Qwen 2.5 and 3 write it."""

from __future__ import annotations

from server.tools.base import ToolParser

OPENING, CLOSING = "<tool_call>", "</tool_call>"


def matches(template: str) -> bool:
    return OPENING in template and '"arguments"' in template and "<function=" not in template


class Parser(ToolParser):
    def outside(self) -> bool:
        before, mark = self.take_until(OPENING, CLOSING)
        self.content(before)
        if mark == OPENING:
            self.begin_json(raw=mark)
        return mark is not None
