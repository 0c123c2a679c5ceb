"""Reading the arguments of tool calls: JSON text of a model, which may be cut short or invalid."""

from __future__ import annotations

import json
import re
from typing import Any

from jaxserve.server.tools.json_scan import MAX_NESTING

# Characters of a JSON string: plain ones, an escape, or both surrogates of one beyond the basic plane.
_CHARACTER = re.compile(
    r'[^"\\]+|\\["\\/bfnrt]|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}'
    r"|\\u(?![dD][89a-fA-F])[0-9a-fA-F]{4}"
)
_LONGEST_OPENING = 256  # most characters of an object before its string begins


def loads(text: str) -> Any:
    """The value of a JSON text; None if it is invalid. Replaces unpaired surrogates, which cannot be encoded."""
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

    A text that was cut short gives the members that are there. A text that is not an object becomes the value of a
    member `arguments`.
    """
    for candidate in (text, *_completions(text)):
        if isinstance(value := loads(candidate), dict):
            return value
    return {"arguments": text} if text.strip() else {}


def _completions(text: str) -> list[str]:
    """Completions of a JSON text that was cut short: closed at its end, and closed after its last complete member."""
    due: list[str] = []  # closing brackets
    last: tuple[int, list[str]] = (0, [])  # position after the last complete member, and the brackets due there
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
    """Reads the string from the growing JSON text of an object {"<name>": "…"}.

    `push` takes more text and returns the string's characters that are certain; `finish` returns the rest. If the
    object does not begin like this, `finish` returns everything: the string with that name, or else the only string in
    the object, or else the object's text.
    """

    def __init__(self, name: str):
        self._name = name
        self._opening = re.compile(r'\s*\{\s*"' + re.escape(name) + r'"\s*:\s*"')
        self._begun = False  # whether the string has begun
        self._unread = ""  # text not yet read: of the string if it has begun, otherwise of the object
        self._other: list[str] = []  # the whole text, if the object does not begin as expected

    def push(self, text: str) -> str:
        if self._other:
            self._other.append(text)
            return ""
        self._unread += text
        if not self._begun:
            opening = self._opening.match(self._unread)
            if opening is None:
                if len(self._unread) > _LONGEST_OPENING:
                    self._other.append(self._unread)
                return ""
            self._begun, self._unread = True, self._unread[opening.end() :]
        place = 0
        while (found := _CHARACTER.match(self._unread, place)) is not None:
            place = found.end()
        shown = self._unread[:place]
        self._unread = self._unread[place:]
        return json.loads(f'"{shown}"', strict=False)

    def finish(self) -> str:
        if self._begun:  # the unread text is the string's end, or an incomplete escape
            rest = {} if self._unread.startswith('"') else as_object('{"": "' + self._unread)
            return rest.get("", "")
        text = "".join(self._other) or self._unread
        members = as_object(text)
        value = members.get(self._name)
        strings = [value] if isinstance(value, str) else [each for each in members.values() if isinstance(each, str)]
        return strings[0] if len(strings) == 1 else text
