"""Connections that send a byte of a greeting now and then, and come again when they are closed."""

from __future__ import annotations

import contextlib
import socket
import threading

HELLO = b"jaxserve hosts 2" + bytes(32)


class Strangers:
    """`count` connections from one address, as long as the context lasts. `came`: how often one has connected."""

    def __init__(self, port: int, count: int, seconds: float = 0.3):
        """`seconds`: between two bytes of a connection."""
        self._port = port
        self._seconds = seconds
        self.came = 0
        self._sent: list[tuple[socket.socket, int]] = []
        self._end = threading.Event()
        for _ in range(count):
            self._sent.append(self._come())
        self._thread = threading.Thread(target=self._drip, daemon=True)

    def _come(self) -> tuple[socket.socket, int]:
        self.came += 1
        return socket.create_connection(("127.0.0.1", self._port), 10), 0

    def _drip(self) -> None:
        while not self._end.wait(self._seconds):
            for i, (connection, sent) in enumerate(self._sent):
                try:
                    connection.sendall(HELLO[sent : sent + 1])
                    self._sent[i] = connection, sent + 1
                except OSError:
                    connection.close()
                    with contextlib.suppress(OSError):
                        self._sent[i] = self._come()

    def __enter__(self) -> Strangers:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._end.set()
        self._thread.join()
        for connection, _ in self._sent:
            connection.close()
