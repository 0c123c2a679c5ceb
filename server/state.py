"""What the handlers of one front share, and the settings it was started with."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from types import ModuleType
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request

from jaxserve.tokenizer import Tokenizer
from jaxserve.types import InvalidRequestError
from server import plugins
from server.client import EngineClient
from server.errors import APIError, unavailable
from server.keys import ApiKey
from server.messages import Ready
from server.metrics import Metrics
from server.response_store import ResponseStore

T = TypeVar("T")

_INLINE_CHARACTERS = 2000  # texts up to this long are tokenized on the event loop; longer ones would hold it up


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """What the operator chooses for the front.

    Attributes:
      model_name: what clients call the model; also the `model_name` label of the metrics.
      api_keys: accepted keys; none leaves the server open.
      salt_by_key: requests under different keys share no prefix cache.
      admin_key: opens the admin endpoints; without one they do not exist.
      max_body_bytes: longest request body.
      max_connections: open connections beyond which requests get 503.
      request_timeout: seconds that a request may take; None: any time.
      max_stored_responses: answers of /v1/responses that are kept.
      cors_origins: origins that browsers may call from; none by default.
      metrics_prefix: begins the names of the metrics.
      drain_seconds: how long running requests may go on after the first signal to stop.
      engine_restarts: how often in ten minutes an engine that died is started again.
      watchdog_seconds: how long an engine that has work may go without finishing a step; 0: any time.
      tool_call_parser: a module of `server.tools.parsers`, "auto" (by the chat template) or "none".
      reasoning_parser: a module of `server.reasoning`, "auto" or "none".
      reasoning_field: what a chat's message calls its reasoning.
      ui: whether there is a page at `/`.
      access_log: whether a line is logged for each request.
      otlp_endpoint: where OpenTelemetry traces go.
    """

    model_name: str
    api_keys: tuple[ApiKey, ...] = ()
    salt_by_key: bool = False
    admin_key: str | None = None
    max_body_bytes: int = 32 * 2**20
    max_connections: int = 4096
    request_timeout: float | None = None
    max_stored_responses: int = 1000
    cors_origins: tuple[str, ...] = ()
    metrics_prefix: str = "jaxserve"
    drain_seconds: float = 30.0
    engine_restarts: int = 3
    watchdog_seconds: float = 120.0
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    reasoning_field: str = "reasoning"
    ui: bool = True
    access_log: bool = False
    otlp_endpoint: str | None = None


@dataclass
class ServerState:
    """One front: its connection to the engine, its tokenizer once loaded, its metrics.

    `open_connections` tells how many clients are connected.
    """

    settings: ServerSettings
    client: EngineClient
    metrics: Metrics
    tokenizer: Tokenizer | None = None
    draining: bool = False
    open_connections: Callable[[], int] = lambda: 0
    created: int = field(default_factory=lambda: int(time.time()))
    pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(4, thread_name_prefix="text"))
    responses: ResponseStore = field(init=False)

    def __post_init__(self) -> None:
        self.responses = ResponseStore(self.settings.max_stored_responses)

    @property
    def status(self) -> str:
        """ "loading", "ready", "draining", "restarting" or "dead"."""
        if self.client.status != "ready":
            return self.client.status
        return "draining" if self.draining else "loading" if self.tokenizer is None else "ready"

    def require_ready(self) -> tuple[Tokenizer, Ready]:
        """The tokenizer and the engine's facts; raises APIError (503) when no new request can be served."""
        if self.client.is_dead:
            again = "; another one is being started: try again" if self.client.revives else ""
            raise unavailable(f"the engine is gone: {self.client.error}{again}", "engine_unavailable")
        if self.draining:
            raise unavailable("the server is shutting down", "shutting_down")
        if self.tokenizer is None or self.client.info is None:
            raise unavailable("the model is still loading", "loading")
        return self.tokenizer, self.client.info

    def check_model(self, name: str | None) -> None:
        """Raises APIError (404) for a model that is not served here."""
        if name is not None and name != self.settings.model_name:
            raise APIError(
                404,
                f"the model {name[:256]!r} does not exist; this server has {self.settings.model_name!r}",
                param="model",
                code="model_not_found",
            )

    @cached_property
    def tool_format(self) -> ModuleType | None:
        """How the model writes tool calls; the tokenizer must be there."""
        return self._format("server.tools.parsers", self.settings.tool_call_parser)

    @cached_property
    def reasoning_format(self) -> ModuleType | None:
        """How the model marks its reasoning; the tokenizer must be there."""
        return self._format("server.reasoning", self.settings.reasoning_parser)

    def _format(self, package: str, choice: str) -> ModuleType | None:
        tokenizer, _ = self.require_ready()
        return plugins.find(package, choice, tokenizer.chat_template)

    def cache_salt(self, http: Request, given: str | None) -> str | None:
        """The salt of a request's prefix-cache pages: the one it brings, and that of its API key where those matter."""
        key = key_of(http)
        return f"{key.digest.hex()}/{given or ''}" if key is not None and self.settings.salt_by_key else given

    async def off_loop(self, work: Callable[[], T]) -> T:
        """`work()` in a thread, so that the event loop goes on."""
        return await asyncio.get_running_loop().run_in_executor(self.pool, work)

    async def encode(self, texts: list[str], add_special_tokens: bool, truncate: int | None = None) -> list[list[int]]:
        """Token ids of each text. Raises InvalidRequestError for one that `fit_text` refuses."""
        tokenizer, info = self.require_ready()
        texts = [fit_text(text, tokenizer, info, truncate, "prompt") for text in texts]

        def work() -> list[list[int]]:
            return [tokenizer.encode(text, add_special_tokens) for text in texts]

        return work() if sum(map(len, texts)) <= _INLINE_CHARACTERS else await self.off_loop(work)


