"""Calls whose arguments are written one by one, as keys and texts between marks, and not as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, ClassVar

from jaxserve.server.tools.base import ToolParser
from jaxserve.server.tools.syntax import Called, quoted
from jaxserve.types import Grammar

WORDS = {"True": "true", "False": "false", "None": "null"}  # of Python


class KeyedParser(ToolParser):
    """Converts keys and values to the JSON text of the arguments.

    A value whose schema has type "string" is returned as it grows. Any other value is read as JSON when it is complete,
    or as a word of Python, which some templates write; if it is neither, it becomes a string.

    A subclass defines the states `outside`; `function`, which calls `begin_arguments`; and `key`, which calls
    `begin_value`.

    Attributes:
      opening: the mark before a function's name.
      key_mark: the mark before a key.
      arguments_end: the mark after the arguments.
      value_end: the mark after a value.
      line_breaks: one line break at the beginning of a value and one at its end are not part of the value.
    """

    opening: str
    key_mark: str
    arguments_end: str
    value_end: str
    line_breaks: ClassVar[bool] = False
    _name = ""
    _count = 0  # keys of the current call so far
    _is_text = _started = False

    def function(self) -> bool:
        """State: the function's name."""
        raise NotImplementedError

    def begin_arguments(self, name: str) -> None:
        """Begins a call of the function `name` and makes `between` the next state."""
        self._name = name
        self._count = 0
        self.state = self.between
        self.begin_call(name)
        self.arguments("{")

    def between(self) -> bool:
        """State: between arguments."""
        _, mark = self.take_until(self.key_mark, self.arguments_end)
        if mark == self.arguments_end:
            self.arguments("}")
            self.state = self.outside
        elif mark:
            self.state = self.key
        return mark is not None

    def key(self) -> bool:
        """State: an argument's name, and the mark before its value."""
        raise NotImplementedError

    def begin_value(self, key: str, is_text: bool | None = None) -> None:
        """Adds the key to the arguments and makes `value` the next state. `is_text`: whether the value is a text; None:
        as the schema says."""
        self.arguments((", " if self._count else "") + json.dumps(key, ensure_ascii=False) + ": ")
        self._count += 1
        schema = self.tools.get(self._name, {}).get("properties", {}).get(key, {})
        by_schema = isinstance(schema, dict) and schema.get("type") == "string"
        self._is_text = by_schema if is_text is None else is_text
        self._started = False
        self.state = self.value_begins if self.line_breaks else self.value

    def value_begins(self) -> bool:
        self.buffer = self.buffer.removeprefix("\n")
        self.state = self.value
        return True

    def value(self) -> bool:
        ended = self.value_end in self.buffer
        if not ended and not self._is_text:
            return False
        text, _ = self.take_until(self.value_end)
        if self.line_breaks and not ended and text.endswith("\n"):
            text = text[:-1]
            self.buffer = "\n" + self.buffer
        if ended:
            text = text.removesuffix("\n") if self.line_breaks else text
            self.state = self.between
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

    def at_end(self) -> None:
        if self.state == self.between:
            self.arguments("}")
        elif self.state == self.function:
            self.content(self.opening + self.buffer)
        super().at_end()


def _json_of(text: str) -> str:
    text = WORDS.get(text.strip(), text)
    try:
        return json.dumps(json.loads(text), ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)


def arguments_syntax(
    function: Called,
    parts: list[tuple[str, Grammar]],
    before: Callable[[str], str],
    free: str,
    *,
    end: str,
    text: str = "text",
) -> str:
    """The Lark expression for a function's arguments, in the order of the schema. Adds schemas of values to `parts`.

    `before(key)`: the expression for the key and marks before the value. `free`: that for arguments of any names.
    `end`: that for the mark after a value. `text`: that for any text and the mark after it. In schemas of type
    "string", only `enum` is enforced.
    """
    if not function.is_strict or function.is_open:
        return free
    expressions = []
    for key, schema in function.properties.items():
        schema = schema if isinstance(schema, dict) else {}
        if schema.get("type") == "string" and isinstance(schema.get("enum"), list):
            value = f"({' | '.join(quoted(str(one)) for one in schema['enum'])}) W? {end}"
        elif schema.get("type") == "string":
            value = text
        else:
            name = f"value{len(parts)}"
            parts.append((name, _value(function, schema)))
            value = f"@{name} W? {end}"
        one = f"{before(key)} {value} W?"
        expressions.append(one if key in function.required else f"({one})?")
    return " ".join(expressions)


def _value(function: Called, schema: dict[str, Any]) -> Grammar:
    """The grammar of a property's value. Any JSON, if the schema refers to the whole schema or to its properties."""
    known = {name: function.schema[name] for name in ("$defs", "definitions") if name in function.schema}
    text = json.dumps(known | schema)
    outside = any(f'"$ref": "{pointer}' in text for pointer in ('#"', "#/properties"))
    return Grammar("json", "{}" if outside else text, field="tools", is_loose=True)
