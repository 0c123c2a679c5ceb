"""Body of /v1/messages, in Anthropic's shape, and its conversion to a chat request."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from jaxserve.limits import MAX_STOP_STRINGS
from jaxserve.server.images.long_strings import behind
from jaxserve.server.schemas.chat import CalledFunction, ChatRequest, Message, Part, ToolCall
from jaxserve.server.schemas.claude_tools import ClaudeTool, functions_of
from jaxserve.server.schemas.common import EngineFields, PositiveTokens, StopString
from jaxserve.server.tools.choice import Choice, NamedChoice, NamedFunction
from jaxserve.types import InvalidRequestError

_EFFORTS = {"xhigh": "high", "max": "high"}  # Anthropic's efforts that chat templates do not know


class Source(msgspec.Struct):
    """The source of a document: its text as `data`, or blocks of text as `content`. Of a picture: its bytes in base64
    as `data`, or its `url`."""

    type: str | None = None
    data: str | None = None
    content: str | list[Block] | None = None
    media_type: str | None = None
    url: str | None = None

    @property
    def long_fields(self) -> tuple[str, ...]:
        return ("data",) if self.type == "base64" else ()


class Block(msgspec.Struct):
    """A part of a message: text, thinking, tool_use, tool_result, an image, or a document that is text."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    is_error: bool | None = None
    content: str | list[Block] | None = None
    source: Source | str | None = None
    title: str | None = None


class ClaudeMessage(msgspec.Struct):
    role: str
    content: str | list[Block]


class ClaudeChoice(msgspec.Struct):
    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct):
    type: str
    budget_tokens: PositiveTokens | None = None
    display: str | None = None


class OutputFormat(msgspec.Struct):
    type: str
    schema: dict[str, Any] | None = None


class OutputConfig(msgspec.Struct):
    effort: str | None = None
    format: OutputFormat | None = None


class CountTokensRequest(EngineFields, kw_only=True):
    """Body of /v1/messages/count_tokens."""

    messages: list[ClaudeMessage]
    model: str | None = None
    system: str | list[Block] | None = None
    tools: list[ClaudeTool] | None = None
    tool_choice: ClaudeChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    mcp_servers: list[Any] | None = None

    def to_chat(self, **sampling: Any) -> ChatRequest:
        """The body as a chat request. Raises InvalidRequestError for content that is not text, tools or thinking."""
        messages = [Message("system", _text(self.system, "system"))] if self.system else []
        for position, message in enumerate(self.messages):
            messages += _messages(message, f"messages[{position}]")
        tools, _ = functions_of(self.tools or ())
        choice = self.tool_choice
        thinking = self.thinking or Thinking("")
        output = self.output_config or OutputConfig()
        last = messages[-1] if messages else None
        return ChatRequest(
            model=self.model,
            messages=messages,
            tools=tools or None,
            tool_choice=None if choice is None else _choice(choice),
            parallel_tool_calls=not choice.disable_parallel_tool_use if choice else None,
            continue_final_message=last is not None and last.role == "assistant" and bool(last.content),
            chat_template_kwargs={"enable_thinking": thinking.type != "disabled"} if self.thinking else None,
            reasoning_effort=_EFFORTS.get(output.effort or "", output.effort),
            include_reasoning=thinking.display != "omitted",
            thinking_token_budget=thinking.budget_tokens if thinking.type != "disabled" else None,
            response_format=_response_format(self.output_format, "output_format")
            or _response_format(output.format, "output_config.format"),
            **sampling,
        )

    @property
    def form_field(self) -> str:
        """The body's field for the answer's form, for error messages."""
        return "output_config" if self.output_format is None else "output_format"

    def notices(self) -> list[str]:
        """Notices of the parts of the request that are left out."""
        _, notices = functions_of(self.tools or ())
        return [*notices, "mcp_servers are not asked"] if self.mcp_servers else notices