def state_of(request: Request) -> ServerState:
    return request.app.state.server


def key_of(request: Request) -> ApiKey | None:
    """The API key that a request came with, where keys are demanded."""
    return request.scope.get("state", {}).get("api_key")


async def read_body(request: Request, decoder: msgspec.json.Decoder[T]) -> T:
    """The request's JSON body as the decoder's type. Raises APIError (400) for anything else."""
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise APIError(400, f"the content type must be application/json, got {content_type[:64]!r}")
    try:
        return decoder.decode((await request.body()).decode())  # msgspec alone would not look into unknown fields
    except UnicodeDecodeError as error:
        raise APIError(400, f"the body is not valid UTF-8: {error}") from None
    except msgspec.ValidationError as error:
        raise APIError(400, str(error), param=_field_of(str(error))) from None
    except msgspec.DecodeError as error:
        raise APIError(400, f"the body is not valid JSON: {error}") from None
    except RecursionError:
        raise APIError(400, "the body is nested too deeply") from None


def _field_of(message: str) -> str | None:
    """The top-level field that a validation message of msgspec points to (`… - at `$.name[0]``)."""
    _, found, path = message.rpartition("`$.")
    if found:
        return path.rstrip("`").split(".")[0].split("[")[0]
    _, found, rest = message.partition("missing required field `")
    return rest.partition("`")[0] if found else None


def fit_text(text: str, tokenizer: Tokenizer, info: Ready, truncate: int | None, param: str) -> str:
    """A text that `fit_prompt` can still fit once it is tokenized: tokenizing takes time, and 250 times its memory.

    Of a text that is sure to be too long, the end is left where it is to be truncated; otherwise InvalidRequestError.
    """
    most = info.max_model_len * (tokenizer.longest_token or len(text))
    if len(text) <= most:
        return text
    if truncate is None:
        raise _too_long(info, f"at least {len(text) // tokenizer.longest_token}", param)  # type: ignore[operator]
    return text[-2 * most :]


def _too_long(info: Ready, count: str, param: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"This model's maximum context length is {info.max_model_len} tokens, and your prompt has {count}. "
        "Please shorten the prompt: at least one token must be left for the output.",
        param,
        "context_length_exceeded",
    )


def fit_prompt(ids: list[int], info: Ready, truncate: int | None, param: str, max_tokens: int | None) -> list[int]:
    """The prompt cut to its last `truncate` tokens (-1: to what leaves room for output), checked against the model.

    Raises InvalidRequestError for an empty or too long prompt and for ids outside the vocabulary.
    """
    if truncate is not None:
        room = max(1, info.max_model_len - max(1, min(max_tokens or 1, info.max_model_len - 1)))
        ids = ids[-(room if truncate == -1 else truncate) :]
    if not ids:
        raise InvalidRequestError("the prompt is empty; it must hold at least one token", param)
    if len(ids) >= info.max_model_len:
        raise _too_long(info, str(len(ids)), param)
    if min(ids) < 0 or max(ids) >= info.vocab_size:
        raise InvalidRequestError(f"{param} holds token ids outside 0 to {info.vocab_size - 1}", param)
    return ids


def room_for(max_tokens: int | None, num_prompt_tokens: int, info: Ready) -> int:
    """max_tokens clamped to what the context leaves; None asks for all of it."""
    room = info.max_model_len - num_prompt_tokens
    return room if max_tokens is None else min(max_tokens, room)


def to_json(value: Any) -> bytes:
    return msgspec.json.encode(value)
