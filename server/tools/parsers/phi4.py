"""functools[{"name": …, "arguments": {…}}, …], or <|tool_call|>[…]<|/tool_call|>, as Phi-4-mini writes it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jaxserve.server.tools.json_list import JSONListParser, list_syntax
from jaxserve.server.tools.syntax import Called, Syntax

OPENING = "functools["


def matches(template: str) -> bool:
    return "<|tool|>" in template and "<|/tool|>" in template


def syntax(functions: Sequence[Called], many: bool) -> Syntax:
    return list_syntax(functions, many, OPENING, bracket="")


def written(calls: Sequence[Mapping[str, Any]]) -> str:
    """Calls as the model writes them, for histories, which its template shows without calls."""
    return f"<|tool_call|>{json.dumps(calls, ensure_ascii=False)}<|/tool_call|>"


class Parser(JSONListParser):
    keeps_special_tokens = True
    openings = (OPENING, "<|tool_call|>", "<|tool_calls|>")
    closings = ("<|/tool_call|>", "<|/tool_calls|>")
