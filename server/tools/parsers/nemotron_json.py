"""<TOOLCALL>[{"name": …, "arguments": {…}}, …]</TOOLCALL>, as Nemotron Nano 2 and Llama Nemotron write it."""

from __future__ import annotations

from collections.abc import Sequence

from jaxserve.server.tools.json_list import JSONListParser, list_syntax
from jaxserve.server.tools.syntax import Called, Syntax

OPENING = "<TOOLCALL>"
CLOSING = "</TOOLCALL>"


def matches(template: str) -> bool:
    return OPENING in template


def syntax(functions: Sequence[Called], many: bool) -> Syntax:
    return list_syntax(functions, many, OPENING, closing=CLOSING)


class Parser(JSONListParser):
    openings = (OPENING,)
    closings = (CLOSING,)
