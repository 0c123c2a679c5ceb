"""<|tool_call|>[{"name": …, "arguments": {…}}, …], as Granite 3 writes it. Other versions write other marks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jaxserve.server.tools.json_list import JSONListParser, list_syntax
from jaxserve.server.tools.syntax import Called, Syntax

OPENING = "<|tool_call|>"


def matches(template: str) -> bool:
    return OPENING in template and "<|start_of_role|>" in template


def syntax(functions: Sequence[Called], many: bool) -> Syntax:
    return list_syntax(functions, many, OPENING)


def written(calls: Sequence[Mapping[str, Any]]) -> str:
    """Calls as the model writes them, for histories, which its template shows without calls."""
    return OPENING + json.dumps(calls, ensure_ascii=False)


class Parser(JSONListParser):
    keeps_special_tokens = True
    openings = (OPENING, "<tool_call>", "<function_call>")
    closings = ("</tool_call>",)
