"""Keys, certificates, and what a server takes at most: rows of the security rules of the API."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import socket
import ssl
import threading
import time

import httpx
import pytest
from serving import SMALL, make_certificate, running_server, wait_until

BODY = {"model": "test-model", "prompt": [50, 51], "max_tokens": 2000, "ignore_eos": True}


@pytest.fixture(scope="module")
def impatient(tiny_model_folder, tmp_path_factory):
    """A server at 20 ms a token that waits half a second for its clients."""
    log = tmp_path_factory.mktemp("log") / "server.log"
    config = {"max_model_len": 2048}
    with running_server(tiny_model_folder, log, engine="SlowEngine", config=config, client_timeout=0.5) as server:
        yield server


def post(server, path: str = "/v1/completions", key: str | None = None, **body) -> httpx.Response:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    return httpx.post(server.url + path, json={**BODY, **body}, headers=headers, timeout=30)


def error_of(response: httpx.Response) -> dict:
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


@pytest.mark.slow
def test_requests_at_a_time_under_a_key(start_server, tmp_path):
    path = tmp_path / "keys"
    path.write_text("one a\ntwo b 1\n")
    server = start_server("SlowEngine", api_key_file=str(path), config={"max_model_len": 2048})
    headers = {"Authorization": "Bearer two"}
    with server.http(headers=headers).stream("POST", "/v1/completions", json={**BODY, "stream": True}) as response:
        lines = response.iter_lines()  # kept: the connection closes with it
        next(lines)
        refused = post(server, key="two", max_tokens=1)
        assert (refused.status_code, error_of(refused)["type"]) == (429, "rate_limit_error")
        assert refused.headers["retry-after"]
        assert post(server, key="one", max_tokens=1).status_code == 200
    wait_until(lambda: post(server, key="two", max_tokens=1).status_code == 200, seconds=3)


def test_completions_count_under_a_key(start_server, tmp_path):
    """A request of n completions was one, however many it asked for."""
    path = tmp_path / "keys"
    path.write_text("one a\ntwo b 4\n")
    server = start_server(
        "SlowEngine", api_key_file=str(path), config={"max_model_len": 2048}, max_completions_per_request=200
    )
    for fields, param in (
        ({"prompt": ["a"] * 1024, "n": 128}, "prompt"), ({"prompt": ["a"] * 201}, "prompt"),
        ({"prompt": ["a", "b"], "n": 101}, "prompt"),
    ):  # fmt: skip
        refused = post(server, key="one", **fields)
        assert (refused.status_code, error_of(refused)["param"]) == (400, param)
        assert "at most 200" in error_of(refused)["message"]
    assert len(post(server, key="one", prompt=["a"] * 100, n=2, max_tokens=1).json()["choices"]) == 200
    for fields in ({"n": 5}, {"prompt": ["a"] * 5}):
        refused = post(server, key="two", **fields)
        assert refused.status_code == 400
        assert "5 completions are more than the 4" in error_of(refused)["message"]
    headers = {"Authorization": "Bearer two"}
    body = {**BODY, "stream": True, "n": 3}
    with server.http(headers=headers).stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        assert post(server, key="two", max_tokens=1).status_code == 200
        refused = post(server, key="two", n=2)
        assert (refused.status_code, error_of(refused)["code"]) == (429, "too_many_requests")
        chat = {"messages": [{"role": "user", "content": "a"}], "n": 2}
        assert httpx.post(server.url + "/v1/chat/completions", json=chat, headers=headers).status_code == 429
    wait_until(lambda: post(server, key="two", n=4, max_tokens=1).status_code == 200, seconds=3)


@pytest.mark.slow
def test_priorities_are_within_the_bounds_of_a_key(start_server, tmp_path):
    path = tmp_path / "keys"
    path.write_text("one a\nvip b - -10\n")
    server = start_server(api_key_file=str(path), config={"scheduling_policy": "priority"})
    for key, priority, status in (("one", 0, 200), ("one", 9, 200), ("one", -1, 400), ("vip", -10, 200),
                                  ("vip", -11, 400)):  # fmt: skip
        answer = post(server, key=key, priority=priority, max_tokens=1)
        assert answer.status_code == status, answer.text
        if status == 400:
            assert error_of(answer)["param"] == "priority"


@pytest.mark.slow
def test_a_flood_of_one_key_leaves_others_their_turn(start_server, tmp_path):
    """500 completions wait under one key; another key's requests are answered long before they are."""
    path = tmp_path / "keys"
    path.write_text("flood\nother\n")
    server = start_server(engine=None, api_key_file=str(path), config=SMALL)
    body = {**BODY, "prompt": [[5, 6]] * 500, "max_tokens": 20, "stream": True}
    ended = 0
    with server.http(headers={"Authorization": "Bearer flood"}).stream("POST", "/v1/completions", json=body) as flood:

        def read() -> None:
            nonlocal ended
            for line in flood.iter_lines():
                ended += '"finish_reason":"length"' in line

        reader = threading.Thread(target=read)
        reader.start()
        wait_until(lambda: ended > 0, seconds=60)
        for _ in range(3):
            assert post(server, key="other", prompt=[7, 8], max_tokens=10).status_code == 200
        assert ended < 400, "the flood was served first"
        reader.join()
        assert ended == 500


