"""/v1/files: upload, list, get, content and delete, in OpenAI's shape. A key's files are invisible to other keys."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import re
from collections.abc import Callable, Iterator
from typing import TypeVar

import msgspec
from starlette.requests import Request as HTTPRequest
from starlette.responses import FileResponse, Response

from jaxserve.server.batches.upload import receive
from jaxserve.server.http.errors import APIError, unavailable
from jaxserve.server.http.file_records import INPUT, OUTPUT, FileRecord
from jaxserve.server.http.file_store import CorruptRecordError, FileStore, log, owner_of
from jaxserve.server.http.state import key_of, state_of, to_json

T = TypeVar("T")

MOST_LISTED = 10_000  # files in one answer
DEFAULT_LIFE = 30 * 86_400  # seconds after which an input of a batch expires
SHORTEST_LIFE = 3600
LONGEST_LIFE = 30 * 86_400
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def store_of(http: HTTPRequest) -> FileStore:
    """Raises APIError (404) where neither files nor batches are served."""
    if (store := state_of(http).files) is None:
        text = "this server keeps no files and runs no batches, because it was started without --files-dir"
        raise APIError(404, text, code="files_not_served")
    return store


@contextlib.contextmanager
def disk_errors() -> Iterator[None]:
    """Turns errors of the disk into answers."""
    try:
        yield
    except CorruptRecordError as error:
        log.error("%s", error)
        text = "what the server has stored of this object cannot be read; its log has the details"
        raise APIError(500, text, code="corrupt_record") from None
    except OSError as error:
        log.error("the folder of --files-dir failed: %s", error)
        if error.errno in _FULL:
            text = f"the disk of the server's files is full ({error.strerror}); nothing was stored"
            raise APIError(507, text, code="disk_full") from None
        raise APIError(500, f"the disk of the server's files failed: {error.strerror}", code="disk_error") from None


async def on_disk(work: Callable[[], T]) -> T:
    """The result of `work()`, which may wait for the disk. Raises APIError for errors of the disk."""
    with disk_errors():
        return await asyncio.to_thread(work)


def shown(record: FileRecord) -> Response:
    return Response(to_json(record), media_type="application/json")


async def upload_file(http: HTTPRequest) -> Response:
    """POST /v1/files: a form with the file, its purpose and perhaps when it expires."""
    store = store_of(http)
    if state_of(http).draining:
        raise unavailable("the server is shutting down", "shutting_down")
    with disk_errors():
        upload, form = await receive(http, store, owner_of(key_of(http)))
        try:
            purpose = form.fields.get("purpose", "")
            if purpose != INPUT:
                text = f"purpose must be {INPUT!r}, as this server uses files for batches only, got {purpose[:64]!r}"
                raise APIError(400, text, param="purpose")
            seconds = _life(form.fields)
            assert form.filename is not None
            filename = form.filename
            return shown(await asyncio.to_thread(lambda: upload.finish(filename, purpose, seconds)))
        finally:
            upload.close()


def _life(fields: dict[str, str]) -> int:
    """Seconds after which a file expires. Raises APIError (400)."""
    anchor = fields.get("expires_after[anchor]")
    seconds = fields.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return DEFAULT_LIFE
    if anchor != "created_at":
        got = repr((anchor or "")[:64])
        raise APIError(400, f"expires_after[anchor] must be 'created_at', got {got}", param="expires_after")
    return check_life("expires_after[seconds]", seconds, "expires_after")


def check_life(name: str, value: str | int | None, param: str) -> int:
    """Seconds from an hour to 30 days. Raises APIError (400) for anything else."""
    text = str(value)
    if not re.fullmatch("[0-9]{1,9}", text, re.ASCII) or not SHORTEST_LIFE <= int(text) <= LONGEST_LIFE:
        allowed = f"a number of seconds from {SHORTEST_LIFE} to {LONGEST_LIFE}"
        raise APIError(400, f"{name} must be {allowed}, got {text[:64]!r}", param=param)
    return int(text)


def query_limit(http: HTTPRequest, default: int, most: int) -> int:
    """The query's `limit`. Raises APIError (400)."""
    text = http.query_params.get("limit", str(default))
    if not re.fullmatch("[0-9]{1,9}", text, re.ASCII) or not 1 <= int(text) <= most:
        raise APIError(400, f"limit must be an integer between 1 and {most}, got {text[:64]!r}", param="limit")
    return int(text)


def listing(data: list[msgspec.Raw], ids: list[str], more: bool) -> Response:
    """A page of a list, as JSON."""
    ends = {"first_id": ids[0] if ids else None, "last_id": ids[-1] if ids else None}
    return Response(to_json({"object": "list", "data": data, **ends, "has_more": more}), media_type="application/json")


async def list_files(http: HTTPRequest) -> Response:
    """GET /v1/files, with `after`, `limit`, `order` and `purpose`."""
    store = store_of(http)
    limit = query_limit(http, MOST_LISTED, MOST_LISTED)
    order = http.query_params.get("order", "desc")
    purpose = http.query_params.get("purpose")
    if order not in ("asc", "desc"):
        raise APIError(400, f"order must be 'asc' or 'desc', got {order[:64]!r}", param="order")
    if purpose not in (None, INPUT, OUTPUT):
        raise APIError(400, f"purpose must be {INPUT!r} or {OUTPUT!r}, got {purpose[:64]!r}", param="purpose")
    after = http.query_params.get("after")
    owner = owner_of(key_of(http))
    found, more = await on_disk(lambda: store.files(owner, after, limit, order == "desc", purpose))
    return listing([msgspec.Raw(to_json(one)) for one in found], [one.id for one in found], more)


async def get_file(http: HTTPRequest) -> Response:
    """GET /v1/files/{id}."""
    store = store_of(http)
    owner = owner_of(key_of(http))
    return shown(await on_disk(lambda: store.file(owner, http.path_params["id"])))


async def get_content(http: HTTPRequest) -> Response:
    """GET /v1/files/{id}/content: its bytes, or a range of them."""
    store = store_of(http)
    owner = owner_of(key_of(http))
    record = await on_disk(lambda: store.file(owner, http.path_params["id"]))
    path = store.path(owner, record.id)
    headers = {"X-Content-Type-Options": "nosniff"}
    return FileResponse(path, headers=headers, media_type="application/octet-stream", filename=record.filename)


async def delete_file(http: HTTPRequest) -> Response:
    """DELETE /v1/files/{id}."""
    store = store_of(http)
    owner = owner_of(key_of(http))
    name = http.path_params["id"]
    await on_disk(lambda: store.delete_file(owner, name))
    return Response(to_json({"id": name, "object": "file", "deleted": True}), media_type="application/json")
