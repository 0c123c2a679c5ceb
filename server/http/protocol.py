"""HTTP/1.1 connections: uvicorn's protocol with TLS handshakes, time limits and errors in the API's shape."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import sys
from typing import Any, TypedDict, Unpack

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from jaxserve.server.http.connections import REFUSAL, RESERVE_SECONDS, Connections, Ticket
from jaxserve.server.http.errors import APIError, unavailable
from jaxserve.server.http.middleware import FILES_PATH

_PIECE = 16 * 2**10  # bytes parsed at a time outside of bodies, so that a head that is too long is noticed early
UPLOAD_BYTES = 2**20
_LINGER_SECONDS = 2.0  # time for a refused client, which may still be sending, to read the answer


class UvicornOptions(TypedDict, total=False):
    """What uvicorn gives a protocol; see `H11Protocol`."""

    config: uvicorn.Config
    server_state: ServerState
    app_state: dict[str, Any]
    _loop: asyncio.AbstractEventLoop | None


def accept(
    *,
    connections: Connections,
    client_timeout: float,
    tls: ssl.SSLContext | None,
    **options: Unpack[UvicornOptions],
) -> asyncio.Protocol:
    """The protocol for a newly accepted socket."""
    connection = Connection(places=connections, client_timeout=client_timeout, **options)
    return connection if tls is None else Handshake(connection, connections, tls, client_timeout)


class Connection(H11Protocol):
    """One client's connection.

    A request's head, and then its body, must each arrive within `client_timeout` seconds; otherwise the answer is 408.
    Of a file that is uploaded, UPLOAD_BYTES must arrive in each `client_timeout`.
    A client that has read nothing of its answer for that time is disconnected. `places` counts the connection. If it
    was beyond the limit when it came, its requests have `surplus` in `scope["state"]`.

    Attributes:
      ticket: the connection's place; None before it has one.
    """

    def __init__(self, *, places: Connections, client_timeout: float, **options: Unpack[UvicornOptions]):
        super().__init__(**options)
        self._places = places
        self.ticket: Ticket | None = None
        self._client_timeout = client_timeout
        self._receiving: asyncio.TimerHandle | None = None
        self._sending: asyncio.TimerHandle | None = None
        self._refused = False
        self._body_left = 0  # bytes that are still to come, at least, behind which the next head may begin
        self._arrived = 0  # bytes since the time limit began

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.ticket = self.ticket or self._places.enter(transport)
        if self.ticket is None:
            self._refused = True
            transport.write(REFUSAL)
            transport.close()
            return
        super().connection_made(transport)
        if self.ticket.is_surplus:
            self._client_timeout = min(self._client_timeout, RESERVE_SECONDS)
            self.app_state = {**self.app_state, "surplus": True}
        self._expect()

    def connection_lost(self, exc: Exception | None) -> None:
        if self.ticket is None:
            return  # it was refused
        self.ticket.leave()
        super().connection_lost(exc)
        for timer in (self._receiving, self._sending):
            if timer is not None:
                timer.cancel()

    def data_received(self, data: bytes) -> None:
        at = 0
        while at < len(data) and not self._refused and not self.transport.is_closing():
            before = self.conn.their_state
            piece = data[at : at + max(_PIECE, self._body_left)]
            self._arrived += len(piece)
            super().data_received(piece)
            at += len(piece)
            if self.conn.their_state is not h11.SEND_BODY:
                self._body_left = 0
            else:
                whole = self._body_left if before is h11.SEND_BODY else self._content_length()
                self._body_left = max(0, whole - len(piece))
            if not self._refused and (self._receiving is None or self.conn.their_state is not before):
                self._expect()

    def _content_length(self) -> int:
        """Bytes of the body of the request whose head came last; 0 if they are not known."""
        headers = dict(self.headers)
        return 0 if b"transfer-encoding" in headers else int(headers.get(b"content-length", b"0"))

    def _expect(self) -> None:
        """Restarts the time limit for the rest of a head or body; ends it if the request is complete."""
        if self._receiving is not None:
            self._receiving.cancel()
            self._receiving = None
        self._arrived = 0
        if self.conn.their_state in (h11.IDLE, h11.SEND_BODY):
            self._receiving = self.loop.call_later(self._client_timeout, self._too_late)

    def _too_late(self) -> None:
        is_upload = self.conn.their_state is h11.SEND_BODY and self.scope["path"].endswith(FILES_PATH)
        if is_upload and (self._arrived >= UPLOAD_BYTES or self.flow.read_paused):
            self._expect()
            return
        text = f"the request did not come whole within {self._client_timeout:g} s"
        self._refuse(APIError(408, text, code="request_timeout"))

    def send_400_response(self, msg: str) -> None:
        """Answers bytes that are not valid HTTP. uvicorn calls it while it handles h11's exception."""
        problem = sys.exception()
        too_long = isinstance(problem, h11.RemoteProtocolError) and problem.error_status_hint == 431
        text = "the request's head is too long" if too_long else f"not a valid HTTP/1.1 request: {problem!s:.200}"
        self._refuse(APIError(431 if too_long else 400, text))

    def _refuse(self, error: APIError) -> None:
        """Sends the error if no answer has begun, then closes, after some time for the client to read it."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            answer = error.response(dict(self.scope or {"path": ""}))
            headers = [*answer.raw_headers, (b"connection", b"close")]
            for event in (
                h11.Response(status_code=error.status, headers=headers),
                h11.Data(data=bytes(answer.body)),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        if self.cycle is not None:  # the handler may still wait for the body
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self._refused = True
        if not self.transport.can_write_eof():  # TLS
            self.transport.close()
            return
        self.flow.resume_reading()  # closing with unread data would reset the connection and lose the answer
        self.transport.write_eof()
        if self._receiving is not None:
            self._receiving.cancel()
        self._receiving = self.loop.call_later(_LINGER_SECONDS, self.transport.abort)

    def shutdown(self) -> None:
        """Closes the connection at shutdown; does not wait for the rest of an incomplete request."""
        if self.conn.their_state is h11.SEND_BODY and not self._refused:
            self._refuse(unavailable("the server is shutting down", "shutting_down"))
        else:
            super().shutdown()

    def drop_if_stuck(self) -> None:
        """Disconnects a client that does not read its answer."""
        if self.flow.write_paused:
            self.transport.abort()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._sending is not None:
            self._sending.cancel()

    def _watch_reader(self, before: int) -> None:
        """Disconnects unless fewer than `before` bytes wait to be sent after `client_timeout`; then checks again."""

        def look() -> None:
            if (now := self.transport.get_write_buffer_size()) < before:
                self._watch_reader(now)
            else:
                self.transport.abort()

        self._sending = self.loop.call_later(self._client_timeout, look)


class Handshake(asyncio.Protocol):
    """A connection during its TLS handshake; `connection` takes over after it."""

    def __init__(self, connection: Connection, connections: Connections, tls: ssl.SSLContext, seconds: float):
        self._connection = connection
        self._connections = connections
        self._tls = tls
        self._seconds = seconds

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        ticket = self._connections.enter(transport)
        if ticket is not None:
            # Event loops can start TLS on a socket, but not safely on a transport that may already be reading.
            own = socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno()))
            own.setblocking(False)
            self._task = asyncio.get_running_loop().create_task(self._shake_hands(own, ticket))
            self._connection.connections.add(self)  # type: ignore[arg-type]  # so that uvicorn shuts it down
        transport.abort()  # type: ignore[attr-defined]

    async def _shake_hands(self, own: socket.socket, ticket: Ticket) -> None:
        self._connection.ticket = ticket
        seconds = min(self._seconds, RESERVE_SECONDS) if ticket.is_surplus else self._seconds
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: self._connection, own, ssl=self._tls, ssl_handshake_timeout=seconds
            )
        except OSError:  # includes ssl.SSLError and TimeoutError
            ticket.leave()
            own.close()
        except BaseException:
            ticket.leave()
            raise
        finally:
            self._connection.connections.discard(self)  # type: ignore[arg-type]

    def shutdown(self) -> None:
        """Ends the handshake; uvicorn calls it at shutdown."""
        self._task.cancel()

    def drop_if_stuck(self) -> None:
        self._task.cancel()
