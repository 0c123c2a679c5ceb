"""Calls of Hunyuan 3: the arguments as in `glm45`, with a mark behind the name, and all calls between two marks:

<tool_calls><tool_call>NAME<tool_sep><arg_key>KEY</arg_key><arg_value>VALUE</arg_value>…</tool_call>…</tool_calls>

The published models write each mark with a suffix, as in <tool_call:opensource>; `hy_v3_preview` is without. The parser
reads both forms.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxserve.server.tools.parsers import glm45
from jaxserve.server.tools.syntax import Called, Syntax, one_or_more
from jaxserve.types import Grammar

SUFFIX = ":opensource"
SUFFIXES = ("", SUFFIX)
MARKS = {marks.call: marks for marks in (glm45.Marks(suffix=suffix) for suffix in SUFFIXES)}  # by the opening mark
# Marks that need no reading: around all calls, and after each.
OTHERS = tuple(f"{mark}{suffix}>" for suffix in SUFFIXES for mark in ("<tool_calls", "</tool_calls", "</tool_call"))


def matches(template: str) -> bool:
    return "<tool_sep" in template and SUFFIX in template


def syntax(functions: Sequence[Called], many: bool) -> Syntax:
    return suffixed_syntax(functions, many, SUFFIX)


def suffixed_syntax(functions: Sequence[Called], many: bool, suffix: str) -> Syntax:
    """The rules of calls whose marks have this suffix."""
    parts: list[tuple[str, Grammar]] = []
    one = glm45.Marks(suffix=suffix)
    rules = f"""
calls: W? {one_or_more("call", "W?", many)} W? all_end
call: begin W? named W? end
{glm45.named_rules(functions, parts, separator="separator?")}
"""
    closing = f"</tool_calls{suffix}>"
    own = (("begin", one.call), ("separator", f"<tool_sep{suffix}>"), ("end", one.call_end), ("all_end", closing))
    marks = (*own, *one.of_arguments())
    return Syntax(rules, opening=f"<tool_calls{suffix}>", marks=marks, parts=tuple(parts))


class Parser(glm45.Parser):
    separators = tuple(f"<tool_sep{suffix}>" for suffix in SUFFIXES)

    def outside(self) -> bool:
        mark = self.content_until(*MARKS, *OTHERS)
        if mark in MARKS:
            self.use(MARKS[mark])
            self.state = self.function
        return mark is not None
