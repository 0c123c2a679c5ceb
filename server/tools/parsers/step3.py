"""Calls of Step 3, whose parameters are like those of `minimax_m2`:

<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="NAME">
<steptml:parameter name="KEY">VALUE</steptml:parameter>…</steptml:invoke><｜tool_call_end｜>…<｜tool_calls_end｜>

Step 3.5 and later write the format of `qwen3_coder`.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxserve.server.tools.parsers import minimax_m2
from jaxserve.server.tools.syntax import Called, Syntax, one_or_more
from jaxserve.types import Grammar

CALLS = "<｜tool_calls_begin｜>"
CALLS_END = "<｜tool_calls_end｜>"
CALL = "<｜tool_call_begin｜>"
SEPARATOR = "<｜tool_sep｜>"
CALL_END = "<｜tool_call_end｜>"
MARKS = minimax_m2.Marks(prefix="steptml:")


def matches(template: str) -> bool:
    return "steptml:" in template


def syntax(functions: Sequence[Called], many: bool) -> Syntax:
    parts: list[tuple[str, Grammar]] = []
    rules = f"""
calls: W? {one_or_more("call", "W?", many)} W? all_end
call: begin "function" separator invoke W? end
{minimax_m2.invoke_rules(functions, parts, MARKS)}
"""
    marks = (("begin", CALL), ("separator", SEPARATOR), ("end", CALL_END), ("all_end", CALLS_END))
    return Syntax(rules, opening=CALLS, marks=marks, parts=tuple(parts))


class Parser(minimax_m2.Parser):
    marks = MARKS
    around = (CALLS, CALLS_END, CALL_END, f"{CALL}function{SEPARATOR}")
