"""Forms of the type multipart/form-data that bring a file: the file goes to the disk as it arrives."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.datastructures import Headers
from starlette.requests import Request

from jaxserve.server.http.errors import APIError
from jaxserve.server.http.file_store import FileStore, Upload, too_large

_PIECE = 2**20  # bytes of the file that are written at a time
_MOST_FIELD = 1024  # bytes of a field that is not the file
_MOST_NAME = 512  # characters of the file's name
_MOST_FORM = 2**16  # bytes of a form besides its file


class Form:
    """A form that is being read.

    Attributes:
      fields: the values of the fields besides the file.
      filename: of the field `file`; None before it has come.
      data: what has come of the file and has not been taken.
    """

    def __init__(self, content_type: str):
        """Raises APIError (400) unless this is the type of a form with a file."""
        from python_multipart.multipart import MultipartParser, parse_options_header  # only uploads need it

        kind, options = parse_options_header(content_type)
        if kind != b"multipart/form-data" or not options.get(b"boundary"):
            text = f"a file must be sent as multipart/form-data with a boundary, got {content_type[:100]!r}"
            raise APIError(400, text)
        self._parse_options = parse_options_header
        parts = ("part_begin", "part_data", "part_end", "headers_finished", "end")
        names = (*parts, "header_field", "header_value", "header_end")
        callbacks: Any = {f"on_{name}": getattr(self, f"_{name}") for name in names}
        self._parser = MultipartParser(options[b"boundary"], callbacks)
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self.data = bytearray()
        self.complete = False
        self._size = 0  # bytes of the form besides its file
        self._headers: dict[bytes, bytes] = {}
        self._header = self._value = b""
        self._field: str | None = None  # whose value is coming; None: the file's
        self._text = b""

    def add(self, data: bytes) -> None:
        """Raises APIError (400) for what is no form, or one that this endpoint does not take."""
        from python_multipart.exceptions import FormParserError

        if self.complete:  # what follows the form
            self._count(len(data))
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise APIError(400, f"the body is not a valid form: {error}") from None

    def _count(self, more: int) -> None:
        self._size += more
        if self._size > _MOST_FORM:
            raise APIError(400, f"the form has more than {_MOST_FORM} bytes besides its file")

    def _part_begin(self) -> None:
        self._count(1)
        self._headers = {}
        self._text = b""

    def _header_field(self, data: bytes, start: int, end: int) -> None:
        self._count(end - start)
        self._header += data[start:end]

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._count(end - start)
        self._value += data[start:end]

    def _header_end(self) -> None:
        self._headers[self._header.lower()] = self._value
        self._header = self._value = b""

    def _headers_finished(self) -> None:
        _, options = self._parse_options(self._headers.get(b"content-disposition", b""))
        name = options.get(b"name", b"").decode(errors="replace")
        self._field = name
        if name == "file":
            if self.filename is not None:
                raise APIError(400, "the form has two fields named file", param="file")
            self.filename = options.get(b"filename", b"file").decode(errors="replace")[:_MOST_NAME] or "file"
            self._field = None

    def _part_data(self, data: bytes, start: int, end: int) -> None:
        if self._field is None:
            self.data += memoryview(data)[start:end]
            return
        self._count(end - start)
        self._text += data[start:end]
        if len(self._text) > _MOST_FIELD:
            raise APIError(400, f"the field {self._field[:64]!r} has more than {_MOST_FIELD} bytes", param=self._field)

    def _part_end(self) -> None:
        if self._field is not None:
            self.fields[self._field] = self._text.decode(errors="replace")

    def _end(self) -> None:
        self.complete = True


async def receive(http: Request, store: FileStore, owner: str) -> tuple[Upload, Form]:
    """Writes the file of a form to the disk as it arrives. The caller closes the upload.

    Raises APIError: 400 for a body that is not such a form, 413 for a file that is too large, or for which the owner
    has no room; and OSError if the disk does not take it.
    """
    form = Form(Headers(scope=http.scope).get("content-type", ""))
    length = http.headers.get("content-length", "0")
    if length.isdecimal() and (most := int(length[:20]) - _MOST_FORM) > 0:
        if most > store.longest:
            raise too_large(store.longest)
        await asyncio.to_thread(store.check_room, owner, most)
    upload = await asyncio.to_thread(Upload, store, owner)
    try:
        async for data in http.stream():
            form.add(data)
            if len(form.data) >= _PIECE:
                await asyncio.to_thread(upload.write, _taken(form))
        await asyncio.to_thread(upload.write, _taken(form))
        if not form.complete:
            raise APIError(400, "the form ends too early: its closing boundary is missing")
        if form.filename is None:
            raise APIError(400, "the form has no field named file", param="file")
    except BaseException:
        upload.close()
        raise
    return upload, form


def _taken(form: Form) -> bytes:
    data = bytes(form.data)
    form.data.clear()
    return data
