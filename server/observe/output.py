"""Lines for a pipe that nobody may be reading: a thread of their own writes them, and the others never wait for it."""

from __future__ import annotations

import logging
import os
import threading
from collections import deque

_MOST_LINES = 10_000  # that wait to be written; what comes beyond is dropped, and counted
_PATIENCE = 1.0  # seconds that the last lines get when the process ends


class Output:
    """Writes lines to a file descriptor, in order."""

    def __init__(self, descriptor: int):
        self._descriptor = descriptor
        self._lines: deque[str] = deque()
        self._dropped = 0
        self._changed = threading.Condition()
        self._written = True  # nothing waits, and nothing is being written
        threading.Thread(target=self._run, name=f"output-{descriptor}", daemon=True).start()

    def write(self, line: str) -> None:
        """Queues a line, or drops it where too many wait; never blocks."""
        with self._changed:
            if len(self._lines) >= _MOST_LINES:
                self._dropped += 1
                return
            self._lines.append(line)
            self._written = False
            self._changed.notify_all()

    def flush(self) -> None:
        """Waits until everything is written, for at most _PATIENCE seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self._written, _PATIENCE)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._written = not self._lines
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._lines)
                lines = list(self._lines)
                self._lines.clear()
                if self._dropped:
                    lines.append(f"({self._dropped} lines were dropped: nobody read them)")
                    self._dropped = 0
            data = memoryview("".join(f"{line}\n" for line in lines).encode(errors="backslashreplace"))
            try:
                while data:
                    data = data[os.write(self._descriptor, data) :]  # past Python's buffers, which have locks
            except OSError:
                pass  # the reader has gone; others may come, as at the end of a terminal


class OutputHandler(logging.Handler):
    """Sends a logger's lines to an output."""

    def __init__(self, output: Output, format: str):
        super().__init__()
        self._output = output
        self.setFormatter(logging.Formatter(format))

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._output.write(self.format(record))
        except Exception:
            self.handleError(record)

    def flush(self) -> None:  # which logging.shutdown calls when the process ends
        self._output.flush()


def log_to_stderr(level: int) -> None:
    """Has everything that is logged written to standard error by a thread; `level` where none is chosen yet."""
    root = logging.getLogger()
    if not root.handlers:
        root.setLevel(level)
    root.handlers = [OutputHandler(Output(2), "%(levelname)s %(name)s: %(message)s")]


def say(text: str) -> None:
    """Writes a last line to standard error, for which the process waits a moment at most."""
    output = Output(2)
    output.write(text)
    output.flush()
