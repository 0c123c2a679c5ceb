"""The endpoints of a server with several models that answer for all of them."""

from __future__ import annotations

import math
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jaxserve.server.http.listing import Listed
from jaxserve.server.http.state import ServerState, key_of, state_of, to_json
from jaxserve.server.models.engines import Models


def _models(http: Request) -> tuple[ServerState, Models]:
    state = state_of(http)
    assert isinstance(state.models, Models)
    return state, state.models


async def list_models(http: Request) -> Response:
    """GET /v1/models: all names of the models that the request's key may use, with the models' states."""
    state, models = _models(http)
    cards = [_card(state, one, name) for one in models.listed(key_of(http)) for name in (one.name, *one.aliases)]
    adapters = [
        _card(state, one, name, adapter=True)
        for one in models.listed(key_of(http))
        for name in models.adapters_of(one.name)
    ]
    return Response(to_json({"object": "list", "data": cards + adapters}), media_type="application/json")


async def get_model(http: Request) -> Response:
    """GET /v1/models/{name}."""
    state, models = _models(http)
    name = http.path_params["name"]
    found = models.find(name, key_of(http))
    adapter = name not in (found.name, *found.aliases)
    return Response(to_json(_card(state, found, name, adapter=adapter)), media_type="application/json")


def _card(state: ServerState, model: Listed, name: str, *, adapter: bool = False) -> dict[str, Any]:
    info = model.info
    expires = model.expires
    return {
        "id": name,
        "object": "model",
        "created": state.created,
        "owned_by": "jaxserve",
        "root": model.name,
        "parent": model.name if adapter else None,
        "max_model_len": None if info is None else info.max_model_len,
        "modalities": ["text"] if info is None or info.sees is None else ["text", "image"],
        "state": model.state,
        "reason": model.reason or None,
        "memory_bytes": model.size,
        "pinned": model.pinned,
        "expires_in_seconds": None if expires is None or expires == math.inf else round(expires, 1),
    }


async def metrics(http: Request) -> Response:
    """GET /metrics, in Prometheus's text format."""
    _, models = _models(http)
    return Response(models.render_metrics(), media_type="text/plain; version=0.0.4; charset=utf-8")


ROUTES = [
    Route("/v1/models", list_models),
    Route("/v1/models/", list_models),
    Route("/models", list_models),
    Route("/v1/models/{name:path}", get_model),
    Route("/metrics", metrics),
]
