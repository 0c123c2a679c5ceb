"""What the handlers of one API server share, and helpers that read requests and fit prompts to the model."""

from __future__ import annotations

import asyncio
import hashlib
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace
from starlette.requests import Request

from jaxserve.adapters.registry import ServedAdapter
from jaxserve.images.patches import Processed
from jaxserve.images.prompts import with_images
from jaxserve.images.videos import ProcessedVideo
from jaxserve.limits import BACKGROUND
from jaxserve.server import plugins
from jaxserve.server.http.body import body_of, check_forms, receive_body
from jaxserve.server.http.body_errors import explain, with_whole_numbers
from jaxserve.server.http.connections import Connections
from jaxserve.server.http.counts import KNOWN, STREAMS, Counts
from jaxserve.server.http.errors import APIError, unavailable
from jaxserve.server.http.file_store import FileStore
from jaxserve.server.http.keys import ApiKey
from jaxserve.server.http.listing import ServerModels
from jaxserve.server.http.request_limits import Accounts, Bodies, TextThreads
from jaxserve.server.http.response_store import ResponseStore
from jaxserve.server.http.settings import ServerSettings
from jaxserve.server.images.long_strings import for_json
from jaxserve.server.images.sources import Source
from jaxserve.server.images.sources import read as read_source
from jaxserve.server.images.video_sources import VideoSource, read_video
from jaxserve.server.images.workers import ImageWorkers
from jaxserve.server.ipc.engine_client import EngineClient
from jaxserve.server.ipc.messages import Ready, ServedWeights
from jaxserve.server.observe.metrics import Metrics
from jaxserve.server.observe.recorder import Recorder
from jaxserve.text.foreign_text import ForeignText
from jaxserve.text.tokenizer import Tokenizer
from jaxserve.types import Image, InvalidRequestError

T = TypeVar("T")

ROUTED = "server"  # key in a request's state of the ServerState of its model, in a server with several
_MOST_REPAIRED = 2**20  # characters; in longer bodies 16.0 is not accepted for 16
_INLINE_BYTES = 2000  # texts of a body up to this size are tokenized on the event loop, longer ones in a thread
_MOST_LISTED = 16  # names of models in an error
_TURN = 200_000  # characters that a thread tokenizes at a time for one request


