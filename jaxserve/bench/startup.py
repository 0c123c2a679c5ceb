"""Measures the time from the start of a server's process until it is ready, by phase."""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import IO

from jaxserve import entry
from jaxserve.config import EngineConfig

_POLL_SECONDS = 0.02
_STOP_SECONDS = 30


@dataclass(frozen=True)
class Start:
    """One start. Times are in seconds, from the process's start or of a phase; None if the log does not have it.

    Attributes:
      cache: "cold" is an empty compilation cache, "warm" that of the start before, "as is" the user's.
      http_s: until the server answered /health.
      load_s: reading and placing the model, sizing the cache.
      compile_s: compiling, or reading compiled programs from the cache.
      executables: number of these programs.
      ready_s: until /ready reported that the server is ready; the sum of all phases.
    """

    cache: str
    http_s: float
    load_s: float | None
    compile_s: float | None
    executables: int | None
    ready_s: float

    @property
    def other_s(self) -> float:
        """The rest: imports, starting processes and devices, the tokenizer."""
        return self.ready_s - (self.load_s or 0.0) - (self.compile_s or 0.0)


def engine_flags(config: EngineConfig) -> list[str]:
    """The command line's flags for the settings that differ from the defaults, except the model."""
    flags = []
    for name, field in EngineConfig.__dataclass_fields__.items():
        value = getattr(config, name)
        flag = name.replace("_", "-")
        if name == "model" or value == field.default:
            continue
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            flags += [f"--{flag}", str(value)]
    return flags


def run_startup(config: EngineConfig, *, cold: bool, timeout: float) -> list[Start]:
    """Starts a server with the user's compilation cache or, with `cold`, twice with a cache that is empty at first.

    The operating system's file cache is not emptied. Raises RuntimeError when the server ends, or is not ready
    within `timeout` seconds.
    """
    if not cold:
        return [measure_start(config, "as is", dict(os.environ), timeout)]
    with tempfile.TemporaryDirectory(prefix="jaxserve-cache-") as folder:
        env = {**os.environ, "JAXSERVE_CACHE": folder}
        env.pop("JAX_COMPILATION_CACHE_DIR", None)  # would take precedence
        return [measure_start(config, cache, env, timeout) for cache in ("cold", "warm")]


def measure_start(config: EngineConfig, cache: str, env: dict[str, str], timeout: float) -> Start:
    """Starts and stops a server in the environment `env`."""
    port = free_port()
    command = entry.command("jaxserve", "serve", config.model, "--port", str(port), *engine_flags(config))
    start = time.perf_counter()
    with server_process(command, env) as (process, log):

        def wait_for(path: str, *statuses: int) -> float:
            while status(port, path) not in statuses:
                if process.poll() is not None:
                    raise RuntimeError(f"the server ended before it was ready:\n{log.text(last=10)}")
                if time.perf_counter() - start > timeout:
                    raise RuntimeError(f"the server was not ready within {timeout:g} s; allow more with --timeout")
                time.sleep(_POLL_SECONDS)
            return time.perf_counter() - start

        http_s = wait_for("/health", 200, 503)
        ready_s = wait_for("/ready", 200)
    text = log.text()
    loaded = re.search(r"loaded .* in ([\d.]+) s", text)
    compiled = re.search(r"compiled (\d+) executables in ([\d.]+) s", text)
    return Start(
        cache,
        http_s,
        float(loaded[1]) if loaded else None,
        float(compiled[2]) if compiled else None,
        int(compiled[1]) if compiled else None,
        ready_s,
    )


class ProcessLog(threading.Thread):
    """A thread that reads a process's output."""

    def __init__(self, stream: IO[str]):
        super().__init__(daemon=True)
        self._stream = stream
        self._lines: list[str] = []
        self.start()

    def run(self) -> None:
        for line in self._stream:
            self._lines.append(line)

    @property
    def so_far(self) -> str:
        return "".join(self._lines)

    def text(self, last: int = 0) -> str:
        """The whole output of a process that has ended, or its last lines."""
        self.join(_STOP_SECONDS)
        return "".join(self._lines[-last:]).rstrip()


@contextlib.contextmanager
def server_process(command: Sequence[str], env: dict[str, str]) -> Iterator[tuple[subprocess.Popen[str], ProcessLog]]:
    """A context with a process, which is stopped at the end, and its log."""
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    log = ProcessLog(process.stdout)
    try:
        yield process, log
    finally:
        process.terminate()
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def status(port: int, path: str) -> int | None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]
