"""The HTTP application: routes, middleware, error answers."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from jaxserve.server.endpoints import (
    adapters,
    batches,
    files,
    invocations,
    llamacpp,
    models,
    ollama,
    page,
    pooling,
    repository,
    responses,
    weights,
)
from jaxserve.server.endpoints.anthropic import count_tokens, create_message
from jaxserve.server.endpoints.chat import create_chat_completion
from jaxserve.server.endpoints.completions import create_completion
from jaxserve.server.http.errors import APIError, handle_exception
from jaxserve.server.http.keys import ApiKey
from jaxserve.server.http.middleware import (
    FILES_PATH,
    ApiKeys,
    BodyLimit,
    ConnectionLimit,
    RequestId,
    UnexpectedErrors,
    WithoutRootPath,
    WithRootPath,
)
from jaxserve.server.http.origin import OriginCheck, OriginHint
from jaxserve.server.http.state import ServerState
from jaxserve.server.observe.access import Access
from jaxserve.server.observe.tracing import Tracer
from jaxserve.server.schemas.batches import URLS
from jaxserve.types import EngineDeadError, InvalidRequestError, QueueFullError

_ROUTES = [
    Route("/v1/completions", create_completion, methods=["POST"]),
    Route("/v1/chat/completions", create_chat_completion, methods=["POST"]),
    Route("/v1/responses", responses.create_response, methods=["POST"]),
    Route("/v1/responses/input_tokens", responses.count_input_tokens, methods=["POST"]),
    Route("/v1/responses/compact", responses.compact, methods=["GET", "POST", "DELETE"]),
    Route("/v1/responses/{id}", responses.get_response),
    Route("/v1/responses/{id}", responses.delete_response, methods=["DELETE"]),
    Route("/v1/responses/{id}/cancel", responses.cancel_response, methods=["POST"]),
    Route("/v1/responses/{id}/input_items", responses.list_input_items),
    Route("/v1/messages", create_message, methods=["POST"]),
    Route("/v1/messages/count_tokens", count_tokens, methods=["POST"]),
    Route("/v1/embeddings", pooling.create_embeddings, methods=["POST"]),
    *(Route(path, pooling.create_scores, methods=["POST"]) for path in ("/v1/score", "/score")),
    *(Route(path, pooling.rerank, methods=["POST"]) for path in ("/v1/rerank", "/rerank", pooling.COHERE_PATH)),
    Route(FILES_PATH, files.upload_file, methods=["POST"]),
    Route(FILES_PATH, files.list_files),
    Route("/v1/files/{id}", files.get_file),
    Route("/v1/files/{id}", files.delete_file, methods=["DELETE"]),
    Route("/v1/files/{id}/content", files.get_content),
    Route("/v1/batches", batches.create_batch, methods=["POST"]),
    Route("/v1/batches", batches.list_batches),
    Route("/v1/batches/{id}", batches.get_batch),
    Route("/v1/batches/{id}/cancel", batches.cancel_batch, methods=["POST"]),
    *(Route(path, models.root) for path in ("/v1", "/v1/")),
    *(Route(path, models.list_models) for path in ("/v1/models", "/v1/models/", "/models")),
    Route("/invocations", invocations.invoke, methods=["POST"]),
    Route("/v1/models/{name:path}", models.get_model),
    Route("/tokenize", models.tokenize, methods=["POST"]),
    Route("/detokenize", models.detokenize, methods=["POST"]),
    *(Route(path, models.health) for path in ("/health", "/v1/health")),
    Route("/ping", models.health, methods=["GET", "POST"]),
    Route("/ready", models.ready),
    Route("/version", models.version),
    Route("/metrics", models.metrics),
    Route("/pool", page.pool),
    Route("/profile", models.profile, methods=["POST"]),
    Route("/load", models.load),
    Route("/server_info", models.server_info),
    Route("/tokenizer_info", models.tokenizer_info),
    *(Route(path, handler, methods=["POST"]) for path, handler in adapters.HANDLERS.items()),
    *(Route(path, run, methods=weights.METHODS.get(path, ["POST"])) for path, run in weights.HANDLERS.items()),
    Route("/reset_prefix_cache", models.reset_prefix_cache, methods=["POST"]),
    Route("/openapi.json", models.openapi),
    *repository.ROUTES,
    *ollama.ROUTES,
    *llamacpp.ROUTES,
]


def build_app(state: ServerState, routes: Sequence[Route] = (), routing: Middleware | None = None) -> Starlette:
    """The application of one API server: the process that serves HTTP and passes requests to the engine's process.

    With several models, `routing` finds that of a request, and `routes` go before those for one model."""
    settings = state.settings
    middleware = [Middleware(RequestId), Middleware(UnexpectedErrors)]
    tracer = Tracer(settings.otlp_endpoint) if settings.otlp_endpoint else None
    if settings.access_log or tracer is not None:
        watch = Middleware(
            Access, model=settings.model_name, log_lines=settings.access_log, tracer=tracer, api_server=state.number
        )
        middleware.insert(0, watch)
    middleware.append(Middleware(OriginHint, origins=settings.cors_origins))
    if not settings.api_keys:
        middleware.append(Middleware(OriginCheck, hosts=settings.hosts, origins=settings.cors_origins))
    if settings.cors_origins:
        middleware.append(
            Middleware(CORSMiddleware, allow_origins=settings.cors_origins, allow_methods=["*"], allow_headers=["*"])
        )
    middleware.append(Middleware(ConnectionLimit, connections=state.connections))
    if settings.api_keys:
        open_paths = page.PATHS | ({"/metrics"} if settings.open_metrics else set())
        monitors = [ApiKey(key) for key in (settings.admin_key, settings.metrics_key) if key is not None]
        middleware.append(
            Middleware(
                ApiKeys,
                keys=settings.api_keys,
                monitor_keys=monitors,
                open_paths=open_paths,
                counts=state.counts,
                model_names=None if routing is not None else settings.model_names,
            )
        )
    middleware.append(Middleware(BodyLimit, bodies=state.bodies))
    routes = [*routes, *_ROUTES, *(page.ROUTES if settings.ui else page.WITHOUT_PAGES)]
    if routing is not None:
        middleware.append(routing)
    if root := settings.root_path:
        middleware.insert(0, Middleware(WithoutRootPath, root_path=root, paths=[route.path for route in routes]))
        middleware.append(Middleware(WithRootPath, root_path=root))
    return _application(state, routes, middleware)


def batch_app(state: ServerState, routing: Middleware | None = None) -> Starlette:
    """What answers the requests of batches, which come from this process: the endpoints without keys, origins and
    connections. `scope["state"]` may hold the key of a batch. `routing` as for `build_app`."""
    routes = [route for route in _ROUTES if route.path in URLS]
    middleware = [Middleware(UnexpectedErrors), Middleware(BodyLimit, bodies=state.bodies)]
    if routing is not None:
        middleware.append(routing)
    return _application(state, routes, middleware)


def _application(state: ServerState, routes: list[Route], middleware: list[Middleware]) -> Starlette:
    answered = (APIError, InvalidRequestError, QueueFullError, EngineDeadError, HTTPException)
    handlers = dict.fromkeys(answered, handle_exception) | {ClientDisconnect: _client_left}
    app = Starlette(routes=routes, middleware=middleware, exception_handlers=handlers)  # type: ignore[arg-type]
    app.state.server = state
    return app


async def _client_left(request: Request, error: Exception) -> Response:
    """The client has disconnected, so nobody reads this answer. 499 is the status that proxies log in this case."""
    return Response(status_code=499)
