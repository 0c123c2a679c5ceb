"""A server's life: starting, overload, clients that leave, engines that die, shutting down."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
from serving import wait_until

BODY = {"model": "test-model", "prompt": [50, 51], "max_tokens": 2000, "ignore_eos": True}


def idle(server) -> bool:
    return server.metric("num_requests_running") == 0 and server.metric("kv_cache_usage_perc") == 0


def test_leaving_a_stream_frees_the_request(slow):
    with slow.http().stream("POST", "/v1/completions", json={**BODY, "stream": True}) as response:
        lines = response.iter_lines()  # kept: the connection closes with it
        next(lines)
        wait_until(lambda: slow.metric("num_requests_running") == 1)
    wait_until(lambda: idle(slow), seconds=3)


def test_leaving_before_the_answer_frees_the_request(slow):
    with pytest.raises(httpx.ReadTimeout):
        slow.http().post("/v1/completions", json={**BODY, "n": 3}, timeout=0.5)
    wait_until(lambda: idle(slow), seconds=3)


def test_stop_string_frees_one_completion_of_several(slow):
    client = slow.openai()
    result = client.completions.create(
        model="test-model", prompt=["Once upon", "ab cd"], stop="upon", max_tokens=30, extra_body={"ignore_eos": True}
    )
    assert [choice.finish_reason for choice in result.choices] == ["stop", "length"]
    assert idle(slow) or wait_until(lambda: idle(slow), seconds=3) is None


def test_streams_arrive_token_by_token(slow):
    times = []
    with slow.http().stream("POST", "/v1/completions", json={**BODY, "max_tokens": 20, "stream": True}) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                times.append(time.monotonic())
    assert len(times) >= 10
    assert times[-1] - times[0] > 0.2


@pytest.mark.slow
def test_health_while_loading(start_server):
    server = start_server("SlowLoadingEngine", ready=False)
    wait_until(lambda: server.status("/health") is not None, seconds=30)
    for path in ("/health", "/ready"):
        loading = httpx.get(server.url + path)
        assert (loading.status_code, loading.json()) == (503, {"status": "loading"})
    response = httpx.post(server.url + "/v1/completions", json=BODY)
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "loading"
    assert response.headers["retry-after"]
    server.wait_ready()
    assert httpx.get(server.url + "/health").json() == {"status": "ok"}
    assert server.stop() == 0


@pytest.mark.slow
def test_signal_while_loading(start_server):
    server = start_server("SlowLoadingEngine", ready=False)
    wait_until(lambda: server.status("/health") == 503, seconds=30)
    start = time.monotonic()
    assert server.stop() == 0
    assert time.monotonic() - start < 10


@pytest.mark.slow
def test_engine_that_does_not_start(start_server):
    server = start_server("BrokenConfigEngine", ready=False)
    assert server.process.wait(20) == 1
    assert "max_model_len of 5 is too small; set it to 10 or more" in server.log.read_text()


def test_no_tokenizer(start_server, tmp_path):
    server = start_server(ready=False, config={"model": str(tmp_path)})
    assert server.process.wait(30) == 1
    assert "no usable tokenizer" in server.log.read_text()


def test_no_tokenizer_beside_an_engine_that_does_not_start(start_server, tmp_path):
    """The log holds the engine's error, and no traceback of the other one."""
    server = start_server("BrokenConfigEngine", ready=False, config={"model": str(tmp_path)})
    assert server.process.wait(30) == 1
    log = server.log.read_text()
    assert "max_model_len of 5 is too small" in log
    assert "Traceback" not in log


def test_a_port_that_is_none(start_server):
    server = start_server(ready=False, port=65536)
    assert server.process.wait(30) == 1
    assert server.log.read_text().splitlines()[-1].startswith("jaxserve: cannot listen on 127.0.0.1:65536: ")