@dataclass
class ServerState:
    """The state of one API server.

    Attributes:
      tokenizer: None until it is loaded.
      fingerprint: names the weights and settings that answers come from; None until they are loaded.
      recorder: records answered requests (`ServerSettings.record`), or None.
      leaving: the server is about to drain, and says so at /ready; it still takes new requests.
      draining: the server is shutting down and takes no new requests.
      created: seconds since the epoch; the `created` of models.
      number: of this API server among several; None if it is the only one.
      counts: what limits count, over all API servers.
      models: what there is to know of the server's models beside this one.
    """

    settings: ServerSettings
    client: EngineClient
    metrics: Metrics
    tokenizer: Tokenizer | None = None
    fingerprint: str | None = None
    recorder: Recorder | None = None
    leaving: bool = False
    draining: bool = False
    created: int = field(default_factory=lambda: int(time.time()))
    number: int | None = None
    counts: Counts = field(default_factory=Counts)
    models: ServerModels | None = None
    _known_engine: int = field(default=0, init=False)
    text_threads: TextThreads = field(default_factory=TextThreads)
    images: ImageWorkers | None = field(default=None, init=False)  # None: the model reads text only
    responses: ResponseStore = field(init=False)
    bodies: Bodies = field(init=False)
    accounts: Accounts = field(init=False)
    connections: Connections = field(init=False)
    files: FileStore | None = field(init=False)  # None: files and batches are not served
    wake_batches: Callable[[], None] = field(default=lambda: None, init=False)  # a batch has been created

    def __post_init__(self) -> None:
        settings = self.settings
        counts = self.counts
        self.responses = ResponseStore(settings.max_stored_responses)
        self.connections = Connections(settings.max_connections, settings.max_connections_per_address, counts)
        self.connections.refused = self.metrics.rejections.inc
        self.bodies = Bodies(settings.max_body_bytes, counts)
        self.accounts = Accounts(settings.max_completions_per_request, counts)
        self.files = None
        if settings.files_dir is not None:
            sizes = {"max_bytes": settings.max_files_bytes, "longest": settings.max_file_bytes}
            self.files = FileStore(Path(settings.files_dir), **sizes)
        self.client.on_stream = partial(counts.add, STREAMS)
        self.client.on_ready = self._tell_engine

    @property
    def status(self) -> str:
        """One of "loading", "ready", "sleeping", "draining", "restarting" and "dead"."""
        if self.client.status != "ready":
            return self.client.status
        if self.draining or self.leaving or self.tokenizer is None:
            return "draining" if self.draining or self.leaving else "loading"
        return "sleeping" if self.sleeps else "ready"

    @property
    def sleeps(self) -> bool:
        """Whether the engine's weights and cache are not on the devices until it is woken up."""
        return self.client.info is not None and self.client.info.sleep_level > 0

    def require_ready(self, context: int | None = None) -> tuple[Tokenizer, Ready]:
        """The tokenizer and the facts about the engine. Raises APIError (503) if no new request can be served.

        `context`: most tokens of prompt and output that the request asks for, if less than the model's.
        """
        tokenizer, info = self.require_loaded()
        if context is not None and context < info.max_model_len:
            info = replace(info, max_model_len=context)
        if self.sleeps:
            raise unavailable("the engine sleeps, until POST /wake_up or /update_weights wakes it up", "sleeping")
        return tokenizer, info

    def require_loaded(self) -> tuple[Tokenizer, Ready]:
        """The same for requests that an engine that sleeps can serve."""
        if self.client.is_dead:
            again = "; another one is being started: try again" if self.client.revives else ""
            raise unavailable(f"the engine is gone: {self.client.error}{again}", "engine_unavailable")
        if self.draining:
            raise unavailable("the server is shutting down", "shutting_down")
        if self.tokenizer is None or self.client.info is None:
            raise unavailable("the model is still loading", "loading")
        return self.tokenizer, self.client.info

    def check_model(self, name: str | None) -> ServedAdapter | None:
        """The LoRA adapter of this name; None for the model itself. Raises APIError (404) for other names."""
        names = self.settings.model_names
        adapters = self.client.adapters
        if name is None or name in names:
            return None
        if name in adapters:
            return adapters[name]
        listed = ", ".join(map(repr, [*names, *adapters][:_MOST_LISTED]))
        more = ", …" if len(names) + len(adapters) > _MOST_LISTED else ""
        raise APIError(
            404,
            f"the model {name[:256]!r} does not exist; this server has {listed}{more}",
            param="model",
            code="model_not_found",
        )

    def _tell_engine(self, info: Ready) -> None:
        """Publishes what this API server knows of the engine, as a number that is not 0."""
        self.metrics.on_ready(info)
        if info.sees is not None and self.images is None:
            self.images = ImageWorkers(info.model_folder, info.sees, self.settings.max_image_pixels)
            self.images.start()
        adapters = sorted(f"{one.name} {one.digest}" for one in info.adapters)
        known = zlib.crc32(repr((adapters, info.sleep_level, info.weights)).encode()) + 1
        self.counts.add(KNOWN, known - self._known_engine)
        self._known_engine = known

    async def all_api_servers_know(self, seconds: float = 1.0) -> None:
        """Waits until the other API servers know of the engine what this one knows. Those that are starting, or hang
        for `seconds`, are not waited for; they ask the engine before they serve."""
        if self.number is None:
            return
        deadline = time.monotonic() + seconds
        while set(self.counts.each(KNOWN)) - {0, self._known_engine} and time.monotonic() < deadline:
            await asyncio.sleep(0.002)

    def fingerprint_of(self, weights: ServedWeights, adapter_digest: str = "") -> str | None:
        """The `system_fingerprint` of answers with these weights and this adapter; "": with none."""
        parts = [weights.version, weights.digest] if weights.updates else []
        parts += [adapter_digest] if adapter_digest else []
        if not parts or self.fingerprint is None:
            return self.fingerprint
        return f"fp_{hashlib.sha256(' '.join([self.fingerprint, *parts]).encode()).hexdigest()[:10]}"

    def seed_of(self, given: int | None) -> int | None:
        """The seed of a request: the client's, or one that the recorder draws; None: the engine derives one."""
        return self.recorder.seed() if given is None and self.recorder is not None else given

    def check_template(self) -> None:
        """Raises InvalidRequestError, for a request that brings a chat template, unless the operator allows it."""
        if not self.settings.trust_request_chat_template:
            raise InvalidRequestError(
                "a request may bring a chat_template only where the server runs with --trust-request-chat-template",
                "chat_template",
                "unsupported_parameter",
            )

    @cached_property
    def tool_format(self) -> ModuleType | None:
        """The module for the format of the model's tool calls. The tokenizer must be loaded."""
        return self._format("jaxserve.server.tools.parsers", self.settings.tool_call_parser)

    @cached_property
    def reasoning_format(self) -> ModuleType | None:
        """The module for the format of the model's reasoning. The tokenizer must be loaded."""
        return self._format("jaxserve.server.reasoning", self.settings.reasoning_parser)

    def _format(self, package: str, choice: str) -> ModuleType | None:
        tokenizer, _ = self.require_ready()
        return plugins.find(package, choice, tokenizer.chat_template)

    def cache_salt(self, http: Request, given: str | None) -> str | None:
        """The salt of a request's prefix-cache pages: `given`, preceded by its key's digest if keys share no cache."""
        key = key_of(http)
        return f"{key.digest.hex()}/{given or ''}" if key is not None and self.settings.salts_by_key else given

    def check_images(self, given: Sequence[Source | VideoSource], info: Ready) -> None:
        """Raises InvalidRequestError for more pictures or videos than are allowed, and for any that the model does not
        read."""
        sources = [one for one in given if isinstance(one, Source)]
        videos = [one for one in given if isinstance(one, VideoSource)]
        if videos and (info.sees is None or info.sees.video is None):
            raise InvalidRequestError(f"{videos[0].where} holds a video; this model sees none", "messages")
        if len(videos) > (most := self.settings.limit_videos_per_request):
            raise InvalidRequestError(
                f"the request has {len(videos)} videos; at most {most} are allowed (--limit-videos-per-request)",
                "messages",
            )
        if sources and info.sees is None:
            raise InvalidRequestError(
                f"{sources[0].where} holds a picture; this model is served for text only", "messages"
            )
        if len(sources) > (most := self.settings.limit_images_per_request):
            raise InvalidRequestError(
                f"the request has {len(sources)} pictures; at most {most} are allowed (--limit-images-per-request)",
                "messages",
            )

    async def with_images(
        self, ids: list[int], sources: Sequence[Source | VideoSource], info: Ready, *, truncates: bool
    ) -> tuple[list[int], list[Image]]:
        """A prompt with its pictures and videos, which `check_images` has allowed. They are fetched and processed; see
        `images.prompts.with_images`. Raises InvalidRequestError for pictures that cannot be read."""
        if truncates:
            raise InvalidRequestError("prompts with pictures are not truncated", "truncate_prompt_tokens")

        async def one(source: Source | VideoSource) -> Processed | ProcessedVideo:
            if isinstance(source, VideoSource):
                files = await self.off_loop(partial(read_video, source, self.settings.allow_image_urls))
                assert self.images is not None
                return await self.images.process_video(files, source)
            file = await self.off_loop(partial(read_source, source, self.settings.allow_image_urls))
            assert self.images is not None
            return await self.images.process(file, source)

        made = await asyncio.gather(*map(one, sources))
        pictures = [one for one in made if isinstance(one, Processed)]
        videos = [one for one in made if isinstance(one, ProcessedVideo)]
        assert self.tokenizer is not None
        assert info.sees is not None  # `check_images` has seen to it
        return with_images(ids, pictures, info.sees, self.tokenizer, videos)

    async def off_loop(self, work: Callable[[], T]) -> T:
        """The result of the server's own `work()`, run in a thread so that the event loop is not blocked."""
        return await asyncio.get_running_loop().run_in_executor(self.text_threads.executor, work)

    async def text_work(self, http: Request, work: Callable[[], T], *, short: bool = False) -> T:
        """The result of a request's `work()`, run in a thread when it is its key's turn.

        `short` work of a request with a short body runs at once on the event loop. Raises APIError (503) if too much
        work of the key is waiting.
        """
        body = body_of(http)
        size = body.size if body is not None else 0
        if short and size <= _INLINE_BYTES:
            return work()
        return await self.text_threads.run(tenant_of(http), size, work)

    async def encode(
        self,
        http: Request,
        texts: list[str],
        add_special_tokens: bool,
        truncate: int | None = None,
        side: str | None = None,
    ) -> list[list[int]]:
        """Token ids of each text. Raises InvalidRequestError for a text that `fit_text` refuses."""
        tokenizer, info = self.require_ready()
        texts = [fit_text(text, tokenizer, info, truncate, "prompt", side) for text in texts]
        ids: list[list[int]] = []
        for some in _in_turns(texts):  # other requests get turns in between, and a disconnected client's work stops
            ids += await self.text_work(http, partial(_encode, tokenizer, some, add_special_tokens), short=True)
        return ids

    def priority(self, http: Request, given: int | None) -> int:
        """The priority of a request; 0 if priorities are off. Raises InvalidRequestError if its key forbids it."""
        _, info = self.require_ready()
        if is_background(http):
            return BACKGROUND
        if info.scheduling_policy != "priority" or given is None:
            return 0
        key = key_of(http)
        if key is not None and given < key.min_priority:
            raise InvalidRequestError(
                f"priority must be at least {key.min_priority} under this key, got {given}", "priority"
            )
        return given

    def timeout(self, http: Request) -> float | None:
        """The longest time for a request, in seconds; None: there is no limit."""
        return None if is_background(http) else self.settings.request_timeout


