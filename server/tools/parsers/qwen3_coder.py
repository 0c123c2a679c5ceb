"""<tool_call><function=NAME><parameter=KEY>\\nVALUE\\n</parameter></function></tool_call>, as Qwen3-Coder writes it.

Values are text; those whose schema does not say "string" are read as JSON where they are JSON.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from jaxserve.types import Grammar
from server.tools.base import ToolParser
from server.tools.syntax import Called, Syntax, one_or_more, quoted

FUNCTION, FUNCTION_END, PARAMETER, PARAMETER_END = "<function=", "</function>", "<parameter=", "</parameter>"


def matches(template: str) -> bool:
    return FUNCTION in template and PARAMETER in template


def syntax(functions: Sequence[Called], many: bool) -> Syntax:
    """A strict function's parameters come in the order of its schema. Of a text, only a choice of texts is enforced."""
    parts: list[tuple[str, Grammar]] = []
    bodies = [_strict(function, parts) if function.is_strict else "parameter*" for function in functions]
    named = zip(functions, bodies, strict=True)
    calls = " | ".join(f"{quoted(f'{FUNCTION}{function.name}>')} W? {body} W? end" for function, body in named)
    rules = rf"""
calls: {one_or_more("call", "W? called W?", many)}
call: ({calls}) W? closing
end: "{FUNCTION_END}"
parameter: "{PARAMETER}" /[^<>\n]{{1,64}}/ ">" text W?
text[lazy]: /(?s:.*)<\/parameter>/
"""
    return Syntax(rules, opening="<tool_call>", marks=(("closing", "</tool_call>"),), parts=tuple(parts))


def _strict(function: Called, parts: list[tuple[str, Grammar]]) -> str:
    """The expression for a function's parameters; adds the schemas of their values to the parts."""
    expressions = []
    for key, schema in function.properties.items():
        schema = schema if isinstance(schema, dict) else {}
        if schema.get("type") == "string" and isinstance(schema.get("enum"), list):
            value = f'({" | ".join(quoted(str(one)) for one in schema["enum"])}) W? "{PARAMETER_END}"'
        elif schema.get("type") == "string":
            value = "text"
        else:
            name = f"value{len(parts)}"
            parts.append((name, _value(function, schema)))
            value = f'@{name} W? "{PARAMETER_END}"'
        one = f"{quoted(f'{PARAMETER}{key}>')} W? {value} W?"
        expressions.append(one if key in function.required else f"({one})?")
    return " ".join(expressions)


def _value(function: Called, schema: dict[str, Any]) -> Grammar:
    """The grammar of a property's value. One that refers to the whole schema, or into it, may be any JSON."""
    known = {name: function.schema[name] for name in ("$defs", "definitions") if name in function.schema}
    text = json.dumps(known | schema)
    outside = any(f'"$ref": "{pointer}' in text for pointer in ('#"', "#/properties"))
    return Grammar("json", "{}" if outside else text, field="tools", is_loose=True)


class Parser(ToolParser):
    _name = ""
    _parameters: set[str]
    _is_text = _started = False

    def outside(self) -> bool:
        before, mark = self.take_until(FUNCTION, "<tool_call>", "</tool_call>")
        self.content(before)
        if mark == FUNCTION:
            self.state = self.function
        return mark is not None

    def function(self) -> bool:
        """The function's name."""
        name, found, rest = self.buffer.partition(">")
        if not found:
            return False
        self._name, self._parameters = name.strip(), set()
        self.buffer, self.state = rest, self.between
        self.begin_call(self._name)
        self.arguments("{")
        return True

    def between(self) -> bool:
        """Between parameters."""
        _, mark = self.take_until(PARAMETER, FUNCTION_END)
        if mark == FUNCTION_END:
            self.arguments("}")
            self.state = self.outside
        elif mark:
            self.state = self.key
        return mark is not None

    def key(self) -> bool:
        """A parameter's name."""
        key, found, rest = self.buffer.partition(">")
        if not found:
            return False
        key = key.strip()
        self.arguments((", " if self._parameters else "") + json.dumps(key, ensure_ascii=False) + ": ")
        self._parameters.add(key)
        schema = self.tools.get(self._name, {}).get("properties", {}).get(key, {})
        self._is_text = isinstance(schema, dict) and schema.get("type") == "string"
        self._started = False
        self.buffer, self.state = rest, self.value_begins
        return True

    def value_begins(self) -> bool:
        self.buffer, self.state = self.buffer.removeprefix("\n"), self.value
        return True

    def value(self) -> bool:
        """A parameter's value, to which the line breaks around it do not belong."""
        ended = PARAMETER_END in self.buffer
        if not ended and not self._is_text:
            return False
        text, _ = self.take_until(PARAMETER_END)
        if not ended and text.endswith("\n"):
            text, self.buffer = text[:-1], "\n" + self.buffer
        if ended:
            text, self.state = text.removesuffix("\n"), self.between
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
            self.content(FUNCTION + self.buffer)
        super().at_end()


def _json_of(text: str) -> str:
    try:
        return json.dumps(json.loads(text), ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
