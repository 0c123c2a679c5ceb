"""Prepares clients' JSON schemas for llguidance."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

WHITESPACE = r" |\n( {0,32}|\t{0,8})"  # allowed between JSON tokens; limited, so that no model can repeat it forever
# Values of `format` that llguidance supports. JSON Schema lets a validator ignore others.
FORMATS = frozenset(
    ["date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "unknown", "uri", "uuid"]
)
_DATA = frozenset(["const", "default", "enum", "example", "examples"])  # keys of plain values
_NAMED = frozenset(["$defs", "definitions", "dependentSchemas", "patternProperties", "properties"])  # schemas by name
# Look-around and references back, which no regular language has and llguidance refuses.
_NOT_REGULAR = re.compile(r"(?<!\\)(?:\\\\)*(?:\(\?<?[=!]|\\[1-9]|\\k<)")
_NOTES = frozenset(["$comment", "description", "title"])  # keys without effect


def without_trivia(schema: Any, leave_out: Callable[[str], None] | None = None) -> Any:
    """A schema without unknown string formats and without keywords that every value satisfies. With `leave_out`, also
    without patterns that are not regular; it is told each of them."""
    if isinstance(schema, list):
        return [without_trivia(one, leave_out) for one in schema]
    if not isinstance(schema, dict):
        return schema
    kept: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _NAMED and isinstance(value, dict):
            kept[key] = {name: without_trivia(one, leave_out) for name, one in value.items()}
        elif key in _DATA:
            kept[key] = value
        elif key == "pattern" and leave_out and isinstance(value, str) and _NOT_REGULAR.search(value):
            leave_out(f"the pattern {value}")
        elif not _is_trivial(key, value):
            kept[key] = without_trivia(value, leave_out)
    return kept


def _is_trivial(key: str, value: Any) -> bool:
    if key == "format":
        return isinstance(value, str) and value not in FORMATS
    if key == "uniqueItems":
        return value is False
    if key == "propertyNames":
        said = {name: one for name, one in value.items() if name not in _NOTES} if isinstance(value, dict) else value
        return said is True or said in ({}, {"type": "string"})
    return False
