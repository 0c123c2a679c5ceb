"""Body of /v1/responses, in OpenAI's shape, and what it means as a chat request."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from jaxserve.limits import MAX_ITEMS
from jaxserve.types import (
    Fraction,
    InvalidRequestError,
    NumLogprobs,
    Penalty,
    RepetitionPenalty,
    Seed,
    Temperature,
    TopK,
)
from server.schemas import CacheSalt, PositiveTokens, Priority, Stop
from server.schemas_chat import CalledFunction, ChatRequest, Message, TemplateKwargs, ToolCall
from server.tools.choice import Function, NamedChoice, NamedFunction, Tool

_LOGPROBS = "message.output_text.logprobs"
_SAME_FIELDS = (
    "model", "stream", "temperature", "top_p", "parallel_tool_calls", "top_k", "min_p", "repetition_penalty",
    "presence_penalty", "frequency_penalty", "seed", "stop", "ignore_eos", "priority", "cache_salt",
    "chat_template_kwargs",
)  # fmt: skip


class TextPart(msgspec.Struct):
    type: str
    text: str | None = None


class Item(msgspec.Struct):
    """A message, a function's call or its output, or reasoning."""

    type: str = "message"
    role: str | None = None
    content: str | list[TextPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[TextPart] | None = None


class FlatTool(msgspec.Struct):
    type: str
    name: str = ""
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FlatChoice(msgspec.Struct):
    type: str
    name: str = ""


class Reasoning(msgspec.Struct):
    effort: str | None = None
    summary: str | None = None


class TextOptions(msgspec.Struct):
    format: dict[str, Any] | None = None


class ResponsesRequest(msgspec.Struct, kw_only=True):
    """Body of /v1/responses."""

    input: str | list[Item]
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: PositiveTokens | None = None
    temperature: Temperature | None = None
    top_p: Fraction | None = None
    top_logprobs: NumLogprobs | None = None
    include: list[str] | None = None
    tools: list[FlatTool] | None = None
    tool_choice: str | FlatChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: TextOptions | None = None
    truncation: Literal["auto", "disabled"] | None = None
    stream: bool | None = None
    store: bool | None = None
    background: bool | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    # beyond OpenAI's
    top_k: TopK | None = None
    min_p: Fraction | None = None
    repetition_penalty: RepetitionPenalty | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    seed: Seed | None = None
    stop: Stop | None = None
    ignore_eos: bool = False
    priority: Priority | None = None
    cache_salt: CacheSalt | None = None
    chat_template_kwargs: TemplateKwargs | None = None
    # known and not served
    conversation: Any = None
    prompt: Any = None

    def check(self) -> None:
        """Raises InvalidRequestError, naming the field, for what chat requests do not check."""
        for name in ("conversation", "prompt"):
            if getattr(self, name) is not None:
                raise InvalidRequestError(f"{name} is not supported by this server", name, "unsupported_parameter")
        if self.background and (self.stream or self.store is False):
            raise InvalidRequestError("background needs stream to be false and store to be true", "background")
        for tool in self.tools or ():
            if tool.type != "function":
                raise InvalidRequestError(f"tools must be of type 'function', got {tool.type[:64]!r}", "tools")
        if isinstance(self.tool_choice, FlatChoice) and self.tool_choice.type != "function":
            raise InvalidRequestError("tool_choice may name a function only", "tool_choice")
        if isinstance(self.input, list) and not 0 < len(self.input) <= MAX_ITEMS:
            raise InvalidRequestError(f"input must hold 1 to {MAX_ITEMS} items, got {len(self.input)}", "input")

    @property
    def wants_logprobs(self) -> bool:
        return _LOGPROBS in (self.include or ()) or bool(self.top_logprobs)

    def conversation_after(self, earlier: list[Message]) -> list[Message]:
        """The messages of earlier responses and this one's input."""
        if isinstance(self.input, str):
            return [*earlier, Message("user", self.input)]
        return [*earlier, *_messages(self.input)]

    def to_chat(self, messages: list[Message]) -> ChatRequest:
        """The same as a chat request about `messages`, after the instructions."""
        opening = [Message("system", self.instructions)] if self.instructions else []
        choice = self.tool_choice
        return ChatRequest(
            messages=opening + messages,
            max_completion_tokens=self.max_output_tokens,
            logprobs=self.wants_logprobs,
            top_logprobs=(self.top_logprobs or 0) if self.wants_logprobs else None,
            tools=[Tool(Function(t.name, t.description, t.parameters, t.strict)) for t in self.tools or ()] or None,
            tool_choice=NamedChoice(NamedFunction(choice.name)) if isinstance(choice, FlatChoice) else choice,
            reasoning_effort=self.reasoning.effort if self.reasoning else None,
            response_format=_response_format(self.text),
            truncate_prompt_tokens=-1 if self.truncation == "auto" else None,
            **{name: getattr(self, name) for name in _SAME_FIELDS},
        )


def _response_format(text: TextOptions | None) -> dict[str, Any] | None:
    """text.format as chat requests have it, where a JSON schema is one level deeper."""
    if text is None or text.format is None or text.format.get("type") != "json_schema":
        return text.format if text else None
    schema = {name: value for name, value in text.format.items() if name != "type"}
    return {"type": "json_schema", "json_schema": schema}


def _messages(items: list[Item]) -> list[Message]:
    """Items as messages: calls and reasoning are parts of an assistant's message there."""
    messages: list[Message] = []
    reasoning = None
    for position, item in enumerate(items):
        where = f"input[{position}]"
        if item.type == "reasoning":
            reasoning = _text(item.content, where) or None
        elif item.type == "message" and item.role is not None and item.content is not None:
            messages.append(Message(item.role, _text(item.content, where), reasoning=reasoning))
            reasoning = None
        elif item.type == "function_call" and item.name and item.call_id:
            if not messages or messages[-1].role != "assistant":
                messages.append(Message("assistant", reasoning=reasoning))
            call = ToolCall(CalledFunction(item.name, item.arguments or "{}"), item.call_id)
            messages[-1].tool_calls = [*(messages[-1].tool_calls or ()), call]
            reasoning = None
        elif item.type == "function_call_output" and item.call_id and item.output is not None:
            messages.append(Message("tool", _text(item.output, where), tool_call_id=item.call_id))
        else:
            raise InvalidRequestError(
                f"{where} of type {item.type[:64]!r} is incomplete or unknown; there are message (role, content), "
                "function_call (call_id, name, arguments), function_call_output (call_id, output) and reasoning",
                "input",
            )
    return messages


def _text(content: str | list[TextPart] | None, where: str) -> str:
    if isinstance(content, str) or content is None:
        return content or ""
    for part in content:
        if part.type not in ("input_text", "output_text", "text", "reasoning_text") or part.text is None:
            raise InvalidRequestError(
                f"{where} has a part of type {part.type[:64]!r}; only text is supported, and no URL is ever fetched",
                "input",
            )
    return "\n".join(part.text or "" for part in content)
