"""What a request allows in tool calls: its functions, its choice among them, and the JSON schema of a forced call."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from jaxserve.types import InvalidRequestError
from server.tools.base import ToolParser
from server.tools.json_scan import ValueScanner

MAX_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")


class Function(msgspec.Struct, omit_defaults=True):
    """A function that a model may call; `parameters` is the JSON schema of an object."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct):
    function: Function
    type: str = "function"


class NamedFunction(msgspec.Struct):
    name: str


class NamedChoice(msgspec.Struct):
    function: NamedFunction
    type: str = "function"


Choice = str | NamedChoice


def check_tools(tools: Sequence[Tool] | None, choice: Choice | None) -> None:
    """Raises InvalidRequestError for tools that are none, and for a choice of what is not there."""
    tools = tools or ()
    if len(tools) > MAX_TOOLS:
        raise InvalidRequestError(f"tools has {len(tools)} entries; at most {MAX_TOOLS} are allowed", "tools")
    seen = set()
    for tool in tools:
        name = tool.function.name
        if tool.type != "function":
            raise InvalidRequestError(f"tools must be of type 'function', got {tool.type[:64]!r}", "tools")
        if not _NAME.fullmatch(name):
            raise InvalidRequestError(
                f"a function's name must be 1 to 128 of A-Za-z0-9_.-, got {name[:140]!r}", "tools"
            )
        if name in seen:
            raise InvalidRequestError(f"tools has two functions named {name!r}", "tools")
        if (tool.function.parameters or {}).get("type", "object") != "object":
            raise InvalidRequestError(f"the parameters of {name!r} must be a schema of type 'object'", "tools")
        seen.add(name)
    if isinstance(choice, str) and choice not in ("none", "auto", "required"):
        raise InvalidRequestError(
            f"tool_choice must be 'none', 'auto', 'required' or name a function, got {choice[:64]!r}", "tool_choice"
        )
    if isinstance(choice, NamedChoice) and choice.function.name not in seen:
        raise InvalidRequestError(f"tool_choice names {choice.function.name[:64]!r}, which is no tool", "tool_choice")
    if choice == "required" and not tools:
        raise InvalidRequestError("tool_choice 'required' needs tools", "tool_choice")


def schema_for_tools(tools: Sequence[Tool], choice: Choice, parallel: bool) -> dict[str, Any]:
    """The JSON schema of what a model has to write under this choice, "required" or a named function.

    A named function's arguments stand alone; otherwise there is a list of {"name", "parameters"}, of one entry where
    parallel calls are not wanted. `forced_parser` reads both.
    """
    if isinstance(choice, NamedChoice):
        return next(_parameters(tool.function) for tool in tools if tool.function.name == choice.function.name)
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": tool.function.name}, "parameters": _parameters(tool.function)},
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for tool in tools
    ]
    schema: dict[str, Any] = {
        "type": "array",
        "minItems": 1,
        "items": calls[0] if len(calls) == 1 else {"anyOf": calls},
    }
    return schema if parallel else schema | {"maxItems": 1}


def _parameters(function: Function) -> dict[str, Any]:
    return {"type": "object", **(function.parameters or {"properties": {}, "additionalProperties": False})}


def forced_parser(tools: Mapping[str, Mapping[str, Any]], choice: Choice) -> ToolParser:
    """A parser of what `schema_for_tools` describes."""
    return NamedCallParser(tools, choice.function.name) if isinstance(choice, NamedChoice) else CallListParser(tools)


class CallListParser(ToolParser):
    """A JSON list of {"name", "parameters"}."""

    def outside(self) -> bool:
        self.buffer = self.buffer.lstrip(" \t\r\n[],")
        if self.buffer.startswith("{"):
            self.begin_json()
        elif self.buffer:
            self.content(self.buffer)
            self.buffer = ""
        return bool(self.buffer)


class NamedCallParser(ToolParser):
    """One function's arguments, and nothing else."""

    def __init__(self, tools: Mapping[str, Mapping[str, Any]], name: str):
        super().__init__(tools)
        self._name = name
        self._value = ValueScanner()

    def outside(self) -> bool:
        self.buffer = self.buffer.lstrip()
        if self.buffer and self.num_calls == 0:
            self.begin_call(self._name)
        used = self._value.push(self.buffer) if not self._value.done else 0
        self.arguments(self.buffer[:used])
        self.buffer = self.buffer[used:] if used else ""
        return False