@pytest.mark.slow
def test_request_timeout(start_server):
    server = start_server("SlowEngine", config={"max_model_len": 2048}, request_timeout=0.5)
    begin = time.monotonic()
    response = post(server)
    assert (response.status_code, error_of(response)["code"]) == (504, "timeout")
    assert 0.4 < time.monotonic() - begin < 5
    *_, last, done = post(server, stream=True).text.strip().split("\n\n")
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "timeout"
    assert done == "data: [DONE]"
    wait_until(lambda: server.metric("num_requests_running") == 0, seconds=3)
    assert post(server, max_tokens=2).status_code == 200


@pytest.mark.slow
def test_too_many_connections(start_server):
    """`Limits on … connections`: 503 in the shape of all errors, and /health goes on."""
    server = start_server("SlowEngine", config={"max_model_len": 2048}, max_connections=2)
    with server.http() as one, server.http() as two:
        for client in (one, two):
            assert client.get("/version").status_code == 200  # keeps its connection
        refused = httpx.get(server.url + "/version")
        assert (refused.status_code, error_of(refused)["code"]) == (503, "too_many_connections")
        assert refused.headers["retry-after"]
        assert refused.headers["connection"] == "close"
        assert httpx.get(server.url + "/health").status_code == 200
        assert one.get("/version").status_code == 200
    wait_until(lambda: httpx.get(server.url + "/version").status_code == 200, seconds=3)
    assert server.metric("admission_rejections_total") >= 1


@pytest.mark.slow
def test_long_head(start_server):
    server = start_server(max_header_bytes=4096)
    assert httpx.get(server.url + "/version", headers={"x": "y" * 1000}).status_code == 200
    with pytest.raises(httpx.HTTPError):  # it is not even read to its end
        httpx.get(server.url + "/version", headers={"x": "y" * 2_000_000}).raise_for_status()


@pytest.mark.slow
def test_many_bodies_at_once(start_server):
    """`Everything countable in a request is bounded`: what is on its way too; short requests are taken all the same."""
    server = start_server(max_body_bytes=100_000)
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
        b"Content-Type: application/json\r\nContent-Length: 99999\r\n\r\n"
    )

    def send(prompt: str) -> httpx.Response:
        return post(server, prompt=prompt, max_tokens=1, truncate_prompt_tokens=1)

    with contextlib.ExitStack() as stack:
        for _ in range(9):
            client = stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            client.sendall(head + b" " * 90_000)
        wait_until(lambda: send("x" * 90_000).status_code == 503, seconds=5)
        refused = send("x" * 90_000)
        assert error_of(refused)["code"] == "too_many_bodies"
        assert refused.headers["retry-after"]
        assert send("x").status_code == 200
    wait_until(lambda: send("x" * 90_000).status_code == 200, seconds=5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "begin",
    [
        b"",
        b"POST /v1/completions HT",
        b"POST /v1/messages HTTP/1.1\r\nHost: localhost\r\n"
        b"Content-Type: application/json\r\nContent-Length: 9\r\n\r\n{",
        b"POST /nowhere HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{",  # is answered before it has come
    ],
)
def test_requests_that_do_not_come(impatient, begin):
    with socket.create_connection(("127.0.0.1", impatient.port)) as client:
        client.sendall(begin)
        answer = everything(client)
    error = json.loads(answer.rpartition(b"\r\n\r\n")[2])["error"]
    if b"nowhere" in begin:
        assert answer.split()[1] == b"404"
    else:
        assert answer.split()[1] == b"408"
        assert "within 0.5 s" in error["message"]
        assert ("code" in error) == (b"messages" not in begin)


