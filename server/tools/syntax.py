"""The formats of tool calls as rules of a Lark grammar, for outputs that a grammar constrains.

A module of `jaxserve.server.tools.parsers` may define `syntax(functions, many)`, which returns a Syntax.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec

from jaxserve.types import Grammar


class Called(msgspec.Struct, frozen=True):
    """A function that may be called.

    Attributes:
      rule: the grammar's rule for the arguments as JSON.
      schema: the JSON schema of the arguments, an object.
      is_strict: the arguments must satisfy the schema. Otherwise they are any object.
    """

    name: str
    rule: str
    schema: dict[str, Any]
    is_strict: bool

    @property
    def properties(self) -> dict[str, Any]:
        found = self.schema.get("properties")
        return found if isinstance(found, dict) else {}

    @property
    def is_open(self) -> bool:
        """Whether the schema says nothing of the arguments' names."""
        return not self.properties and self.schema.get("additionalProperties") is not False

    @property
    def required(self) -> list[str]:
        found = self.schema.get("required")
        return found if isinstance(found, list) else []


class Syntax(msgspec.Struct, frozen=True):
    """The rules of one format of calls.

    Attributes:
      rules: Lark rules that define `calls`, the text after the opening. They may use `called`, which matches the
        opening, and `W`, which matches white space in JSON.
      opening: the mark before calls; "" if the format has none.
      start: the character that begins calls without the opening, which is only allowed at the beginning of an answer;
        "" if calls always need the opening, which may follow any text.
      marks: other marks that the rules use, see Grammar.
      parts: other grammars that the rules use, see Grammar.
    """

    rules: str
    opening: str = ""
    start: str = ""
    marks: tuple[tuple[str, str], ...] = ()
    parts: tuple[tuple[str, Grammar], ...] = ()


def quoted(text: str) -> str:
    """A text as a Lark literal."""
    return json.dumps(text, ensure_ascii=False)


def call_object(functions: Sequence[Called], arguments: str, *, name: str = "name", before: str = "") -> str:
    """The expression for {`name`: …, `arguments`: {…}}. `before`: the expression for other members that come first."""

    def one(function: Called) -> str:
        return f'{quoted(quoted(function.name))} W? "," W? {quoted(quoted(arguments))} W? ":" W? {function.rule}'

    names = " | ".join(map(one, functions))
    return f'"{{" W? {before} {quoted(quoted(name))} W? ":" W? ({names}) W? "}}"'


def one_or_more(item: str, between: str, many: bool) -> str:
    """The expression for one item; with `many`, for one or more items with `between` between them."""
    return f"{item} ({between} {item})*" if many else item
