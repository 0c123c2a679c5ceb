"""Connections are counted once they are accepted: silent ones, and those in the middle of a TLS handshake."""

from __future__ import annotations

import contextlib
import socket
import ssl
import time

import httpx
import pytest
from serving import make_certificate, wait_until
from test_limits import error_of, everything

from jaxserve.server.http.connections import REFUSAL, RESERVE, Connections


class Transport:
    """Of a connection from that address."""

    def __init__(self, peer):
        self._peer = peer

    def get_extra_info(self, name):
        return self._peer if name == "peername" else None


def silent(stack: contextlib.ExitStack, server, count: int) -> list[socket.socket]:
    """Connections of clients that say nothing."""
    return [stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=20)) for _ in range(count)]


def get(server, path: str) -> tuple[int, str | None]:
    """The status, and the error's code; 0 where there is no answer."""
    try:
        answer = httpx.get(server.url + path, timeout=20)
    except httpx.HTTPError:
        return 0, None
    return answer.status_code, None if answer.is_success else error_of(answer)["code"]


@pytest.mark.slow
def test_silent_connections_count_and_time_out(start_server):
    server = start_server(max_connections=4, client_timeout=3)
    with contextlib.ExitStack() as stack, server.http() as early:
        assert early.get("/version").status_code == 200
        silent(stack, server, 4)
        wait_until(lambda: get(server, "/version") == (503, "too_many_connections"))
        for path in ("/health", "/ready", "/metrics"):
            assert get(server, path)[0] == 200
        assert early.get("/version").status_code == 200  # who was there before goes on
        wait_until(lambda: get(server, "/version")[0] == 200, seconds=20)
        assert early.get("/version").status_code == 200
    assert "Traceback" not in server.log.read_text()


@pytest.mark.slow
def test_no_more_than_the_reserve(start_server):
    """Beyond it sockets are closed at once, so that they cannot use up the files of the process."""
    server = start_server(max_connections=2, client_timeout=10)
    with contextlib.ExitStack() as stack:
        sockets = silent(stack, server, 2 + RESERVE)
        wait_until(lambda: get(server, "/health")[0] in (0, 503))
        (late,) = silent(stack, server, 1)
        assert everything(late) == REFUSAL
        begin = time.monotonic()
        assert b" 408 " in everything(sockets[-1])[:20]  # the reserve is free again sooner than other places
        assert time.monotonic() - begin < 9
        wait_until(lambda: get(server, "/health")[0] == 200, seconds=20)


@pytest.mark.slow
def test_connections_of_one_address(start_server):
    server = start_server(max_connections_per_address=3)
    with contextlib.ExitStack() as stack:
        mine = silent(stack, server, 3)
        wait_until(lambda: get(server, "/health")[0] in (0, 503))
        mine.pop().close()
        wait_until(lambda: get(server, "/version")[0] == 200)
    many = start_server()
    with contextlib.ExitStack() as stack:  # a proxy on this machine, say
        silent(stack, many, 50)
        assert get(many, "/version")[0] == 200


def test_whom_connections_count_for():
    def admitted(peers: list, limit: int = 4, per_address: int | None = None) -> int:
        connections = Connections(limit, per_address)
        return sum(connections.enter(Transport(peer)) is not None for peer in peers)

    assert admitted([("10.0.0.1", 1)] * 5) == 2  # half of all
    assert admitted([("10.0.0.1", 1), ("::ffff:10.0.0.1", 1, 0, 0)] * 3) == 2
    assert admitted([(f"10.0.0.{i}", 1) for i in range(100)]) == 4 + RESERVE
    assert admitted([(f"2001:db8::{i}", 1, 0, 0) for i in range(5)]) == 2
    assert admitted([(f"2001:db8:0:{i}::1", 1, 0, 0) for i in range(5)]) == 5
    assert admitted([("fe80::1%eth0", 1, 0, 2)] * 5) == 2
    assert admitted([("127.0.0.1", 1), ("::1", 1, 0, 0), "", b""] * 2) == 8
    assert admitted([("127.0.0.1", 1)] * 5, per_address=3) == 3
    assert admitted([("10.0.0.1", 1)] * 9, per_address=0) == 9


def test_places_are_given_back():
    connections = Connections(1, 1)
    for _ in range(3):
        ticket = connections.enter(Transport(("10.0.0.1", 1)))
        assert ticket is not None
        assert not ticket.is_surplus
        ticket.leave()
        ticket.leave()
    first, second = (connections.enter(Transport((f"10.0.0.{i}", 1))) for i in range(2))
    assert (first.is_surplus, second.is_surplus, connections.is_over_limit) == (False, True, True)


@pytest.fixture(scope="module")
def secure(tiny_model_folder, tmp_path_factory):
    """A server with TLS, and what its clients trust: (server, context)."""
    from serving import running_server

    folder = tmp_path_factory.mktemp("tls")
    certificate, key = make_certificate(folder)
    options = {"ssl_certfile": str(certificate), "ssl_keyfile": str(key), "max_connections": 3, "client_timeout": 2.0}
    with running_server(tiny_model_folder, folder / "log", engine="ParrotEngine", ready=False, **options) as server:
        context = ssl.create_default_context(cafile=str(certificate))
        wait_until(lambda: secure_get(server, context, "/ready") == 200, seconds=60)
        yield server, context


def secure_get(server, context: ssl.SSLContext, path: str) -> int:
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(f"https://127.0.0.1:{server.port}{path}", verify=context, timeout=20).status_code
    return 0


def test_handshakes_count_and_time_out(secure):
    server, context = secure
    with contextlib.ExitStack() as stack:
        sockets = silent(stack, server, 3)
        wait_until(lambda: secure_get(server, context, "/version") == 503)
        assert secure_get(server, context, "/health") == 200
        assert everything(sockets[0]) == b""  # closed by the server
        wait_until(lambda: secure_get(server, context, "/version") == 200)


def test_failed_handshakes_leave(secure):
    server, context = secure
    for data in (b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01", b""):
        for _ in range(6):
            with socket.create_connection(("127.0.0.1", server.port)) as client:
                client.sendall(data)
    wait_until(lambda: secure_get(server, context, "/version") == 200)
    assert "Traceback" not in server.log.read_text()


def test_a_request_together_with_the_handshakes_end(secure):
    """Its bytes may be here before anybody knows that the handshake has ended."""
    server, context = secure
    request = b"GET /version HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    for _ in range(5):
        incoming = ssl.MemoryBIO()
        outgoing = ssl.MemoryBIO()
        tls = context.wrap_bio(incoming, outgoing, server_hostname="127.0.0.1")
        with socket.create_connection(("127.0.0.1", server.port), timeout=20) as client:
            while True:
                try:
                    tls.do_handshake()
                    break
                except ssl.SSLWantReadError:
                    client.sendall(outgoing.read())
                    incoming.write(client.recv(2**16))
            tls.write(request)
            client.sendall(outgoing.read())  # the last of the handshake, and the request
            answer = b""
            while b"}" not in answer:
                incoming.write(client.recv(2**16))
                with contextlib.suppress(ssl.SSLWantReadError):
                    while data := tls.read(2**16):
                        answer += data
        assert answer.startswith(b"HTTP/1.1 200")


def test_long_bodies_over_tls(secure):
    server, context = secure
    body = {"model": "test-model", "prompt": "x" * 3_000_000, "truncate_prompt_tokens": 1, "max_tokens": 1}
    answer = httpx.post(f"https://127.0.0.1:{server.port}/v1/completions", json=body, verify=context, timeout=60)
    assert answer.status_code == 200
