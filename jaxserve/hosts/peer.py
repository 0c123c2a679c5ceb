"""Another host of the replica: what is sent to it waits in a queue, what it sends is passed on, and silence is noticed.

A host that sends nothing for a while is lost, and so is one whose queue grows too long: nobody waits for it.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

from jaxserve.hosts import messages
from jaxserve.hosts.channel import MAX_FRAME, Channel
from jaxserve.hosts.messages import HostError

BEAT_SECONDS = 0.5
MAX_QUEUED = 2**29  # bytes that wait to be sent; an adapter's weights may be tens of MB


class Peer:
    """The thread that calls `send` never waits for the other host.

    Args:
      timeout: seconds of silence after which the host is lost.
      beat: makes the message that is sent every BEAT_SECONDS.
      receive: called with each message, on one thread. If it raises HostError, the host is lost.
      lose: called once with the reason when the host is lost, on a thread of the peer.
      most: bytes of a message that is taken.
    """

    def __init__(
        self,
        channel: Channel,
        timeout: float,
        beat: Callable[[], messages.Message],
        receive: Callable[[messages.Message], None],
        lose: Callable[[str], None],
        most: int = MAX_FRAME,
    ):
        self.address = channel.address
        self._channel = channel
        self._timeout = timeout
        self._beat = beat
        self._receive = receive
        self._lose = lose
        self._most = most
        self._queue: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._queued = 0  # bytes; only an estimate, as two threads change it
        self._lost = threading.Event()
        self.closed = threading.Event()  # the other end has closed the connection, or is lost
        channel.set_timeout(timeout)
        for work in (self._read, self._write):
            threading.Thread(target=work, name=f"host {channel.address}", daemon=True).start()

    def send(self, body: bytes) -> None:
        """Queues an encoded message."""
        if self._queued > MAX_QUEUED:
            self._end("it lags: too much waits to be sent to it")
            return
        self._queued += len(body)
        self._queue.put(body)

    def flush(self, seconds: float) -> None:
        """Waits at most so long until everything is sent."""
        deadline = time.monotonic() + seconds
        while self._queued > 0 and not self.closed.is_set() and time.monotonic() < deadline:
            time.sleep(0.01)

    def _read(self) -> None:
        try:
            while True:
                self._receive(messages.decode(self._channel.receive(self._most)))
        except TimeoutError:
            self._end(f"it has been silent for {self._timeout:g} s")
        except HostError as error:
            self._end(str(error))
        except (EOFError, OSError):
            self._end("its process has ended")

    def _write(self) -> None:
        due = time.monotonic()
        try:
            while not self.closed.is_set():
                try:
                    body = self._queue.get(timeout=max(due - time.monotonic(), 0.0))
                    self._channel.send(body)
                    self._queued -= len(body)
                except queue.Empty:
                    pass
                if time.monotonic() >= due:
                    self._channel.send(messages.encode(self._beat()))
                    due = time.monotonic() + BEAT_SECONDS
        except TimeoutError:
            self._end(f"it has read nothing for {self._timeout:g} s")
        except OSError:
            pass  # the other thread says what has happened

    def _end(self, reason: str) -> None:
        self.closed.set()
        if not self._lost.is_set():
            self._lost.set()
            self._lose(reason)
