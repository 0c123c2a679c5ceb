"""Ollama's API under /api, for its clients (https://github.com/ollama/ollama/blob/main/docs/api.md).

Streams are lines of JSON. The models are those that the operator serves; clients cannot add or delete any.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import time
from collections.abc import AsyncGenerator, Callable
from datetime import UTC, datetime
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response
from starlette.routing import Route

from jaxserve import __version__
from jaxserve.server.chat.conversation import ChatRun, prepare
from jaxserve.server.chat.generation import Generation, Usage, whole_choices
from jaxserve.server.chat.output_parser import Piece
from jaxserve.server.endpoints.chat import logprobs_json
from jaxserve.server.endpoints.completions import prepare_completion
from jaxserve.server.endpoints.model_card import ModelCard, card_of, model_card
from jaxserve.server.endpoints.pooling import embed
from jaxserve.server.http.errors import APIError, own_path
from jaxserve.server.http.keys import ApiKey
from jaxserve.server.http.listing import Listed, ServerModels
from jaxserve.server.http.sse import Lines, run_until_disconnect
from jaxserve.server.http.state import ServerState, key_of, models_of, read_body, state_of, to_json
from jaxserve.server.schemas.ollama import (
    OLLAMA_TAG,
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaFields,
    OllamaGenerateRequest,
    OllamaNameRequest,
    forms_of,
    keep_seconds,
)
from jaxserve.server.schemas.pooling import EmbeddingRequest
from jaxserve.server.tools.base import CallDelta, Parsed
from jaxserve.server.tools.call_arguments import loads
from jaxserve.text.fill_in_middle import marker_ids
from jaxserve.text.tokenizer import Tokenizer
from jaxserve.types import InvalidRequestError

API_VERSION = "0.13.0"  # of Ollama, whose API this is: clients ask for the version before they use newer parts
SHOW_PATH = "/api/show"
LOAD_SECONDS = "load_seconds"  # key in a request's state: for how long it waited for its model to be in memory
_FOR_EVER = "9999-12-31T23:59:59Z"
_NO_MESSAGE = {"message": {"role": "assistant", "content": ""}}
_NO_RESPONSE = {"response": ""}
_LONGEST_UNLOAD = 4096  # bytes of a request that asks to unload a model
_UNITS = (("B", 10**9), ("M", 10**6), ("K", 10**3))

_chat_decoder = msgspec.json.Decoder(OllamaChatRequest)
_generate_decoder = msgspec.json.Decoder(OllamaGenerateRequest)
_embed_decoder = msgspec.json.Decoder(OllamaEmbedRequest)
_embeddings_decoder = msgspec.json.Decoder(OllamaEmbeddingsRequest)
_name_decoder = msgspec.json.Decoder(OllamaNameRequest)


async def chat(http: HTTPRequest) -> Response:
    """POST /api/chat."""
    state = state_of(http)
    started = _began(http)
    body = await read_body(http, _chat_decoder, any_type=True)
    asked = _check(state, body)
    if not body.messages:
        return _nothing(asked, body.keep_alive, _NO_MESSAGE)
    if body.tools and state.tool_format is None:
        raise InvalidRequestError(
            f"{asked!r} does not support tools: the format of this model's calls is not known here; start the server "
            "with --tool-call-parser",
            "tools",
        )
    request = body.to_chat(body.messages, body.tools)
    context = body.given_options.num_ctx
    work = prepare(state, http, request, form_field="format", context=context)
    run = await run_until_disconnect(http.receive, work)
    return await _answered(http, body, _Writer(_message, asked, run, body, started, _load_ns(http)))


async def generate(http: HTTPRequest) -> Response:
    """POST /api/generate."""
    state = state_of(http)
    started = _began(http)
    body = await read_body(http, _generate_decoder, any_type=True)
    asked = _check(state, body)
    if body.asks_nothing:
        return _nothing(asked, body.keep_alive, _NO_RESPONSE)
    context = body.given_options.num_ctx
    if body.is_plain:
        work = prepare_completion(state, http, body.completion(), context)
        generation = (await run_until_disconnect(http.receive, work)).generation
        writer = _Writer(_response, asked, _Plain(state, generation), body, started, _load_ns(http))
        return await _answered(http, body, writer)
    before = body.context or ()
    chatting = prepare(state, http, body.chat(), form_field="format", before=before, context=context)
    run = await run_until_disconnect(http.receive, chatting)
    writer = _Writer(_response, asked, run, body, started, _load_ns(http))
    writer.tells_context = not body.images
    return await _answered(http, body, writer)


async def embeddings(http: HTTPRequest) -> Response:
    """POST /api/embed."""
    state = state_of(http)
    started = _began(http)
    body = await read_body(http, _embed_decoder, any_type=True)
    name = served_model(state, body.model, body.keep_alive)
    facts = {"model": body.model, "load_duration": _load_ns(http)}
    if body.input in ("", []):
        return _json({**facts, "embeddings": [], "total_duration": 0, "prompt_eval_count": 0})
    cut = None if body.truncate is False else -1
    request = EmbeddingRequest(
        model=name, input=body.input, dimensions=body.dimensions, truncate_prompt_tokens=cut  # type: ignore[arg-type]
    )  # fmt: skip
    vectors, usage = await run_until_disconnect(http.receive, embed(state, http, request))
    data = await state.text_work(http, lambda: [vector.tolist() for vector in vectors])
    facts |= {"total_duration": _ns(time.monotonic() - started), "prompt_eval_count": usage["prompt_tokens"]}
    return _json({**facts, "embeddings": data})


async def embedding(http: HTTPRequest) -> Response:
    """POST /api/embeddings, the older form with one input."""
    state = state_of(http)
    body = await read_body(http, _embeddings_decoder, any_type=True)
    name = served_model(state, body.model, body.keep_alive)
    if not body.prompt:
        return _json({"embedding": []})
    request = EmbeddingRequest(model=name, input=body.prompt, truncate_prompt_tokens=-1)
    vectors, _ = await run_until_disconnect(http.receive, embed(state, http, request))
    return _json({"embedding": vectors[0].tolist()})


async def tags(http: HTTPRequest) -> Response:
    """GET /api/tags: the models that are served."""
    return _json({"models": [entry for _, entry in await _entries(http)]})


async def running(http: HTTPRequest) -> Response:
    """GET /api/ps: the models that are in memory."""
    found = []
    for one, entry in await _entries(http):
        if one.state == "ready" and one.info is not None:
            expires = math.inf if one.expires is None else one.expires
            until = _FOR_EVER if expires == math.inf else _time(time.time() + expires)
            more = {"size": one.size or entry["size"], "context_length": one.info.max_model_len}
            found.append(entry | more | {"expires_at": until})
    return _json({"models": found})


async def show(http: HTTPRequest) -> Response:
    """POST /api/show: facts about a model."""
    state = state_of(http)
    body = await read_body(http, _name_decoder, any_type=True)
    name = served_model(state, body.asked)
    tokenizer, info = state.require_loaded()
    card = await state.off_loop(lambda: model_card(info))
    template = tokenizer.chat_template or ""
    # Continue reads num_ctx here, and cuts its prompts to that.
    parameters = {"num_ctx": info.max_model_len} | tokenizer.generation_defaults.sampling()
    answer = {
        "modelfile": f"FROM {name}\n",
        "parameters": "\n".join(f"{key:<30} {value}" for key, value in parameters.items()),
        "template": template,
        "details": _details(state.settings.model_name if name in state.client.adapters else "", card),
        "model_info": {
            "general.architecture": card.family,
            "general.parameter_count": card.parameters,
            f"{card.family}.context_length": info.max_model_len,
            f"{card.family}.vocab_size": info.vocab_size,
            **{f"{card.family}.{name}": value for name, value in card.facts.items()},
        },
        "capabilities": _capabilities(state, tokenizer),
        "modified_at": _time(card.modified),
    }
    response = _json(answer)
    models_of(http).shown[name] = bytes(response.body)
    return response


async def version(http: HTTPRequest) -> Response:
    """GET /api/version: of the API, and of the server."""
    return _json({"version": API_VERSION, "server": f"jaxserve {__version__}"})


async def pull(http: HTTPRequest) -> Response:
    """POST /api/pull: succeeds for a model that is served. Nothing is downloaded for a client."""
    body = await read_body(http, _name_decoder, any_type=True)
    if not body.asked:
        raise InvalidRequestError("model is required: the name of a model", "model")
    try:
        known_name(models_of(http), body.asked, key_of(http))
    except APIError as error:
        text = f"{error.message}; it downloads no others for clients: its operator starts it with a model"
        raise APIError(error.status, text, param="model", code=error.code) from None
    done = {"status": "success"}
    return _json(done) if body.stream is False else Lines(_lines(done), closing=b"", on_error=_error_line)


async def refuse(http: HTTPRequest) -> Response:
    """The paths that would change which models there are."""
    raise APIError(
        400,
        f"{own_path(http.scope)} is not supported: the operator of this server chooses its models",
        code="unsupported",
    )


ROUTES = [
    Route("/api/chat", chat, methods=["POST"]),
    Route("/api/generate", generate, methods=["POST"]),
    Route("/api/embed", embeddings, methods=["POST"]),
    Route("/api/embeddings", embedding, methods=["POST"]),
    Route("/api/tags", tags),
    Route("/api/ps", running),
    Route(SHOW_PATH, show, methods=["POST"]),
    Route("/api/version", version),
    Route("/api/pull", pull, methods=["POST"]),
    *(Route(f"/api/{name}", refuse, methods=["POST"]) for name in ("create", "copy", "push")),
    Route("/api/delete", refuse, methods=["DELETE"]),
    Route("/api/blobs/{digest}", refuse, methods=["HEAD", "POST"]),
]


def served_model(state: ServerState, asked: str, keep_alive: str | float | None = None) -> str:
    """The name under which the model that a client asks for is served: as given, or with or without the tag "latest".

    `keep_alive` says for how long it stays in memory without a request, in a server with several models. Raises
    APIError (404) for other names.
    """
    if not asked:
        raise InvalidRequestError("model is required: the name of a model", "model")
    seconds = keep_seconds(keep_alive)
    names = {*state.settings.model_names, *state.client.adapters}
    found = next((name for name in forms_of(asked) if name in names), asked)
    state.check_model(found)
    if seconds is not None and state.models is not None:
        state.models.keep(found, math.inf if seconds < 0 else seconds)
    return found


def known_name(models: ServerModels, asked: str, key: ApiKey | None) -> str:
    """The name of the model among the server's that a client asks for. Raises APIError (404) if there is none."""
    for name in forms_of(asked):
        with contextlib.suppress(APIError):
            models.find(name, key)
            return name
    return models.find(asked, key).name


