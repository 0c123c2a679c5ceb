"""The engine's end of the connection to one API server, with a thread that reads and a thread that writes."""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import threading
from collections import deque
from typing import Any, BinaryIO

from jaxserve.server.ipc import messages

log = logging.getLogger("jaxserve.engine")

MAX_BACKLOG = 64 * 2**20  # bytes queued for one API server; above this the engine makes no steps


class ApiServerConnection:
    """One connected API server. One thread puts its messages into the loop's inbox, another sends it what is queued.

    Attributes:
      running: request id -> completions that have not ended, under the ids that the API server chose.
    """

    def __init__(self, number: int, connection: socket.socket, inbox: queue.SimpleQueue[Any]):
        self.number = number
        self.running: dict[str, set[int]] = {}
        self._connection = connection
        self._inbox = inbox
        self._outgoing: deque[bytes] = deque()
        self._backlog = 0  # bytes that are queued or being written
        self._closing = False
        self._changed = threading.Condition()
        self._writer = threading.Thread(target=self._write, name=f"api-server-{number}-write", daemon=True)
        self._writer.start()
        threading.Thread(target=self._read, name=f"api-server-{number}-read", daemon=True).start()

    def send(self, message: messages.EngineMessage) -> None:
        """Queues a message; never blocks."""
        frame = messages.to_frame(message)
        with self._changed:
            self._outgoing.append(frame)
            self._backlog += len(frame)
            self._changed.notify()

    @property
    def is_behind(self) -> bool:
        return self._backlog > MAX_BACKLOG

    def cut(self) -> None:
        """Ends the connection. The loop learns of it as if the API server had gone."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self, seconds: float) -> None:
        """Waits up to `seconds` until all queued messages are written, then closes the connection."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._writer.join(seconds)
        self._connection.close()

    def _read(self) -> None:
        try:
            with self._connection.makefile("rb") as stream:
                while (message := read_message(stream)) is not None:
                    self._inbox.put((self, message))
        except (OSError, ValueError) as error:
            log.warning("API server %d: %s", self.number, error)
        except Exception:
            log.exception("API server %d cannot be read any more", self.number)
        finally:
            self._inbox.put((self, None))  # tells the loop that this API server has gone, for whatever reason

    def _write(self) -> None:
        try:
            while True:
                with self._changed:
                    while not (self._outgoing or self._closing):
                        self._changed.wait()
                    if not self._outgoing:
                        return
                    frames = list(self._outgoing)
                    self._outgoing.clear()
                data = b"".join(frames)
                self._connection.sendall(data)
                with self._changed:
                    self._backlog -= len(data)
        except OSError:
            pass  # the API server has gone
        except Exception:
            log.exception("API server %d cannot be written to any more", self.number)
        finally:
            with self._changed:
                closing = self._closing
            if not closing:  # writing failed: this ends the API server's wait and this API server's reading thread
                self.cut()


def read_message(stream: BinaryIO) -> messages.ApiServerMessage | None:
    """The next message; None at the end of the stream. Raises ValueError for bytes that are not a message."""
    header = stream.read(messages.LENGTH_BYTES)
    if len(header) < messages.LENGTH_BYTES:
        return None
    length = messages.frame_length(header)
    body = stream.read(length)
    return messages.decode_api_server_message(body) if len(body) == length else None
