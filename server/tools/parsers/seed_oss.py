"""<seed:tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></seed:tool_call>, as Seed-OSS writes it.

Line breaks may stand between the marks. Those beside a value are part of it, unlike in `qwen3_coder`.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxserve.server.tools.parsers import qwen3_coder
from jaxserve.server.tools.syntax import Called, Syntax

OPENING = "<seed:tool_call>"
CLOSING = "</seed:tool_call>"


def matches(template: str) -> bool:
    return "seed:tool_call" in template


def syntax(functions: Sequence[Called], many: bool) -> Syntax:
    return qwen3_coder.block_syntax(functions, many, OPENING, CLOSING)


class Parser(qwen3_coder.Parser):
    keeps_special_tokens = True
    line_breaks = False
    block = (OPENING, CLOSING)
