"""The pages at `/` and `/docs`: static files, and GET /pool, the data for the picture of the KV pages."""

from __future__ import annotations

import hashlib
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jaxserve.server.http.errors import own_path
from jaxserve.server.http.state import state_of, to_json

_FOLDER = Path(__file__).parent.parent / "static"
_FILES = {
    "/": ("index.html", "text/html"),
    "/docs": ("docs.html", "text/html"),
    "/ui/app.css": ("app.css", "text/css"),
    "/ui/docs.css": ("docs.css", "text/css"),
} | {f"/ui/{name}": (name, "text/javascript") for name in ("page.js", "chat.js", "pictures.js", "pool.js", "docs.js")}
PATHS = frozenset(_FILES)  # open without a key, because they hold no data; the page's own requests need one
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


async def _file(http: Request) -> Response:
    name, kind = _FILES[own_path(http.scope)]
    data = (_FOLDER / name).read_bytes()
    headers = dict(_HEADERS)
    policy = _HEADERS["Content-Security-Policy"]
    if kind == "text/html" and (root := state_of(http).settings.root_path):  # the page's links are relative to it
        data = data.replace(b"<head>", f'<head>\n  <base href="{root}/">'.encode(), 1)
        headers["Content-Security-Policy"] = policy.replace("base-uri 'none'", "base-uri 'self'")
    headers["ETag"] = f'"{hashlib.sha256(data).hexdigest()[:32]}"'
    if http.headers.get("if-none-match") == headers["ETag"]:
        return Response(status_code=304, headers=headers)
    return Response(data, headers=headers, media_type=kind)


async def pool(http: Request) -> Response:
    """GET /pool: a `jaxserve.scheduling.page_snapshot.PoolSnapshot`, at most half a second old."""
    state = state_of(http)
    state.require_ready()
    return Response(to_json(await state.client.pool()), media_type="application/json")


async def _plain(http: Request) -> Response:
    """What Ollama answers at its root. Its clients ask there whether a server runs."""
    return Response("Ollama is running", media_type="text/plain")


ROUTES = [Route(path, _file) for path in _FILES]
WITHOUT_PAGES = [Route("/", _plain)]
