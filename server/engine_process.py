"""The engine's process: `python -m server.engine_process`, started by `server.run` with its settings on standard input.

Standard input stays open for as long as the parent lives; its end means that the parent has gone.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from dataclasses import asdict

import msgspec

from jaxserve.config import EngineConfig
from server.bridge import DEFAULT_ENGINE, run_engine


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
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("jaxserve").setLevel(logging.INFO)
    launch = msgspec.json.decode(sys.stdin.buffer.readline(), type=Launch)
    threading.Thread(target=_exit_with_parent, name="parent", daemon=True).start()
    return run_engine(EngineConfig(**launch.config), launch.socket_path, launch.engine_class)  # type: ignore[arg-type]


def _exit_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(1)  # nothing here outlives the parent, and the loop may be busy compiling


if __name__ == "__main__":
    # os._exit skips the interpreter's shutdown, which would wait for the threads of an accelerator runtime
    code = main()
    logging.shutdown()
    os._exit(code)
