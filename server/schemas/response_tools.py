"""The tools of /v1/responses as functions that a model can call, and the way back from its calls to tools.

Models can only call functions. Custom tools (free text), tools in namespaces and the client's shell are described to
the model as functions. Tools that would run on the server are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from jaxserve.limits import MAX_TOOLS
from jaxserve.server.http.notices import shown
from jaxserve.server.schemas.chat import CUSTOM_INPUT
from jaxserve.server.tools.call_arguments import loads
from jaxserve.server.tools.choice import (
    AllowedTool,
    AllowedTools,
    Choice,
    Function,
    NamedChoice,
    NamedFunction,
    Tool,
)
from jaxserve.types import InvalidRequestError

LOCAL_SHELL = "local_shell"
_SHELL = Function(
    LOCAL_SHELL,
    "Runs a command on the user's machine and returns its output.",
    {
        "type": "object",
        "properties": {
            "command": {"type": "array", "items": {"type": "string"}, "description": "The program and its arguments."},
            "working_directory": {"type": "string"},
            "timeout_ms": {"type": "integer"},
        },
        "required": ["command"],
        "additionalProperties": False,
    },
)


class CustomFormat(msgspec.Struct, omit_defaults=True):
    """The input of a custom tool: any text, or text of a grammar."""

    type: str
    syntax: str | None = None
    definition: str | None = None


class FlatTool(msgspec.Struct, omit_defaults=True):
    """A tool. Its type decides which fields it has."""

    type: str
    name: str = ""
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: CustomFormat | None = None
    tools: list[FlatTool] | None = None


class FlatChoice(msgspec.Struct, omit_defaults=True):
    """A tool_choice that is an object: one tool, or the tools that are allowed."""

    type: str
    name: str = ""
    namespace: str | None = None
    mode: str | None = None
    tools: list[FlatChoice] | None = None


class Origin(msgspec.Struct):
    """The tool that a function stands for: of type "function", "custom" or "local_shell"."""

    type: str = "function"
    name: str = ""
    namespace: str | None = None


def full_name(name: str, namespace: str | None) -> str:
    """The name by which a model calls a function, which includes its namespace."""
    return f"{namespace.rstrip('_')}__{name}" if namespace else name


class ToolMap:
    """A request's tools.

    Attributes:
      functions: what the model may call. The first function of a namespace carries the namespace's description.
      kept: the tools that the functions stand for, as the client gave them.
      notices: notices of tools that are left out.
    """

    def __init__(self, tools: Sequence[FlatTool], more: Iterable[FlatTool] = ()):
        """`more`: tools from items of the history, which may repeat known tools."""
        self.functions: list[Tool] = []
        self.kept: list[dict[str, Any]] = []
        self.notices: list[str] = []
        self._origins: dict[str, Origin] = {}
        self._inside: dict[str, list[str]] = {}  # a function's name without its namespace -> its full names
        self._namespaces: set[str] = set()
        for tool in tools:
            self._add(tool)
        for tool in more:
            self._add(tool, unless_known=True)

    def _add(self, tool: FlatTool, unless_known: bool = False) -> None:
        if tool.type == "namespace":
            inner = [part for part in tool.tools or () if self._add_function(part, unless_known, tool)]
            if inner:
                described = {"description": tool.description or "", "tools": [_described(part) for part in inner]}
                self.kept.append({"type": "namespace", "name": tool.name, **described})
        elif self._add_function(tool, unless_known):
            self.kept.append(_described(tool))

    def _add_function(self, tool: FlatTool, unless_known: bool, namespace: FlatTool | None = None) -> bool:
        if len(self.functions) + len(self.notices) >= MAX_TOOLS:
            raise InvalidRequestError(f"tools has more than {MAX_TOOLS} entries, those of namespaces included", "tools")
        match tool.type:
            case "function":
                function = Function(tool.name, tool.description, tool.parameters, tool.strict)
            case "custom":
                function = Function(tool.name, _custom_description(tool), _CUSTOM_PARAMETERS)
            case "local_shell" if namespace is None:
                function = _SHELL
            case _:
                self.notices.append(f"tools of type {shown(tool.type)} do not run here")
                return False
        origin = Origin(tool.type, function.name, namespace.name if namespace else None)
        name = full_name(origin.name, origin.namespace)
        if unless_known and name in self._origins:
            return False
        if namespace is not None:
            about = [None if namespace.name in self._namespaces else namespace.description, function.description]
            function = msgspec.structs.replace(function, name=name, description="\n".join(filter(None, about)) or None)
            self._namespaces.add(namespace.name)
            self._inside.setdefault(origin.name, []).append(name)
        self._origins[name] = origin
        self.functions.append(Tool(function))
        return True

    def origin(self, name: str) -> Origin:
        """The tool that a called function stands for."""
        return self._origins.get(name) or Origin(name=name)

    def choice(self, given: str | FlatChoice | None) -> Choice | None:
        """A tool_choice in terms of the functions. Raises InvalidRequestError for a tool that cannot be chosen."""
        if not isinstance(given, FlatChoice):
            return given
        if given.type != "allowed_tools":
            return NamedChoice(NamedFunction(self._chosen(given)))
        names = [self._chosen(tool) for tool in given.tools or () if self._runs(tool)]
        allowed = AllowedTools([AllowedTool(NamedFunction(name)) for name in names], given.mode or "auto")
        return NamedChoice(type="allowed_tools", allowed_tools=allowed)

    def _runs(self, choice: FlatChoice) -> bool:
        return choice.type in ("function", "custom", LOCAL_SHELL)

    def _chosen(self, choice: FlatChoice) -> str:
        if not self._runs(choice):
            raise InvalidRequestError(
                f"tool_choice may be 'none', 'auto' or 'required', or name a tool of type function, custom or "
                f"local_shell, got type {choice.type[:64]!r}",
                "tool_choice",
            )
        name = full_name(LOCAL_SHELL if choice.type == LOCAL_SHELL else choice.name, choice.namespace)
        inside = self._inside.get(name, [])
        return inside[0] if name not in self._origins and len(inside) == 1 else name


_CUSTOM_PARAMETERS = {
    "type": "object",
    "properties": {CUSTOM_INPUT: {"type": "string"}},
    "required": [CUSTOM_INPUT],
    "additionalProperties": False,
}


def _custom_description(tool: FlatTool) -> str:
    """The description of a custom tool. It includes the tool's grammar, which is not enforced."""
    text = tool.description or ""
    if tool.format is not None and tool.format.type == "grammar":
        text += f"\n\n`{CUSTOM_INPUT}` follows this grammar ({tool.format.syntax}):\n{tool.format.definition}"
    return text.strip()


def _described(tool: FlatTool) -> dict[str, Any]:
    """A tool as the response lists it, with the fields that clients expect."""
    fields = msgspec.to_builtins(tool)
    return {"parameters": None, "strict": None, **fields} if tool.type == "function" else fields


def shell_action(arguments: str) -> dict[str, Any]:
    """The action of a local_shell_call from the function's arguments; without a command if they were cut short."""
    given = loads(arguments)
    given = given if isinstance(given, dict) else {}
    command = given.get("command")
    if isinstance(command, str):
        command = ["bash", "-lc", command]
    action: dict[str, Any] = {
        "type": "exec",
        "command": [str(part) for part in command] if isinstance(command, list) else [],
        "env": {},
    }
    directory = given.get("working_directory")
    timeout = given.get("timeout_ms")
    action["working_directory"] = directory if isinstance(directory, str) else None
    action["timeout_ms"] = timeout if isinstance(timeout, int) else None
    return action
