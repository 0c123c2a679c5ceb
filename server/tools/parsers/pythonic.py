"""[name(key="value", …), …] as the whole answer, as Llama 3.2 and 4 write it.

Calls are read with the `ast` module. They may have keyword arguments whose values are literals. Nothing is evaluated.
"""

from __future__ import annotations

import ast
import json
import keyword
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jaxserve.server.tools.base import ToolParser
from jaxserve.server.tools.json_scan import MAX_NESTING
from jaxserve.server.tools.syntax import Called, Syntax, one_or_more, quoted

MAX_CALL = 65_536  # characters of one call
_NAME = re.compile(r"[A-Za-z_][\w.-]*")
_OPENING = re.compile(rf"\s*\[\s*{_NAME.pattern}\s*\(")
_OPENING_BEGUN = re.compile(rf"\s*(\[\s*({_NAME.pattern}\s*)?)?")
# A string, or a word of Python that can be a key only here.
_RESERVED = re.compile(
    rf"""("(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')|\b({"|".join(keyword.kwlist)})(?=\s*=[^=])""", re.DOTALL
)
_RENAMED = "_reserved"  # the end of such a word while `ast` reads it
_PAIRS = {"(": ")", "[": "]", "{": "}"}
_WORDS = {"true": True, "false": False, "null": None}


def matches(template: str) -> bool:
    return False  # no part of a template tells for certain that a model uses this format


def syntax(functions: Sequence[Called], many: bool) -> Syntax:
    """The rules of the format. Names and keywords are those of the functions; values may be any literals."""

    def call(function: Called) -> str:
        keys = " | ".join(quoted(f"{key}=") for key in function.properties if key.isidentifier())
        pairs = one_or_more(f"({keys}) value", 'W? "," W?', True)
        return f'{quoted(function.name + "(")} W? {f"({pairs})? W? " if keys else ""}")"'

    rules = rf"""
calls: "[" W? {one_or_more("call", 'W? "," W?', many)} W? "]"
call: {" | ".join(map(call, functions))}
value: STRING | NUMBER | "True" | "False" | "None" | "[" W? (value (W? "," W? value)*)? W? "]"
  | "{{" W? (STRING W? ":" W? value (W? "," W? STRING W? ":" W? value)*)? W? "}}"
STRING: /"([^"\\\x00-\x1f]|\\[\\"'nrt])*"|'([^'\\\x00-\x1f]|\\[\\"'nrt])*'/
NUMBER: /-?(0|[1-9][0-9]{{0,17}})(\.[0-9]{{1,17}})?/
"""
    return Syntax(rules, start="[")


class Parser(ToolParser):
    def __init__(self, tools: Mapping[str, Mapping[str, Any]]):
        super().__init__(tools)
        self.state = self.opening
        self._opening = ""
        self._end = _CallEnd()

    def opening(self) -> bool:
        """State: at the beginning of the answer, which decides whether the answer is a list of calls."""
        if _OPENING.match(self.buffer):
            place = self.buffer.index("[") + 1
            self._opening = self.buffer[:place]
            self.buffer = self.buffer[place:]
            self.state = self.items
            return True
        if _OPENING_BEGUN.fullmatch(self.buffer):
            return False
        self.state = self.outside
        return True

    def outside(self) -> bool:
        self.content(self.buffer)
        self.buffer = ""
        return False

    def items(self) -> bool:
        """State: before a call, or after the last one."""
        self.buffer = self.buffer.lstrip(" \t\r\n,")
        if self.buffer.startswith("]"):
            self.buffer = self.buffer[1:]
            self.state = self.outside
        elif self.buffer:
            self._end = _CallEnd()
            self.state = self.call
        return bool(self.buffer)

    def call(self) -> bool:
        """State: inside a call, up to its last bracket."""
        if not self._end.push(self.buffer[self._end.length :]):
            return False
        try:
            name, arguments = read_call(self.buffer[: self._end.length])
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            self._give_up()
            return True
        self.buffer = self.buffer[self._end.length :]
        self.state = self.items
        self.begin_call(name)
        self.arguments(arguments)
        return True

    def _give_up(self) -> None:
        self.content("" if self.num_calls else self._opening)
        self.state = self.outside

    def at_end(self) -> None:
        if self.state in (self.items, self.call) and self.buffer:
            self._give_up()
        if self.state == self.opening:
            self.content(self.buffer)
        super().at_end()


class _CallEnd:
    """Finds the bracket that ends a call. A text that cannot be a call ends early, so that `read_call` refuses it."""

    def __init__(self) -> None:
        self.length = 0  # characters seen; at the end, those of the whole call
        self._due: list[str] = []
        self._quote = ""
        self._escaped = False

    def push(self, text: str) -> bool:
        """Takes more of the text; returns whether the call ends in it."""
        return any(map(self._ends, text))

    def _ends(self, char: str) -> bool:
        self.length += 1
        if self._quote:
            self._quote = self._quote if self._escaped or char != self._quote else ""
            self._escaped = char == "\\" and not self._escaped
        elif char in "\"'":
            self._quote = char
        elif char in _PAIRS:
            self._due.append(_PAIRS[char])
        elif char in ")]}" and (not self._due or self._due.pop() != char or not self._due):
            return True
        return len(self._due) > MAX_NESTING or self.length > MAX_CALL


def read_call(text: str) -> tuple[str, str]:
    """The name and JSON arguments of `name(key=literal, …)`. Raises ValueError or SyntaxError for other text.

    The name and the keys may be such that Python would not take them: a-b(from="x").
    """
    name, bracket, rest = text.partition("(")
    name = name.strip()
    if not _NAME.fullmatch(name):
        raise ValueError("not a name")
    rest = _RESERVED.sub(lambda found: found[1] or found[2] + _RENAMED, rest)
    node = ast.parse(f"call{bracket}{rest}", mode="eval").body
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("not a call with keyword arguments")
    arguments = {}
    for one in node.keywords:
        if one.arg is None:
            raise ValueError("** in a call")
        arguments[one.arg.removesuffix(_RENAMED)] = literal(one.value)
    return name, json.dumps(arguments, ensure_ascii=False, allow_nan=False)


def literal(node: ast.expr) -> Any:
    """The value of a literal that JSON can express. Raises ValueError for any other expression."""
    match node:
        case ast.Constant(value=str() | int() | float() | None as value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.Name(id=word) if word in _WORDS:
            return _WORDS[word]
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [literal(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return {_key(key): literal(value) for key, value in zip(keys, values, strict=True)}
    raise ValueError("not a literal")


def _key(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise ValueError("keys must be strings")
