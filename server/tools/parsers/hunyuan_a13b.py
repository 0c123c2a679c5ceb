"""<tool_calls>[{"name": …, "arguments": {…}}, …]</tool_calls>, as Hunyuan-A13B and Jamba write it."""

from __future__ import annotations

from collections.abc import Sequence

from jaxserve.server.tools.json_list import JSONListParser, list_syntax
from jaxserve.server.tools.syntax import Called, Syntax

OPENING = "<tool_calls>"
CLOSING = "</tool_calls>"


def matches(template: str) -> bool:
    """Hunyuan 3 has these marks, too, around calls of another form."""
    return OPENING in template and CLOSING in template and "tool_sep" not in template


def syntax(functions: Sequence[Called], many: bool) -> Syntax:
    return list_syntax(functions, many, OPENING, closing=CLOSING)


class Parser(JSONListParser):
    openings = (OPENING,)
    closings = (CLOSING,)
