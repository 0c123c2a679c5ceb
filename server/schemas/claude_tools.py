"""Anthropic's tools as functions: the client's own tools, and tools that Anthropic defines and the client runs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from jaxserve.limits import MAX_TOOLS
from jaxserve.server.http.notices import shown
from jaxserve.server.tools.choice import Function, Tool
from jaxserve.types import InvalidRequestError

# Type without its date -> (description, properties, required) of tools that the client runs and Anthropic defines.
_DEFINED = {
    "bash": (
        "Runs a command in a shell session that goes on between calls.",
        {"command": {"type": "string"}, "restart": {"type": "boolean", "description": "Begins a new session."}},
        [],
    ),
    "text_editor": (
        "Looks at files and changes them.",
        {
            "command": {"type": "string", "enum": ["view", "create", "str_replace", "insert"]},
            "path": {"type": "string"},
            "file_text": {"type": "string", "description": "For create."},
            "old_str": {"type": "string", "description": "For str_replace."},
            "new_str": {"type": "string", "description": "For str_replace and insert."},
            "insert_line": {"type": "integer", "description": "For insert: the line after which."},
            "view_range": {"type": "array", "items": {"type": "integer"}, "description": "For view: first, last line."},
        },
        ["command", "path"],
    ),
}
_DATED = re.compile(r"(.+)_\d{8}")


class ClaudeTool(msgspec.Struct):
    """A tool of the client (`type` is missing or "custom"), or one that Anthropic defines."""

    name: str | None = None
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


def functions_of(tools: Sequence[ClaudeTool]) -> tuple[list[Tool], list[str]]:
    """The tools as functions, and a notice of each tool that is left out because it would run on the server.

    Raises InvalidRequestError if there are too many.
    """
    if len(tools) > MAX_TOOLS:
        raise InvalidRequestError(f"tools has {len(tools)} entries; at most {MAX_TOOLS} are allowed", "tools")
    functions = []
    notices = []
    for tool in tools:
        dated = _DATED.fullmatch(tool.type or "")
        defined = _DEFINED.get(dated[1]) if dated else None
        if tool.type in (None, "custom"):
            functions.append(Tool(Function(tool.name or "", tool.description, tool.input_schema, tool.strict)))
        elif defined is not None and dated is not None:
            description, properties, required = defined
            parameters = {"type": "object", "properties": properties, "required": required}
            functions.append(Tool(Function(tool.name or dated[1], description, parameters)))
        else:
            notices.append(f"tools of type {shown(tool.type)} do not run here")
    return functions, notices