def test_port_in_use(start_server, slow):
    server = start_server(ready=False, port=slow.port)
    assert server.process.wait(20) == 1
    assert f"cannot listen on 127.0.0.1:{slow.port}" in server.log.read_text()


def test_engine_death(start_server):
    server = start_server("FailingEngine")
    http = server.http()
    response = http.post("/v1/completions", json={**BODY, "prompt": [7, 8, 9]})
    assert response.status_code == 500
    assert "KeyError" not in response.text
    assert http.post("/v1/completions", json={**BODY, "max_tokens": 5}).status_code == 200
    events = http.post("/v1/completions", json={**BODY, "stream": True}).text.strip().split("\n\n")
    assert "device lost" in json.loads(events[-2].removeprefix("data: "))["error"]["message"]
    assert events[-1] == "data: [DONE]"
    server.wait_ready()  # another engine has taken its place
    assert http.post("/v1/completions", json={**BODY, "max_tokens": 5}).status_code == 200


@pytest.mark.slow
def test_queue_full(start_server):
    server = start_server("SlowEngine", config={"max_waiting": 1, "max_model_len": 2048})
    with server.http().stream("POST", "/v1/completions", json={**BODY, "stream": True}) as response:
        lines = response.iter_lines()  # kept: the connection closes with it
        next(lines)
        refused = httpx.post(server.url + "/v1/completions", json=BODY)
    assert refused.status_code == 503
    assert refused.headers["retry-after"]
    assert refused.json()["error"]["code"] == "queue_full"
    assert server.metric("admission_rejections_total") == 1


@pytest.mark.slow
def test_api_keys(start_server):
    server = start_server(api_keys=["first", "second"])
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic first"}):
        for path in ("/v1/models", "/metrics", "/nowhere", "/version"):
            response = httpx.get(server.url + path, headers=headers)
            assert response.status_code == 401
            assert response.json()["error"]["code"] == "invalid_api_key"
    assert httpx.get(server.url + "/v1/models", headers={"Authorization": "Bearer second"}).status_code == 200
    assert server.status("/health") == server.status("/ready") == 200
    with pytest.raises(openai.AuthenticationError):
        server.openai().models.list()


@pytest.mark.slow
def test_body_limit(start_server):
    server = start_server(max_body_bytes=1000)
    body = json.dumps({**BODY, "prompt": "x" * 2000}).encode()
    headers = {"content-type": "application/json"}
    assert httpx.post(server.url + "/v1/completions", content=body, headers=headers).status_code == 413
    chunks = (body[i : i + 100] for i in range(0, len(body), 100))
    response = httpx.post(server.url + "/v1/completions", content=chunks, headers=headers)
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "body_too_long"


def in_background(server, body, running: int = 1) -> tuple[threading.Thread, list]:
    """Sends a request; returns when so many are under way, or it is answered."""
    answers: list = []

    def run() -> None:
        answers.append(httpx.post(server.url + "/v1/completions", json=body, timeout=30))

    thread = threading.Thread(target=run)
    thread.start()
    wait_until(lambda: answers or server.metric("num_requests_running") >= running)
    return thread, answers


def test_drain_lets_running_requests_finish(start_server):
    server = start_server("SlowEngine", config={"max_model_len": 2048})
    thread, answers = in_background(server, {**BODY, "max_tokens": 60})
    server.process.send_signal(signal.SIGTERM)
    wait_until(lambda: server.status("/ready") == 503)
    refused = httpx.post(server.url + "/v1/completions", json=BODY)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
    thread.join()
    assert answers[0].status_code == 200
    assert answers[0].json()["usage"]["completion_tokens"] == 60
    assert server.process.wait(10) == 0


