"""Triton's HTTP endpoints below /v2: health, models, the repository with load and unload, and its generate extension.

https://github.com/triton-inference-server/server/tree/main/docs/protocol
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jaxserve import __version__
from jaxserve.server.endpoints.completions import prepare_completion
from jaxserve.server.endpoints.models import require_admin
from jaxserve.server.http.body import put_back, receive_body
from jaxserve.server.http.errors import APIError
from jaxserve.server.http.listing import Listed
from jaxserve.server.http.sse import EventStream, run_until_disconnect
from jaxserve.server.http.state import key_of, models_of, read_body, state_of, to_json
from jaxserve.server.images.long_strings import Cutter
from jaxserve.server.schemas.common import CompletionRequest
from jaxserve.server.schemas.triton import IGNORED, OTHER_NAMES, PARAMETERS, IndexRequest, LoadRequest, UnloadRequest
from jaxserve.types import InvalidRequestError

T = TypeVar("T")

_VERSION = "1"  # of each model, as Triton counts them
_STATES = {"ready": "READY", "starting": "LOADING", "waiting": "LOADING", "unloading": "UNLOADING"}
_index_decoder = msgspec.json.Decoder(IndexRequest)
_load_decoder = msgspec.json.Decoder(LoadRequest)
_unload_decoder = msgspec.json.Decoder(UnloadRequest)
_fields_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_completion_decoder = msgspec.json.Decoder(CompletionRequest)


def _json(value: Any) -> Response:
    return Response(to_json(value), media_type="application/json")


def _model(http: Request) -> Listed:
    """The model of a request's path. Raises APIError (404) for one that there is not."""
    if (version := http.path_params.get("version", _VERSION)) != _VERSION:
        raise APIError(404, f"there is no version {version[:64]!r} of a model, only {_VERSION}")
    return models_of(http).find(http.path_params["name"], key_of(http))


async def _read(http: Request, decoder: msgspec.json.Decoder[T]) -> T:
    """The body, which may be empty, and need not be declared as JSON: Triton's client does not."""
    received = await receive_body(http)
    if not received.text():
        return decoder.decode(b"{}")
    put_back(http, received)
    return await read_body(http, decoder, any_type=True)


async def server_facts(http: Request) -> Response:
    """GET /v2."""
    extensions = ["model_repository", "generate"]
    return _json({"name": "jaxserve", "version": __version__, "extensions": extensions})


async def live(http: Request) -> Response:
    """GET /v2/health/live: 200 while the server runs."""
    return Response(status_code=200)


async def ready(http: Request) -> Response:
    """GET /v2/health/ready: 200 if new requests are served."""
    return Response(status_code=200 if state_of(http).status == "ready" else 503)


async def model_ready(http: Request) -> Response:
    """GET /v2/models/{name}/ready: 200 if the model is in memory."""
    return Response(status_code=200 if _model(http).state == "ready" else 503)


async def model_facts(http: Request) -> Response:
    """GET /v2/models/{name}: its inputs and outputs."""
    text = {"datatype": "BYTES", "shape": [1]}
    found = _model(http)
    inputs = [{"name": "text_input", **text}]
    outputs = [{"name": "text_output", **text}]
    return _json(
        {"name": found.name, "versions": [_VERSION], "platform": "jaxserve", "inputs": inputs, "outputs": outputs}
    )


async def model_config(http: Request) -> Response:
    """GET /v2/models/{name}/config."""
    text = {"data_type": "TYPE_STRING", "dims": [1]}
    return _json(
        {
            "name": _model(http).name,
            "platform": "",
            "backend": "jaxserve",
            "max_batch_size": 0,
            "input": [{"name": "text_input", **text}],
            "output": [{"name": "text_output", **text}],
            "model_transaction_policy": {"decoupled": True},
        }
    )


async def index(http: Request) -> Response:
    """POST /v2/repository/index: the models and their states; with `ready`, only those that are ready."""
    body = await _read(http, _index_decoder)
    found = models_of(http).listed(key_of(http))
    entries = [
        {"name": one.name, "version": _VERSION, "state": _STATES.get(one.state, "UNAVAILABLE"), "reason": one.reason}
        for one in found
    ]
    return _json([entry for entry in entries if entry["state"] == "READY" or not body.ready])


async def load(http: Request) -> Response:
    """POST /v2/repository/models/{name}/load: starts a model, and answers when it is ready. Needs the admin key."""
    require_admin(http, may_be_empty=True)
    await _read(http, _load_decoder)
    await run_until_disconnect(http.receive, models_of(http).load(http.path_params["name"]))
    return _json({})


async def unload(http: Request) -> Response:
    """POST /v2/repository/models/{name}/unload: stops a model after its running requests, and answers when its memory
    is free. Needs the admin key."""
    require_admin(http, may_be_empty=True)
    await _read(http, _unload_decoder)
    await run_until_disconnect(http.receive, models_of(http).unload(http.path_params["name"]))
    return _json({})


