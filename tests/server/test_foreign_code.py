"""Serving from inside a folder that others wrote: none of its modules, programs or libraries is run."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from serving import DEMO, ROOT, SMALL, ServerUnderTest, free_port

from jaxserve import entry

PACKAGES = (
    "server",
    "jaxserve",
    "checkpoints",
    "pallas_kernels",
    "jax",
    "numpy",
    "transformers",
    "tokenizers",
    "peers",
)
MODULES = ("json", "msgspec", "logging", "runpy", "uvicorn", "sitecustomize", "usercustomize", "types", "socket")
# What pip writes for an entry point, of a checkout that may not be installed.
CONSOLE_SCRIPT = f"""import sys
sys.path.insert(0, {str(ROOT)!r})
from jaxserve.commands.cli import main
sys.exit(main())
"""


@pytest.fixture
def hostile(tmp_path) -> Path:
    """The bundled model in a folder with decoys, each of which would write a line to `ran` when it is run."""
    folder = tmp_path / "model"
    shutil.copytree(DEMO, folder, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    report = f"open({str(tmp_path / 'ran')!r}, 'a').write(__name__ + '\\n')\nraise SystemExit(7)\n"
    for name in PACKAGES:
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(report)
    for name in MODULES:
        (folder / f"{name}.py").write_text(report)
    for name in ("c++", "python"):
        (folder / name).write_text(f"#!/bin/sh\necho {name} >> {tmp_path / 'ran'}\n")
        (folder / name).chmod(0o755)
    return folder


def start(hostile: Path, command: list[str], *flags: str) -> ServerUnderTest:
    port = free_port()
    settings = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items() if value is not True]
    log = hostile.parent / "log"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with log.open("w") as output:
        process = subprocess.Popen(
            [*command, "serve", ".", f"--port={port}", *settings, "--forbid-compile", *flags],
            cwd=hostile,
            env=environment | {"JAX_PLATFORMS": "cpu"},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    return ServerUnderTest(process, port, ".", log)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["console script", "entry"])
def test_a_server_runs_nothing_of_the_folder_it_is_in(hostile, way):
    script = hostile.parent / "bin" / "jaxserve"
    script.parent.mkdir()
    script.write_text(CONSOLE_SCRIPT)
    server = start(hostile, [sys.executable, str(script)] if way == "console script" else entry.command("jaxserve"))
    try:
        server.wait_ready(seconds=240)
        answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "Once", "max_tokens": 2}, timeout=30)
        assert answer.status_code == 200, answer.text
    finally:
        server.process.send_signal(signal.SIGTERM)
        server.process.wait(20)
    assert not (hostile.parent / "ran").exists(), (hostile.parent / "ran").read_text()


@pytest.mark.slow
def test_the_environment_of_the_engine_is_the_users(hostile):
    """Nothing is added to PYTHONPATH, and children of the engine leave the current folder out too."""
    code = "import os; print(os.environ.get('PYTHONPATH'), os.environ['PYTHONSAFEPATH'])"
    (hostile.parent / "stub").mkdir()
    (hostile.parent / "stub" / "engine_stub.py").write_text(
        "import subprocess, sys\nclass Engine:\n  @classmethod\n  def load(cls, config):\n"
        f"    raise ValueError(subprocess.check_output([sys.executable, '-c', {code!r}], text=True))\n"
    )
    path = os.pathsep.join([str(ROOT), str(hostile.parent / "stub")])
    options = (
        f'{{"config": {{"model": "."}}, "serve": {{"port": {free_port()}, "engine_class": "engine_stub:Engine"}}}}'
    )
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests/server/launch.py"), options],
        cwd=hostile, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert f"{path} 1" in done.stderr
    assert not (hostile.parent / "ran").exists()