@pytest.mark.slow
def test_drain_ends_what_takes_too_long(start_server):
    server = start_server("SlowEngine", config={"max_model_len": 2048}, drain_seconds=0.3)
    thread, answers = in_background(server, {**BODY, "stream": True})
    server.process.send_signal(signal.SIGTERM)
    thread.join()
    events = answers[0].text.strip().split("\n\n")
    assert "shutting down" in json.loads(events[-2].removeprefix("data: "))["error"]["message"]
    assert events[-1] == "data: [DONE]"
    assert server.process.wait(10) == 0


@pytest.mark.slow
def test_restart_on_a_socket_that_stays(start_server):
    """Whoever was accepted gets an answer or an error; whoever comes meanwhile waits for the next process."""
    body = {**BODY, "max_tokens": 30}
    with socket.create_server(("127.0.0.1", 0), backlog=512) as listener:
        options = {"fd": listener.fileno(), "port": listener.getsockname()[1], "config": {"max_model_len": 2048}}
        first = start_server("SlowEngine", drain_seconds=0.5, **options)
        url = f"{first.url}/v1/completions"
        endless, ended = in_background(first, {**BODY, "stream": True})
        quick, answered = in_background(first, body, running=2)
        first.process.send_signal(signal.SIGTERM)
        wait_until(lambda: "stopping" in first.log.read_text())
        with ThreadPoolExecutor(20) as pool:
            newcomers = [pool.submit(httpx.post, url, json=body, timeout=60) for _ in range(20)]
            assert first.process.wait(10) == 0
            endless.join()
            quick.join()
            assert "shutting down" in ended[0].text
            assert answered[0].status_code == 200 or "shutting down" in answered[0].text
            assert not any(one.done() for one in newcomers)
            second = start_server("SlowEngine", **options)
            answers = [one.result() for one in newcomers]
        loading = [answer for answer in answers if answer.status_code == 503]
        assert {answer.status_code for answer in answers} <= {200, 503}
        assert all(answer.json()["error"]["code"] == "loading" for answer in loading)
        assert all("retry-after" in answer.headers for answer in loading)
        assert httpx.post(url, json=body, timeout=60).json()["usage"]["completion_tokens"] == 30
        assert second.stop() == 0


@pytest.mark.slow
def test_exit_waits_for_no_client(start_server):
    """Neither for one who has not sent all, who gets a 503, nor for one who does not read."""
    server = start_server("SlowEngine", config={"max_model_len": 2048}, drain_seconds=3)
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
        "Content-Type: application/json\r\nContent-Length: {}\r\n\r\n"
    )
    body = json.dumps({**BODY, "max_tokens": 2000, "stream": True, "n": 128, "logprobs": 20})
    with socket.socket() as deaf, socket.create_connection(("127.0.0.1", server.port)) as late:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.connect(("127.0.0.1", server.port))
        deaf.sendall((head.format(len(body)) + body).encode())
        late.sendall(head.format(9).encode() + b"{")
        wait_until(lambda: server.metric("num_requests_running") > 0)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(20) == 0
        assert late.recv(2**16).startswith(b"HTTP/1.1 503 ")
    assert "Traceback" not in server.log.read_text()


@pytest.mark.slow
def test_second_signal_exits_at_once(start_server):
    server = start_server("SlowEngine", config={"max_model_len": 2048})
    with server.http().stream("POST", "/v1/completions", json={**BODY, "stream": True}) as response:
        lines = response.iter_lines()  # kept: the connection closes with it
        next(lines)
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: server.status("/ready") == 503)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(2) == 1


@pytest.mark.slow
def test_engine_goes_when_the_server_is_killed(start_server):
    server = start_server()
    children = subprocess.run(
        ["ps", "--ppid", str(server.process.pid), "-o", "pid="], capture_output=True, text=True, check=True
    ).stdout.split()
    assert len(children) == 1
    server.process.kill()
    server.process.wait()

    def gone() -> bool:
        return subprocess.run(["ps", "-p", children[0], "-o", "stat="], capture_output=True, text=True).stdout[:1] in (
            "",
            "Z",
        )

    wait_until(gone, seconds=3)
