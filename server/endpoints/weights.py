"""Sleep, and new weights: vLLM's /sleep, /wake_up and /is_sleeping; /update_weights, which is also SGLang's
/update_weights_from_disk.

All need the admin key. `jaxserve.server.ipc.weight_changes` says what happens to requests meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from jaxserve.server.endpoints.adapters import below
from jaxserve.server.endpoints.models import require_admin
from jaxserve.server.http.errors import APIError, unavailable
from jaxserve.server.http.middleware import WEIGHT_PATHS
from jaxserve.server.http.state import ServerState, read_body, state_of, to_json
from jaxserve.server.ipc.messages import Sleep, UpdateWeights, WakeUp
from jaxserve.server.schemas.weights import UpdateWeightsRequest
from jaxserve.types import EngineDeadError, InvalidRequestError, QueueFullError

_decoder = msgspec.json.Decoder(UpdateWeightsRequest)


async def sleep(http: Request) -> Response:
    """POST /sleep?level=1&mode=wait&timeout=300. Answers when the devices' memory is free."""
    state = _state(http)
    query = http.query_params
    level = {"1": 1, "2": 2}.get(query.get("level", "1"))
    if level is None:
        raise APIError(400, f"level must be 1 or 2, got {query['level'][:64]!r}", param="level")
    if (mode := query.get("mode", "wait")) not in ("wait", "abort"):
        raise APIError(400, f"mode must be wait or abort, got {mode[:64]!r}", param="mode")
    text = query.get("timeout", "300")
    if not (text.isdecimal() and len(text) < 5 and int(text) <= 3600):
        raise APIError(400, f"timeout must be a whole number of seconds up to 3600, got {text[:64]!r}", param="timeout")
    await _change(state, Sleep, level, mode == "abort", float(text))
    return _json({"is_sleeping": True})


async def wake_up(http: Request) -> Response:
    """POST /wake_up. Answers when requests are served again."""
    state = _state(http)
    await _change(state, WakeUp)
    return _json({"is_sleeping": False})


async def is_sleeping(http: Request) -> Response:
    """GET /is_sleeping."""
    return _json({"is_sleeping": _state(http).sleeps})


async def update_weights(http: Request) -> Response:
    """POST /update_weights. Answers when the new weights are served, with their version."""
    state = _state(http)
    began = time.monotonic()
    if state.settings.weights_root is None:
        raise APIError(404, "weights cannot be replaced here; start the server with --weights-root DIR")
    root = Path(state.settings.weights_root)
    body = await read_body(http, _decoder)
    if not body.flush_cache:
        raise APIError(400, "flush_cache must be true: cached pages belong to the old weights", param="flush_cache")
    path = await state.off_loop(lambda: below(root, body.model_path, "--weights-root", "model_path"))
    aborts = body.abort_all_requests or body.mode == "abort"
    await _change(state, UpdateWeights, str(path), body.weight_version, aborts, body.timeout)
    _, info = state.require_loaded()
    seconds = round(time.monotonic() - began, 3)
    text = f"the weights of {body.model_path} are served as version {info.weights.version}"
    return _json({"success": True, "message": text, "weight_version": info.weights.version, "seconds": seconds})


HANDLERS = dict(zip(WEIGHT_PATHS, (sleep, wake_up, is_sleeping, update_weights, update_weights), strict=True))
METHODS = {"/is_sleeping": ["GET"]}  # of the others: POST


def _state(http: Request) -> ServerState:
    """The server's state. Raises APIError for a request without the admin key, and while there is no engine."""
    require_admin(http, may_be_empty=True)
    state = state_of(http)
    state.require_loaded()
    return state


async def _change(state: ServerState, kind: Callable[..., Any], *fields: Any) -> None:
    """Has the engine make a change, and waits until all API servers know. Raises APIError if nothing has changed."""
    try:
        await state.client.change_weights(kind, *fields)
    except EngineDeadError:
        raise
    except QueueFullError as error:
        raise unavailable(f"{error}; nothing has changed", "busy") from None
    except InvalidRequestError as error:
        raise APIError(400, str(error)) from None
    except RuntimeError as error:
        raise APIError(500, f"{error}; the server's log has the details", code="internal_error") from error
    await state.all_api_servers_know()


def _json(value: Any) -> Response:
    return Response(to_json(value), media_type="application/json")
