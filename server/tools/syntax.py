"""How formats write calls, as rules of a Lark grammar, for outputs that have to hold to a form.

A module of `jaxserve.server.tools.parsers` may define `syntax(functions, many)`, which gives a Syntax.
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
      rule: the grammar's rule for its arguments as JSON.
      schema: JSON schema of its arguments, an object's.
      is_strict: arguments have to satisfy it.
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
    def required(self) -> list[str]:
        found = self.schema.get("required")
        return found if isinstance(found, list) else []


class Syntax(msgspec.Struct, frozen=True):
    """A format's way to write calls.

    Attributes:
      rules: Lark rules that define `calls`: what follows the opening. They may use `called`, the opening, and `W`, the
        white space that JSON may hold.
      opening: the mark that begins calls; "" where the format has none.
      start: the character that begins calls without the mark. Such formats write calls at the beginning of an answer
        alone, others ("") after any text.
      marks: other marks that the rules use, see Grammar.
      parts: other grammars that the rules use, see Grammar.
    """

    rules: str
    opening: str = ""
    start: str = ""
    marks: tuple[tuple[str, str], ...] = ()
    parts: tuple[tuple[str, Grammar], ...] = ()


def quoted(text: str) -> str:
    """A text as a literal of Lark."""
    return json.dumps(text, ensure_ascii=False)


def call_object(functions: Sequence[Called], arguments: str) -> str:
    """The expression for {"name": …, `arguments`: {…}}."""

    def one(function: Called) -> str:
        return f'{quoted(quoted(function.name))} W? "," W? {quoted(quoted(arguments))} W? ":" W? {function.rule}'

    names = " | ".join(map(one, functions))
    return f'"{{" W? {quoted(quoted("name"))} W? ":" W? ({names}) W? "}}"'


def one_or_more(item: str, between: str, many: bool) -> str:
    """The expression for one item, or with `many` for several with something between."""
    return f"{item} ({between} {item})*" if many else item
