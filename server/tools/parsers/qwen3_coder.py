"""<tool_call><function=NAME><parameter=KEY>\\nVALUE\\n</parameter></function></tool_call>, as Qwen3-Coder writes it.

Values are text; those whose schema does not say "string" are read as JSON where they are JSON.
"""

from __future__ import annotations

import json

from server.tools.base import ToolParser

FUNCTION, FUNCTION_END, PARAMETER, PARAMETER_END = "<function=", "</function>", "<parameter=", "</parameter>"


def matches(template: str) -> bool:
    return FUNCTION in template and PARAMETER in template


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
