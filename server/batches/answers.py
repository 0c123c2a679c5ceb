"""The lines of a batch's output, and the files that they are appended to. Each line is {"id", "custom_id", "response":
{"status_code", "request_id", "body"}, "error"}; `response` is null for a request that was never answered."""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from io import FileIO

import msgspec

_OPENING = b'{"id":"batch_req_'  # every line of the output begins with this


class _Answered(msgspec.Struct):
    """The field of an output line that tells which request it answers."""

    custom_id: str


class NotAnswersError(ValueError):
    """A file holds something that no batch has written. `end`: bytes of whole lines before that. `found`: the
    beginning of it."""

    def __init__(self, end: int, found: bytes):
        super().__init__(f"not a line of a batch's output: {found!r}")
        self.end = end
        self.found = found


def answer_line(custom_id: str, status: int, body: bytes) -> bytes:
    """The line with the answer to a request; `body` is JSON."""
    response = {"status_code": status, "request_id": uuid.uuid4().hex, "body": msgspec.Raw(body)}
    return _line(custom_id, response, None)


def unanswered_line(custom_id: str, code: str, message: str) -> bytes:
    """The line of a request that has no answer, and why."""
    return _line(custom_id, None, {"code": code, "message": message})


def _line(custom_id: str, response: dict[str, object] | None, error: dict[str, str] | None) -> bytes:
    name = f"batch_req_{uuid.uuid4().hex}"
    line = {"id": name, "custom_id": custom_id, "response": response, "error": error}
    return msgspec.json.encode(line) + b"\n"


def recover(output: FileIO, take: Callable[[str], object]) -> int:
    """Calls `take` with the custom_id of each whole line, and returns their number. Removes a last line that a killed
    run left unfinished; later lines are appended behind the others.

    Raises NotAnswersError, and leaves the file as it is, if it holds anything but output lines.
    """
    decode = msgspec.json.Decoder(_Answered).decode
    output.seek(0)
    end = 0
    count = 0
    with open(os.dup(output.fileno()), "rb") as lines:
        for raw in lines:
            whole = raw.endswith(b"\n")
            try:
                if raw[: len(_OPENING)] != _OPENING[: len(raw)]:
                    raise msgspec.DecodeError
                if whole:
                    take(decode(raw).custom_id)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                raise NotAnswersError(end, raw[:80]) from None
            if whole:
                end += len(raw)
                count += 1
    output.truncate(end)
    output.seek(end)
    return count


class AnswerFile:
    """Appends to an unbuffered file in its own thread, so that the event loop never waits for the disk. Lines that come
    during a write go into the next one together."""

    def __init__(self, file: FileIO):
        self._file = file
        self._lines: list[bytes] = []
        self._thread = ThreadPoolExecutor(1, "batch-output")
        self._turn = asyncio.Lock()
        self._error: str | None = None

    async def append(self, line: bytes) -> None:
        """Returns when the line is on the disk. Raises OSError if writing fails, for example because the disk is full;
        the file may then end in a part of a line. A line is written even if its caller is cancelled, see `flush`."""
        self._lines.append(line)
        await asyncio.shield(asyncio.ensure_future(self.flush()))

    async def flush(self) -> None:
        """Returns when all lines are on the disk. Raises what `append` raises."""
        async with self._turn:
            if self._lines and self._error is None:  # otherwise the write before this one has included the line
                lines = self._lines
                self._lines = []
                try:
                    await asyncio.get_running_loop().run_in_executor(self._thread, self._write, b"".join(lines))
                except OSError as error:
                    self._error = str(error)
            if self._error is not None:  # the file may end in a part of a line, which nothing may follow
                raise OSError(self._error)

    def _write(self, data: bytes) -> None:
        left = memoryview(data)
        while left:
            left = left[self._file.write(left) :]
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Waits for the current write to end."""
        self._thread.shutdown()
