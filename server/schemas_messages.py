"""Body of /v1/messages, in Anthropic's shape, and what it means as a chat request."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from jaxserve.types import MAX_STOP_STRINGS, Fraction, InvalidRequestError, Temperature, TopK
from server.schemas import PositiveTokens, StopString
from server.schemas_chat import CalledFunction, ChatRequest, Message, ToolCall
from server.tools.choice import Choice, Function, NamedChoice, NamedFunction, Tool


class Block(msgspec.Struct):
    """A part of a message: text, thinking, tool_use or tool_result."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[Block] | None = None


class ClaudeMessage(msgspec.Struct):
    role: str
    content: str | list[Block]


class ClaudeTool(msgspec.Struct):
    name: str
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None


class ClaudeChoice(msgspec.Struct):
    type: str
    name: str | None = None
    disable_parallel_tool_use: bool = False


class Thinking(msgspec.Struct):
    type: str


class CountTokensRequest(msgspec.Struct, kw_only=True):
    """Body of /v1/messages/count_tokens."""

    messages: list[ClaudeMessage]
    model: str | None = None
    system: str | list[Block] | None = None
    tools: list[ClaudeTool] | None = None
    tool_choice: ClaudeChoice | None = None
    thinking: Thinking | None = None

    def to_chat(self, **sampling: Any) -> ChatRequest:
        """The same as a chat request. Raises InvalidRequestError for what is not text, tools or thinking."""
        messages = [Message("system", _text(self.system, "system"))] if self.system else []
        for position, message in enumerate(self.messages):
            messages += _messages(message, f"messages[{position}]")
        kwargs = {}
        if self.thinking is not None:
            kwargs["enable_thinking"] = self.thinking.type != "disabled"
        choice = self.tool_choice
        return ChatRequest(
            model=self.model,
            messages=messages,
            tools=[_tool(tool) for tool in self.tools] if self.tools else None,
            tool_choice=None if choice is None else _choice(choice),
            parallel_tool_calls=not choice.disable_parallel_tool_use if choice else None,
            continue_final_message=bool(messages) and messages[-1].role == "assistant",
            chat_template_kwargs=kwargs,
            **sampling,
        )


class MessagesRequest(CountTokensRequest, kw_only=True):
    """Body of /v1/messages."""

    max_tokens: PositiveTokens
    stop_sequences: Annotated[list[StopString], Meta(max_length=MAX_STOP_STRINGS)] | None = None
    stream: bool | None = None
    temperature: Temperature | None = None
    top_k: TopK | None = None
    top_p: Fraction | None = None

    def chat(self) -> ChatRequest:
        return self.to_chat(
            max_tokens=self.max_tokens,
            stop=self.stop_sequences,
            stream=self.stream,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
        )


def _messages(message: ClaudeMessage, where: str) -> Iterator[Message]:
    """A message as one or more: the results of tools become messages of their own, before what the user says."""
    if message.role not in ("user", "assistant"):
        raise InvalidRequestError(f"{where}.role must be 'user' or 'assistant', got {message.role[:64]!r}", "messages")
    if isinstance(message.content, str):
        yield Message(message.role, message.content)
        return
    texts, thoughts, calls = [], [], []
    for block in message.content:
        if block.type == "tool_result" and message.role == "user":
            text = "" if block.content is None else _text(block.content, where)
            yield Message("tool", text, tool_call_id=block.tool_use_id)
        elif block.type == "tool_use" and message.role == "assistant" and block.name is not None:
            arguments = msgspec.json.encode(block.input or {}).decode()
            calls.append(ToolCall(CalledFunction(block.name, arguments), block.id or ""))
        elif block.type == "thinking" and message.role == "assistant":
            thoughts.append(block.thinking or "")
        elif block.type != "redacted_thinking":
            texts.append(_text([block], where))
    if texts or calls or message.role == "assistant":
        reasoning = "\n".join(thoughts) or None
        yield Message(message.role, "\n".join(texts), reasoning=reasoning, tool_calls=calls or None)


def _text(content: str | list[Block], where: str) -> str:
    if isinstance(content, str):
        return content
    for block in content:
        if block.type != "text" or block.text is None:
            raise InvalidRequestError(
                f"{where} has a block of type {block.type[:64]!r}, which is not supported there", "messages"
            )
    return "\n".join(block.text or "" for block in content)


def _tool(tool: ClaudeTool) -> Tool:
    if tool.type not in (None, "custom"):
        raise InvalidRequestError(f"tools must be of type 'custom', got {tool.type[:64]!r}", "tools")
    return Tool(Function(tool.name, tool.description, tool.input_schema))


def _choice(choice: ClaudeChoice) -> Choice:
    if choice.type == "tool":
        return NamedChoice(NamedFunction(choice.name or ""))
    known = {"auto": "auto", "any": "required", "none": "none"}
    if choice.type not in known:
        raise InvalidRequestError(
            f"tool_choice.type must be auto, any, tool or none, got {choice.type[:64]!r}", "tool_choice"
        )
    return known[choice.type]
