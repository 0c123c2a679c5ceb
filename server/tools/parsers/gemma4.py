"""<|tool_call>call:NAME{KEY:<|"|>TEXT<|"|>,KEY:[1,2]}<tool_call|>, as Gemma 4 writes it; see `gemma`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from jaxserve.server.tools.parsers.gemma import KEY, MARKS, Parser
from jaxserve.server.tools.syntax import Called, Syntax, one_or_more, quoted
from jaxserve.types import Grammar

__all__ = ["Parser", "matches", "syntax"]

OPENING = "<|tool_call>"
_COMMA = '","'
_PLAIN = ("boolean", "integer", "null", "number")  # types whose values are JSON


def matches(template: str) -> bool:
    return OPENING in template


def syntax(functions: Sequence[Called], many: bool) -> Syntax:
    """The rules of the format. Arguments come in any order; of lists and objects nothing is enforced."""
    parts: list[tuple[str, Grammar]] = []

    def call(function: Called) -> str:
        pairs = "any_pair"
        if function.is_strict and not function.is_open:
            known = {f"{key}:": schema for key, schema in function.properties.items() if KEY.fullmatch(f"{key}:")}
            pairs = " | ".join(f"{quoted(key)} {_value(schema, parts)}" for key, schema in known.items())
        arguments = f"({one_or_more(f'({pairs})', _COMMA, True)})?" if pairs else ""
        return f'{quoted(f"{function.name}{{")} {arguments} "}}"'

    rules = rf"""
calls: {one_or_more("call", "W? called W?", many)}
call: "call:" ({" | ".join(map(call, functions))}) closing
any_pair: /[^\s:{{}}\[\],<>|"]{{1,64}}/ ":" value
value: quote until_quote | STRING | NUMBER | "true" | "false" | "null"
  | "[" (value ("," value)*)? "]" | "{{" (any_pair ("," any_pair)*)? "}}"
STRING: /"([^"\\\x00-\x1f]|\\[\\"nrt])*"/
NUMBER: /-?(0|[1-9][0-9]{{0,17}})(\.[0-9]{{1,17}})?/
"""
    closing, quote = MARKS[OPENING]
    return Syntax(rules, opening=OPENING, marks=(("closing", closing), ("quote", str(quote))), parts=tuple(parts))


def _value(schema: Any, parts: list[tuple[str, Grammar]]) -> str:
    """The expression for a value; adds its schema to `parts` if it is JSON."""
    kind = schema.get("type") if isinstance(schema, dict) else None
    if kind == "string":
        texts = schema.get("enum")
        return f"quote ({' | '.join(quoted(str(text)) for text in texts)}) quote" if texts else "quote until_quote"
    if kind in _PLAIN:
        name = f"value{len(parts)}"
        parts.append((name, Grammar("json", json.dumps(schema), field="tools", is_loose=True)))
        return f"@{name}"
    return "value"
