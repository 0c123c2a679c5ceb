"""Runs a module of jaxserve as a program: `python -P /…/jaxserve/entry.py jaxserve.server.process.engine_process`.

`python -m` puts the current folder first on the path. That folder may be a model's repository, with modules of its own.
A child process started this way imports its parent's installation, and nothing from the current folder.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path


def command(module: str, *arguments: str, python: str = sys.executable) -> list[str]:
    """The command line that runs `module` with these arguments."""
    return [python, "-P", str(Path(__file__).resolve()), module, *arguments]


def child_environment() -> dict[str, str]:
    """This process's environment without API keys. PYTHONSAFEPATH keeps the current folder out of the import path of
    the child's own child processes."""
    own = {name: value for name, value in os.environ.items() if not (name.startswith("JAXSERVE_") and "KEY" in name)}
    return own | {"PYTHONSAFEPATH": "1"}


if __name__ == "__main__":
    root = Path(__file__).resolve().parent.parent
    if root not in [Path(folder).resolve() for folder in sys.path]:  # a checkout that is not installed
        sys.path.insert(0, str(root))
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
