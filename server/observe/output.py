"""Writing lines to a pipe that may have no reader: one thread writes, so that no other thread ever waits."""

from __future__ import annotations

import logging
import os
import select
import threading
from collections import deque
from collections.abc import Iterator

_MOST_LINES = 10_000  # lines that may wait to be written; further ones are counted and dropped
_PATIENCE = 1.0  # seconds to write the last lines when the process ends


class Output:
    """Writes lines to a file descriptor, in order."""

    def __init__(self, descriptor: int):
        self._descriptor = descriptor
        self._lines: deque[str] = deque()
        self._dropped = 0
        self._changed = threading.Condition()
        self._written = True  # no line waits or is being written
        self._closed = False
        threading.Thread(target=self._run, name=f"output-{descriptor}", daemon=True).start()

    def write(self, line: str) -> None:
        """Queues a line, or drops it if too many wait; never blocks."""
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

    def close(self) -> None:
        """Ends the thread when everything is written, and closes the descriptor. Lines written from now on are lost."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._written = not self._lines
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._lines or self._closed)
                if not self._lines:
                    os.close(self._descriptor)
                    return
                lines = list(self._lines)
                self._lines.clear()
                if self._dropped:
                    lines.append(f"({self._dropped} lines were dropped: nobody read them)")
                    self._dropped = 0
            try:
                for piece in _pieces(lines):
                    data = memoryview(piece)
                    while data:
                        data = data[os.write(self._descriptor, data) :]  # bypasses Python's buffers, which have locks
            except OSError:
                pass  # the reader has gone; another one may come, as on a terminal


def _pieces(lines: list[str]) -> Iterator[bytes]:
    """The lines as bytes, in pieces that a pipe takes whole, so that lines of several processes do not mix. Only a line
    that is longer than that is a longer piece."""
    piece = b""
    for line in lines:
        data = f"{line}\n".encode(errors="backslashreplace")
        if piece and len(piece) + len(data) > select.PIPE_BUF:
            yield piece
            piece = b""
        piece += data
    yield piece


class OutputHandler(logging.Handler):
    """Sends a logger's lines to an Output."""

    def __init__(self, output: Output, format: str):
        super().__init__()
        self._output = output
        self.setFormatter(logging.Formatter(format))

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._output.write(self.format(record))
        except Exception:
            self.handleError(record)

    def flush(self) -> None:  # logging.shutdown calls it when the process ends
        self._output.flush()


def log_to_stderr(level: int, prefix: str = "") -> None:
    """Has a thread write all log lines to standard error, with `prefix` before their texts. Sets `level` unless the
    root logger has handlers already."""
    root = logging.getLogger()
    if not root.handlers:
        root.setLevel(level)
    before = prefix.replace("%", "%%")
    root.handlers = [OutputHandler(Output(2), f"%(levelname)s %(name)s: {before}%(message)s")]


def say(text: str) -> None:
    """Writes a last line to standard error, waiting at most _PATIENCE seconds."""
    output = Output(2)
    output.write(text)
    output.flush()
