"""Calls of DeepSeek V3.2, whose parameters tell whether they are texts:

<｜DSML｜function_calls>
<｜DSML｜invoke name="NAME"><｜DSML｜parameter name="KEY" string="true">TEXT</｜DSML｜parameter>
<｜DSML｜parameter name="KEY" string="false">JSON</｜DSML｜parameter></｜DSML｜invoke>…
</｜DSML｜function_calls>

V4 writes tool_calls in place of function_calls. The parser reads both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxserve.server.tools.parsers import minimax_m2
from jaxserve.server.tools.syntax import Called, Syntax, one_or_more
from jaxserve.types import Grammar

DSML = "｜DSML｜"
MARKS = minimax_m2.Marks(prefix=DSML)
BLOCKS = {name: (f"<{DSML}{name}>", f"</{DSML}{name}>") for name in ("function_calls", "tool_calls")}
_KIND = '" string="'  # between a parameter's name and whether it is a text


def matches(template: str) -> bool:
    """The mark's name may stand apart from the rest, in a variable."""
    return DSML in template and "function_calls>" in template


def syntax(functions: Sequence[Called], many: bool) -> Syntax:
    return block_syntax(functions, many, "function_calls")


def block_syntax(functions: Sequence[Called], many: bool, name: str) -> Syntax:
    """The rules of calls in a block of this name."""

    def name_end(schema: Any) -> str:
        is_text = isinstance(schema, dict) and schema.get("type") == "string"
        return f"{_KIND}{'true' if is_text else 'false'}{minimax_m2.NAME_END}"

    parts: list[tuple[str, Grammar]] = []
    opening, closing = BLOCKS[name]
    rules = f"""
calls: W? {one_or_more("invoke", "W?", many)} W? closing
{minimax_m2.invoke_rules(functions, parts, MARKS, name_end)}
"""
    return Syntax(rules, opening=opening, marks=(("closing", closing),), parts=tuple(parts))


class Parser(minimax_m2.Parser):
    marks = MARKS
    around = tuple(mark for block in BLOCKS.values() for mark in block)

    def begin_parameter(self, key: str) -> None:
        key, found, kind = key.partition(_KIND)
        self.begin_value(key.strip(), kind == "true" if found else None)
