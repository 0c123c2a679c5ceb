"""The arguments of tool calls: JSON text that a model wrote, whole, cut short or wrong."""

from __future__ import annotations

import json
import re
from typing import Any

from server.tools.json_scan import MAX_NESTING

# One character of a JSON string, escaped or not, or both halves of one beyond the basic plane.
_CHARACTER = re.compile(
    r'[^"\\]+|\\["\\/bfnrt]|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}'
    r"|\\u(?![dD][89a-fA-F])[0-9a-fA-F]{4}"
)


def loads(text: str) -> Any:
    """The value of a JSON text; None where it is none. Halves of characters, which cannot be encoded, are replaced."""
    try:
        value = json.loads(text, strict=False)
        if "\\u" not in text:
            return value
        halves = json.dumps(value, ensure_ascii=False).encode("utf-16-le", "surrogatepass")
        return json.loads(halves.decode("utf-16-le", "replace"))
    except (ValueError, RecursionError):
        return None


def as_object(text: str) -> dict[str, Any]:
    """The arguments as an object. Never fails.

    Of a text that was cut short, the members that had come are there. A text that is no object at all stands whole
    under the name `arguments`.
    """
    for candidate in (text, *_completions(text)):
        if isinstance(value := loads(candidate), dict):
            return value
    return {"arguments": text} if text.strip() else {}


def _completions(text: str) -> list[str]:
    """Texts that may be whole where `text` is not: closed as it stands, and closed after its last whole member."""
    due: list[str] = []  # closing brackets
    last: tuple[int, list[str]] = (0, [])  # a place where a member may end, and the brackets that are due there
    in_string = escaped = False
    for position, char in enumerate(text):
        if in_string:
            in_string = escaped or char != '"'
            escaped = char == "\\" and not escaped
        elif char == '"':
            in_string = True
        elif char in "{[":
            if len(due) >= MAX_NESTING:
                return []
            due.append("}" if char == "{" else "]")
            last = (position + 1, due.copy())
        elif char in "}]" and due:
            due.pop()
        elif char == ",":
            last = (position, due.copy())
    end, closing = last
    whole = (text[:-1] if escaped else text) + '"' * in_string
    return [whole + "".join(reversed(due)), text[:end] + "".join(reversed(closing))]


class StringReader:
    """Reads the string of a growing object {"<name>": "…"} as it comes.

    `push` takes more of the object's JSON text and returns the characters of the string that are certain by now;
    `finish` returns the rest. Where the object has another form, all of it comes at the end: the string by that name,
    else the only string there is, else the object's text.
    """

    def __init__(self, name: str):
        self._name = name
        self._opening = re.compile(r'\s*\{\s*"' + re.escape(name) + r'"\s*:\s*"')
        self._text = ""  # of the object, so far
        self._place = 0  # up to where the string has been read; 0: it has not begun
        self._told = ""

    def push(self, text: str) -> str:
        self._text += text
        if not self._place:
            opening = self._opening.match(self._text)
            if opening is None:
                return ""
            self._place = opening.end()
        start = self._place
        while (found := _CHARACTER.match(self._text, self._place)) is not None:
            self._place = found.end()
        more = json.loads(f'"{self._text[start : self._place]}"', strict=False)
        self._told += more
        return more

    def finish(self) -> str:
        if self._place:
            whole = self._told if self._text[self._place :].startswith('"') else _rest(self._told, self._value())
        else:
            whole = self._value()
        more = whole[len(self._told) :]
        self._told = whole
        return more

    def _value(self) -> str:
        members = as_object(self._text)
        value = members.get(self._name)
        strings = [value] if isinstance(value, str) else [each for each in members.values() if isinstance(each, str)]
        return strings[0] if len(strings) == 1 else self._text


def _rest(told: str, whole: str) -> str:
    return whole if whole.startswith(told) else told