class MessagesRequest(CountTokensRequest, kw_only=True):
    """Body of /v1/messages."""

    max_tokens: PositiveTokens
    stop_sequences: Annotated[list[StopString], Meta(max_length=MAX_STOP_STRINGS)] | None = None
    stream: bool | None = None

    def chat(self) -> ChatRequest:
        """The body as a chat request. Raises InvalidRequestError, naming the field, for what is not served."""
        self.check()
        return self.to_chat(
            max_tokens=self.max_tokens, stop=self.stop_sequences, stream=self.stream, **self.engine_fields()
        )


def _messages(message: ClaudeMessage, where: str) -> Iterator[Message]:
    """A message as one or more. Tool results become separate messages, before the user's text."""
    if message.role not in ("user", "assistant", "system"):
        raise InvalidRequestError(
            f"{where}.role must be 'user', 'assistant' or 'system', got {message.role[:64]!r}", "messages"
        )
    if isinstance(message.content, str):
        yield Message(message.role, message.content)
        return
    parts: list[Block] = []
    thoughts = []
    calls = []
    for block in message.content:
        if block.type == "tool_result" and message.role == "user":
            content = _content(block.content or "", where)
            if block.is_error:
                content = f"Error: {content}" if isinstance(content, str) else ["Error: ", *content]
            yield Message("tool", content, tool_call_id=block.tool_use_id)
        elif block.type == "tool_use" and message.role == "assistant" and block.name is not None:
            calls.append(ToolCall(CalledFunction(block.name, block.input or {}), block.id))
        elif block.type == "thinking" and message.role == "assistant":
            thoughts.append(block.thinking or "")
        elif block.type != "redacted_thinking":
            parts.append(block)
    if parts or calls or message.role == "assistant":
        reasoning = "\n".join(filter(None, thoughts)) or None
        yield Message(message.role, _content(parts, where), reasoning=reasoning, tool_calls=calls or None)


def _content(content: str | list[Block], where: str) -> str | list[Part | str]:
    """A text; parts if some are pictures."""
    if isinstance(content, str) or all(block.type != "image" for block in content):
        return _text(content, where)
    return [_picture(block, where) if block.type == "image" else _text([block], where) for block in content]


def _picture(block: Block, where: str) -> Part:
    source = block.source if isinstance(block.source, Source) else Source()
    if source.type == "base64" and source.data is not None:
        return Part("image_url", image_url=behind(f"data:{source.media_type or 'image/png'};base64,", source.data))
    if source.type == "url" and source.url is not None:
        return Part("image_url", image_url=source.url)
    raise InvalidRequestError(
        f"{where} has an image whose source is {(source.type or '')[:64]!r}; there are base64 (media_type, data) and "
        "url (url)",
        "messages",
    )


def _text(content: str | list[Block], where: str) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for block in content:
        text = block.text if block.type == "text" else _document(block, where)
        if text is None:
            raise InvalidRequestError(
                f"{where} has a block of type {block.type[:64]!r}, which is not supported there; text, thinking, "
                "tool_use, tool_result, image and documents of text are",
                "messages",
            )
        texts.append(text)
    return "\n".join(texts)


def _document(block: Block, where: str) -> str | None:
    """The text of a document or a search result; None for any other block."""
    source = block.source if block.type == "document" and isinstance(block.source, Source) else Source()
    inner = block.content if block.type == "search_result" else source.content
    text = source.data if source.type == "text" else None if inner is None else _text(inner, where)
    return f"{block.title}\n{text}" if block.title and text is not None else text


def _choice(choice: ClaudeChoice) -> Choice:
    if choice.type == "tool":
        return NamedChoice(NamedFunction(choice.name or ""))
    known = {"auto": "auto", "any": "required", "none": "none"}
    if choice.type not in known:
        raise InvalidRequestError(
            f"tool_choice.type must be auto, any, tool or none, got {choice.type[:64]!r}", "tool_choice"
        )
    return known[choice.type]


def _response_format(form: OutputFormat | None, field: str) -> dict[str, Any] | None:
    if form is None:
        return None
    if form.type != "json_schema" or form.schema is None:
        raise InvalidRequestError(
            f"{field} must be of type 'json_schema' with the schema under `schema`, got type {form.type[:64]!r}", field
        )
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": form.schema}}
