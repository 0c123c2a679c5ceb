"""Conversations, and the bodies of /v1/chat/completions and /tokenize, which hold them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from jaxserve.limits import MAX_CALLS, MAX_MESSAGES, MAX_TOOLS
from jaxserve.server.images.sources import Source
from jaxserve.server.images.video_sources import VideoSource
from jaxserve.server.schemas.common import AskedLogprobs, PositiveTokens, SamplingFields, SomeTokens
from jaxserve.server.tools.call_arguments import as_object
from jaxserve.server.tools.choice import Choice, Function, Mode, NamedChoice, NamedFunction, Tool, check_tools, choose
from jaxserve.text.chat_template import TEMPLATE_INPUTS, check_variables
from jaxserve.types import InvalidRequestError

CUSTOM_INPUT = "input"  # the only parameter of a tool that takes free text
_MAY_BE_EMPTY = ("assistant", "tool", "function")  # roles whose content may be null
_TEXT_PARTS = ("text", "input_text", "output_text")
_IMAGE_PARTS = ("image_url", "input_image")
_VIDEO_PARTS = ("video_url", "video")
_HAVE_PICTURES = ("user", "tool", "function")


TemplateKwargs = Annotated[
    dict[str, Any], Meta(extra_json_schema={"propertyNames": {"not": {"enum": sorted(TEMPLATE_INPUTS)}}})
]
ReasoningEffort = Annotated[str, Meta(max_length=32)]


class ImageURL(msgspec.Struct):
    """A picture: a data URL, or an address at a host that the operator allows."""

    url: str
    detail: Literal["auto", "low", "high", "original"] | None = None

    @property
    def long_fields(self) -> tuple[str, ...]:
        return ("url",)


class VideoURL(msgspec.Struct):
    """A video: a data URL of an animation, or data:video/jpeg;base64,FRAME,FRAME,... ."""

    url: str


class Part(msgspec.Struct):
    type: str | None = "text"
    text: str | None = None
    refusal: str | None = None
    image_url: ImageURL | str | None = None
    detail: Literal["auto", "low", "high", "original"] | None = None  # beside an `image_url` that is a string
    video_url: VideoURL | str | None = None
    video: list[Part | str] | str | None = None  # frames, as parts of pictures or data URLs; or as `video_url`
    fps: Annotated[float, Meta(gt=0, le=1000)] | None = None  # frames of `video` or `video_url` a second

    def clip(self, where: str) -> VideoSource | None:
        """The video; None for a part of another type."""
        if self.type not in _VIDEO_PARTS:
            return None
        given = self.video_url.url if isinstance(self.video_url, VideoURL) else self.video_url or self.video
        if not given:
            raise InvalidRequestError(f"{where} has a part of type {self.type!r} without {self.type}", "messages")
        if isinstance(given, str):
            return VideoSource((given,), self.fps, where)
        pictures = [Source(one, "auto", where) if isinstance(one, str) else one.picture(where) for one in given]
        if None in pictures:
            raise InvalidRequestError(f"{where} has a video whose frames are not all pictures", "messages")
        return VideoSource(tuple(one.url for one in pictures if one is not None), self.fps, where)

    @property
    def long_fields(self) -> tuple[str, ...]:
        return ("image_url",)

    def picture(self, where: str) -> Source | None:
        """The picture; None for a part of another type."""
        if self.type not in _IMAGE_PARTS:
            return None
        given = ImageURL(self.image_url, self.detail) if isinstance(self.image_url, str) else self.image_url
        if given is None or not given.url:
            raise InvalidRequestError(f"{where} has a part of type {self.type!r} without image_url", "messages")
        return Source(given.url, given.detail or "auto", where)


class CalledFunction(msgspec.Struct):
    name: str
    arguments: str | dict[str, Any] | None = None


class CalledCustomTool(msgspec.Struct):
    name: str
    input: str = ""


class ToolCall(msgspec.Struct):
    """A call that an earlier answer made. `arguments` is an object, or its JSON text, which may have been cut short."""

    function: CalledFunction | None = None
    id: str | None = None
    type: str | None = "function"
    custom: CalledCustomTool | None = None

    def to_template(self, where: str) -> dict[str, Any]:
        """The call as templates expect it, with the arguments as an object."""
        if self.function is not None:
            given = self.function.arguments
            arguments = as_object(given or "") if isinstance(given, str | None) else given
            function = {"name": self.function.name, "arguments": arguments}
        elif self.custom is not None:
            function = {"name": self.custom.name, "arguments": {CUSTOM_INPUT: self.custom.input}}
        else:
            raise InvalidRequestError(f"{where}: a tool call must have a function", "messages")
        return {"id": self.id or "", "type": "function", "function": function}


class Message(msgspec.Struct):
    """A message of a history. Every answer of this server is valid as one."""

    role: str
    content: str | list[Part | str] | None = None
    name: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    tool_calls: list[ToolCall] | None = None
    function_call: CalledFunction | None = None
    tool_call_id: str | None = None

    def to_template(self, position: int) -> dict[str, Any]:
        """The message as templates expect it. Raises InvalidRequestError for invalid messages and parts that are not
        text."""
        where = f"messages[{position}]"
        if not 0 < len(self.role) <= 64:
            raise InvalidRequestError(f"{where}.role must have 1 to 64 characters", "messages")
        if self.content is None and self.role not in _MAY_BE_EMPTY:
            raise InvalidRequestError(f"{where}.content is missing", "messages")
        role = "tool" if self.role == "function" else self.role  # the older name of the same role
        message: dict[str, Any] = {"role": role, "content": self._content(where)}
        for name in ("name", "tool_call_id"):
            if (value := getattr(self, name)) is not None:
                message[name] = value
        calls = self.tool_calls or ([ToolCall(self.function_call)] if self.function_call else [])
        if calls:
            if role != "assistant" or len(calls) > MAX_CALLS:
                raise InvalidRequestError(
                    f"{where}: only a message of role assistant may hold tool_calls, and at most {MAX_CALLS}",
                    "messages",
                )
            message["tool_calls"] = [call.to_template(where) for call in calls]
        if (reasoning := self.reasoning or self.reasoning_content) is not None:
            message["reasoning_content"] = reasoning
        return message

    @property
    def pictures(self) -> list[Source | VideoSource]:
        """The pictures and videos, in order. `to_template` has the checks."""
        parts = self.content if isinstance(self.content, list) else []
        found = (part.picture("messages") or part.clip("messages") for part in parts if isinstance(part, Part))
        return [picture for picture in found if picture is not None]

    def _content(self, where: str) -> str | list[dict[str, Any]]:
        """The content's text; if it has pictures, its parts as templates expect them."""
        if not self.pictures:
            return self.text(where)
        if self.role not in _HAVE_PICTURES:
            raise InvalidRequestError(f"{where}: a message of role {self.role} may not hold pictures", "messages")
        parts: list[dict[str, Any]] = []
        for part in self.content or ():
            one = Part(text=part) if isinstance(part, str) else part
            if one.picture(where) is not None:
                parts.append({"type": "image"})
            elif one.clip(where) is not None:
                parts.append({"type": "video"})
            else:
                parts.append({"type": "text", "text": Message(self.role, [one]).text(where)})
        return parts

    def text(self, where: str = "messages") -> str:
        """The content's text parts, joined by newlines; a refusal is text as well.

        Raises InvalidRequestError for a part of another type.
        """
        if not isinstance(self.content, list):
            return self.content or self.refusal or ""
        texts = []
        for part in self.content:
            if isinstance(part, str):
                part = Part(text=part)
            text = part.text if part.type in _TEXT_PARTS else part.refusal if part.type == "refusal" else None
            if text is None:
                raise InvalidRequestError(
                    f"{where} has a part of type {(part.type or '')[:64]!r}; only text, pictures and videos are "
                    "supported",
                    "messages",
                )
            texts.append(text)
        return "\n".join(texts)


