"""Connections that come to a listening socket, until they have proven that they know the secret.

One thread serves all of them and waits for none: a stranger holds a socket for a few seconds, and no thread. There is a
bound on their number. Where it is reached, the oldest makes room for the newest, so that a host that knows the secret,
which proves it within milliseconds, gets in however many strangers come.
"""

from __future__ import annotations

import logging
import math
import selectors
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from jaxserve.hosts.channel import Channel, Greeting

log = logging.getLogger(__name__)

MOST = 256  # connections that have not proven it yet
MOST_EACH = 128  # of one address
LOG_SECONDS = 1.0  # between two lines in the log that give the same reason
_BACKLOG = 1024


def bind(host: str, port: int) -> socket.socket:
    """A socket that has this address, and refuses connections until it listens. Raises OSError."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError:
        listener.close()
        raise
    return listener


@dataclass(eq=False)
class _Stranger:
    greeting: Greeting
    address: str
    deadline: float


class Greetings:
    """Takes the connections of a socket from `bind`."""

    def __init__(
        self, listener: socket.socket, secret: bytes, seconds: float, serve: Callable[[Channel], None], name: str
    ):
        """`seconds`: for a connection to prove that it knows the secret, and for the rest of its greeting. `serve`:
        called with each that has proven it, on a thread of its own; it has the rest of the time until it calls
        `set_timeout`. If `serve` raises OSError, EOFError or ValueError, the connection is closed, and the log says
        why."""
        self._listener = listener
        self._secret = secret
        self._seconds = seconds
        self._serve = serve
        self._name = name
        self._selector = selectors.DefaultSelector()
        self._strangers: dict[_Stranger, None] = {}  # the oldest first
        self._logged: dict[str, float] = {}  # reason -> when the log gave it last
        listener.listen(_BACKLOG)
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def _run(self) -> None:
        while True:
            oldest = next(iter(self._strangers), None)
            wait = None if oldest is None else max(oldest.deadline - time.monotonic(), 0.0)
            for key, _ in self._selector.select(wait):
                if key.data is None:
                    self._accept()
                elif key.data in self._strangers:  # else it made room just now
                    self._advance(key.data)
            now = time.monotonic()
            for one in [one for one in self._strangers if one.deadline <= now]:
                self._refuse(one, f"it has not proven within {self._seconds:g} s that it knows the secret")

    def _accept(self) -> None:
        try:
            connection, address = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return  # it is gone again
        except OSError as error:  # too many open files, for example
            log.error("cannot take a connection: %s", error)
            time.sleep(1.0)
            return
        self._make_room(address[0])
        one = _Stranger(Greeting(connection, self._secret), address[0], time.monotonic() + self._seconds)
        self._strangers[one] = None
        self._selector.register(connection, selectors.EVENT_READ, one)

    def _make_room(self, address: str) -> None:
        """Closes the oldest connection of an address that has as many as it may. If there are too many of all
        addresses, closes the oldest of the one that has most."""
        counts = Counter(one.address for one in self._strangers)
        if counts[address] < MOST_EACH:
            if len(self._strangers) < MOST:
                return
            ((address, _),) = counts.most_common(1)
        oldest = next(one for one in self._strangers if one.address == address)
        self._refuse(oldest, "too many connections have not proven yet that they know the secret")

    def _advance(self, one: _Stranger) -> None:
        try:
            link = one.greeting.advance()
        except (OSError, EOFError) as error:
            self._refuse(one, str(error))
            return
        if link is None:
            return
        self._forget(one)
        link.set_deadline(one.deadline)
        name = f"{self._name} {one.address}"
        try:
            threading.Thread(target=self._run_one, args=(link,), name=name, daemon=True).start()
        except RuntimeError as error:  # the system gives no more threads
            log.error("cannot serve a connection from %s: %s", one.address, error)
            link.close()

    def _run_one(self, link: Channel) -> None:
        try:
            self._serve(link)
        except (OSError, EOFError, ValueError) as error:
            log.warning("the connection from %s is closed: %s", link.address, error)
            link.close()

    def _forget(self, one: _Stranger) -> None:
        self._selector.unregister(one.greeting.connection)
        del self._strangers[one]

    def _refuse(self, one: _Stranger, reason: str) -> None:
        self._forget(one)
        one.greeting.connection.close()
        now = time.monotonic()
        if now - self._logged.get(reason, -math.inf) >= LOG_SECONDS:
            self._logged[reason] = now
            log.warning("a connection from %s was refused: %s", one.address, reason)
