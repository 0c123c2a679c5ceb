"""Servers in processes of their own, on free ports."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from pathlib import Path

import anthropic
import httpx
import openai
import pytest

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
DEMO = ROOT / "checkpoints" / "demo"
# The real engine with a pool so small that sequences are preempted under load. All tests use the same settings, so
# that the compiled programs are made once.
SMALL = {
    "max_num_seqs": 16,
    "max_num_batched_tokens": 128,
    "max_model_len": 256,
    "kv_pages": 26,
    "forbid_compile": True,
}


@dataclass
class ServerUnderTest:
    """A running server process."""

    process: subprocess.Popen
    port: int
    model: str
    log: Path
    clients: list[httpx.Client] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def http(self, **options) -> httpx.Client:
        client = httpx.Client(base_url=self.url, timeout=30, **options)
        self.clients.append(client)
        return client

    def openai(self, **options) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=30, **options)

    def openai_async(self, timeout: float = 30) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=timeout)

    def anthropic(self) -> anthropic.Anthropic:
        return anthropic.Anthropic(base_url=self.url, api_key="none", max_retries=0, timeout=30)

    def wait_ready(self, seconds: float = 60) -> None:
        wait_until(lambda: self.status("/ready") == 200 or self.process.poll() is not None, seconds)
        assert self.process.poll() is None, self.log.read_text()

    def status(self, path: str) -> int | None:
        """Of a GET; None: there is no answer. It is cheap: a client of httpx reads certificates for 10 ms."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            connection.request("GET", path)
            return connection.getresponse().status
        except (OSError, HTTPException):
            return None
        finally:
            connection.close()

    def metric(self, name: str, *values: str) -> float:
        """The first that has these values among its labels'."""
        for line in httpx.get(f"{self.url}/metrics").text.splitlines():
            if line.startswith(f"jaxserve:{name}{{") and all(f'="{value}"' in line for value in values):
                return float(line.rsplit(" ", 1)[1])
        raise KeyError(name)

    def stop(self, seconds: float = 20) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        for client in self.clients:
            client.close()
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise


def wait_until(condition, seconds: float = 10, message: str = "") -> None:
    """Polls `condition` until it holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, message or "timed out"
        time.sleep(0.02)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1, and its key; skips the test where nothing can make them."""
    key = folder / "key.pem"
    certificate = folder / "certificate.pem"
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificate")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-keyout", key, "-out", certificate, "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"],
        check=True, capture_output=True,
    )  # fmt: skip
    return certificate, key


@contextlib.contextmanager
def running_server(folder: Path, log: Path, *, engine: str | None, ready: bool = True, config=None, **serve):
    port = serve.setdefault("port", free_port())
    serve.setdefault("served_model_name", "test-model")
    serve.setdefault("access_log", False)
    if engine is not None:
        serve["engine_class"] = f"fake_engine:{engine}"
    options = {"config": {"model": str(folder), **(config or {})}, "serve": serve}
    process = _launch(options, log, [serve["fd"]] if "fd" in serve else [])
    server = ServerUnderTest(process, port, serve["served_model_name"], log)
    try:
        if ready:
            server.wait_ready(seconds=240 if engine is None else 60)
        yield server
    finally:
        server.stop()


@contextlib.contextmanager
def server_of_models(log: Path, *flags: str, engine: str | None = "NumberedEngine"):
    """A server with several models, which `flags` of `jaxserve serve` name."""
    port = free_port()
    engine_class = engine and f"fake_engine:{engine}"
    process = _launch({"flags": [*flags, "--port", str(port)], "engine_class": engine_class}, log)
    server = ServerUnderTest(process, port, "", log)
    try:
        server.wait_ready(120)
        yield server
    finally:
        server.stop()


def _launch(options: dict, log: Path, pass_fds=()) -> subprocess.Popen:
    path = os.pathsep.join([str(ROOT), str(HERE), os.environ.get("PYTHONPATH", "")])
    with log.open("w") as output:
        return subprocess.Popen(
            [sys.executable, str(HERE / "launch.py"), json.dumps(options)],
            env={**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"},
            stdout=output,
            stderr=subprocess.STDOUT,
            pass_fds=pass_fds,
        )