Messages = Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]
Tools = Annotated[list[Tool], Meta(max_length=MAX_TOOLS)]


class Conversation(msgspec.Struct, kw_only=True):
    """The fields of a chat request that make its prompt: messages, and how to render them."""

    messages: Messages
    tools: Tools | None = None
    add_generation_prompt: bool | None = None  # None: unless continue_final_message is set
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
        if self.continue_final_message and self.add_generation_prompt:
            raise InvalidRequestError(
                "continue_final_message goes on with the last message, and add_generation_prompt begins a new one: set "
                "one of them to true",
                "continue_final_message",
            )
        if self.continue_final_message and self.messages[-1].role != "assistant":
            raise InvalidRequestError(
                "continue_final_message needs a last message of role assistant", "continue_final_message"
            )
        return [message.to_template(i) for i, message in enumerate(self.messages)]

    @property
    def pictures(self) -> list[Source | VideoSource]:
        """The pictures and videos of all messages, in order."""
        return [
            picture._replace(where=f"messages[{position}]")
            for position, message in enumerate(self.messages)
            for picture in message.pictures
        ]

    def template_tools(self) -> list[dict[str, Any]]:
        """The tools, with their type first, as models have seen them."""
        return [{"type": tool.type, "function": msgspec.to_builtins(tool.function)} for tool in self.tools or ()]

    def template_kwargs(self) -> dict[str, Any]:
        """The variables that the request gives to the template."""
        kwargs = dict(self.chat_template_kwargs or {})
        if kwargs:
            check_variables(kwargs, "chat_template_kwargs")
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
    add_generation_prompt: bool | None = None  # None: unless continue_final_message is set
    continue_final_message: bool = False
    add_special_tokens: bool = False
    chat_template: str | None = None
    chat_template_kwargs: TemplateKwargs | None = None
    reasoning_effort: ReasoningEffort | None = None
    include_reasoning: bool = True
    thinking_token_budget: PositiveTokens | None = None
    logprobs: bool | None = None
    top_logprobs: AskedLogprobs | None = None
    return_accepted_proposals: bool | None = None
    max_tokens: SomeTokens | None = None
    max_completion_tokens: SomeTokens | None = None
    echo: bool | None = None

    def check(self) -> None:
        super().check()
        for name in ("max_tokens", "max_completion_tokens"):
            if getattr(self, name) == 0:
                raise InvalidRequestError(f"{name} must be at least 1, or -1 for no limit, got 0", name)
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequestError("top_logprobs above 0 is only allowed when logprobs is true", "top_logprobs")
        if self.return_accepted_proposals and not self.logprobs:
            raise InvalidRequestError(
                "return_accepted_proposals marks the entries of logprobs, so logprobs must be true",
                "return_accepted_proposals",
            )
        if self.thinking_token_budget is not None and ((self.n or 1) > 1 or self.use_beam_search):
            raise InvalidRequestError("thinking_token_budget needs n to be 1, without beams", "thinking_token_budget")
        if self.tools and self.functions:
            raise InvalidRequestError("functions is the older form of tools: give one of them", "functions")
        try:
            if tools := self.all_tools:
                check_tools(tools)
            self.choose()
        except InvalidRequestError as error:
            older = {"tools": "functions", "tool_choice": "function_call"} if self.is_legacy else {}
            raise InvalidRequestError(str(error), older.get(error.param or "", error.param)) from None

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.logprobs)

    def output_limit(self) -> int | None:
        """The most tokens of output; None: what the context leaves."""
        limit = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return None if limit == -1 else limit

    @property
    def is_legacy(self) -> bool:
        """Whether the request uses the older `functions`, with which an answer holds at most one call."""
        return bool(self.functions) or isinstance(self.function_call, NamedFunction)

    @property
    def all_tools(self) -> list[Tool]:
        return [Tool(function) for function in self.functions or ()] or self.tools or []

    @property
    def is_parallel(self) -> bool:
        """Whether an answer may hold several calls."""
        return self.parallel_tool_calls is not False and not self.is_legacy

    def choose(self) -> tuple[list[Tool], Mode]:
        """The tools that may be called, and the mode; see `jaxserve.server.tools.choice.choose`."""
        choice = self.tool_choice
        if self.is_legacy:
            call = self.function_call
            if isinstance(call, str) and call not in ("none", "auto"):
                raise InvalidRequestError("function_call must be 'none', 'auto' or name a function", "function_call")
            choice = NamedChoice(call) if isinstance(call, NamedFunction) else call
        return choose(self.all_tools, choice)

    def conversation(self) -> Conversation:
        """The fields that make the prompt. It shows no tools if none may be called."""
        fields = {name: getattr(self, name) for name in Conversation.__struct_fields__}
        _, mode = self.choose()
        return Conversation(**fields | {"tools": None if mode == "none" else self.all_tools or None})


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """Body of /tokenize: a prompt, or messages with the fields of Conversation. With `content` it is llama.cpp's form,
    whose fields come last."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    add_generation_prompt: bool | None = None  # None: unless continue_final_message is set
    continue_final_message: bool = False
    add_special_tokens: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: TemplateKwargs | None = None
    return_token_strs: bool | None = None
    content: str | None = None
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False
