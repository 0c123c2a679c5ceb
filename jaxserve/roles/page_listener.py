"""The prefill server's end of the connections: a thread for each, which hands requests to the engine and sends pages.

The engine's thread never waits for a connection. It puts contents into an export's queue as long as few bytes wait
there; the connection's thread waits for the devices' copies, and for the socket.
"""

from __future__ import annotations

import logging
import queue
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxserve.config import ConfigError
from jaxserve.hosts.channel import MAX_MESSAGE, Channel
from jaxserve.hosts.greetings import Greetings, bind
from jaxserve.hosts.host_environment import split_address
from jaxserve.hosts.identity import difference
from jaxserve.hosts.messages import HostError
from jaxserve.roles import messages
from jaxserve.types import InvalidRequestError

log = logging.getLogger(__name__)

GREETING_SECONDS = 5.0  # for a connection to prove that it knows the secret, and to say hello
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
      peer: the decode server's address.
      queue: what is to be sent; a Done ends it. Only the engine's thread puts something in.
      unsent: pages in the queue. The engine adds, the connection's thread subtracts.
      cancelled: the decode server has given up, or is gone.
    """

    def __init__(self, ask: messages.Ask, peer: str):
        self.ask, self.peer, self.queue = ask, peer, queue.SimpleQueue[Contents | messages.Done]()
        self.unsent = 0
        self.cancelled = False
        self.lock = threading.Lock()

    def put(self, contents: Contents) -> None:
        with self.lock:
            self.unsent += len(contents.places)
        self.queue.put(contents)

    def end(self, reason: str | None = None) -> None:
        self.queue.put(messages.Done(reason))

    def refuse(self, error: InvalidRequestError) -> None:
        """Ends an export that no right decode server asks for."""
        log.warning("the decode server %s asks for pages that it does not get: %s", self.peer, error)
        self.end(str(error))


def listen(address: str) -> socket.socket:
    """A socket that has the address, and refuses connections until `PageListener` begins. Raises ConfigError."""
    try:
        return bind(*split_address(address))
    except OSError as error:
        raise ConfigError(f"prefill_listen: cannot listen on {address}: {error.strerror or error}") from error


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
        most: int,
    ):
        """`begin`: takes a new export, or raises InvalidRequestError. `wake`: called when there is room in an export's
        queue, or it is cancelled. `load`: the requests that the engine has. Other threads call them. `most`: bytes of
        an `Ask` for the longest prompt."""
        self._identity = identity
        self._most = most
        self._begin = begin
        self._wake = wake
        self._load = load
        self._places = threading.Semaphore(MOST_CONNECTIONS)
        Greetings(listener, secret, GREETING_SECONDS, self._serve, "decode servers")

    def _serve(self, link: Channel) -> None:
        if not self._places.acquire(blocking=False):
            raise HostError(f"there are {MOST_CONNECTIONS} connections of decode servers already")
        try:
            self._greet(link)
            while True:
                link.set_timeout(IDLE_SECONDS)
                match messages.decode(link.receive(self._most)):
                    case messages.Ping():
                        link.send(messages.encode(messages.Pong(self._load())))
                    case messages.Ask() as ask:
                        self._answer(ask, link)
                    case other:
                        raise HostError(f"it sends a {type(other).__name__}, which a decode server does not say")
        except (EOFError, ConnectionError, TimeoutError):
            pass  # it has given up, is gone, or has nothing to ask any more
        finally:
            link.close()
            self._places.release()

    def _greet(self, link: Channel) -> None:
        """Raises HostError if its pages are not like those here."""
        hello = messages.decode(link.receive(MAX_MESSAGE))
        if not isinstance(hello, messages.Hello):
            raise HostError("it does not say hello")
        if (reason := difference(self._identity, hello.identity, "the prefill server")) is not None:
            link.send(messages.encode(messages.Refused(f"its pages are not those of this decode server: {reason}")))
            raise HostError(reason)
        link.send(messages.encode(messages.Welcome()))

    def _answer(self, ask: messages.Ask, link: Channel) -> None:
        export = Export(ask, link.address)
        link.set_timeout(SEND_SECONDS)
        try:
            self._begin(export)
        except InvalidRequestError as error:
            export.refuse(error)
        try:
            while not isinstance(item := self._next(export, link), messages.Done):
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

    def _next(self, export: Export, link: Channel) -> Contents | messages.Done:
        """What to send next. Raises EOFError if the decode server gives up, which closes the connection."""
        while True:
            try:
                return export.queue.get(timeout=LOOK_SECONDS)
            except queue.Empty:
                if link.has_input():
                    raise EOFError("it gives up") from None


def _parts(contents: Contents) -> list[memoryview]:
    """The contents of the pages, in their order. Waits for the devices' copies. Raises OSError if they failed with the
    step that should have computed them."""
    try:
        arrays = [np.ascontiguousarray(x) for x in contents.arrays]
    except Exception as error:
        raise HostError(f"pages could not be read: {error}") from error
    return [memoryview(array[i].reshape(-1).view(np.uint8)) for i in range(len(contents.places)) for array in arrays]