@pytest.mark.slow
def test_connections_that_keep_their_time(impatient):
    """Neither an idle connection nor an answer that takes long has to do with it."""
    with impatient.http() as client:
        for pause in (0.7, 0.0, 0.7):
            assert client.get("/version").status_code == 200
            time.sleep(pause)
        assert client.post("/v1/completions", json=BODY | {"max_tokens": 50}).status_code == 200


@pytest.mark.slow
def test_readers_that_take_nothing_are_disconnected(impatient):
    """Their requests, of 40 s, end with it."""
    body = json.dumps(BODY | {"stream": True, "n": 64, "logprobs": 20}).encode()
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
        b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    )
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", impatient.port))
        client.sendall(head % len(body) + body)
        wait_until(lambda: impatient.metric("num_requests_running") > 0)
        wait_until(lambda: impatient.metric("num_requests_running") == 0, seconds=25)


def test_errors_of_http_have_the_shape_of_all(http, parrot):
    for request, status in (
        (b"NONSENSE\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nno colon\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nX: " + b"y" * 300_000 + b"\r\n\r\n", b"431"),
        (b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 20_000 + b"\r\n", b"431"),
        (b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
         b"Transfer-Encoding: chunked\r\n\r\nxyz\r\n", b"400"),
    ):  # fmt: skip
        with socket.create_connection(("127.0.0.1", parrot.port)) as client:
            client.sendall(request)
            answer = everything(client)
        assert answer.split()[1] == status, answer
        assert set(json.loads(answer.rpartition(b"\r\n\r\n")[2])["error"]) == {"message", "type", "param", "code"}
    assert "Traceback" not in parrot.log.read_text()


def everything(client: socket.socket) -> bytes:
    """What comes until the server closes."""
    client.settimeout(10)
    return b"".join(iter(lambda: client.recv(2**16), b""))


@pytest.mark.slow
def test_files(start_server):
    """As many as connections need, though most systems begin with 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = len(os.listdir("/proc/self/fd")) + 40  # what this process has open, and what starting another takes
    resource.setrlimit(resource.RLIMIT_NOFILE, (few, hard))
    try:
        server = start_server()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    with contextlib.ExitStack() as stack:
        for _ in range(few + 40):
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
        assert httpx.get(server.url + "/version", timeout=5).status_code == 200


@pytest.mark.slow
def test_https(start_server, tmp_path):
    certificate, key = make_certificate(tmp_path)
    server = start_server(ready=False, ssl_certfile=str(certificate), ssl_keyfile=str(key))
    context = ssl.create_default_context(cafile=str(certificate))

    def status() -> int | None:
        try:
            return httpx.get(f"https://127.0.0.1:{server.port}/ready", verify=context).status_code
        except httpx.HTTPError:
            return None

    wait_until(lambda: status() == 200, seconds=60)
    broken = start_server(ready=False, ssl_certfile=str(key))
    assert broken.process.wait(30) == 1
    assert "cannot use the certificate" in broken.log.read_text()


@pytest.mark.slow
def test_queue_of_tokens(start_server):
    """`queued tokens`: the prompts that wait are bounded too, but a lone one is taken however long it is."""
    config = {"max_waiting_tokens": 50, "max_num_seqs": 1, "max_model_len": 256, "max_num_batched_tokens": 128,
              "kv_pages": 26, "load_format": "dummy"}  # fmt: skip
    server = start_server(engine=None, config=config)
    answers: list[httpx.Response] = []
    threads = [
        threading.Thread(target=lambda: answers.append(post(server, prompt=[50] * 40, max_tokens=200)))
        for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    statuses = sorted(answer.status_code for answer in answers)
    assert statuses[0] == 200
    assert statuses[-1] == 503
    assert {error_of(a)["code"] for a in answers if a.status_code == 503} == {"queue_full"}
