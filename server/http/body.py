"""Request bodies as bytes: their size and shape are bounded before they are decoded."""

from __future__ import annotations

import asyncio
import contextlib
import zlib
from collections.abc import AsyncIterator

import msgspec
import numpy as np
from starlette.requests import Request

from jaxserve.limits import MAX_CONTAINERS, MAX_NESTING, MAX_SCHEMA, MAX_STRINGS
from jaxserve.server.http.errors import APIError
from jaxserve.server.http.request_limits import Body
from jaxserve.server.images.long_strings import Cutter

# Fields that hold a schema or another free form, each bounded by MAX_SCHEMA. In _LISTS every element is bounded.
_FREE_FIELDS = (
    "response_format", "structured_outputs", "text", "output_config", "output_format", "metadata", "tool_choice",
    "logit_bias", "chat_template_kwargs", "function_call", "json_schema",
)  # fmt: skip
_LISTS = ("tools", "functions")
_PIECE = 2**18  # bytes that are examined before other tasks run
_GZIP = ("gzip", "x-gzip")
_WITH_GZIP_HEADER = zlib.MAX_WBITS | 16
_FEW = MAX_NESTING  # so few opening brackets cannot be nested too deeply
_READ = "body_read"  # key in a request's state of a body that was put back
# approximate memory of each as a Python object
_VALUE_BYTES = 40
_STRING_BYTES = 60
_CONTAINER_BYTES = 100
_read_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_read_list = msgspec.json.Decoder(list[msgspec.Raw]).decode


def body_of(request: Request) -> Body | None:
    """The account of a request's body; None outside the application."""
    return request.scope.get("state", {}).get("body")


def put_back(request: Request, received: Cutter) -> None:
    """Makes the next `receive_body` return `received`, so that the handler that the body chose can read it again."""
    request.scope.setdefault("state", {})[_READ] = received


def taken_back(request: Request) -> Cutter | None:
    """What `put_back` was given, once; None if there is nothing."""
    found: Cutter | None = request.scope.get("state", {}).pop(_READ, None)
    return found


async def receive_body(request: Request) -> Cutter:
    """A request's JSON body, which may be compressed with gzip. Raises APIError (400, 413, 415 or 503) for another
    encoding, and if decoding it would take too much memory.

    Only the caller keeps a reference to it, unless it calls `put_back`.
    """
    if (received := taken_back(request)) is not None:
        return received
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity", *_GZIP):
        raise APIError(
            415,
            f"the body is encoded as {encoding[:64]!r}, which this server does not read; send it plain, without a "
            "content-encoding, or as gzip",
            code="unsupported_content_encoding",
        )
    shape = _Shape()
    parts = _inflated(request.stream(), body_of(request)) if encoding in _GZIP else request.stream()
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) <= MAX_SCHEMA and encoding not in _GZIP:
        data = b"".join([part async for part in parts])
        received = Cutter(data)
        shape.estimate(data)
    else:
        received = Cutter()
        async for piece in _pieces(parts):
            received.add(piece, within=shape.add(piece))
        await check_forms(received.text())
    if (body := body_of(request)) is not None:
        strings = shape.quotes // 2
        body.expand(_VALUE_BYTES * shape.values + _STRING_BYTES * strings + _CONTAINER_BYTES * shape.containers)
    return received


async def _pieces(parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The data in pieces, none of which ends within an escape. Other tasks run in between."""
    held = b""
    async for part in parts:
        data = held + part if held else part
        held = b""
        if data.endswith(b"\\") and (len(data) - len(data.rstrip(b"\\"))) % 2:
            data, held = data[:-1], data[-1:]
        if len(data) <= _PIECE:
            yield data
            continue
        start = 0
        while start < len(data):
            end = start + _PIECE
            while data[end - 1 : end] == b"\\":
                end += _PIECE
            yield data[start:end]
            start = end
            await asyncio.sleep(0)
    yield held


async def _inflated(parts: AsyncIterator[bytes], body: Body | None) -> AsyncIterator[bytes]:
    """The contents of gzip data, whose size the body's account checks piece by piece. Raises APIError (400, 413 or
    503)."""
    whole = b"".join([part async for part in parts])
    if body is not None:
        body.size = 0  # from here on, the limit is for what was compressed
    stream = zlib.decompressobj(_WITH_GZIP_HEADER)
    for start in range(0, len(whole), _PIECE):
        rest = whole[start : start + _PIECE]
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
            yield piece
            await asyncio.sleep(0)
    if not stream.eof:
        raise APIError(400, "the body is declared as gzip, and its data end too early")


class _Shape:
    """Counts brackets, quotes and commas of growing JSON text; brackets outside its strings only."""

    def __init__(self) -> None:
        self.containers = self.quotes = self.values = self._depth = 0

    def estimate(self, data: bytes) -> None:
        """Counts in a whole short text, also within strings where these are too few for what `add` raises."""
        containers = data.count(b"{") + data.count(b"[")
        if containers > _FEW:
            self.add(data)
            return
        self.containers = containers
        self.quotes = data.count(b'"')
        self.values = data.count(b",")

    def add(self, piece: bytes) -> bool:
        """Returns whether the piece lies within one string, without an escape. Raises APIError (400) if there are too
        many brackets or strings, or if brackets are nested too deeply."""
        escapes = b"\\" in piece
        if not escapes and b'"' not in piece and (self.quotes % 2 or not piece):
            return True
        self.values += piece.count(b",")
        if escapes:
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
        return False


async def check_forms(data: bytes) -> None:
    """Raises APIError (400) for a field in a free form that is too long. Ignores invalid JSON, which the caller's
    decoder reports. Other tasks run before and behind this pass over a long body."""
    if len(data) <= MAX_SCHEMA:
        return
    await asyncio.sleep(0)
    with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        fields = _read_fields(data)
        for name in _FREE_FIELDS:
            if name in fields:
                _check_form(name, name, fields[name])
        for name in _LISTS:
            if name in fields and bytes(memoryview(fields[name])[:1]) == b"[":
                for i, one in enumerate(_read_list(fields[name])):
                    _check_form(f"{name}[{i}]", name, one)
    await asyncio.sleep(0)


def _check_form(where: str, param: str, raw: msgspec.Raw) -> None:
    if (size := memoryview(raw).nbytes) > MAX_SCHEMA:
        raise APIError(400, f"{where} has {size} bytes of JSON; at most {MAX_SCHEMA} are allowed", param=param)
