"""The files of pictures: from data URLs, and from addresses at hosts that the operator allows."""

from __future__ import annotations

import http.client
import ipaddress
import socket
import time
from collections.abc import Sequence
from typing import NamedTuple
from urllib.parse import SplitResult, urljoin, urlsplit

from jaxserve.images.reading import MAX_BYTES
from jaxserve.server.images.long_strings import pieces_of
from jaxserve.types import InvalidRequestError

FETCH_SECONDS = 10.0
MAX_REDIRECTS = 3
ANY_HOST = "*"
_PIECE = 2**16  # bytes read at a time
_LOCAL = "localhost"


class Source(NamedTuple):
    """A picture in a message.

    url: a data URL, or an address.
    detail: "low", "high" or "auto".
    where: for errors, the part of the request that holds it.
    """

    url: str
    detail: str
    where: str


class File(NamedTuple):
    """A picture's file in pieces.

    in_base64: as it came in a data URL. It is decoded where the picture is (`workers`).
    """

    pieces: Sequence[bytes | memoryview]
    in_base64: bool


def read(source: Source, allowed_hosts: Sequence[str]) -> File:
    """The picture's file. Slow where it fetches an address: call it in a thread.

    Raises InvalidRequestError for anything but a data URL that says that it is a picture in base64, or an address at
    one of `allowed_hosts` that answers with at most MAX_BYTES within FETCH_SECONDS.
    """
    if source.url.startswith("data:"):
        return _of_data_url(source)
    try:
        return File([_fetch(source, allowed_hosts)], False)
    except InvalidRequestError:
        raise
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise _refused(source, f"it cannot be fetched ({type(error).__name__})") from None


def _of_data_url(source: Source) -> File:
    beginning, *rest = pieces_of(source.url)
    head, comma, _ = beginning.partition(b",")
    kind, *parameters = head.decode(errors="replace").removeprefix("data:").split(";")
    if not comma or "base64" not in parameters:
        raise _refused(source, "a data URL must be data:image/...;base64,...")
    if kind and not kind.startswith("image/"):
        raise _refused(source, f"a data URL must hold a picture, not {kind[:64]!r}")
    pieces: list[bytes | memoryview] = [memoryview(beginning)[len(head) + 1 :], *rest]
    if sum(map(len, pieces)) > MAX_BYTES * 4 // 3 + 4:
        raise _refused(source, f"it has more than {MAX_BYTES} bytes")
    return File(pieces, True)


def _fetch(source: Source, allowed_hosts: Sequence[str]) -> bytes:
    deadline = time.monotonic() + FETCH_SECONDS
    url = source.url
    for _ in range(MAX_REDIRECTS + 1):
        parts = urlsplit(url)
        address = _address_of(source, parts, allowed_hosts)
        found = _get(source, parts, address, deadline)
        if isinstance(found, bytes):
            return found
        url = urljoin(url, found)
    raise _refused(source, f"it is redirected more than {MAX_REDIRECTS} times")


def _address_of(source: Source, parts: SplitResult, allowed_hosts: Sequence[str]) -> str:
    """The address to connect to. It is looked up once, so that a name cannot mean another address later."""
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise _refused(source, f"a picture must be a data URL, or http or https, not {parts.scheme[:16]!r}")
    host = parts.hostname.lower()
    if not allowed_hosts:
        raise _refused(source, "this server fetches no URLs (--allow-image-urls): send the picture as a data URL")
    if host not in allowed_hosts and ANY_HOST not in allowed_hosts:
        raise _refused(source, f"this server fetches no URLs of {host[:128]!r} (--allow-image-urls)")
    found = [info[4][0] for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]
    named = host in allowed_hosts and (host == _LOCAL or _is_address(host))
    if not found or not (named or all(ipaddress.ip_address(address).is_global for address in found)):
        raise _refused(source, "its host is at a private address")
    return str(found[0])


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _get(source: Source, parts: SplitResult, address: str, deadline: float) -> bytes | str:
    """The picture's bytes, or where the answer redirects to."""
    host = parts.hostname or ""
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(host, parts.port, timeout=max(deadline - time.monotonic(), 0.1))
    connect = socket.create_connection
    connection._create_connection = lambda given, *rest: connect((address, given[1]), *rest)  # type: ignore[attr-defined]
    try:
        path = parts.path or "/"
        connection.request("GET", f"{path}?{parts.query}" if parts.query else path, headers={"Accept": "image/*"})
        answer = connection.getresponse()
        if answer.status in (301, 302, 303, 307, 308) and (location := answer.getheader("Location")):
            return location
        if answer.status != 200:
            raise _refused(source, f"its host answers {answer.status}")
        data = bytearray()
        while piece := answer.read(_PIECE):
            data += piece
            if len(data) > MAX_BYTES:
                raise _refused(source, f"it has more than {MAX_BYTES} bytes")
            if time.monotonic() > deadline:
                raise _refused(source, f"fetching it takes more than {FETCH_SECONDS:g} seconds")
        return bytes(data)
    finally:
        connection.close()


def _refused(source: Source, reason: str) -> InvalidRequestError:
    return InvalidRequestError(f"{source.where}: a picture cannot be read: {reason}", "messages", "invalid_image")
