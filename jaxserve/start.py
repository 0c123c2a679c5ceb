"""The program `jaxserve`. For `jaxserve serve`, the engine's process starts before anything is imported here: both then
import their libraries at the same time."""

from __future__ import annotations

import subprocess
import sys

from jaxserve import entry

ENGINE = "jaxserve.server.process.engine_process"
PRELOAD = "--preload"  # the process imports the engine before it is told what to load


def main() -> int:
    engine = None
    asks = any(word in ("-h", "--help") or word.startswith("--help=") for word in sys.argv)
    if sys.argv[1:2] == ["serve"] and not asks:
        engine = subprocess.Popen(entry.command(ENGINE, PRELOAD), stdin=subprocess.PIPE, env=entry.child_environment())
    from jaxserve.commands.cli import main as run

    try:
        return run(engine=engine)
    finally:
        if engine is not None and engine.stdin is not None:
            engine.stdin.close()  # one that was not used ends