def is_background(http: Request) -> bool:
    """Whether a request comes from a batch, and steps aside for others."""
    return http.scope.get("state", {}).get("background", False)


def _encode(tokenizer: Tokenizer, texts: list[str], add_special_tokens: bool) -> list[list[int]]:
    foreign = [ForeignText(tokenizer, text) for text in texts]
    return [text.encode(text.hidden, add_special_tokens) for text in foreign]


def _in_turns(texts: list[str]) -> Iterator[list[str]]:
    """The texts in lists of at most _TURN characters together; a longer text is a list by itself."""
    some: list[str] = []
    size = 0
    for text in texts:
        if some and size + len(text) > _TURN:
            yield some
            some = []
            size = 0
        some.append(text)
        size += len(text)
    if some:
        yield some


def state_of(request: Request) -> ServerState:
    """The state of the model that serves a request: the one that `server.models.routing` has found, or the only one."""
    routed: ServerState | None = request.scope.get("state", {}).get(ROUTED)
    return request.app.state.server if routed is None else routed


def models_of(request: Request) -> ServerModels:
    """What there is to know of the server's models."""
    models = state_of(request).models
    assert models is not None
    return models


def key_of(request: Request) -> ApiKey | None:
    """The API key of a request; None if the server requires no keys."""
    return request.scope.get("state", {}).get("api_key")


