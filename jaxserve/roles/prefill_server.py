"""A prefill server as a decode server sees it: threads ask it for pages, and one thread watches whether it is alive.

The engine's thread calls `submit`, `Transfer.take_arrived` and `Transfer.cancel`, which never wait. Contents go to
their places in the host's memory, which belong to the transfer until it is over.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from jaxserve.hosts import channel
from jaxserve.hosts.channel import MAX_MESSAGE, Channel
from jaxserve.hosts.host_environment import split_address
from jaxserve.hosts.messages import HostError
from jaxserve.roles import messages

log = logging.getLogger(__name__)

CONNECTIONS = 8  # prompts that one decode server has one prefill server compute at a time
CONNECT_SECONDS = 3.0  # for a connection and its greetings
PING_SECONDS = 0.5  # between two questions
SILENT_SECONDS = 2.0  # without an answer for so long, a server is down
RETRY_SECONDS = 1.0, 15.0  # until a server that is down is tried again: at first, and at most


class Transfer:
    """Pages on their way from a prefill server.

    Attributes:
      received: pages whose contents are here.
      error: once it is over: why pages are missing; None: all are here.
    """

    def __init__(
        self,
        ask: messages.Ask,
        keys: Sequence[bytes],
        places: Sequence[int],
        store: Callable[[int, memoryview], None],
        page_bytes: int,
        seconds: float,
    ):
        """`keys` and `places`: of each page of `ask.wanted`. `store`: puts the contents of a page into its place."""
        self.ask = ask
        self.keys = keys
        self.places = places
        self.deadline = time.monotonic() + seconds
        self._store = store
        self._page_bytes = page_bytes
        self.began = time.monotonic()
        self.received = 0
        self.over = False
        self._left = dict.fromkeys(range(len(places)))  # indices of pages that have not come, ascending
        self.error: str | None = None
        self._arrived: deque[int] = deque()
        self._cancelled = False
        self._lock = threading.Lock()
        self._connection: socket.socket | None = None

    def take_arrived(self) -> list[int]:
        """Places whose contents have arrived since the last call."""
        return [self._arrived.popleft() for _ in range(len(self._arrived))]

    def left(self) -> list[int]:
        """Once it is over: the places of pages that have not come."""
        return [self.places[i] for i in self._left]

    def cancel(self) -> None:
        """Ends the transfer soon. Its places belong to it until it is over."""
        with self._lock:
            self._cancelled = True
            if self._connection is not None:
                _shut(self._connection)

    # In a thread of the server

    def run(self, link: Channel, connection: socket.socket) -> None:
        """Raises OSError, EOFError or ValueError for a connection that is of no more use."""
        with self._lock:
            if self._cancelled:
                return
            self._connection = connection
        try:
            link.set_deadline(self.deadline)
            link.send(messages.encode(self.ask))
            while True:
                message = messages.decode(link.receive(MAX_MESSAGE))
                if isinstance(message, messages.Done):
                    missing = self.received < len(self.places)
                    self.error = message.reason or ("pages are missing" if missing else None)
                    return
                if not isinstance(message, messages.Pages):
                    raise HostError("it answers what it was not asked")
                self._take(message, link.receive(self._page_bytes * len(message.places)))
        finally:
            with self._lock:
                self._connection = None

    def _take(self, pages: messages.Pages, data: memoryview) -> None:
        each = self._page_bytes
        if len(data) != each * len(pages.places):
            raise HostError("it sends pages of another size")
        for i, place in enumerate(pages.places):
            if place not in self._left:
                raise HostError("it sends pages that were not asked for, or twice")
            if pages.keys[messages.KEY_BYTES * i : messages.KEY_BYTES * (i + 1)] != self.keys[place]:
                raise HostError("it sends pages of another prompt")
            self._store(self.places[place], data[each * i : each * (i + 1)])
            del self._left[place]
            self._arrived.append(self.places[place])
            self.received += 1

    @property
    def cancelled(self) -> bool:
        return self._cancelled


class PrefillServer:
    """Attributes:
    up: whether it answers, and has pages like those here.
    load: requests that it had at its last answer.
    num_transfers: transfers that were submitted and are not over; only the engine's thread changes it.
    """

    def __init__(self, address: str, secret: bytes, identity: dict[str, str], wake: Callable[[], None]):
        """`wake`: called after each change that the engine may wait for."""
        self.address, self._secret, self._hello = address, secret, messages.encode(messages.Hello(identity))
        self._wake, self._jobs = wake, queue.SimpleQueue[Transfer | None]()
        self.up = False
        self.load = 0
        self.num_transfers = 0
        self._running: set[Transfer] = set()
        self._closed = threading.Event()
        threads = [self._watch] + [self._work] * CONNECTIONS
        for work in threads:
            threading.Thread(target=work, name=f"prefill {address}", daemon=True).start()

    def submit(self, transfer: Transfer) -> None:
        self._running.add(transfer)
        self._jobs.put(transfer)

    def close(self) -> None:
        self._closed.set()
        for _ in range(CONNECTIONS):
            self._jobs.put(None)

    def _connect(self) -> tuple[Channel, socket.socket]:
        connection = socket.create_connection(split_address(self.address), CONNECT_SECONDS)
        try:
            link = channel.connect(connection, self._secret, CONNECT_SECONDS)
            link.send(self._hello)
            answer = messages.decode(link.receive(MAX_MESSAGE))
            if not isinstance(answer, messages.Welcome):
                raise HostError(answer.reason if isinstance(answer, messages.Refused) else "it does not answer a hello")
        except BaseException:
            connection.close()
            raise
        return link, connection

    # Transfers

    def _work(self) -> None:
        link: tuple[Channel, socket.socket] | None = None
        while (transfer := self._jobs.get()) is not None:
            for is_last in (link is None, True):
                try:
                    link = link or self._connect()
                    transfer.run(*link)
                    break
                except (OSError, EOFError, ValueError) as error:
                    transfer.error = _reason(error)
                    if link is not None:
                        link[1].close()
                        link = None
                    if is_last or transfer.received or transfer.cancelled or isinstance(error, TimeoutError):
                        break  # else the connection may only have been old
                    transfer.error = None
            if transfer.cancelled and link is not None:  # the answer to it may still be coming
                link[1].close()
                link = None
            self._running.discard(transfer)
            transfer.over = True
            self._wake()

    # Watching

    def _watch(self) -> None:
        wait = RETRY_SECONDS[0]
        said = ""
        while not self._closed.is_set():
            try:
                link, connection = self._connect()
                self.up = True
                wait = RETRY_SECONDS[0]
                said = ""
                log.info("the prefill server %s is up", self.address)
                self._wake()
                try:
                    self._ping(link)
                finally:
                    connection.close()
            except (OSError, EOFError, ValueError) as error:
                if (reason := _reason(error)) != said:
                    log.warning("the prefill server %s is not used: %s", self.address, reason)
                said = reason
            self.up = False
            for transfer in list(self._running):
                transfer.cancel()
            self._wake()
            self._closed.wait(wait)
            wait = min(2 * wait, RETRY_SECONDS[1])

    def _ping(self, link: Channel) -> None:
        while not self._closed.wait(PING_SECONDS):
            link.set_deadline(time.monotonic() + SILENT_SECONDS)
            link.send(messages.encode(messages.Ping()))
            answer = messages.decode(link.receive(MAX_MESSAGE))
            if not isinstance(answer, messages.Pong):
                raise HostError("it does not answer a ping")
            self.load = answer.load


def _reason(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "it does not answer in time"
    return str(error) or type(error).__name__


def _shut(connection: socket.socket) -> None:
    """Wakes a thread that waits for the connection."""
    with contextlib.suppress(OSError):  # it has ended already
        connection.shutdown(socket.SHUT_RDWR)