def _check(state: ServerState, body: OllamaFields) -> str:
    """Checks a body, and puts the served model's name into it. Returns the name that the client used."""
    asked = body.model
    body.model = served_model(state, asked, body.keep_alive)
    body.check()
    tokenizer, _ = state.require_ready()
    if body.think and not _thinks(state, tokenizer):
        raise InvalidRequestError(f"{asked!r} does not support thinking; leave think out, or set it to false", "think")
    return asked


def _thinks(state: ServerState, tokenizer: Tokenizer) -> bool:
    """Whether the model reasons, or may be told to."""
    template = tokenizer.chat_template or ""
    return state.reasoning_format is not None or "enable_thinking" in template or "<think>" in template


def _capabilities(state: ServerState, tokenizer: Tokenizer) -> list[str]:
    _, info = state.require_loaded()
    if info.task == "embed":
        return ["embedding"]
    found = {
        "completion": info.task == "generate",
        "tools": state.tool_format is not None,
        "insert": marker_ids(tokenizer) is not None,
        "vision": info.sees is not None,
        "thinking": _thinks(state, tokenizer),
    }
    return [name for name, is_there in found.items() if is_there]


async def _entries(http: HTTPRequest) -> list[tuple[Listed, dict[str, Any]]]:
    """The models that the request's key may use, with their entries in the shape of /api/tags, one for each name."""
    state = state_of(http)
    models = models_of(http)
    found = []
    for one in models.listed(key_of(http)):
        of_one = partial(card_of, one.source) if one.info is None else partial(model_card, one.info)
        card = await state.off_loop(of_one)
        adapters = models.adapters_of(one.name)
        for name in (one.name, *one.aliases, *adapters):
            tagged = name if ":" in name.rpartition("/")[2] else name + OLLAMA_TAG
            entry = {
                "name": tagged,
                "model": tagged,
                "modified_at": _time(card.modified or state.created),
                "size": card.size,
                "digest": hashlib.sha256(f"{state.fingerprint} {one.source} {name}".encode()).hexdigest(),
                "details": _details(one.name if name in adapters else "", card),
            }
            found.append((one, entry))
    return found


