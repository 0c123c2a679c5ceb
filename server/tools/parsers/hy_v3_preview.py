"""Calls of Hunyuan 3's preview, whose marks have no suffix; see `hy_v3`."""

from __future__ import annotations

from collections.abc import Sequence

from jaxserve.server.tools.parsers.hy_v3 import SUFFIX, Parser, suffixed_syntax
from jaxserve.server.tools.syntax import Called, Syntax

__all__ = ["Parser", "matches", "syntax"]


def matches(template: str) -> bool:
    return "<tool_sep>" in template and SUFFIX not in template


def syntax(functions: Sequence[Called], many: bool) -> Syntax:
    return suffixed_syntax(functions, many, "")
