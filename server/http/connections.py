"""Who may connect: how many at a time, from the moment that a socket is accepted, before any of its bytes are read."""

from __future__ import annotations

import asyncio
import ipaddress
from collections import Counter
from collections.abc import Callable

RESERVE = 32  # connections beyond the limit, for those who ask for health or metrics
RESERVE_SECONDS = 5.0  # in which these must ask
_REFUSED = (
    b'{"error":{"message":"too many connections are open already; try again later","type":"server_error","param":null,'
    b'"code":"too_many_connections"}}'
)
REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nConnection: close\r\nRetry-After: 1\r\n"
    b"Content-Length: %d\r\n\r\n%b" % (len(_REFUSED), _REFUSED)
)


class Connections:
    """Counts open connections, whether they have sent anything or not, in all and by address.

    Attributes:
      limit: of all, beyond which there is a reserve of RESERVE.
      refused: called for each that is not let in.
    """

    def __init__(self, limit: int, per_address: int | None):
        """`per_address`: most from one address, 0: any number; None: half of `limit`, but any number from this
        machine, where a proxy may stand for many."""
        self.limit = limit
        self.refused: Callable[[], None] = lambda: None
        self._spares_local = per_address is None
        self._per_address = max(1, limit // 2) if per_address is None else per_address
        self._by_address: Counter[str] = Counter()
        self._count = 0

    @property
    def is_over_limit(self) -> bool:
        return self._count > self.limit

    def enter(self, transport: asyncio.BaseTransport) -> Ticket | None:
        """Counts a connection that was just accepted; None where it must be closed."""
        address = self._address(transport)
        if self._count >= self.limit + RESERVE or (address and self._by_address[address] >= self._per_address):
            self.refused()
            return None
        return Ticket(self, address)

    def add(self, address: str | None, number: int) -> None:
        self._count += number
        if address:
            self._by_address[address] += number
            if not self._by_address[address]:
                del self._by_address[address]

    def _address(self, transport: asyncio.BaseTransport) -> str | None:
        """Whom a connection counts for: an IPv4 address, or a network of IPv6, all of which a host has; or nobody."""
        peer = transport.get_extra_info("peername")
        if not self._per_address or not isinstance(peer, tuple):
            return None
        ip = ipaddress.ip_address(peer[0].partition("%")[0])
        ip = getattr(ip, "ipv4_mapped", None) or ip
        if ip.is_loopback and self._spares_local:
            return None
        return str(ip if ip.version == 4 else ipaddress.ip_network((int(ip) >> 64 << 64, 64)))


class Ticket:
    """The place of one open connection, until `leave`.

    Attributes:
      is_surplus: it is one of the reserve.
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
