"""Engines that die or hang under a real server: who waits hears that it may try again, and another engine comes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import tokenizers_for_tests as kinds
from serving import HERE, ROOT, free_port, wait_until

from jaxserve.server.process.api_server import ApiServer

pytestmark = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux")
BODY = {"model": "test-model", "prompt": [50, 51], "max_tokens": 2000, "ignore_eos": True}
SHORT = BODY | {"max_tokens": 5}


def engine_of(server) -> int:
    """The process of its engine."""
    pid = server.process.pid
    (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(child)


def ask(server, body) -> httpx.Response:
    return httpx.post(server.url + "/v1/completions", json=body, timeout=60)


def last_error(events: str) -> dict:
    """Of a stream that an error ended."""
    *_, error, done = events.strip().split("\n\n")
    assert done == "data: [DONE]"
    return json.loads(error.removeprefix("data: "))["error"]


class Streams:
    """Requests of a server that are under way, every other one streamed."""

    def __init__(self, server, count: int, **options):
        self.answers: list[httpx.Response] = []
        bodies = [BODY | {"stream": i % 2 == 0} | options for i in range(count)]
        self._threads = [threading.Thread(target=lambda b=body: self.answers.append(ask(server, b))) for body in bodies]
        for thread in self._threads:
            thread.start()
        wait_until(lambda: server.metric("num_requests_running") == count, seconds=30)

    def join(self) -> list[httpx.Response]:
        for thread in self._threads:
            thread.join(60)
        return self.answers


def test_an_engine_that_is_killed_is_started_again(start_server):
    server = start_server("MarkedEngine", config={"max_model_len": 2048})
    assert ask(server, SHORT).status_code == 200
    streams = Streams(server, 4)
    tokens = server.metric("generation_tokens_total")
    first = engine_of(server)
    os.kill(first, signal.SIGKILL)
    for answer in streams.join():
        if answer.status_code == 200:
            error = last_error(answer.text)
        else:
            assert answer.status_code == 503
            assert answer.headers["retry-after"]
            error = answer.json()["error"]
        assert error["code"] == "engine_unavailable"
        assert "try again" in error["message"]
    assert {answer.status_code for answer in streams.answers} == {200, 503}
    server.wait_ready()
    assert engine_of(server) != first
    assert ask(server, SHORT).json()["usage"]["completion_tokens"] == 5
    wait_until(lambda: server.metric("num_requests_running") == 0)
    assert server.metric("generation_tokens_total") >= tokens + 5, "a counter went backwards"
    assert server.metric("engine_restarts_total") == 1
    os.kill(second := engine_of(server), signal.SIGSTOP)
    with ThreadPoolExecutor(2) as pool:
        silent = [pool.submit(ask, server, SHORT | {"stream": stream}) for stream in (False, True)]
        wait_until(lambda: server.status("/load") == 200 and httpx.get(server.url + "/load").json()["server_load"] == 2)
        time.sleep(0.2)
        os.kill(second, signal.SIGKILL)
        whole, streamed = (one.result() for one in silent)
    assert whole.json()["usage"]["completion_tokens"] == 5, "requests without any output go to the next engine"
    assert streamed.text.count('"text":') >= 5
    assert "error" not in streamed.text
    assert server.stop() == 0


@pytest.mark.slow
def test_while_it_restarts(start_server, tmp_path):
    """What comes meanwhile is told to try again, and /health says why. It gives up after so many attempts."""
    kinds.save_byte_level(tmp_path)
    server = start_server("MarkedEngine", config={"model": str(tmp_path)}, engine_restarts=2)
    os.kill(engine := engine_of(server), signal.SIGSTOP)
    (tmp_path / "broken").touch()
    os.kill(engine, signal.SIGKILL)
    seen = {}

    def ended() -> bool:
        try:
            health = httpx.get(server.url + "/health")
            answer = ask(server, SHORT)
            seen.setdefault(health.json()["status"], (health, answer, server.status("/ready")))
        except httpx.HTTPError:
            pass
        return server.process.poll() is not None

    wait_until(ended, seconds=60)
    health, answer, ready = seen["restarting"]
    assert health.status_code == answer.status_code == ready == 503
    assert "ended" in health.json()["reason"] or "broken" in health.json()["reason"]
    assert answer.headers["retry-after"]
    assert answer.json()["error"]["code"] == "engine_unavailable"
    assert server.process.returncode == 1
    assert "the engine died 3 times in 10 minutes, the last time: the model is broken" in server.log.read_text()


@pytest.mark.slow
def test_without_restarts_the_server_ends_with_its_engine(start_server):
    server = start_server("MarkedEngine", engine_restarts=0)
    answer = ask(server, BODY | {"prompt": [66, 1]})
    assert answer.status_code == 503
    assert "try again" not in answer.text
    assert server.process.wait(20) == 1
    assert "jaxserve: the engine died: the engine process ended" in server.log.read_text()


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_watchdog(start_server):
    """A step that does not end, and a process that is stopped, are ended; a step that compiles is not, nor is an engine
    whose API server was stopped."""
    server = start_server("MarkedEngine", config={"max_model_len": 2048}, watchdog_seconds=4.0)
    compiling = ask(server, SHORT | {"prompt": [68, 1]})
    assert compiling.status_code == 200, compiling.text
    streams = Streams(server, 1, max_tokens=200)
    server.process.send_signal(signal.SIGSTOP)  # the API server, which is not the engine's fault
    time.sleep(6)
    server.process.send_signal(signal.SIGCONT)
    assert "error" not in streams.join()[0].text
    assert server.metric("engine_restarts_total") == 0
    answer = ask(server, BODY | {"prompt": [67, 1]})
    assert answer.status_code == 503
    assert "the engine has not finished a step for 4 s" in answer.json()["error"]["message"]
    reason = httpx.get(server.url + "/health").json().get("reason", "")
    assert "has not finished a step" in reason or server.metric("engine_restarts_total") == 1
    server.wait_ready()
    streams = Streams(server, 2)
    os.kill(engine_of(server), signal.SIGSTOP)
    for answer in streams.join():
        assert "the engine has not finished a step for 4 s" in answer.text
    server.wait_ready()
    assert ask(server, SHORT).status_code == 200
    assert server.metric("engine_restarts_total") == 2


@pytest.mark.slow
def test_a_stopped_engine_does_not_outlive_its_server(start_server):
    server = start_server()
    os.kill(engine := engine_of(server), signal.SIGSTOP)
    server.process.kill()
    server.process.wait()
    status = Path(f"/proc/{engine}/status")
    wait_until(lambda: not status.exists() or "zombie" in status.read_text(), seconds=20)


def test_a_task_of_the_server_that_fails_ends_it():
    """For whatever reason: else it would go on and never be ready."""

    async def fail():
        raise KeyError("unexpected")

    server = ApiServer.__new__(ApiServer)
    server.failure = None
    server.should_exit = False
    asyncio.run(server._guard(fail()))
    assert server.should_exit
    assert server.failure == "'unexpected'"


# Folders, pipes


@pytest.mark.slow
def test_folders_go_with_killed_processes(start_server, tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.mktemp("t")
    monkeypatch.setenv("TMPDIR", str(folder))
    (folder / "jaxserve-mine").mkdir()
    (folder / "jaxserve-mine" / "data").touch()
    first = start_server()
    first.process.kill()
    first.process.wait()
    assert len(list(folder.glob("jaxserve-*/engine.sock"))) == 1
    second = start_server()
    third = start_server()  # which leaves the folder of the second alone
    assert len(list(folder.glob("jaxserve-*/engine.sock"))) == 2
    assert ask(second, SHORT).status_code == ask(third, SHORT).status_code == 200
    assert second.stop() == third.stop() == 0
    assert [path.name for path in folder.iterdir()] == ["jaxserve-mine"]


@pytest.mark.slow
def test_long_names_of_temporary_folders(start_server, tmp_path, monkeypatch):
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    server = start_server()
    assert ask(server, SHORT).status_code == 200
    assert server.stop() == 0


@pytest.mark.slow
def test_a_full_pipe_holds_nobody_up(tiny_model_folder):
    """Neither that of the access log nor that of the other messages, also not at the end."""
    port = free_port()
    serve = {"port": port, "engine_class": "fake_engine:ParrotEngine", "access_log": True}
    options = {"config": {"model": str(tiny_model_folder), "max_model_len": 256}, "serve": serve}
    path = os.pathsep.join([str(ROOT), str(HERE), os.environ.get("PYTHONPATH", "")])
    read_end, write_end = os.pipe()
    filler = b"x" * 2**16
    os.set_blocking(write_end, False)
    while True:
        try:
            os.write(write_end, filler)
        except BlockingIOError:
            if len(filler) == 1:
                break
            filler = filler[: len(filler) // 2]
    os.set_blocking(write_end, True)
    process = subprocess.Popen(
        [sys.executable, str(HERE / "launch.py"), json.dumps(options)],
        env={**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"},
        stdout=write_end,
        stderr=write_end,
    )
    try:
        os.close(write_end)
        url = f"http://127.0.0.1:{port}"

        def ready() -> bool:
            try:
                return httpx.get(url + "/ready", timeout=5).status_code == 200
            except httpx.HTTPError:
                return False

        wait_until(ready, seconds=60)
        body = {"prompt": [50, 51], "max_tokens": 2}
        with httpx.Client(timeout=20) as client:
            for _ in range(20):
                assert client.post(url + "/v1/completions", json=body).status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()
        os.close(read_end)
