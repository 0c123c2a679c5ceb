"""Bodies of Ollama's API, and their conversion to chat requests and completions.

https://github.com/ollama/ollama/blob/main/docs/api.md
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from jaxserve import limits
from jaxserve.server.schemas.chat import ChatRequest, ImageURL, Message, Part, ToolCall, Tools
from jaxserve.server.schemas.common import CompletionRequest, PositiveTokens, SamplingOptions, TokenId
from jaxserve.server.schemas.foreign_fields import PENALTIES
from jaxserve.types import InvalidRequestError

OLLAMA_TAG = ":latest"  # which clients add to a name without a tag
_NUMBER = re.compile(r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)")
_DURATION = re.compile(r"[+-]?(?:(?:\d+(?:\.\d*)?|\.\d+)(?:ns|us|µs|ms|s|m|h))+")
_PARTS = re.compile(r"([\d.]+)(ns|us|µs|ms|s|m|h)")
_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_LONGEST = 64  # characters of a duration
_EFFORTS = {"low": "low", "medium": "medium", "high": "high", "max": "high"}
_RENAMED = {"repeat_penalty": "repetition_penalty"}

KeepAlive = Annotated[str | float, Meta(description="Seconds, or a duration such as 5m; has no effect on one model")]
Think = Annotated[bool | str, Meta(description="Or how much: low, medium, high")]
Format = Annotated[str | dict[str, Any], Meta(description='"json", or a JSON schema')]
Prediction = Annotated[int, Meta(ge=-2, le=limits.MAX_INT, description="0 and less: to the end of the context")]
Context = Annotated[list[TokenId], Meta(description="That of an earlier answer, which this one goes on from")]
Images = Annotated[list[str], Meta(description="Pictures in base64")]


class OllamaOptions(SamplingOptions, kw_only=True):
    """Ollama's options. Those that only say how a model is loaded, such as num_gpu, have no effect. Of the last ones,
    values that ask for nothing are accepted."""

    num_ctx: Annotated[PositiveTokens, Meta(description="Most tokens of prompt and answer together")] | None = None
    num_predict: Prediction | None = None
    penalize_newline: bool | None = None
    repeat_last_n: int | None = None
    typical_p: float | None = None
    tfs_z: float | None = None
    mirostat: int | None = None

    def fields(self) -> dict[str, Any]:
        """The options as fields of a completion or a chat request, whose `check` refuses what is not served. Raises
        InvalidRequestError for an option that these have no field for."""
        skipped = ("num_ctx", "num_predict", "penalize_newline")
        given = {
            _RENAMED.get(name, name): getattr(self, name) for name in self.__struct_fields__ if name not in skipped
        }
        if self.penalize_newline is False and any(given[name] not in (None, off) for name, off in PENALTIES.items()):
            raise InvalidRequestError(
                "penalize_newline is not supported by this server; penalties look at all tokens", "options"
            )
        if self.seed == -1:  # a random one
            given["seed"] = None
        given["max_tokens"] = self.num_predict if self.num_predict and self.num_predict > 0 else -1
        return given


class OllamaMessage(msgspec.Struct, kw_only=True):
    role: str
    content: str | None = None
    thinking: str | None = None
    images: Images | None = None
    tool_calls: list[ToolCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class OllamaFields(msgspec.Struct, kw_only=True):
    """The fields that /api/chat and /api/generate have in common."""

    model: str
    stream: bool | None = None
    format: Format | None = None
    options: OllamaOptions | None = None
    keep_alive: KeepAlive | None = None
    think: Think | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=limits.MAX_LOGPROBS)] | None = None
    truncate: Annotated[bool, Meta(description="Prompts are not truncated: true is refused")] | None = None
    shift: Annotated[bool, Meta(description="The context is not shifted: true is refused")] | None = None

    @property
    def given_options(self) -> OllamaOptions:
        return self.options or OllamaOptions()

    @property
    def streams(self) -> bool:
        return self.stream is not False

    def check(self) -> None:
        """Raises InvalidRequestError, naming the field, for what is not served."""
        if isinstance(self.think, str) and self.think not in _EFFORTS:
            raise InvalidRequestError(
                f"think must be true, false, {', '.join(map(repr, _EFFORTS))}, got {self.think[:64]!r}", "think"
            )
        if self.truncate:
            raise InvalidRequestError(
                "truncate is not supported by this server, which refuses prompts that are too long; leave it out",
                "truncate",
            )
        if self.shift:
            raise InvalidRequestError(
                "shift is not supported by this server, where answers end with the context; leave it out", "shift"
            )
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequestError("top_logprobs above 0 is only allowed when logprobs is true", "top_logprobs")

    def response_format(self) -> dict[str, Any] | None:
        """`format` in OpenAI's shape. Raises InvalidRequestError for a text other than "json"."""
        if self.format in (None, ""):
            return None
        if self.format in ("json", {}):
            return {"type": "json_object"}
        if isinstance(self.format, str):
            raise InvalidRequestError(f'format must be "json" or a JSON schema, got {self.format[:64]!r}', "format")
        return {"type": "json_schema", "json_schema": {"name": "format", "schema": self.format}}

    def to_chat(self, messages: Sequence[OllamaMessage], tools: Tools | None = None) -> ChatRequest:
        """A chat request with these messages."""
        return ChatRequest(
            model=self.model,
            messages=_messages(messages),
            tools=tools or None,
            stream=self.streams,
            response_format=self.response_format(),
            chat_template_kwargs=None if self.think is None else {"enable_thinking": self.think is not False},
            reasoning_effort=_EFFORTS[self.think] if isinstance(self.think, str) else None,
            include_reasoning=self.think is not False,
            logprobs=self.logprobs,
            top_logprobs=self.top_logprobs,
            **self.given_options.fields(),
        )