def _details(parent: str, card: ModelCard) -> dict[str, Any]:
    unit = next(((letter, size) for letter, size in _UNITS if card.parameters >= size), None)
    return {
        "parent_model": parent,
        "format": card.format,
        "family": card.family,
        "families": [card.family],
        "parameter_size": f"{card.parameters / unit[1]:.1f}{unit[0]}" if unit else str(card.parameters or ""),
        "quantization_level": card.stored,
    }


def unloaded(path: str, body: bytes) -> Response | None:
    """The answer to a request for a model that is not in memory, if it asks to unload it and for nothing else."""
    kind = {"/api/chat": OllamaChatRequest, "/api/generate": OllamaGenerateRequest}.get(path)
    if kind is None or len(body) > _LONGEST_UNLOAD:
        return None
    try:
        asked = msgspec.json.decode(body, type=kind)
        if keep_seconds(asked.keep_alive) != 0:
            return None
    except (msgspec.DecodeError, UnicodeDecodeError, InvalidRequestError):
        return None
    if isinstance(asked, OllamaChatRequest):
        return None if asked.messages else _nothing(asked.model, 0, _NO_MESSAGE)
    return _nothing(asked.model, 0, _NO_RESPONSE) if asked.asks_nothing else None


def _nothing(asked: str, keep_alive: str | float | None, part: dict[str, Any]) -> Response:
    """The answer to a request without a prompt, which asks to load the model or, with a keep_alive of 0, to unload it.
    The one model of a server stays loaded."""
    reason = "unload" if keep_seconds(keep_alive) == 0 else "load"
    return _json({"model": asked, "created_at": _time(time.time()), **part, "done": True, "done_reason": reason})


