"""Calls of DeepSeek V3.1: <｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{…}<｜tool▁call▁end｜>; see `deepseek_v3`."""

from __future__ import annotations

from collections.abc import Sequence

from jaxserve.server.tools.parsers.deepseek_v3 import CALL, FENCE, SEPARATOR, Parser, marked_syntax
from jaxserve.server.tools.syntax import Called, Syntax

__all__ = ["Parser", "matches", "syntax"]


def matches(template: str) -> bool:
    return CALL in template and FENCE not in template and SEPARATOR in template


def syntax(functions: Sequence[Called], many: bool) -> Syntax:
    return marked_syntax(functions, many)
