"""<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>, as MiMo writes it.

Line breaks may stand between the marks. Those beside a value are part of it, unlike in `qwen3_coder`.
"""

from __future__ import annotations

from jaxserve.server.tools.parsers import qwen3_coder
from jaxserve.server.tools.parsers.qwen3_coder import syntax

__all__ = ["Parser", "matches", "syntax"]


def matches(template: str) -> bool:
    return qwen3_coder.OPENING in template and qwen3_coder.is_compact(template)


class Parser(qwen3_coder.Parser):
    line_breaks = False
