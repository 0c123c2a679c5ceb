"""Calls whose arguments are written one by one, as keys and texts, instead of as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, ClassVar

from jaxserve.types import Grammar
from server.tools.base import ToolParser
from server.tools.syntax import Called, quoted


class KeyedParser(ToolParser):
    """Makes JSON of keys and values.

    A value whose schema says "string" is given out as it comes. Another one is read as JSON once it is whole, and is a
    text where it is no JSON.

    Attributes:
      value_end: the mark after a value.
      line_breaks: a line break after the mark before a value, and one before the mark after it, are not part of it.
    """

    value_end: ClassVar[str]
    line_breaks: ClassVar[bool] = False
    _name = ""
    _count = 0  # of keys
    _is_text = _started = False

    def begin_arguments(self, name: str) -> None:
        self._name, self._count = name, 0
        self.begin_call(name)
        self.arguments("{")

    def begin_value(self, key: str) -> None:
        """The value of `key` comes next; see the state `value`."""
        self.arguments((", " if self._count else "") + json.dumps(key, ensure_ascii=False) + ": ")
        self._count += 1
        schema = self.tools.get(self._name, {}).get("properties", {}).get(key, {})
        self._is_text = isinstance(schema, dict) and schema.get("type") == "string"
        self._started = False
        self.state = self.value_begins if self.line_breaks else self.value

    def after_value(self) -> None:
        """Sets the state that follows a value."""
        raise NotImplementedError

    def value_begins(self) -> bool:
        self.buffer, self.state = self.buffer.removeprefix("\n"), self.value
        return True

    def value(self) -> bool:
        ended = self.value_end in self.buffer
        if not ended and not self._is_text:
            return False
        text, _ = self.take_until(self.value_end)
        if self.line_breaks and not ended and text.endswith("\n"):
            text, self.buffer = text[:-1], "\n" + self.buffer
        if ended:
            text = text.removesuffix("\n") if self.line_breaks else text
            self.after_value()
        if self._is_text:
            self._text(text, ended)
        else:
            self.arguments(_json_of(text))
        return ended

    def _text(self, text: str, ended: bool) -> None:
        if not text and not ended:
            return
        self.arguments(("" if self._started else '"') + json.dumps(text, ensure_ascii=False)[1:-1])
        self._started = True
        if ended:
            self.arguments('"')


def _json_of(text: str) -> str:
    try:
        return json.dumps(json.loads(text), ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)


def strict_arguments(
    function: Called, parts: list[tuple[str, Grammar]], before: Callable[[str], str], value_end: str
) -> str:
    """The expression of Lark for a strict function's arguments, in the order of its schema; the schemas of their values
    are added to `parts`.

    `before(key)` is the expression for what stands before the value. The rule `text` has to match any text and
    the mark after it. Of a text, only a choice of texts is enforced.
    """
    end, expressions = quoted(value_end), []
    for key, schema in function.properties.items():
        schema = schema if isinstance(schema, dict) else {}
        if schema.get("type") == "string" and isinstance(schema.get("enum"), list):
            value = f"({' | '.join(quoted(str(one)) for one in schema['enum'])}) W? {end}"
        elif schema.get("type") == "string":
            value = "text"
        else:
            name = f"value{len(parts)}"
            parts.append((name, _value(function, schema)))
            value = f"@{name} W? {end}"
        one = f"{before(key)} {value} W?"
        expressions.append(one if key in function.required else f"({one})?")
    return " ".join(expressions)


def _value(function: Called, schema: dict[str, Any]) -> Grammar:
    """The grammar of a property's value. One that refers to the whole schema, or into it, may be any JSON."""
    known = {name: function.schema[name] for name in ("$defs", "definitions") if name in function.schema}
    text = json.dumps(known | schema)
    outside = any(f'"$ref": "{pointer}' in text for pointer in ('#"', "#/properties"))
    return Grammar("json", "{}" if outside else text, field="tools", is_loose=True)
