"""Body of /v1/responses, in OpenAI's shape, and its conversion to a chat request."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from jaxserve.limits import MAX_ITEMS, NumLogprobs
from jaxserve.server.schemas.chat import ChatRequest, Message, TemplateKwargs
from jaxserve.server.schemas.common import EngineFields, PositiveTokens, Stop
from jaxserve.server.schemas.response_items import Item
from jaxserve.server.schemas.response_tools import FlatChoice, FlatTool, ToolMap
from jaxserve.types import InvalidRequestError

_LOGPROBS = "message.output_text.logprobs"
_SEALED = "reasoning.encrypted_content"
_SAME_FIELDS = (
    "model", "stream", "parallel_tool_calls", "stop", "chat_template_kwargs", "thinking_token_budget",
)  # fmt: skip


class Reasoning(msgspec.Struct):
    effort: str | None = None
    summary: str | None = None


class TextOptions(msgspec.Struct):
    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ResponsesRequest(EngineFields, kw_only=True):
    """Body of /v1/responses."""

    input: str | list[Item]
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: PositiveTokens | None = None
    top_logprobs: NumLogprobs | None = None
    include: list[str] | None = None
    tools: list[FlatTool] | None = None
    tool_choice: str | FlatChoice | None = None
    max_tool_calls: int | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: TextOptions | None = None
    truncation: Literal["auto", "disabled"] | None = None
    stream: bool | None = None
    store: bool | None = None
    background: bool | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    # not in OpenAI's API
    stop: Stop | None = None
    chat_template_kwargs: TemplateKwargs | None = None
    thinking_token_budget: PositiveTokens | None = None
    # known fields that are not served
    conversation: Any = None
    prompt: Any = None

    def check(self) -> None:
        """Raises InvalidRequestError, naming the field, for errors that the checks of a chat request do not find."""
        super().check()
        for name in ("conversation", "prompt"):
            if getattr(self, name) is not None:
                raise InvalidRequestError(f"{name} is not supported by this server", name, "unsupported_parameter")
        if self.background and self.store is False:
            raise InvalidRequestError("background needs store to be true", "background")
        if isinstance(self.input, list) and not 0 < len(self.input) <= MAX_ITEMS:
            raise InvalidRequestError(f"input must hold 1 to {MAX_ITEMS} items, got {len(self.input)}", "input")

    @property
    def wants_logprobs(self) -> bool:
        return _LOGPROBS in (self.include or ()) or bool(self.top_logprobs)

    @property
    def wants_sealed_reasoning(self) -> bool:
        return _SEALED in (self.include or ())

    @property
    def items(self) -> list[Item]:
        """The input as items."""
        if not isinstance(self.input, str):
            return self.input
        return [Item(role="user", content=self.input)]

    def tool_map(self) -> ToolMap:
        """The tools of the request and of its items."""
        return ToolMap(self.tools or (), (tool for item in self.items for tool in item.tools or ()))

    def to_chat(self, messages: list[Message], tools: ToolMap) -> ChatRequest:
        """A chat request of the instructions, then `messages`."""
        opening = [Message("system", self.instructions)] if self.instructions else []
        return ChatRequest(
            messages=opening + messages,
            max_completion_tokens=self.max_output_tokens,
            logprobs=self.wants_logprobs,
            top_logprobs=(self.top_logprobs or 0) if self.wants_logprobs else None,
            tools=tools.functions or None,
            tool_choice=tools.choice(self.tool_choice),
            reasoning_effort=self.reasoning.effort if self.reasoning else None,
            response_format=_response_format(self.text),
            truncate_prompt_tokens=-1 if self.truncation == "auto" else None,
            **self.engine_fields(),
            **{name: getattr(self, name) for name in _SAME_FIELDS},
        )


class InputTokensRequest(ResponsesRequest, kw_only=True):
    """Body of /v1/responses/input_tokens."""

    input: str | list[Item] | None = None  # type: ignore[assignment]

    @property
    def items(self) -> list[Item]:
        return [] if self.input is None else super().items


def _response_format(text: TextOptions | None) -> dict[str, Any] | None:
    """text.format as a chat request's response_format, which nests a JSON schema one level deeper."""
    if text is None or text.format is None or text.format.get("type") != "json_schema":
        return text.format if text else None
    schema = {name: value for name, value in text.format.items() if name != "type"}
    return {"type": "json_schema", "json_schema": schema}