async def _answered(http: HTTPRequest, body: OllamaFields, writer: _Writer) -> Response:
    """The answer, whole or as a stream of lines."""
    if body.streams:
        return Lines(writer.lines(), closing=b"", on_error=_error_line)
    return _json(await run_until_disconnect(http.receive, writer.whole()))


class _Plain:
    """A completion without a chat template, with the methods of a ChatRun."""

    def __init__(self, state: ServerState, generation: Generation):
        self.tokenizer, _ = state.require_ready()
        self.generation = generation

    async def pieces(self) -> AsyncGenerator[list[Piece], None]:
        async with contextlib.aclosing(self.generation.deltas()) as batches:
            async for deltas in batches:
                yield [
                    Piece(
                        index=delta.index,
                        parts=[delta.text] if delta.text else [],
                        token_ids=delta.token_ids,
                        logprobs=delta.logprobs,
                        finish_reason=delta.finish_reason,
                        stop_reason=delta.stop_reason,
                    )
                    for delta in deltas
                ]

    def usage(self) -> Usage:
        return self.generation.usage()


def _message(text: str, thinking: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
    """The part of /api/chat."""
    message: dict[str, Any] = {"role": "assistant", "content": text}
    return {"message": message | _if_any(thinking=thinking, tool_calls=calls)}


def _response(text: str, thinking: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
    """The part of /api/generate."""
    return {"response": text, **_if_any(thinking=thinking)}


class _Writer:
    """Writes one answer. `part` makes an answer's own members of text, thinking and calls.
    `started`: when the request came, by time.monotonic(). `load_ns`: how long the model's start took of that.

    Attributes:
      tells_context: the answer has the token ids of prompt and output, which a later request may go on from.
    """

    def __init__(
        self,
        part: Callable[[str, str, list[dict[str, Any]]], dict[str, Any]],
        asked: str,
        run: ChatRun | _Plain,
        body: OllamaFields,
        started: float,
        load_ns: int,
    ):
        self._part = part
        self._asked = asked
        self._run = run
        self._top = (body.top_logprobs or 0) if body.logprobs else None
        self._started = started
        self._load_ns = load_ns
        self._calls = Parsed()  # those that have not been written; the last one may still grow
        self._tokens: list[int] = []
        self.tells_context = False

    async def whole(self) -> dict[str, Any]:
        (piece,) = await whole_choices(self._run.pieces())
        self._tokens = piece.token_ids
        return self._line(piece, self._complete(piece)) | self._end(piece)

    async def lines(self) -> AsyncGenerator[bytes, None]:
        async with contextlib.aclosing(self._run.pieces()) as batches:
            async for pieces in batches:
                lines = []
                for piece in pieces:
                    self._tokens += piece.token_ids if self.tells_context else ()
                    calls = self._complete(piece)
                    if piece.content or piece.reasoning or calls:
                        lines.append(self._line(piece, calls))
                    if piece.finish_reason is not None:
                        empty = Piece(index=piece.index)
                        lines.append(self._line(empty, []) | self._end(piece))
                yield b"".join(to_json(line) + b"\n" for line in lines)

    def _complete(self, piece: Piece) -> list[dict[str, Any]]:
        """The calls that a piece completes. A call that the limit of tokens cut short is left out."""
        for call in piece.calls:
            self._calls.add(call)
        kept = 0 if piece.finish_reason is not None else 1
        found = self._calls.calls
        done, self._calls.parts = found[: len(found) - kept], list(found[len(found) - kept :])
        return [written for call in done if (written := _call(call)) is not None]

    def _line(self, piece: Piece, calls: list[dict[str, Any]]) -> dict[str, Any]:
        line: dict[str, Any] = {"model": self._asked, "created_at": _time(time.time())}
        line |= self._part(piece.content, piece.reasoning, calls) | {"done": False}
        if self._top is not None and piece.logprobs:
            line["logprobs"] = logprobs_json(self._run.tokenizer, piece.logprobs, self._top)
        return line

    def _end(self, piece: Piece) -> dict[str, Any]:
        generation = self._run.generation
        usage = self._run.usage()
        prompt, output = generation.times[0].seconds()
        end: dict[str, Any] = {
            "done": True,
            "done_reason": "length" if piece.finish_reason == "length" else "stop",
            "total_duration": _ns(time.monotonic() - self._started),
            "load_duration": self._load_ns,
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": _ns(prompt),
            "eval_count": usage.completion_tokens,
            "eval_duration": _ns(output),
        }
        if self.tells_context:
            end["context"] = [*generation.requests[0].prompt_token_ids, *self._tokens]
        return end


def _call(call: CallDelta) -> dict[str, Any] | None:
    """A call in Ollama's shape, with its arguments as an object; None if they are not whole."""
    arguments = loads(call.arguments or "{}")
    if not isinstance(arguments, dict):
        return None
    return {"id": call.id, "function": {"index": call.index, "name": call.name, "arguments": arguments}}


def _if_any(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value}


async def _lines(*bodies: dict[str, Any]) -> AsyncGenerator[bytes, None]:
    yield b"".join(to_json(body) + b"\n" for body in bodies)


def _error_line(error: APIError) -> bytes:
    return error.plain_body() + b"\n"


def _json(body: dict[str, Any]) -> Response:
    return Response(to_json(body), media_type="application/json")


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def _began(http: HTTPRequest) -> float:
    """When a request came, by time.monotonic()."""
    return time.monotonic() - http.scope.get("state", {}).get(LOAD_SECONDS, 0.0)


def _load_ns(http: HTTPRequest) -> int:
    """Nanoseconds for which a request has waited for its model."""
    return round(http.scope.get("state", {}).get(LOAD_SECONDS, 0.0) * 1e9)


def _ns(seconds: float) -> int:
    """Nanoseconds, at least one, as clients divide by them."""
    return max(1, round(seconds * 1e9))
