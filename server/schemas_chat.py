"""Conversations: messages, tools, and how both become a prompt."""

from __future__ import annotations

import json
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from jaxserve.limits import MAX_CALLS, MAX_MESSAGES, MAX_TOOLS
from jaxserve.tokenizer import TEMPLATE_INPUTS
from jaxserve.types import InvalidRequestError, NumLogprobs
from server.schemas import PositiveTokens, SamplingFields
from server.tools.choice import (
    Choice,
    Function,
    Mode,
    NamedChoice,
    NamedFunction,
    Tool,
    check_tools,
    choose,
)

_MAY_BE_EMPTY = ("assistant", "tool", "function")  # the roles whose content may be null


TemplateKwargs = Annotated[
    dict[str, Any], Meta(extra_json_schema={"propertyNames": {"not": {"enum": sorted(TEMPLATE_INPUTS)}}})
]
ReasoningEffort = Annotated[str, Meta(max_length=32)]


class Part(msgspec.Struct):
    type: str = "text"
    text: str | None = None


class CalledFunction(msgspec.Struct):
    name: str
    arguments: str = "{}"


class ToolCall(msgspec.Struct):
    """A call that an earlier answer made; `arguments` is JSON text of an object."""

    function: CalledFunction
    id: str = ""
    type: str = "function"

    def to_template(self, where: str) -> dict[str, Any]:
        """Templates get the arguments as an object."""
        try:
            arguments = json.loads(self.function.arguments or "{}")
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            raise InvalidRequestError(
                f"{where}: the arguments of {self.function.name[:64]!r} must be a JSON object as text", "messages"
            )
        function = {"name": self.function.name, "arguments": arguments}
        return {"id": self.id, "type": "function", "function": function}


class Message(msgspec.Struct):
    role: str
    content: str | list[Part] | None = None
    name: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    function_call: CalledFunction | None = None

    def modern(self) -> Message:
        """The same with tool calls in place of `function_call` and role "function", which clients used before them."""
        if self.role == "function":
            return msgspec.structs.replace(self, role="tool")
        if self.function_call is not None and not self.tool_calls:
            return msgspec.structs.replace(self, tool_calls=[ToolCall(self.function_call)])
        return self

    def to_template(self, position: int) -> dict[str, Any]:
        """The message as a template sees it, text parts joined by newlines. Refuses what is not text."""
        where = f"messages[{position}]"
        if not 0 < len(self.role) <= 64:
            raise InvalidRequestError(f"{where}.role must have 1 to 64 characters", "messages")
        if self.content is None and self.role not in _MAY_BE_EMPTY:
            raise InvalidRequestError(f"{where}.content is missing", "messages")
        message: dict[str, Any] = {"role": self.role, "content": self.text(where)}
        for name in ("name", "tool_call_id"):
            if (value := getattr(self, name)) is not None:
                message[name] = value
        if self.tool_calls:
            if self.role != "assistant" or len(self.tool_calls) > MAX_CALLS:
                raise InvalidRequestError(
                    f"{where}: only a message of role assistant may hold tool_calls, and at most {MAX_CALLS}",
                    "messages",
                )
            message["tool_calls"] = [call.to_template(where) for call in self.tool_calls]
        if (reasoning := self.reasoning or self.reasoning_content) is not None:
            message["reasoning_content"] = reasoning
        return message

    def text(self, where: str = "messages") -> str:
        """The content's text parts, joined by newlines. Raises InvalidRequestError for a part of another type."""
        if not isinstance(self.content, list):
            return self.content or ""
        for part in self.content:
            if part.type != "text" or part.text is None:
                raise InvalidRequestError(
                    f"{where} has a part of type {part.type[:64]!r}; only text is supported, no URL is ever fetched",
                    "messages",
                )
        return "\n".join(part.text or "" for part in self.content)


Messages = Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]
Tools = Annotated[list[Tool], Meta(max_length=MAX_TOOLS)]