def tenant_of(request: Request) -> str:
    """The tenant of a request: a name for its API key; "" if the server requires no keys. Batches have tenants of their
    own, so that texts of other requests need not wait for theirs."""
    key = key_of(request)
    name = "" if key is None else key.digest[:8].hex()
    return f"{name} batch" if is_background(request) else name


def require_json(request: Request) -> None:
    """Raises APIError (400) unless the request declares its body as JSON."""
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise APIError(400, f"the content type must be application/json, got {content_type[:64]!r}")


async def read_body(request: Request, decoder: msgspec.json.Decoder[T], *, any_type: bool = False) -> T:
    """The request's JSON body as the decoder's type. Raises APIError (400 or 415) if it cannot be decoded.

    `any_type`: the request need not declare its body as JSON.
    """
    if not any_type:
        require_json(request)
    try:
        received = await receive_body(request)
        body = received.text().decode()  # msgspec would not check the UTF-8 of unknown fields
        cut = received if received.aside else None
        del received  # which has the body, too
        value = _decode(body, decoder)
        if cut is not None and not cut.claim(value):
            data = cut.whole()
            await check_forms(data)
            body = data.decode()
            value = _decode(body, decoder)
        return value
    except UnicodeDecodeError as error:
        raise APIError(400, f"the body is not valid UTF-8: {error}") from None
    except msgspec.ValidationError as error:
        raise explain(error, body) from None
    except msgspec.DecodeError as error:
        raise APIError(400, f"the body is not valid JSON: {error}") from None
    except RecursionError:
        raise APIError(400, "the body is nested too deeply") from None


