"""<|START_ACTION|>[{"tool_call_id": "0", "tool_name": …, "parameters": {…}}, …]<|END_ACTION|>, as Command R7B and
Command A write it."""

from __future__ import annotations

from collections.abc import Sequence

from jaxserve.server.tools.json_list import JSONListParser
from jaxserve.server.tools.syntax import Called, Syntax, call_object, one_or_more

OPENING = "<|START_ACTION|>"
CLOSING = "<|END_ACTION|>"


def matches(template: str) -> bool:
    return OPENING in template


def syntax(functions: Sequence[Called], many: bool) -> Syntax:
    number = r'"\"tool_call_id\"" W? ":" W? /"[0-9]{1,4}"/ W? "," W? '
    rules = f"""
calls: "[" W? {one_or_more("object", 'W? "," W?', many)} W? "]" W? closing
object: {call_object(functions, "parameters", name="tool_name", before=f"({number})?")}
"""
    return Syntax(rules, opening=OPENING, marks=(("closing", CLOSING),))


class Parser(JSONListParser):
    keeps_special_tokens = True
    openings = (OPENING,)
    closings = (CLOSING,)
