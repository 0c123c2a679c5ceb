"""Calls of the Gemma family.

- FunctionGemma: <start_function_call>call:NAME{KEY:<escape>TEXT<escape>,KEY:3}<end_function_call>
- Gemma 4: <|tool_call>call:NAME{KEY:<|"|>TEXT<|"|>,KEY:[1,2]}<tool_call|>
- Gemma 3, which writes Python: ```tool_code, then lines of name(key="value"), a list of calls or print(…) of one, ```
"""

from __future__ import annotations

import ast
import json
import re
from typing import Any

from jaxserve.server.tools.base import ToolParser, begun_mark
from jaxserve.server.tools.json_scan import MAX_NESTING
from jaxserve.server.tools.keyed import WORDS
from jaxserve.server.tools.parsers.pythonic import MAX_CALL, read_call

CODE = "```tool_code"
# The mark that opens a call -> (the mark that closes it, the mark around texts).
MARKS = {
    "<start_function_call>": ("<end_function_call>", "<escape>"),
    "<|tool_call>": ("<tool_call|>", '<|"|>'),
    CODE: ("```", None),
}
_HEAD = re.compile(r"\s*call\s*:\s*([\w.-]{1,128})\s*(?=\{)")
KEY = re.compile(r"\s*([^\s:{}\[\],]{1,256})\s*:")
_PLAIN = re.compile(r"[^,{}\[\]]*")


def matches(template: str) -> bool:
    """Whether it is one of the earlier models; for Gemma 4 see `gemma4`."""
    return "<start_function_call>" in template or CODE in template


class Parser(ToolParser):
    keeps_special_tokens = True
    _opening = ""

    def outside(self) -> bool:
        mark = self.content_until(*MARKS)
        if mark is not None:
            self._opening = mark
            self.state = self.call
        return mark is not None

    def call(self) -> bool:
        """State: inside a call or a block of Python, which is read when it is complete."""
        closing, quote = MARKS[self._opening]
        place = _find_outside(self.buffer, closing, quote)
        if place < 0 and len(self.buffer) <= MAX_CALL:
            return False
        text = self.buffer[: place if place >= 0 else MAX_CALL]
        self.buffer = self.buffer[len(text) :]
        self._read(text, closing if place >= 0 else "")
        return True

    def _read(self, text: str, closing: str) -> None:
        """Reads the text between two marks as calls; if it is not calls, it becomes content. The buffer begins with
        `closing`."""
        self.state = self.outside
        if self._reads_calls(text):
            self.buffer = self.buffer.removeprefix(closing)
        else:
            self.content(self._opening + text)

    def _reads_calls(self, text: str) -> bool:
        """Adds the calls in a text. Returns false for other text."""
        try:
            calls = _code(text) if self._opening == CODE else [_call(text, MARKS[self._opening][1] or "")]
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            return False
        for name, arguments in calls:
            self.begin_call(name)
            self.arguments(arguments)
        return True

    def at_cut(self) -> None:
        """Adds calls that are complete. Of Python these may be all but the last line."""
        if self.state == self.call:
            text = self.buffer[: len(self.buffer) - begun_mark(self.buffer, [MARKS[self._opening][0]])]
            if not self._reads_calls(text) and self._opening == CODE:
                self._reads_calls(text.rpartition("\n")[0])
        super().at_cut()

    def at_end(self) -> None:
        if self.state == self.call:
            text = self.buffer
            self.buffer = ""
            self._read(text, "")
        super().at_end()


def _find_outside(text: str, mark: str, quote: str | None) -> int:
    """The position of the first `mark` outside quoted texts; -1 if there is none."""
    at = 0
    while True:
        place = text.find(mark, at)
        if place < 0 or quote is None:
            return place
        begin = text.find(quote, at, place)
        if begin < 0:
            return place
        end = text.find(quote, begin + len(quote))
        if end < 0:
            return -1
        at = end + len(quote)


def _code(text: str) -> list[tuple[str, str]]:
    """The calls in lines of Python, as (name, JSON arguments). Raises ValueError or SyntaxError for other text."""
    nodes: list[ast.expr] = []
    for statement in ast.parse(text.strip()).body:
        if not isinstance(statement, ast.Expr):
            raise ValueError("not a call")
        match statement.value:
            case ast.Call(func=ast.Name(id="print"), args=[node], keywords=[]):
                nodes.append(node)
            case ast.List(elts=items):
                nodes += items
            case node:
                nodes.append(node)
    if not nodes:
        raise ValueError("no call")
    return [read_call(ast.unparse(node)) for node in nodes]


def _call(text: str, quote: str) -> tuple[str, str]:
    """The name and JSON arguments of call:NAME{…}. Raises ValueError for other text."""
    head = _HEAD.match(text)
    if head is None:
        raise ValueError("not a call")
    reader = _Reader(text, quote, head.end())
    arguments = reader.value(0)
    if text[reader.at :].strip():
        raise ValueError("text after the arguments")
    return head[1], json.dumps(arguments, ensure_ascii=False, allow_nan=False)


class _Reader:
    """Reads values in a variant of JSON with unquoted keys, and with marks instead of quotes around texts."""

    def __init__(self, text: str, quote: str, at: int):
        self.at = at
        self._text = text
        self._quote = quote

    def value(self, depth: int) -> Any:
        if depth > MAX_NESTING:
            raise ValueError("nested too deeply")
        self._space()
        if self._takes(self._quote):
            end = self._text.find(self._quote, self.at)
            if end < 0:
                raise ValueError("an open text")
            text = self._text[self.at : end]
            self.at = end + len(self._quote)
            return text
        if self._takes("{"):
            return dict(self._items("}", lambda: (self._key(), self.value(depth + 1))))
        if self._takes("["):
            return self._items("]", lambda: self.value(depth + 1))
        return self._plain()

    def _items(self, closing: str, read: Any) -> list[Any]:
        items: list[Any] = []
        self._space()
        if self._takes(closing):
            return items
        while True:
            items.append(read())
            self._space()
            if self._takes(closing):
                return items
            if not self._takes(","):
                raise ValueError(f"no {closing}")

    def _key(self) -> str:
        found = KEY.match(self._text, self.at)
        if found is None:
            raise ValueError("no key")
        self.at = found.end()
        return found[1].removeprefix(self._quote).removesuffix(self._quote).strip('"')

    def _plain(self) -> Any:
        """A JSON number, word or string, or a word of Python; any other text is a string as it is."""
        if self._text.startswith('"', self.at):
            text, self.at = json.JSONDecoder(strict=False).raw_decode(self._text, self.at)
            return text
        found = _PLAIN.match(self._text, self.at)
        assert found is not None
        self.at = found.end()
        text = found[0].strip()
        if not text:
            raise ValueError("no value")
        try:
            value = json.loads(WORDS.get(text, text))
            json.dumps(value, allow_nan=False)
            return value
        except ValueError:
            return text

    def _takes(self, text: str) -> bool:
        if not self._text.startswith(text, self.at):
            return False
        self.at += len(text)
        return True

    def _space(self) -> None:
        while self._text[self.at : self.at + 1].isspace():
            self.at += 1
