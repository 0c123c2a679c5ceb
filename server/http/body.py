"""Request bodies as bytes: their size and shape are bounded before they are decoded."""

from __future__ import annotations

import asyncio
import contextlib
import zlib
from collections.abc import Iterator

import msgspec
import numpy as np
from starlette.requests import Request

from jaxserve.limits import MAX_CONTAINERS, MAX_NESTING, MAX_SCHEMA, MAX_STRINGS
from jaxserve.server.http.errors import APIError
from jaxserve.server.http.request_limits import Body

# Fields that hold a schema or another free form, each bounded by MAX_SCHEMA. In _LISTS every element is bounded.
_FREE_FIELDS = (
    "response_format", "structured_outputs", "text", "output_config", "output_format", "metadata", "tool_choice",
    "logit_bias", "chat_template_kwargs", "function_call", "json_schema",
)  # fmt: skip
_LISTS = ("tools", "functions")
_PIECE = 2**18  # bytes that are examined before other tasks run
_GZIP = ("gzip", "x-gzip")
_WITH_GZIP_HEADER = zlib.MAX_WBITS | 16
_READ = "body_read"  # key in a request's state of a body that was put back
_FEW = MAX_NESTING  # so few opening brackets cannot be nested too deeply
# approximate memory of each as a Python object
_VALUE_BYTES = 40
_STRING_BYTES = 60
_CONTAINER_BYTES = 100
_read_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_read_list = msgspec.json.Decoder(list[msgspec.Raw]).decode


def body_of(request: Request) -> Body | None:
    """The account of a request's body; None outside the application."""
    return request.scope.get("state", {}).get("body")


def put_back(request: Request, data: bytes) -> None:
    """Makes the next `read_bytes` return `data`, so that the handler that was chosen by the body can read it again."""
    request.scope.setdefault("state", {})[_READ] = data


def taken_back(request: Request) -> bytes | None:
    """What `put_back` was given, once; None if there is nothing."""
    return request.scope.get("state", {}).pop(_READ, None)


async def read_bytes(request: Request) -> bytes:
    """A request's JSON body, which may be compressed with gzip. Raises APIError (400, 413, 415 or 503) for another
    encoding, and if decoding it would take too much memory.

    Only the caller keeps a reference to it, unless it calls `put_back`.
    """
    if (data := taken_back(request)) is not None:
        return data
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity", *_GZIP):
        raise APIError(
            415,
            f"the body is encoded as {encoding[:64]!r}, which this server does not read; send it plain, without a "
            "content-encoding, or as gzip",
            code="unsupported_content_encoding",
        )
    parts = [part async for part in request.stream()]
    data = parts[0] if len(parts) == 1 else b"".join(parts)
    del parts
    if encoding in _GZIP:
        data = await _inflated(data, body_of(request))
    brackets = data.count(b"{") + data.count(b"[")
    strings = data.count(b'"') // 2
    if brackets > _FEW or strings > MAX_STRINGS:  # count exactly, without brackets and quotes inside strings
        shape = _Shape()
        for piece in _pieces(data):
            shape.add(piece)
            await asyncio.sleep(0)
        brackets = shape.containers
        strings = shape.quotes // 2
    if len(data) > MAX_SCHEMA:  # between passes over a long body, other tasks run
        await asyncio.sleep(0)
        _check_forms(data)
        await asyncio.sleep(0)
    if (body := body_of(request)) is not None:
        values = data.count(b",")
        body.expand(_VALUE_BYTES * values + _STRING_BYTES * strings + _CONTAINER_BYTES * brackets)
    return data


async def _inflated(data: bytes, body: Body | None) -> bytes:
    """The contents of gzip data, whose size the body's account checks piece by piece. Raises APIError (400, 413 or
    503)."""
    if body is not None:
        body.size = 0  # from here on, the limit is for what was compressed
    pieces = []
    stream = zlib.decompressobj(_WITH_GZIP_HEADER)
    for start in range(0, len(data), _PIECE):
        rest = data[start : start + _PIECE]
        is_full = False  # more may follow of what the stream has read
        while rest or is_full:
            if stream.eof:  # another member, as of files that were joined
                stream = zlib.decompressobj(_WITH_GZIP_HEADER)
            try:
                piece = stream.decompress(rest, _PIECE)
            except zlib.error:
                raise APIError(400, "the body is declared as gzip, but its data are damaged or none of gzip") from None
            rest = stream.unused_data or stream.unconsumed_tail
            is_full = len(piece) == _PIECE and not stream.eof
            if body is not None:
                body.grow(len(piece))
            pieces.append(piece)
            await asyncio.sleep(0)
    if not stream.eof:
        raise APIError(400, "the body is declared as gzip, and its data end too early")
    return b"".join(pieces)


def _pieces(data: bytes) -> Iterator[bytes]:
    """The data in pieces, none of which ends within an escape."""
    start = 0
    while start < len(data):
        end = start + _PIECE
        while data[end - 1 : end] == b"\\":
            end += _PIECE
        yield data[start:end]
        start = end


class _Shape:
    """Counts brackets and quotes of growing JSON text, outside its strings. `add` raises APIError (400) if there are
    too many, or if brackets are nested too deeply."""

    def __init__(self) -> None:
        self.containers = self.quotes = self._depth = 0

    def add(self, piece: bytes) -> None:
        if b"\\" in piece:
            piece = piece.replace(b"\\\\", b"").replace(b'\\"', b"")
        data = np.frombuffer(piece, np.uint8)
        quote = data == ord('"')
        outside = ~np.logical_xor.accumulate(quote)
        if self.quotes % 2:
            outside = ~outside
        self.quotes += int(np.count_nonzero(quote))
        folded = data | 0x20  # [ and { become {, ] and } become }
        is_open = (folded == ord("{")) & outside
        is_close = (folded == ord("}")) & outside
        where = np.flatnonzero(is_open | is_close)
        depth = self._depth + np.cumsum(np.where(is_open[where], 1, -1))
        self.containers += int(np.count_nonzero(is_open))
        if len(depth):
            self._depth = int(depth[-1])
            if (deepest := int(depth.max())) > MAX_NESTING:
                raise APIError(400, f"the body is nested too deeply: {deepest} levels, of at most {MAX_NESTING}")
        if self.containers > MAX_CONTAINERS:
            raise APIError(400, f"the body holds more than {MAX_CONTAINERS} objects and lists")
        if self.quotes > 2 * MAX_STRINGS:
            raise APIError(400, f"the body holds more than {MAX_STRINGS} strings")


def _check_forms(data: bytes) -> None:
    """Raises APIError (400) for a field in a free form that is too long. Ignores invalid JSON, which the caller's
    decoder reports."""
    with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        fields = _read_fields(data)
        for name in _FREE_FIELDS:
            if name in fields:
                _check_form(name, name, fields[name])
        for name in _LISTS:
            if name in fields and bytes(memoryview(fields[name])[:1]) == b"[":
                for i, one in enumerate(_read_list(fields[name])):
                    _check_form(f"{name}[{i}]", name, one)


def _check_form(where: str, param: str, raw: msgspec.Raw) -> None:
    if (size := memoryview(raw).nbytes) > MAX_SCHEMA:
        raise APIError(400, f"{where} has {size} bytes of JSON; at most {MAX_SCHEMA} are allowed", param=param)
