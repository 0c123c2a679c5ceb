"""The program `jaxserve`. For `jaxserve serve`, the engine's process starts before anything is imported here: both then
import their libraries at the same time."""

from __future__ import annotations

import os
import subprocess
import sys

from jaxserve import entry

ENGINE = "jaxserve.server.process.engine_process"
PRELOAD = "--preload"  # the process imports the engine before it is told what to load


def main() -> int:
    engine = None
    asks = any(word in ("-h", "--help") or word.startswith("--help=") for word in sys.argv)
    if sys.argv[1:2] == ["serve"] and not asks:
        engine = subprocess.Popen(entry.command(ENGINE, PRELOAD), stdin=subprocess.PIPE, env=child_environment())
    from jaxserve.commands.cli import main as run

    try:
        return run(engine=engine)
    finally:
        if engine is not None and engine.stdin is not None:
            engine.stdin.close()  # one that was not used ends


def child_environment() -> dict[str, str]:
    """This process's environment without API keys. PYTHONSAFEPATH keeps the current folder out of the import path of
    the child's own child processes."""
    own = {name: value for name, value in os.environ.items() if not (name.startswith("JAXSERVE_") and "KEY" in name)}
    return own | {"PYTHONSAFEPATH": "1"}
