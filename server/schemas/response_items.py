"""The input items of /v1/responses, and their conversion to chat messages."""

from __future__ import annotations

import base64
import binascii
import uuid
from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec

from jaxserve.server.images.long_strings import for_json
from jaxserve.server.schemas.chat import CUSTOM_INPUT, CalledFunction, Message, Part, ToolCall
from jaxserve.server.schemas.response_tools import LOCAL_SHELL, FlatTool, full_name
from jaxserve.types import InvalidRequestError

_SEALED = "jaxserve.reasoning:"  # prefix of `encrypted_content` that this server wrote
_TEXTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")
# Items that only another server can use, such as the calls of tools that ran there. They are left out.
_FOREIGN = (
    "web_search_call", "file_search_call", "code_interpreter_call", "image_generation_call", "mcp_call",
    "mcp_list_tools", "mcp_approval_request", "mcp_approval_response", "tool_search_call", "compaction",
    "program", "program_output", "configuration_update",
)  # fmt: skip


class ItemPart(msgspec.Struct, omit_defaults=True):
    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: str | None = None
    detail: Literal["auto", "low", "high", "original"] | None = None

    @property
    def long_fields(self) -> tuple[str, ...]:
        return ("image_url",)


class ShellAction(msgspec.Struct, omit_defaults=True):
    type: str = "exec"
    command: list[str] = []
    env: dict[str, str] | None = None
    working_directory: str | None = None
    timeout_ms: int | None = None
    user: str | None = None


class Item(msgspec.Struct, omit_defaults=True):
    """An item of the input. Its type decides which fields it has; an item without a type is a message."""

    type: str | None = None
    id: str | None = None
    role: str | None = None
    content: str | list[ItemPart] | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | dict[str, Any] | None = None
    input: str | None = None
    output: str | list[ItemPart] | None = None
    action: ShellAction | None = None
    summary: list[ItemPart] | None = None
    encrypted_content: str | None = None
    status: str | None = None
    tools: list[FlatTool] | None = None


def sealed(reasoning: str) -> str:
    """Reasoning as `encrypted_content`. It is only encoded, because the client gets the same text unencrypted too."""
    return _SEALED + base64.b64encode(reasoning.encode()).decode()


def unsealed(content: str | None) -> str:
    """The reasoning in `encrypted_content`; "" if another server wrote it."""
    if content is None or not content.startswith(_SEALED):
        return ""
    try:
        return base64.b64decode(content.removeprefix(_SEALED), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return ""


def listed(items: Sequence[Item]) -> list[dict[str, Any]]:
    """The input as /input_items returns it: every item has an id, and every message a list of parts."""
    result = []
    for item in items:
        given = msgspec.to_builtins(item, enc_hook=for_json)
        fields = {"id": f"{item.type or 'msg'}_{uuid.uuid4().hex}", "type": "message", **given}
        if fields["type"] == "message" and isinstance(item.content, str):
            kind = "output_text" if item.role == "assistant" else "input_text"
            part = {"type": kind, "text": item.content}
            fields["content"] = [part | {"annotations": []} if kind == "output_text" else part]
        if fields["type"] != "item_reference":
            fields.setdefault("status", "completed")
        result.append(fields)
    return result


class Reader:
    """Converts items to messages. Items of calls and reasoning become parts of an assistant's message.

    `lookup` returns the item with an id; None if it is not known.

    Attributes:
      messages: the messages so far.
      notices: notices of items that were left out.
    """

    def __init__(self, lookup: Callable[[str], Item | None]):
        self.messages: list[Message] = []
        self.notices: list[str] = []
        self._lookup = lookup
        self._reasoning = ""

    def read(self, items: Sequence[Item]) -> None:
        """Converts the next items. Raises InvalidRequestError for an item that is incomplete or of unknown type."""
        for position, item in enumerate(items):
            self._read(item, f"input[{position}]")

    def _read(self, item: Item, where: str) -> None:
        call_id = item.call_id or item.id
        match item.type:
            case "reasoning":
                self._reasoning += (
                    _text(item.content, where) or unsealed(item.encrypted_content) or _text(item.summary, where)
                )
            case "message" | None if item.role == "assistant" or (item.role and item.content is not None):
                if self._reasoning and item.role != "assistant":
                    self._assistant()
                content = _content(item.content, where)
                self.messages.append(Message(item.role, content, reasoning=self._take_reasoning()))
            case "function_call" if item.name and call_id:
                self._call(full_name(item.name, item.namespace), item.arguments, call_id)
            case "custom_tool_call" if item.name and call_id:
                self._call(full_name(item.name, item.namespace), {CUSTOM_INPUT: item.input or ""}, call_id)
            case "local_shell_call" if item.action is not None and call_id:
                arguments = msgspec.to_builtins(item.action)
                self._call(LOCAL_SHELL, {name: arguments[name] for name in arguments if name != "type"}, call_id)
            case "function_call_output" | "custom_tool_call_output" | "local_shell_call_output" if call_id:
                self.messages.append(Message("tool", _content(item.output, where), tool_call_id=call_id))
            case "item_reference" | None if item.id is not None and item.role is None:
                self._refer(item.id, where)
            case "additional_tools" | "tool_search_output":
                pass  # ResponsesRequest.tool_map adds their tools
            case kind if kind in _FOREIGN:
                self.notices.append(f"{where} of type {kind!r} is of another server")
            case kind:
                raise InvalidRequestError(
                    f"{where} of type {kind!r:.64} is incomplete or unknown; there are message (role, content), "
                    "function_call (call_id, name, arguments), custom_tool_call (call_id, name, input), "
                    "local_shell_call (call_id, action), the outputs of these (call_id, output), reasoning and "
                    "item_reference (id)",
                    "input",
                )

    def _refer(self, name: str, where: str) -> None:
        found = self._lookup(name)
        if found is None:
            self.notices.append(f"{where} refers to {ascii(name)[:80]}, which is not stored here, or is there already")
        else:
            self._read(found, where)

    def _call(self, name: str, arguments: str | dict[str, Any] | None, call_id: str) -> None:
        if self._reasoning or not self.messages or self.messages[-1].role != "assistant":
            self._assistant()
        message = self.messages[-1]
        message.tool_calls = message.tool_calls or []
        message.tool_calls.append(ToolCall(CalledFunction(name, arguments), call_id))

    def _assistant(self) -> None:
        self.messages.append(Message("assistant", reasoning=self._take_reasoning()))

    def _take_reasoning(self) -> str | None:
        reasoning = self._reasoning or None
        self._reasoning = ""
        return reasoning


def _content(content: str | list[ItemPart] | None, where: str) -> str | list[Part | str]:
    """A text; parts if some are pictures."""
    if not isinstance(content, list) or all(part.type != "input_image" for part in content):
        return _text(content, where)
    return [
        Part(part.type, image_url=part.image_url, detail=part.detail)
        if part.type == "input_image"
        else Part(text=_text([part], where))
        for part in content
    ]


def _text(content: str | list[ItemPart] | None, where: str) -> str:
    if isinstance(content, str) or content is None:
        return content or ""
    texts = []
    for part in content:
        text = part.refusal if part.type == "refusal" else part.text if part.type in _TEXTS else None
        if text is None:
            raise InvalidRequestError(
                f"{where} has a part of type {part.type[:64]!r}; only text and pictures (input_image) are supported",
                "input",
            )
        texts.append(text)
    return "\n".join(texts)
