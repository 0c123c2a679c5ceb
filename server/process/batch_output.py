"""A file to which lines are appended. A line counts as written once it is on the disk."""

from __future__ import annotations

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor
from io import FileIO


class BatchOutput:
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
        the file may then end in a part of a line."""
        self._lines.append(line)
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
