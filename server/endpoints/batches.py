"""/v1/batches: create, list, get and cancel, in OpenAI's shape. `server/batches/runner.py` runs them."""

from __future__ import annotations

import time

import msgspec
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from jaxserve.server.endpoints.files import check_life, listing, on_disk, query_limit, store_of
from jaxserve.server.http.errors import APIError, unavailable
from jaxserve.server.http.file_records import BatchRecord, new_id
from jaxserve.server.http.file_store import owner_of
from jaxserve.server.http.state import key_of, read_body, state_of, to_json
from jaxserve.server.schemas.batches import BatchRequest

_decoder = msgspec.json.Decoder(BatchRequest)
MOST_LISTED = 100


def _shown(batch: BatchRecord) -> Response:
    return Response(to_json(batch.shown()), media_type="application/json")


async def create_batch(http: HTTPRequest) -> Response:
    """POST /v1/batches. The batch begins at once, or when others have ended."""
    store = store_of(http)
    state = state_of(http)
    if state.draining:
        raise unavailable("the server is shutting down", "shutting_down")
    body = await read_body(http, _decoder)
    body.check()
    now = int(time.time())
    if (expiry := body.output_expires_after) is not None:
        check_life("output_expires_after.seconds", expiry.seconds, "output_expires_after")
    batch = BatchRecord(
        id=new_id("batch_"),
        endpoint=body.endpoint,
        input_file_id=body.input_file_id,
        completion_window=body.completion_window,
        created_at=now,
        expires_at=now + body.seconds,
        metadata=body.metadata,
        output_expires_after=expiry,
    )
    owner = owner_of(key_of(http))
    most = state.settings.max_batches_in_progress
    await on_disk(lambda: store.create_batch(owner, batch, most))
    state.wake_batches()
    return _shown(batch)


async def list_batches(http: HTTPRequest) -> Response:
    """GET /v1/batches, with `after` and `limit`: the newest first."""
    store = store_of(http)
    limit = query_limit(http, 20, MOST_LISTED)
    after = http.query_params.get("after")
    owner = owner_of(key_of(http))
    found, more = await on_disk(lambda: store.batches(owner, after, limit))
    return listing([msgspec.Raw(to_json(one.shown())) for one in found], [one.id for one in found], more)


async def get_batch(http: HTTPRequest) -> Response:
    """GET /v1/batches/{id}."""
    store = store_of(http)
    owner = owner_of(key_of(http))
    return _shown(await on_disk(lambda: store.batch(owner, http.path_params["id"])))


async def cancel_batch(http: HTTPRequest) -> Response:
    """POST /v1/batches/{id}/cancel. What is answered by then stays answered."""
    store = store_of(http)
    owner = owner_of(key_of(http))
    name = http.path_params["id"]

    def cancel() -> BatchRecord:
        batch = store.batch(owner, name)
        if batch.has_ended:
            text = f"a batch whose status is {batch.status!r} cannot be cancelled"
            raise APIError(409, text, code="batch_has_ended")
        store.wish_cancelled(owner, name)
        return store.batch(owner, name)

    return _shown(await on_disk(cancel))
