"""Scanning growing JSON text: where a value ends, and the name and arguments of an incomplete tool call."""

from __future__ import annotations

import json

MAX_NESTING = 64  # levels of brackets in a tool call


class ValueScanner:
    """Finds the end of one JSON value. It checks only brackets and strings, so the text may still be invalid JSON.

    Attributes:
      done: the value has ended. A number or a word ends before the character that follows it.
      bad: the text cannot become a value.
    """

    def __init__(self) -> None:
        self.done = self.bad = False
        self._open: list[str] = []  # closing brackets that are due
        self._in_string = self._escaped = self._in_word = False

    def push(self, text: str) -> int:
        """Takes the next text; returns how many characters belong to the value."""
        for position, char in enumerate(text):
            if self._in_string:
                self._string(char)
            elif char in '"{[]}' and not self._in_word:
                self._bracket(char)
            elif not self._open and (char in ",}] \t\r\n" and self._in_word):
                self.done = True
                return position
            elif not self._open and char not in " \t\r\n":
                self._in_word = True
            if self.done or self.bad:
                return position + 1
        return len(text)

    def _string(self, char: str) -> None:
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == '"':
            self._in_string = False
            self.done = not self._open

    def _bracket(self, char: str) -> None:
        if char == '"':
            self._in_string = True
        elif char in "{[":
            self._open.append("}" if char == "{" else "]")
            self.bad = len(self._open) > MAX_NESTING
        else:
            self.bad = not self._open or self._open.pop() != char
            self.done = not self.bad and not self._open


class CallScanner:
    """Reads one object {"name": …, "arguments": {…}}, or with "tool_name" and "parameters".

    Its keys may have any order, and there may be other keys.

    Attributes:
      name: the function's name; None until it is known.
      arguments: the JSON text of the arguments so far; it only grows at its end.
      done: the object has ended and is a call.
      bad: the object is not a call.
      unclosed: `bad` is true only because another character follows where `}` is due. That character was not taken.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self.arguments = ""
        self.done = self.bad = self.unclosed = False
        self._state = "start"
        self._key = ""
        self._text = ""  # text so far of the current key or value
        self._scanner = ValueScanner()

    def push(self, text: str) -> int:
        """Takes the next text; returns how many of its characters belong to the object.

        Stops at the end of the name, so that what the caller does with the name cannot depend on how the text is cut.
        """
        position = 0
        unnamed = self.name is None
        while position < len(text) and not self.done and not self.bad and (self.name is None) is unnamed:
            if self._state in ("key", "value"):
                position += self._read(text[position:])
            else:
                self._between(text[position])
                position += not self.unclosed
        return position

    def close(self) -> None:
        """Accepts an unclosed object as complete."""
        self.done = True
        self.bad = False
        self.unclosed = False
        self.arguments = self.arguments or "{}"

    def _between(self, char: str) -> None:
        match self._state, char:
            case _, " " | "\t" | "\r" | "\n":
                pass
            case "start", "{":
                self._state = "first key"
            case "first key" | "next key", '"':
                self._begin("key", char)
            case "colon", ":":
                self._begin("value", "")
            case "after", ",":
                self._state = "next key"
            case "after" | "first key", "}":
                self.done = self.name is not None
                self.bad = self.name is None
                self.arguments = self.arguments or "{}"
            case _:
                self.bad = True
                self.unclosed = self._state == "after" and self.name is not None

    def _begin(self, state: str, text: str) -> None:
        self._state, self._text, self._scanner = state, text, ValueScanner()
        self._scanner.push(text)

    def _read(self, text: str) -> int:
        used = self._scanner.push(text)
        self._text += text[:used]
        streams = self._state == "value" and self._is_arguments and self._text.lstrip().startswith("{")
        if streams:
            self.arguments += text[:used] if self.arguments else self._text.lstrip()
        self.bad = self._scanner.bad
        if self._scanner.done:
            self._end(streams)
        return used

    @property
    def _is_arguments(self) -> bool:
        return self._key in ("arguments", "parameters")

    def _end(self, streamed: bool) -> None:
        """Handles the end of a key or a value."""
        if self._state == "key":
            self._state, self._key = "colon", str(self._loads(self._text))
            self.bad = self.bad or (self._is_arguments and bool(self.arguments))
            return
        self._state = "after"
        if self._key in ("name", "tool_name"):
            name = self._loads(self._text)
            self.name = name if isinstance(name, str) else None
            self.bad = self.bad or not self.name
        elif self._is_arguments and not streamed:  # null, or an object inside a string
            value = self._loads(self._text)
            self.arguments = "{}" if value is None else value if isinstance(value, str) else ""
            self.bad = self.bad or not self.arguments.lstrip().startswith("{")

    def _loads(self, text: str) -> object:
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            self.bad = True
            return ""
