"""The lines of a batch's input. Each is {"custom_id", "method": "POST", "url", "body"}."""

from __future__ import annotations

import asyncio
import codecs
import hashlib
from collections.abc import AsyncGenerator, Callable, Container, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec

from jaxserve.server.http.body_errors import explain
from jaxserve.server.http.file_records import BatchErrorRecord

_MOST_ERRORS = 100  # that a batch tells
_MOST_MODELS = 64
_LONGEST_ID = 512
_READ_AHEAD = 2**18  # bytes of lines that a thread reads at a time


class BatchLine(msgspec.Struct):
    """A request of a batch. `body`: its fields, each as JSON."""

    custom_id: str
    url: str
    body: dict[str, msgspec.Raw]
    method: str = "POST"

    @property
    def digest(self) -> bytes:
        return digest_of(self.custom_id)

    @property
    def size(self) -> int:
        """Bytes of its body, about."""
        return sum(memoryview(value).nbytes for value in self.body.values())


def digest_of(custom_id: str) -> bytes:
    """Stands for a custom_id where many of them are kept, which may be long."""
    return hashlib.blake2b(custom_id.encode("utf-8", "surrogatepass"), digest_size=16).digest()


class BatchError(ValueError):
    """The input or output file cannot be used; the message names the file and the line."""


class LineError(ValueError):
    """A line is not a request. `code` says why in a word, as OpenAI's batches do."""

    def __init__(self, code: str, message: str, param: str | None = None):
        super().__init__(message)
        self.code = code
        self.param = param


_decode = msgspec.json.Decoder(BatchLine).decode


def raw_lines(file: BinaryIO, longest: int = 2**62) -> Iterator[tuple[int, bytes | None]]:
    """The lines of a file that are not blank, with their numbers from 1, without a byte order mark. A line of more than
    `longest` bytes is None, and is never whole in memory."""
    number = 0
    while raw := file.readline(min(longest + 1, _READ_AHEAD)):
        number += 1
        if not raw.endswith(b"\n"):  # a long line is measured before it is read, whole, once
            begin = file.tell() - len(raw)
            while (rest := file.readline(_READ_AHEAD)) and not rest.endswith(b"\n"):
                pass
            size = file.tell() - begin
            if size - rest.endswith(b"\n") > longest:
                yield number, None
                continue
            file.seek(begin)
            raw = file.read(size)
        if number == 1:
            raw = raw.removeprefix(codecs.BOM_UTF8)
        if raw.strip():
            yield number, raw


def parse(raw: bytes) -> BatchLine:
    """Raises LineError for a line that is not a request."""
    try:
        return _decode(raw)
    except msgspec.ValidationError as error:
        code = "missing_required_parameter" if "missing required field" in str(error) else "invalid_request"
        raise LineError(code, explain(error, raw.decode(errors="replace")).message) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise LineError("invalid_json_line", str(error)) from None


def read_lines(source: Path) -> Iterator[BatchLine]:
    """The requests of a file. Raises BatchError, naming the line, for a line that is not a request."""
    with open(source, "rb") as file:
        for number, raw in raw_lines(file):
            assert raw is not None
            try:
                yield parse(raw)
            except LineError as error:
                raise BatchError(f"{source}:{number}: {error}") from None


class Checked(NamedTuple):
    """What `check_lines` found: the number of requests, the model that the first one names, and what is wrong."""

    total: int
    model: str | None
    errors: list[BatchErrorRecord]


def check_lines(
    source: Path, endpoint: str, *, most: int, longest: int, why_not: Callable[[str], str | None]
) -> Checked:
    """Checks an input of at most `most` lines of at most `longest` bytes, which all go to `endpoint`. Does not check
    bodies, but for the model: `why_not` tells why one is not served."""
    errors: list[BatchErrorRecord] = []
    seen: set[bytes] = set()
    models: dict[str, str | None] = {}  # name -> why it is not served
    total = 0
    with open(source, "rb") as file:
        for number, raw in raw_lines(file, longest):
            total += 1
            if total > most:
                text = f"the input has more than {most} requests, the most of one batch (--max-batch-requests)"
                errors.append(BatchErrorRecord("request_limit_exceeded", text, None, number))
                break
            try:
                if raw is None:
                    raise LineError("line_too_long", f"the line has more than {longest} bytes")
                line = parse(raw)
                _check_line(line, endpoint, models, why_not)
                if (digest := line.digest) in seen:
                    text = f"custom_id {line.custom_id!r} stands on an earlier line, too; each must be unique"
                    raise LineError("duplicate_custom_id", text, "custom_id")
                seen.add(digest)
            except LineError as error:
                errors.append(BatchErrorRecord(error.code, str(error), error.param, number))
                if len(errors) == _MOST_ERRORS:
                    break
    if not total:
        errors.append(BatchErrorRecord("empty_file", "the input has no requests"))
    return Checked(total, next(iter(models), None), errors)


def _check_line(
    line: BatchLine, endpoint: str, models: dict[str, str | None], why_not: Callable[[str], str | None]
) -> None:
    if not 0 < len(line.custom_id) <= _LONGEST_ID:
        text = f"custom_id must have from 1 to {_LONGEST_ID} characters, got {len(line.custom_id)}"
        raise LineError("invalid_custom_id", text, "custom_id")
    if line.method != "POST":
        raise LineError("invalid_method", f"method must be POST, got {line.method[:16]!r}", "method")
    if line.url != endpoint:
        text = f"url must be the batch's endpoint, {endpoint!r}, got {line.url[:128]!r}"
        raise LineError("invalid_url", text, "url")
    try:
        model = msgspec.json.decode(line.body.get("model", b"null"), type=str | None)
    except msgspec.ValidationError:
        raise LineError("invalid_request", "body.model must be a string", "body.model") from None
    if model is not None:
        if model not in models and len(models) < _MOST_MODELS:
            models[model] = why_not(model)
        if (reason := models.get(model, "the batch names too many models")) is not None:
            raise LineError("model_not_found", reason, "body.model")


async def lines_but(source: Path, done: Container[bytes]) -> AsyncGenerator[BatchLine, None]:
    """The requests of a file that was checked, without those whose digests are in `done`. A thread reads the file, some
    lines at a time."""
    with open(source, "rb") as file:
        lines = raw_lines(file)

        def some() -> list[BatchLine]:
            found = []
            size = 0
            for _, raw in lines:
                assert raw is not None
                size += len(raw)
                if (line := parse(raw)).digest not in done:
                    found.append(line)
                if size > _READ_AHEAD:
                    return found
            ended.append(True)
            return found

        ended: list[bool] = []
        while not ended:
            for line in await asyncio.to_thread(some):
                yield line
