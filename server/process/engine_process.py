"""The engine's process, started by `jaxserve.server.process.run` through `jaxserve.entry`, with its settings on
standard input.

Standard input stays open for as long as the parent lives; its end means that the parent has gone.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import threading
from dataclasses import asdict

import msgspec

from jaxserve.config import EngineConfig
from jaxserve.server.ipc.engine_server import DEFAULT_ENGINE, run_engine
from jaxserve.server.observe.output import log_to_stderr

_PR_SET_PDEATHSIG = 1  # of linux/prctl.h


class Launch(msgspec.Struct, kw_only=True):
    """The one line of JSON that the parent writes. `config` holds EngineConfig's fields."""

    config: dict[str, str | int | float | bool | list[str] | None]
    socket_path: str
    engine_class: str = DEFAULT_ENGINE

    @classmethod
    def of(cls, config: EngineConfig, socket_path: str, engine_class: str) -> Launch:
        return cls(config=asdict(config), socket_path=socket_path, engine_class=engine_class)


def main() -> int:
    """Runs the engine until it is drained, its fronts are gone or its parent is."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the front decides when the engine ends
    _end_with_parent()
    log_to_stderr(logging.WARNING)
    logging.getLogger("jaxserve").setLevel(logging.INFO)
    launch = msgspec.json.decode(sys.stdin.buffer.readline(), type=Launch)
    threading.Thread(target=_watch_parent, name="parent", daemon=True).start()
    return run_engine(EngineConfig(**launch.config), launch.socket_path, launch.engine_class)  # type: ignore[arg-type]


def _watch_parent() -> None:
    try:
        sys.stdin.buffer.read()
    finally:
        os._exit(1)  # nothing here outlives the parent, and the loop may be busy compiling


def _end_with_parent() -> None:
    """Has Linux kill this process when its parent's main thread ends, even where it is stopped and reads no input."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


if __name__ == "__main__":
    # os._exit skips the interpreter's shutdown, which would wait for the threads of an accelerator runtime
    code = main()
    logging.shutdown()
    os._exit(code)
