"""Keeps other sites' web pages from using a server that requires no key, and tells which flag lets one in.

A browser lets any page send requests to a server on the user's machine. The request names the page's site in `Origin`.
After DNS rebinding, where the site's name resolves to the user's machine, it names the site in `Host` instead.
"""

from __future__ import annotations

import ipaddress
import logging
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from jaxserve.server.http.errors import APIError

log = logging.getLogger("jaxserve.server")

_HARMLESS = frozenset({"GET", "HEAD", "OPTIONS"})  # change nothing, and browsers hide the answers from other sites
_DEFAULT_PORTS = {"http": 80, "https": 443}


class OriginCheck:
    """Answers 421 if `Host` names another machine, and 403 if another site's page sent the request.

    `hosts`: accepted names in `Host`, besides local names such as localhost; None: any. `origins`: sites whose pages
    may send requests, such as "https://example.com"; "*": all.
    """

    def __init__(self, app: ASGIApp, hosts: Collection[str] | None, origins: Collection[str]):
        self.app = app
        self._hosts = None if hosts is None else frozenset(map(str.lower, hosts))
        self._origins = frozenset(map(str.lower, origins))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._error(scope["method"], Headers(scope=scope)) if scope["type"] == "http" else None
        if error is None:
            await self.app(scope, receive, send)
        else:
            await error.response(scope)(scope, receive, send)

    def _error(self, method: str, headers: Headers) -> APIError | None:
        host = headers.get("host", "")
        if (
            self._hosts is not None
            and host
            and not is_local(name := _split(f"//{host}")[0])
            and name not in self._hosts
        ):
            text = f"this server answers under the names of this machine alone, not {host[:256]!r}; see --allowed-host"
            return APIError(421, text, code="unknown_host")
        if method in _HARMLESS or (origin := foreign_origin(headers, self._origins)) is None:
            return None
        text = f"pages of {origin[:256]!r} may not use this server, which asks for no API key; see --allowed-origins"
        return APIError(403, text, code="unknown_origin")


class OriginHint:
    """Answers 403 when a browser asks whether another site's page may send a request, unless `origins` has the site;
    the browser then shows the page a CORS error. Logs once which flag would allow it."""

    def __init__(self, app: ASGIApp, origins: Collection[str]):
        self.app = app
        self._origins = frozenset(map(str.lower, origins))
        self._has_logged = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope) if scope["type"] == "http" else Headers()
        if (origin := foreign_origin(headers, self._origins)) is None:
            await self.app(scope, receive, send)
            return
        text = f"pages of {origin[:256]!r} may not use this server; --allowed-origins {origin[:256]} allows it"
        if not self._has_logged:
            self._has_logged = True
            log.warning("%s (browsers call this a CORS error; further ones are not logged)", text)
        if scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
            await APIError(403, text, code="unknown_origin").response(scope)(scope, receive, send)
        else:
            await self.app(scope, receive, send)


def foreign_origin(headers: Headers, origins: frozenset[str]) -> str | None:
    """The site whose page sent a request, unless it is this server's own or one of `origins`."""
    origin = headers.get("origin", "").lower()
    if not origin or origins & {origin, "*"}:
        return None
    if headers.get("sec-fetch-site") == "same-origin":  # a page cannot set it
        return None
    names = headers.get("host", ""), headers.get("x-forwarded-host", "")
    own = {_split(f"//{name}", origin) for name in names if name}
    return None if _split(origin, origin) in own else origin


def is_local(name: str) -> bool:
    """Whether a host name or address always stands for the machine that uses it, as localhost does."""
    try:
        return ipaddress.ip_address(name.partition("%")[0]).is_loopback
    except ValueError:
        return name.rstrip(".") == "localhost" or name.rstrip(".").endswith(".localhost")


def _split(url: str, origin: str = "") -> tuple[str, int | None]:
    """Name and port of a URL; the port defaults to that of the origin's scheme."""
    try:
        parts = urlsplit(url.lower())
        return parts.hostname or "", parts.port or _DEFAULT_PORTS.get(urlsplit(origin).scheme)
    except ValueError:
        return "", None
