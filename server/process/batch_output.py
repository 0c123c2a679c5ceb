"""A file that lines are appended to, each of which is on the disk before it counts as written."""

from __future__ import annotations

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor
from io import FileIO


class BatchOutput:
    """Appends to an unbuffered file in a thread of its own, so that the event loop never waits for the disk; lines that
    come while it does are written together."""

    def __init__(self, file: FileIO):
        self._file = file
        self._lines: list[bytes] = []
        self._thread = ThreadPoolExecutor(1, "batch-output")
        self._turn = asyncio.Lock()
        self._error: str | None = None

    async def append(self, line: bytes) -> None:
        """Returns when the line is on the disk. Raises OSError where it cannot be, as on a full disk; the file may then
        end in a part of a line."""
        self._lines.append(line)
        async with self._turn:
            if self._lines and self._error is None:  # else the turn before took it along
                lines, self._lines = self._lines, []
                try:
                    await asyncio.get_running_loop().run_in_executor(self._thread, self._write, b"".join(lines))
                except OSError as error:
                    self._error = str(error)
            if self._error is not None:  # nothing may follow a part of a line
                raise OSError(self._error)

    def _write(self, data: bytes) -> None:
        left = memoryview(data)
        while left:
            left = left[self._file.write(left) :]
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Waits for what is being written."""
        self._thread.shutdown()
