"""A page of another site cannot use a server without keys."""

from __future__ import annotations

import socket

import httpx
import pytest
from serving import ServerUnderTest

from jaxserve.server.http.origin import is_local

BODY = {"model": "test-model", "prompt": [50, 51], "max_tokens": 2}


def ask(server: ServerUnderTest, method: str = "POST", **headers: str) -> tuple[int, str | None]:
    """The status and the error's code; names of headers are written with underscores."""
    url = f"{server.url}/v1/{'completions' if method == 'POST' else 'models'}"
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    answer = httpx.request(method, url, json=BODY if method == "POST" else None, headers=named, timeout=30)
    return answer.status_code, None if answer.is_success else answer.json()["error"]["code"]


def test_hosts_of_a_local_server(parrot):
    for host in (
        "localhost",
        "LOCALHOST:9",
        "127.0.0.1",
        "127.0.0.2:80",
        "[::1]",
        "[::1]:8000",
        "app.localhost",
        "localhost.",
    ):
        assert ask(parrot, host=host) == (200, None), host
    for host in (
        "evil.example",
        "evil.example:8000",
        "127.0.0.1.evil.example",
        "localhost.evil.example",
        "10.0.0.1",
        "[::2]",
        "]",
    ):
        for method in ("POST", "GET"):
            assert ask(parrot, method, host=host) == (421, "unknown_host"), host
    with socket.create_connection(("127.0.0.1", parrot.port)) as client:  # HTTP/1.0, which no browser speaks
        client.sendall(b"GET /version HTTP/1.0\r\n\r\n")
        assert client.recv(2**16).split()[1] == b"200"


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", "http://localhost:1", "https://127.0.0.1", "file://", "http://["]
)
def test_origins(parrot, origin):
    assert ask(parrot, origin=origin) == (403, "unknown_origin")
    assert ask(parrot, origin=origin, content_type="text/plain") == (403, "unknown_origin")
    assert ask(parrot, origin=origin, sec_fetch_site="cross-site") == (403, "unknown_origin")
    assert ask(parrot, origin=origin, sec_fetch_site="same-site") == (403, "unknown_origin")
    assert ask(parrot, "GET", origin=origin) == (200, None)  # whose answer the page cannot read
    assert "access-control-allow-origin" not in httpx.get(parrot.url + "/v1/models", headers={"origin": origin}).headers


def test_the_first_error_names_the_flag(parrot):
    """Of a page, in the answer and once in the log: browsers only tell of a CORS error."""
    asked = {"origin": "https://app.example", "access-control-request-method": "POST"}
    for path in ("/v1/chat/completions", "/api/chat"):
        answer = httpx.options(parrot.url + path, headers=asked)
        assert answer.status_code == 403
        assert "--allowed-origins https://app.example" in answer.text
    assert parrot.log.read_text().count("browsers call this a CORS error") == 1


def test_own_origins(parrot):
    own = f"127.0.0.1:{parrot.port}"
    assert ask(parrot, origin=f"http://{own}") == (200, None)
    assert ask(parrot, origin="http://localhost", host="localhost") == (200, None)
    assert ask(parrot, origin="http://localhost", host="localhost:80") == (200, None)
    # Proxies that serve the page under a name and a scheme of their own.
    assert ask(parrot, origin="https://llm.example", x_forwarded_host="llm.example") == (200, None)
    assert ask(parrot, origin="https://llm.example", sec_fetch_site="same-origin") == (200, None)


@pytest.mark.slow
def test_allowed_hosts_and_origins(start_server):
    server = start_server(allowed_hosts=["LLM.example"], cors_origins=["https://app.example"])
    assert ask(server, host="llm.example:80") == (200, None)
    assert ask(server, host="llm.example", origin="https://llm.example") == (200, None)
    assert ask(server, host="evil.example") == (421, "unknown_host")
    assert ask(server, origin="https://app.example") == (200, None)
    assert ask(server, origin="https://app.example.evil") == (403, "unknown_origin")
    asked = {"origin": "https://app.example", "access-control-request-method": "POST"}
    assert httpx.options(server.url + "/v1/completions", headers=asked).status_code == 200
    other = asked | {"origin": "https://other.example"}
    assert "--allowed-origins" in httpx.options(server.url + "/v1/completions", headers=other).text


@pytest.mark.slow
def test_servers_for_others(start_server):
    """One on all addresses is called by many names, and still obeys no page of another site."""
    server = start_server(host="0.0.0.0")
    assert ask(server, host="anything.example") == (200, None)
    assert ask(server, host="llm.example", origin="https://llm.example") == (200, None)
    assert ask(server, host="llm.example", origin="https://evil.example") == (403, "unknown_origin")


@pytest.mark.slow
def test_an_inherited_listener(start_server):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.set_inheritable(True)
        server = start_server(fd=listener.fileno(), port=listener.getsockname()[1])
        assert ask(server, host="localhost") == (200, None)
        assert ask(server, host="evil.example") == (421, "unknown_host")


@pytest.mark.slow
def test_a_key_is_enough(start_server):
    """Which a page of another site does not have."""
    server = start_server(api_keys=["secret"])
    assert ask(server, host="llm.example", origin="https://other.example", authorization="Bearer secret") == (200, None)
    asked = {"origin": "https://other.example", "access-control-request-method": "POST"}
    answer = httpx.options(server.url + "/v1/completions", headers=asked)
    assert (answer.status_code, "--allowed-origins" in answer.text) == (403, True)


def test_local_names():
    assert all(map(is_local, ("localhost", "127.0.0.1", "127.8.8.8", "::1", "x.localhost")))
    assert not any(map(is_local, ("", "0.0.0.0", "::", "192.168.0.1", "localhost.example", "127.1.example")))
