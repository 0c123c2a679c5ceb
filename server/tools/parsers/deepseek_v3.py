"""Calls of DeepSeek V3 and R1: a name and a block of JSON between marks.

<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\\n```json\\n{…}\\n```<｜tool▁call▁end｜>…<｜tool▁calls▁end｜>

V3.1 writes the name before the separator, and no fence. The parser reads both forms.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxserve.server.tools.base import ToolParser
from jaxserve.server.tools.syntax import Called, Syntax, one_or_more, quoted

CALLS = "<｜tool▁calls▁begin｜>"
CALLS_END = "<｜tool▁calls▁end｜>"
CALL = "<｜tool▁call▁begin｜>"
SEPARATOR = "<｜tool▁sep｜>"
CALL_END = "<｜tool▁call▁end｜>"
FENCE = "```json"


def matches(template: str) -> bool:
    return CALL in template and FENCE in template


def syntax(functions: Sequence[Called], many: bool) -> Syntax:
    return marked_syntax(functions, many, kind="function", before=quoted(f"\n{FENCE}\n"), after='"\\n```"')


def marked_syntax(
    functions: Sequence[Called], many: bool, *, kind: str = "", before: str = "", after: str = ""
) -> Syntax:
    """The syntax of calls between marks. With `kind`, that word comes before the separator and the name after it, with
    the expressions `before` and `after` around the arguments. Without, the name comes before the separator."""
    if kind:
        names = " | ".join(f"{quoted(function.name)} {before} {function.rule}" for function in functions)
        call = f"begin {quoted(kind)} separator ({names}) {after} end"
    else:
        call = f"begin ({' | '.join(f'{quoted(f.name)} separator {f.rule}' for f in functions)}) end"
    rules = f"calls: {one_or_more('call', 'W?', many)} W? all_end\ncall: {call}"
    marks = (("begin", CALL), ("separator", SEPARATOR), ("end", CALL_END), ("all_end", CALLS_END))
    return Syntax(rules, opening=CALLS, marks=marks)


class Parser(ToolParser):
    keeps_special_tokens = True

    def outside(self) -> bool:
        mark = self.content_until(CALL, CALLS, CALL_END, CALLS_END)
        if mark == CALL:
            self.state = self.head
        return mark is not None

    def head(self) -> bool:
        """State: the name, before its arguments."""
        kind, separator, rest = self.buffer.partition(SEPARATOR)
        place = rest.find("{")
        end = rest.find(CALL_END)
        if not separator or (place < 0 and end < 0):
            return False
        place = end if place < 0 else place if end < 0 else min(place, end)
        name, _, fence = rest[:place].strip().partition("\n")
        if not name.strip() or (fence and not fence.strip().startswith("```")):
            name = kind
        self.buffer = rest[place:]
        if self.buffer.startswith("{"):
            self.begin_named(name.strip())
        else:
            self.begin_call(name.strip())
            self.arguments("{}")
            self.state = self.tail
        return True

    def after_json(self) -> None:
        self.state = self.tail

    def tail(self) -> bool:
        """State: after the arguments, in the end of the fence, up to a mark."""
        _, mark = self.take_until(CALL, CALL_END, CALLS_END)
        if mark is not None:
            self.state = self.head if mark == CALL else self.outside
        return mark is not None

    def at_end(self) -> None:
        if self.state == self.head:
            self.content(CALL + self.buffer)
        super().at_end()