class OllamaChatRequest(OllamaFields, kw_only=True):
    """Body of /api/chat. Without messages it asks whether the model is there."""

    messages: Annotated[list[OllamaMessage], Meta(max_length=limits.MAX_MESSAGES)] | None = None
    tools: Tools | None = None


class OllamaGenerateRequest(OllamaFields, kw_only=True):
    """Body of /api/generate. Without a prompt it asks whether the model is there."""

    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    template: Annotated[str, Meta(description="Not supported: the model has a template of its own")] | None = None
    raw: Annotated[bool, Meta(description="The prompt is complete, without a template")] | None = None
    images: Images | None = None
    context: Context | None = None

    @property
    def asks_nothing(self) -> bool:
        return not (self.prompt or self.suffix or self.images)

    @property
    def is_plain(self) -> bool:
        """Whether the prompt is completed without the chat template."""
        return bool(self.raw or self.suffix)

    def check(self) -> None:
        super().check()
        if self.template:
            raise InvalidRequestError(
                "template is not supported by this server; the operator's --chat-template replaces the model's own, "
                "and with raw the prompt is complete",
                "template",
            )
        kind = "raw" if self.raw else "suffix"
        others = ("system", "context", "images", *(("think",) if self.raw else ()))
        for name in others:
            if self.is_plain and getattr(self, name):
                raise InvalidRequestError(f"{name} cannot be combined with {kind}", name)
        if self.context and self.images:
            raise InvalidRequestError("context cannot be combined with images", "context")

    def chat(self) -> ChatRequest:
        """The prompt as a conversation of one turn."""
        system = [OllamaMessage(role="system", content=self.system)] if self.system else []
        return self.to_chat([*system, OllamaMessage(role="user", content=self.prompt, images=self.images)])

    def completion(self) -> CompletionRequest:
        """The prompt as it is, or as what comes before `suffix`."""
        return CompletionRequest(
            model=self.model,
            prompt=self.prompt or "",
            suffix=self.suffix,
            stream=self.streams,
            response_format=self.response_format(),
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            **self.given_options.fields(),
        )


class OllamaEmbedRequest(msgspec.Struct, kw_only=True):
    """Body of /api/embed."""

    model: str
    input: str | Annotated[list[str], Meta(max_length=limits.MAX_PROMPTS)]
    truncate: Annotated[bool, Meta(description="Cuts inputs that are too long; false: they are refused")] | None = None
    dimensions: PositiveTokens | None = None
    options: OllamaOptions | None = None
    keep_alive: KeepAlive | None = None


class OllamaEmbeddingsRequest(msgspec.Struct, kw_only=True):
    """Body of /api/embeddings, the older form."""

    model: str
    prompt: str | None = None
    options: OllamaOptions | None = None
    keep_alive: KeepAlive | None = None


class OllamaNameRequest(msgspec.Struct, kw_only=True):
    """Bodies with the name of a model: /api/show and /api/pull. `name` is the older field."""

    model: str | None = None
    name: str | None = None
    stream: bool | None = None

    @property
    def asked(self) -> str:
        return self.model or self.name or ""


def forms_of(name: str) -> tuple[str, str, str]:
    """A model's name as given, and without and with the tag that clients add."""
    return name, name.removesuffix(OLLAMA_TAG), name + OLLAMA_TAG


def keep_seconds(value: str | float | None) -> float | None:
    """`keep_alive` in seconds; negative: for ever; None: the server's default. Raises InvalidRequestError for a text
    that is no duration."""
    if value is None or not isinstance(value, str):
        return value
    text = value.strip()
    if len(text) > _LONGEST or not (_NUMBER.fullmatch(text) or _DURATION.fullmatch(text)):
        raise InvalidRequestError(
            f"keep_alive must be a number of seconds or a duration such as 1h30m, got {value[:64]!r}", "keep_alive"
        )
    if _NUMBER.fullmatch(text):
        return float(text)
    seconds = sum(float(number) * _UNITS[unit] for number, unit in _PARTS.findall(text))
    return -seconds if text.startswith("-") else seconds


def _messages(given: Sequence[OllamaMessage]) -> list[Message]:
    """The messages of a chat request. Calls get ids, as templates want them, and each result that of its call: the
    first one of its name that has no result yet, or else the first one."""
    messages = []
    open_calls: list[tuple[str, str]] = []  # id and name of calls without a result
    count = 0
    for one in given:
        calls = []
        for call in one.tool_calls or ():
            call_id = call.id or f"call{count:05}"  # nine letters and digits, which Mistral's template asks for
            count += 1
            calls.append(msgspec.structs.replace(call, id=call_id))
            open_calls.append((call_id, call.function.name if call.function else ""))
        call_id_of_result = one.tool_call_id
        if one.role == "tool":
            fitting = [pair for pair in open_calls if call_id_of_result == pair[0]]
            if call_id_of_result is None:
                fitting = [pair for pair in open_calls if one.tool_name == pair[1]] or open_calls
            if fitting:
                call_id_of_result = fitting[0][0]
                open_calls.remove(fitting[0])
        messages.append(
            Message(
                one.role,
                _content(one),
                name=one.tool_name,
                reasoning=one.thinking or None,
                tool_calls=calls or None,
                tool_call_id=call_id_of_result,
            )
        )
    return messages


def _content(message: OllamaMessage) -> str | list[Part | str]:
    text = message.content or ""
    if not message.images:
        return text
    urls = (one if one.startswith("data:") else f"data:image/png;base64,{one}" for one in message.images)
    parts: list[Part | str] = [Part("image_url", image_url=ImageURL(url)) for url in urls]
    return [*parts, text] if text else parts
