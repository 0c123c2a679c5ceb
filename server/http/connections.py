"""Limits on open connections. They apply as soon as a socket is accepted, before any of its bytes are read."""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Callable

from jaxserve.server.http.counts import CONNECTIONS, Counts

RESERVE = 32  # connections beyond the limit that may ask for health or metrics
RESERVE_SECONDS = 5.0  # time for such a connection to send its request
_REFUSED = (
    b'{"error":{"message":"too many connections are open already; try again later","type":"server_error","param":null,'
    b'"code":"too_many_connections"}}'
)
REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nConnection: close\r\nRetry-After: 1\r\n"
    b"Content-Length: %d\r\n\r\n%b" % (len(_REFUSED), _REFUSED)
)


class Connections:
    """Counts the open connections of all API servers, idle ones included, in total and per client address.

    Attributes:
      limit: most connections in total, apart from RESERVE more.
      refused: called for each connection that is refused.
    """

    def __init__(self, limit: int, per_address: int | None, counts: Counts | None = None):
        """`per_address`: most connections from one address; 0: no limit; None: half of `limit`, and no limit for this
        machine, where a proxy may serve many clients."""
        self.limit = limit
        self.refused: Callable[[], None] = lambda: None
        self._spares_local = per_address is None
        self._per_address = max(1, limit // 2) if per_address is None else per_address
        self._counts = counts or Counts()

    @property
    def is_over_limit(self) -> bool:
        return self._counts.total(CONNECTIONS) > self.limit

    def enter(self, transport: asyncio.BaseTransport) -> Ticket | None:
        """Counts a connection that was just accepted; None if the caller must close it."""
        address = self._address(transport)
        with self._counts.lock():
            room = self._counts.total(CONNECTIONS) < self.limit + RESERVE
            if room and (not address or self._counts.total(address) < self._per_address):
                return Ticket(self, address)
        self.refused()
        return None

    def add(self, address: str | None, number: int) -> None:
        self._counts.add(CONNECTIONS, number)
        if address:
            self._counts.add(address, number)

    def _address(self, transport: asyncio.BaseTransport) -> str | None:
        """The address that a connection counts for: an IPv4 address, or an IPv6 /64 network, since one host has all of
        its addresses. None if no limit applies."""
        peer = transport.get_extra_info("peername")
        if not self._per_address or not isinstance(peer, tuple):
            return None
        ip = ipaddress.ip_address(peer[0].partition("%")[0])
        ip = getattr(ip, "ipv4_mapped", None) or ip
        if ip.is_loopback and self._spares_local:
            return None
        return str(ip if ip.version == 4 else ipaddress.ip_network((int(ip) >> 64 << 64, 64)))


class Ticket:
    """The place of one open connection, from creation until `leave`.

    Attributes:
      is_surplus: whether the connection was beyond the limit when it came.
    """

    def __init__(self, connections: Connections, address: str | None):
        self._connections: Connections | None = connections
        self._address = address
        connections.add(address, 1)
        self.is_surplus = connections.is_over_limit

    def leave(self) -> None:
        if self._connections is not None:
            self._connections.add(self._address, -1)
            self._connections = None
