"""The prefill server's end of the connections: a thread for each, which hands requests to the engine and sends pages.

The engine's thread never waits for a connection. It puts contents into an export's queue as long as few bytes wait
there; the connection's thread waits for the devices' copies, and for the socket.
"""

from __future__ import annotations

import logging
import queue
import select
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxserve.config import ConfigError
from jaxserve.hosts import channel
from jaxserve.hosts.channel import Channel
from jaxserve.hosts.environment import split_address
from jaxserve.hosts.errors import HostError
from jaxserve.hosts.identity import difference
from jaxserve.roles import messages

log = logging.getLogger(__name__)

GREETING_SECONDS = 5.0  # for a connection to prove that it knows the secret
SEND_SECONDS = 10.0  # for a decode server to read some of what is sent to it
LOOK_SECONDS = 0.2  # between two looks whether the decode server has given up
IDLE_SECONDS = 600.0  # after which a connection that asks nothing is closed
MOST_CONNECTIONS = 1024


@dataclass
class Contents:
    """Contents of pages for one frame. `arrays`: of the pages that a call of the devices has read, and maybe more."""

    places: list[int]
    keys: bytes
    arrays: list[Any]


class Export:
    """Pages that a decode server has asked for.

    Attributes:
      queue: what is to be sent; a Done ends it. Only the engine's thread puts something in.
      unsent: pages in the queue. The engine adds, the connection's thread subtracts.
      cancelled: the decode server has given up, or is gone.
    """

    def __init__(self, ask: messages.Ask):
        self.ask, self.queue = ask, queue.SimpleQueue[Contents | messages.Done]()
        self.unsent, self.cancelled, self.lock = 0, False, threading.Lock()

    def put(self, contents: Contents) -> None:
        with self.lock:
            self.unsent += len(contents.places)
        self.queue.put(contents)

    def end(self, reason: str | None = None) -> None:
        self.queue.put(messages.Done(reason))


def listen(address: str) -> socket.socket:
    """A socket that has the address, and refuses connections until `PageListener` begins. Raises ConfigError."""
    host, port = split_address(address)
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(f"prefill_listen: cannot listen on {address}: {error.strerror or error}") from error
    return listener


class PageListener:
    """Serves the connections of decode servers."""

    def __init__(
        self,
        listener: socket.socket,
        secret: bytes,
        identity: dict[str, str],
        begin: Callable[[Export], None],
        wake: Callable[[], None],
        load: Callable[[], int],
    ):
        """`begin`: takes a new export. `wake`: called when there is room in an export's queue, or it is cancelled.
        `load`: the requests that the engine has. Other threads call them."""
        self._listener, self._secret, self._identity = listener, secret, identity
        self._begin, self._wake, self._load = begin, wake, load
        self._places = threading.Semaphore(MOST_CONNECTIONS)
        listener.listen(128)
        threading.Thread(target=self._accept, name="decode servers", daemon=True).start()

    def _accept(self) -> None:
        while True:
            self._places.acquire()
            try:
                connection, address = self._listener.accept()
            except OSError as error:
                self._places.release()
                log.error("cannot take a decode server's connection: %s", error)
                time.sleep(1.0)
                continue
            threading.Thread(target=self._serve, args=(connection, address[0]), name="decode", daemon=True).start()

    def _serve(self, connection: socket.socket, address: str) -> None:
        try:
            connection.settimeout(GREETING_SECONDS)
            link = channel.accept(connection, self._secret)
            self._greet(link)
            while True:
                link.set_timeout(IDLE_SECONDS)
                match messages.decode(link.receive()):
                    case messages.Ping():
                        link.send(messages.encode(messages.Pong(self._load())))
                    case messages.Ask() as ask:
                        self._answer(ask, link, connection)
                    case _:
                        raise HostError("it says what a decode server does not say")
        except (EOFError, ConnectionError, TimeoutError):
            pass  # it has given up, is gone, or has nothing to ask any more
        except (OSError, ValueError) as error:
            log.warning("a connection from %s was refused: %s", address, error)
        finally:
            connection.close()
            self._places.release()

    def _greet(self, link: Channel) -> None:
        """Raises HostError if its pages are not like those here."""
        hello = messages.decode(link.receive())
        if not isinstance(hello, messages.Hello):
            raise HostError("it does not say hello")
        if (reason := difference(self._identity, hello.identity, "the prefill server")) is not None:
            link.send(messages.encode(messages.Refused(f"its pages are not those of this decode server: {reason}")))
            raise HostError(reason)
        link.send(messages.encode(messages.Welcome()))

    def _answer(self, ask: messages.Ask, link: Channel, connection: socket.socket) -> None:
        export = Export(ask)
        self._begin(export)
        link.set_timeout(SEND_SECONDS)
        try:
            while not isinstance(item := self._next(export, connection), messages.Done):
                parts = _parts(item)
                link.send(messages.encode(messages.Pages(item.places, item.keys)))
                link.send(*parts)
                with export.lock:
                    export.unsent -= len(item.places)
                self._wake()
            link.send(messages.encode(item))
        finally:
            export.cancelled = True
            self._wake()

    def _next(self, export: Export, connection: socket.socket) -> Contents | messages.Done:
        """What to send next. Raises EOFError if the decode server gives up, which closes the connection."""
        while True:
            try:
                return export.queue.get(timeout=LOOK_SECONDS)
            except queue.Empty:
                if select.select([connection], [], [], 0)[0]:
                    raise EOFError("it gives up") from None


def _parts(contents: Contents) -> list[memoryview]:
    """The contents of the pages, in their order. Waits for the devices' copies. Raises OSError if they failed with the
    step that should have computed them."""
    try:
        arrays = [np.ascontiguousarray(x) for x in contents.arrays]
    except Exception as error:
        raise HostError(f"pages could not be read: {error}") from error
    return [memoryview(array[i].reshape(-1).view(np.uint8)) for i in range(len(contents.places)) for array in arrays]
