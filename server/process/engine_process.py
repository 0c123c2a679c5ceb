"""The engine's process: `EngineProcess` starts and ends it from the API server, `main` is what runs in it.

It is started through `jaxserve.entry` and reads its settings from standard input. The parent keeps standard input open
while it lives; the end of standard input means that the parent has gone.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import msgspec

from jaxserve import entry, jax_pools
from jaxserve.adapters.registry import ServedAdapter
from jaxserve.config import EngineConfig, LoRAModule
from jaxserve.server.ipc.messages import ServedWeights
from jaxserve.server.ipc.run_engine import DEFAULT_ENGINE, run_engine
from jaxserve.server.observe.output import log_to_stderr
from jaxserve.server.process.socket_folder import SocketFolder
from jaxserve.start import ENGINE, PRELOAD

_ENDING_SECONDS = 1  # from the end of a process's connection to its own
FLUSH_SECONDS = 5  # time to write the last answers, and then for the engine to exit, once no request runs
_PR_SET_PDEATHSIG = 1  # from linux/prctl.h


class Launch(msgspec.Struct, kw_only=True):
    """The line of JSON that the parent writes to standard input. `config` holds the fields of EngineConfig; `weights`
    are those that the engine serves from the start, if they have been replaced. `name` begins the lines of its log."""

    config: dict[str, Any]
    socket_path: str
    engine_class: str = DEFAULT_ENGINE
    weights: ServedWeights = ServedWeights()
    name: str = ""


class EngineProcess:
    """The engine's process and the folder of its socket. Leaving the context ends the one and removes the other.
    `early`: a process that `jaxserve.start` has started, which waits to be told what to load. `name`: of the model, in
    the engine's log. `environment`: variables of the process besides this one's."""

    def __init__(
        self,
        config: EngineConfig,
        engine_class: str,
        early: subprocess.Popen[bytes] | None = None,
        *,
        name: str = "",
        environment: Mapping[str, str] | None = None,
    ):
        self._config = config
        self._engine_class = engine_class
        self._early = early
        self._name, self._environment = name, entry.child_environment() | dict(environment or {})
        self._folder, self._weights = SocketFolder(), ServedWeights()
        self.start()

    @property
    def socket_path(self) -> str:
        return self._folder.socket_path

    @property
    def shared(self) -> Path:
        """See SocketFolder."""
        return self._folder.shared

    def start(self) -> None:
        """Starts the process; an earlier one must have ended. Linux ends it when the calling thread ends."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.socket_path)
        early = self._early
        self._early = None
        self._process = early or subprocess.Popen(entry.command(ENGINE), stdin=subprocess.PIPE, env=self._environment)
        start = Launch(
            config=asdict(self._config),
            socket_path=self.socket_path,
            engine_class=self._engine_class,
            weights=self._weights,
            name=self._name,
        )
        launch = msgspec.json.encode(start)
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended already; connecting to it will report that
            self._process.stdin.write(launch + b"\n")
            self._process.stdin.flush()

    def keep_adapters(self, adapters: Iterable[ServedAdapter]) -> None:
        """The next process begins with these adapters, those of them whose files can still be read."""
        modules = [LoRAModule(one.name, one.path, one.parent, required=False) for one in adapters]
        self._config = replace(self._config, lora_modules=tuple(modules))

    def keep_weights(self, weights: ServedWeights) -> None:
        """The next process begins with these weights, and does not start if their files cannot be read any more."""
        self._weights = weights

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, *exception: object) -> None:
        try:
            self._process.wait(FLUSH_SECONDS if exception[0] is None else 0)
        except subprocess.TimeoutExpired:
            self.kill()
        self._folder.remove()

    def runs(self) -> bool:
        return self._process.poll() is None

    def was_killed(self) -> bool:
        """Whether the process, whose connection has ended, was ended from outside: by SIGKILL, as by an operator, or by
        Linux where memory is scarce."""
        try:
            return self._process.wait(_ENDING_SECONDS) == -signal.SIGKILL
        except subprocess.TimeoutExpired:
            return False

    def kill(self) -> None:
        """Ends the process at once, even one that is suspended, and waits until it is gone."""
        self._process.kill()
        self._process.wait()
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()


def main() -> int:
    """Runs the engine until it is drained, its last API server has disconnected, or its parent has ended."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the API server decides when the engine ends
    end_with_parent()
    log_to_stderr(logging.WARNING)
    logging.getLogger("jaxserve").setLevel(logging.INFO)
    if PRELOAD in sys.argv:
        importlib.import_module(DEFAULT_ENGINE.partition(":")[0])
    line = sys.stdin.buffer.readline()
    if not line:  # the parent has ended, or does not serve
        return 0
    launch = msgspec.json.decode(line, type=Launch)
    if launch.name:
        log_to_stderr(logging.WARNING, f"{launch.name}: ")
    jax_pools.reserve(float(launch.config["memory_utilization"]))  # type: ignore[arg-type]
    watch_parent()
    config = EngineConfig(**launch.config)  # type: ignore[arg-type]
    return run_engine(config, launch.socket_path, launch.engine_class, launch.weights)


def watch_parent() -> None:
    """Has a thread end this process at the end of standard input, which the parent keeps open while it lives."""
    threading.Thread(target=_end_after_input, name="parent", daemon=True).start()


def _end_after_input() -> None:
    try:
        sys.stdin.buffer.read()
    finally:
        os._exit(1)  # at once: the loop may be busy compiling, and must not outlive the parent


def end_with_parent() -> None:
    """Has Linux kill this process when the parent's thread that started it ends, even if this process is suspended and
    reads no input."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


if __name__ == "__main__":
    # os._exit skips the interpreter's shutdown, which would wait for the threads of an accelerator runtime
    code = main()
    logging.shutdown()
    os._exit(code)