def _decode(body: str, decoder: msgspec.json.Decoder[T]) -> T:
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        if "got `float`" not in str(error) or len(body) > _MOST_REPAIRED:
            raise
        return decoder.decode(with_whole_numbers(body))


def fit_text(
    text: str, tokenizer: Tokenizer, info: Ready, truncate: int | None, param: str, side: str | None = None
) -> str:
    """The text, unless it is certain to have too many tokens. Tokenizing would take time, and 250 times its memory.

    With `truncate`, returns the end of such a text that `fit_prompt` keeps, long enough for it to truncate. Without,
    raises InvalidRequestError.
    """
    if len(text) < info.max_model_len or (fewest := tokenizer.fewest_tokens(text)) <= info.max_model_len:
        return text
    if truncate is None:
        raise _too_long(info, f"at least {fewest}", param)
    enough = 2 * info.max_model_len * (tokenizer.longest_token or 1)
    return text[:enough] if side == "right" else text[-enough:]


def _too_long(info: Ready, count: str, param: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"This model's maximum context length is {info.max_model_len} tokens, and your prompt has {count}. "
        "Please shorten the prompt: at least one token must be left for the output.",
        param,
        "context_length_exceeded",
    )


def fit_prompt(
    ids: list[int], info: Ready, truncate: int | None, param: str, max_tokens: int | None, side: str | None = None
) -> list[int]:
    """The prompt, checked against the model, and cut to `truncate` tokens if that is given. `side`: which end is cut
    off, "left" (the default) or "right".

    -1 cuts it so that `max_tokens` fit after it. Raises InvalidRequestError for a prompt that is empty or too long, and
    for ids outside the vocabulary.
    """
    if truncate is not None:
        room = max(1, info.max_model_len - max(1, min(max_tokens or 1, info.max_model_len - 1)))
        most = room if truncate == -1 else truncate
        ids = ids[:most] if side == "right" else ids[-most:]
    if not ids:
        raise InvalidRequestError("the prompt is empty; it must hold at least one token", param)
    if len(ids) >= info.max_model_len:
        raise _too_long(info, str(len(ids)), param)
    if min(ids) < 0 or max(ids) >= info.vocab_size:
        raise InvalidRequestError(f"{param} holds token ids outside 0 to {info.vocab_size - 1}", param)
    return ids


def room_for(max_tokens: int | None, num_prompt_tokens: int, info: Ready) -> int:
    """The most tokens of output: `max_tokens`, or what the context leaves if that is less or `max_tokens` is None."""
    room = info.max_model_len - num_prompt_tokens
    return room if max_tokens is None else min(max_tokens, room)


def to_json(value: Any) -> bytes:
    return msgspec.json.encode(value, enc_hook=for_json)
