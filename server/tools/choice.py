"""A request's functions and its `tool_choice` among them, and the parsers of forced calls."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from jaxserve.limits import MAX_TOOLS
from jaxserve.server.tools.base import ToolParser
from jaxserve.server.tools.json_scan import ValueScanner
from jaxserve.types import InvalidRequestError

FUNCTION_NAME = r"^[A-Za-z0-9_.-]{1,128}$"
_NAME = re.compile(FUNCTION_NAME)


class Function(msgspec.Struct, omit_defaults=True):
    """A function that a model may call; `parameters` is the JSON schema of an object."""

    name: Annotated[str, Meta(pattern=FUNCTION_NAME)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct):
    function: Function
    type: str = "function"


class NamedFunction(msgspec.Struct):
    name: str


class AllowedTool(msgspec.Struct):
    function: NamedFunction
    type: str = "function"


class AllowedTools(msgspec.Struct):
    """Some of a request's tools, which a model may ("auto") or must ("required") call. The prompt shows all tools."""

    tools: list[AllowedTool]
    mode: str = "auto"


class NamedChoice(msgspec.Struct):
    """A tool_choice that is an object: a function by name, or some of the tools."""

    function: NamedFunction | None = None
    type: str = "function"
    allowed_tools: AllowedTools | None = None


Choice = str | NamedChoice
Mode = Literal["none", "auto", "required", "named"]


def choose(tools: Sequence[Tool], given: Choice | None) -> tuple[list[Tool], Mode]:
    """The functions that may be called, and the mode. In mode "named" there is one function, which must be called.

    Raises InvalidRequestError for a choice that names no tool of the request.
    """
    if isinstance(given, NamedChoice):
        if given.type == "function" and given.function is not None:
            return [_named(tools, given.function.name)], "named"
        if given.type == "allowed_tools" and given.allowed_tools is not None:
            names = dict.fromkeys(tool.function.name for tool in given.allowed_tools.tools)
            if not names or given.allowed_tools.mode not in ("auto", "required"):
                raise InvalidRequestError("allowed_tools must hold tools, and mode 'auto' or 'required'", "tool_choice")
            mode: Mode = "auto" if given.allowed_tools.mode == "auto" else "required"
            return [_named(tools, name) for name in names], mode
        raise InvalidRequestError(
            "tool_choice must be of type 'function', with a function, or 'allowed_tools', with allowed_tools",
            "tool_choice",
        )
    match given:
        case None | "auto":
            return list(tools), "auto" if tools else "none"
        case "none":
            return [], "none"
        case "required" if tools:
            return list(tools), "required"
        case "required":
            raise InvalidRequestError("tool_choice 'required' needs tools", "tool_choice")
    raise InvalidRequestError(
        f"tool_choice must be 'none', 'auto', 'required' or name a function, got {given[:64]!r}", "tool_choice"
    )


def _named(tools: Sequence[Tool], name: str) -> Tool:
    found = next((tool for tool in tools if tool.function.name == name), None)
    if found is None:
        raise InvalidRequestError(f"tool_choice names {name[:64]!r}, which is no tool", "tool_choice")
    return found


def check_tools(tools: Sequence[Tool]) -> None:
    """Raises InvalidRequestError for invalid tools."""
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


def forced_parser(tools: Mapping[str, Mapping[str, Any]], mode: Mode) -> ToolParser:
    """A parser of calls that a grammar of `jaxserve.server.chat.forms` forces: the function's arguments in mode
    "named", otherwise a list of {"name", "parameters"}."""
    return NamedCallParser(tools, next(iter(tools))) if mode == "named" else CallListParser(tools)


class CallListParser(ToolParser):
    """Reads a JSON list of {"name", "parameters"}."""

    def outside(self) -> bool:
        self.buffer = self.buffer.lstrip(" \t\r\n[],")
        if self.buffer.startswith("{"):
            self.begin_json()
        elif self.buffer:
            self.content(self.buffer)
            self.buffer = ""
        return bool(self.buffer)


class NamedCallParser(ToolParser):
    """Reads the arguments of one function, which are the whole text."""

    def __init__(self, tools: Mapping[str, Mapping[str, Any]], name: str):
        super().__init__(tools)
        self._name = name
        self._value = ValueScanner()

    def outside(self) -> bool:
        if self.num_calls == 0:
            self.buffer = self.buffer.lstrip()
            if not self.buffer:
                return False
            self.begin_call(self._name)
        used = self._value.push(self.buffer) if not self._value.done else 0
        self.arguments(self.buffer[:used])
        self.buffer = self.buffer[used:] if used else ""
        return False