async def generate(http: Request) -> Response:
    """POST /v2/models/{name}/generate: the continuation of `text_input`, after it unless `exclude_input_in_output`."""
    given = await _generation(http)
    state = state_of(http)
    answer = await run_until_disconnect(http.receive, prepare_completion(state, http, given.body))
    (choice,) = await run_until_disconnect(http.receive, answer.generation.collect())
    return _json({**given.head, "text_output": choice.text if given.excludes_input else given.input + choice.text})


async def generate_stream(http: Request) -> Response:
    """POST /v2/models/{name}/generate_stream: the continuation in server-sent events."""
    given = await _generation(http)
    given.body.stream = True
    state = state_of(http)
    answer = await run_until_disconnect(http.receive, prepare_completion(state, http, given.body))

    async def events() -> AsyncGenerator[bytes, None]:
        async with contextlib.aclosing(answer.generation.deltas()) as batches:
            async for deltas in batches:
                yield b"".join(b"data: %b\n\n" % to_json({**given.head, "text_output": one.text}) for one in deltas)

    return EventStream(events(), closing=b"", on_error=lambda error: b"data: %b\n\n" % error.plain_body())


@dataclass
class _Given:
    """What a request to generate asks for, as one of /v1/completions."""

    body: CompletionRequest
    input: str
    excludes_input: bool

    @property
    def head(self) -> dict[str, Any]:
        return {"model_name": self.body.model, "model_version": _VERSION}


async def _generation(http: Request) -> _Given:
    """The body of a request to generate. Parameters are in `parameters`, as vLLM's backend has them, or beside
    `text_input`, as TensorRT-LLM's has them. Raises APIError or InvalidRequestError."""
    found = _model(http)
    fields = await _read(http, _fields_decoder)
    parameters = _value(fields, "parameters", dict[str, msgspec.Raw], {})
    text = _value(fields, "text_input", str, None)
    if text is None:
        raise InvalidRequestError("text_input is required: a string", "text_input")
    given = fields | parameters
    excludes_input = _value(given, "exclude_input_in_output", bool, False)
    for name in IGNORED:
        given.pop(name, None)
    if unknown := [name for name in given if name not in PARAMETERS and name not in OTHER_NAMES]:
        allowed = ", ".join(sorted({*PARAMETERS, *OTHER_NAMES}))
        raise InvalidRequestError(f"there is no parameter {unknown[0][:64]!r}; there are {allowed}", unknown[0][:64])
    given = {OTHER_NAMES.get(name, name): _read_as(name, value) for name, value in given.items()}
    name = found.name if http.path_params["name"] in found.aliases else http.path_params["name"]
    completion = Cutter()
    completion.add(to_json({**given, "prompt": text, "model": name}), within=False)
    put_back(http, completion)
    body = await read_body(http, _completion_decoder, any_type=True)
    body.check()
    return _Given(body, text, excludes_input)


def _read_as(name: str, value: msgspec.Raw) -> msgspec.Raw:
    """A parameter's value as /v1/completions has it. TensorRT-LLM's examples send empty texts for no words."""
    if name in ("stop_words", "bad_words") and bytes(value) in (b'""', b'[""]'):
        return msgspec.Raw(b"[]")
    return msgspec.Raw(b"[%b]" % bytes(value)) if name == "end_id" else value


def _value(fields: dict[str, msgspec.Raw], name: str, kind: type[T], default: T | None) -> T:
    """Takes a field out of a body. Raises InvalidRequestError for one of another type."""
    if (raw := fields.pop(name, None)) is None:
        return default  # type: ignore[return-value]
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError):
        kinds = {str: "a string", bool: "true or false"}
        raise InvalidRequestError(f"{name} must be {kinds.get(kind, 'an object')}", name) from None


async def refuse(http: Request) -> Response:
    """POST /v2/models/{name}/infer and GET /v2/models/{name}/stats."""
    _model(http)
    end = http.url.path.rpartition("/")[2]
    raise APIError(400, f"/{end} is not served: texts go to /generate, and statistics are at /metrics")


_MODEL = "/v2/models/{name:path}"
_Handler = Callable[[Request], Awaitable[Response]]
_OF_MODEL: dict[str, tuple[_Handler, str]] = {
    "/ready": (model_ready, "GET"),
    "/config": (model_config, "GET"),
    "/generate": (generate, "POST"),
    "/generate_stream": (generate_stream, "POST"),
    "/infer": (refuse, "POST"),
    "/stats": (refuse, "GET"),
    "": (model_facts, "GET"),
}
ROUTES = [
    Route("/v2", server_facts),
    Route("/v2/health/live", live),
    Route("/v2/health/ready", ready),
    Route("/v2/repository/index", index, methods=["POST"]),
    Route("/v2/repository/models/{name:path}/load", load, methods=["POST"]),
    Route("/v2/repository/models/{name:path}/unload", unload, methods=["POST"]),
    *(
        Route(f"{_MODEL}{version}{end}", handler, methods=[method])
        for end, (handler, method) in _OF_MODEL.items()
        for version in ("/versions/{version}", "")
    ),
]