class Conversation(msgspec.Struct, kw_only=True):
    """Messages and how to render them; the fields of a chat request that make its prompt."""

    messages: Messages
    tools: Tools | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None

    def template_messages(self) -> list[dict[str, Any]]:
        if not 0 < len(self.messages) <= MAX_MESSAGES:
            raise InvalidRequestError(
                f"messages must hold 1 to {MAX_MESSAGES} messages, got {len(self.messages)}", "messages"
            )
        if self.continue_final_message and self.messages[-1].role != "assistant":
            raise InvalidRequestError(
                "continue_final_message needs a last message of role assistant", "continue_final_message"
            )
        return [message.modern().to_template(i) for i, message in enumerate(self.messages)]

    def template_tools(self) -> list[dict[str, Any]] | None:
        return msgspec.to_builtins(self.tools) if self.tools else None

    def template_kwargs(self) -> dict[str, Any]:
        """The template's variables: any that a request likes, as templates run in a sandbox and for a limited time."""
        kwargs = dict(self.chat_template_kwargs or {})
        if taken := kwargs.keys() & TEMPLATE_INPUTS:
            raise InvalidRequestError(
                f"chat_template_kwargs must not hold {min(taken)}, which is no variable of a template",
                "chat_template_kwargs",
            )
        if self.reasoning_effort is not None:
            kwargs.setdefault("reasoning_effort", self.reasoning_effort)
            if self.reasoning_effort == "none":
                kwargs.setdefault("enable_thinking", False)
        return kwargs


class ChatRequest(SamplingFields, kw_only=True):
    """Body of /v1/chat/completions."""

    messages: Messages
    tools: Tools | None = None
    tool_choice: Choice | None = None
    parallel_tool_calls: bool | None = None
    functions: Annotated[list[Function], Meta(max_length=MAX_TOOLS)] | None = None
    function_call: str | NamedFunction | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    chat_template: str | None = None
    chat_template_kwargs: TemplateKwargs | None = None
    reasoning_effort: ReasoningEffort | None = None
    include_reasoning: bool = True
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None
    max_tokens: PositiveTokens | None = None
    max_completion_tokens: PositiveTokens | None = None
    echo: bool | None = None

    def check(self) -> None:
        super().check()
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequestError("top_logprobs above 0 is only allowed when logprobs is true", "top_logprobs")
        if self.tools and self.functions:
            raise InvalidRequestError("functions is the older form of tools: give one of them", "functions")
        try:
            check_tools(self.all_tools)
            self.choose()
        except InvalidRequestError as error:
            older = {"tools": "functions", "tool_choice": "function_call"} if self.is_legacy else {}
            raise InvalidRequestError(str(error), older.get(error.param or "", error.param)) from None

    @property
    def is_legacy(self) -> bool:
        """The client knows functions and one call at a time, and no tools."""
        return bool(self.functions) or isinstance(self.function_call, NamedFunction)

    @property
    def all_tools(self) -> list[Tool]:
        return [Tool(function) for function in self.functions or ()] or self.tools or []

    @property
    def is_parallel(self) -> bool:
        """An answer may hold several calls."""
        return self.parallel_tool_calls is not False and not self.is_legacy

    def choose(self) -> tuple[list[Tool], Mode]:
        """The tools that may be called, and how. Raises InvalidRequestError."""
        choice = self.tool_choice
        if self.is_legacy:
            call = self.function_call
            if isinstance(call, str) and call not in ("none", "auto"):
                raise InvalidRequestError("function_call must be 'none', 'auto' or name a function", "function_call")
            choice = NamedChoice(call) if isinstance(call, NamedFunction) else call
        return choose(self.all_tools, choice)

    def conversation(self) -> Conversation:
        """What makes the prompt; tools that may not be called are no part of it."""
        fields = {name: getattr(self, name) for name in Conversation.__struct_fields__}
        _, mode = self.choose()
        return Conversation(**fields | {"tools": None if mode == "none" else self.all_tools or None})


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """Body of /tokenize: a prompt, or messages with the fields of Conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: TemplateKwargs | None = None
    return_token_strs: bool | None = None
