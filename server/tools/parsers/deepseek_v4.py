"""Calls of DeepSeek V4, in a block named tool_calls; see `deepseek_v32`."""

from __future__ import annotations

from collections.abc import Sequence

from jaxserve.server.tools.parsers.deepseek_v32 import DSML, Parser, block_syntax
from jaxserve.server.tools.syntax import Called, Syntax

__all__ = ["Parser", "matches", "syntax"]


def matches(template: str) -> bool:
    return DSML in template and "tool_calls>" in template and "function_calls>" not in template


def syntax(functions: Sequence[Called], many: bool) -> Syntax:
    return block_syntax(functions, many, "tool_calls")
