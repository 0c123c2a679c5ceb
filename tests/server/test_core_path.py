"""How much code a plain request runs: one stream of a plain dense model, in the API server and in the engine.

Somebody who reads the engine for the first time reads these files (ARCHITECTURE.md has their order). The bounds are
what is reached, so that the way does not grow. `pytest -s` prints the files with their functions."""

from __future__ import annotations

import json
import os
import sys
import time
from collections import defaultdict
from pathlib import Path

import pytest
from serving import DEMO, ROOT, running_server, wait_until

from jaxserve.config import EngineConfig
from jaxserve.engine.engine import Engine
from jaxserve.execution.runner import ModelRunner

PACKAGES = ("jaxserve", "server", "checkpoints", "pallas_kernels")
MOST_FILES = 60
MOST_FUNCTIONS = 400
MODEL_FILES = 33  # more, where the step's program is traced
BODY = {"model": "test-model", "messages": [{"role": "user", "content": "Tell me about the sea."}], "max_tokens": 24}

Functions = dict[str, set[str]]


def functions_of(rows: list[tuple[str, str, int]]) -> Functions:
    """File -> its functions among these; comprehensions count as part of their function."""
    found: Functions = defaultdict(set)
    for file, name, line in rows:
        path = Path(os.path.realpath(file)).relative_to(ROOT)
        last = name.rpartition(".")[2]
        if path.parts[0] in PACKAGES and (not last.startswith("<") or last == "<lambda>"):
            found[str(path)].add(f"{name}:{line}")
    return found


def show(title: str, found: Functions) -> None:
    print(f"\n{title}: {len(found)} files, {sum(map(len, found.values()))} functions")
    for file in sorted(found):
        print(f"  {file}: {', '.join(sorted(found[file]))}")


@pytest.fixture
def flag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRACE_FLAG", str(tmp_path / "flag"))
    monkeypatch.setenv("TRACE_ROOT", str(ROOT))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent / "traced"))
    return tmp_path / "flag"


@pytest.mark.slow
def test_a_plain_stream(flag: Path, tmp_path: Path):
    with running_server(DEMO, tmp_path / "log", engine=None) as server, server.http() as client:

        def stream() -> None:
            with client.stream("POST", "/v1/chat/completions", json=BODY | {"stream": True}) as answer:
                assert list(answer.iter_lines())[-2] == "data: [DONE]"

        def traced() -> set[tuple[str, str, int]]:
            flag.touch()
            time.sleep(0.1)
            stream()
            time.sleep(0.1)
            flag.unlink()
            wait_until(lambda: len(list(tmp_path.glob("flag.*.json"))) == 2, 10)
            written = list(tmp_path.glob("flag.*.json"))
            rows = {tuple(row) for path in written for row in json.loads(path.read_text())}
            for path in written:
                path.unlink()
            return rows

        stream()  # what is done once
        rows = traced() & traced() & traced()  # without what the processes do now and then
    found = functions_of(sorted(rows))
    show("a plain stream", found)
    for file in ("server/endpoints/chat.py", "jaxserve/scheduling/scheduler.py", "jaxserve/execution/runner.py"):
        assert file in found, "the stream is not traced"
    assert len(found) <= MOST_FILES
    assert sum(map(len, found.values())) <= MOST_FUNCTIONS


def test_a_plain_step():
    """What traces the program of a decode: the model, and its kernels' interfaces."""
    engine = Engine.load(EngineConfig(model=str(DEMO), max_num_seqs=4, max_model_len=64, kv_pages=16), progress=False)
    assert type(engine.runner) is ModelRunner
    codes = set()
    sys.setprofile(lambda frame, event, argument: codes.add(frame.f_code) if event == "call" else None)
    try:
        engine.runner.trace(engine.shapes[0])
    finally:
        sys.setprofile(None)
    rows = [(code.co_filename, code.co_qualname, code.co_firstlineno) for code in codes]
    found = functions_of([row for row in rows if os.path.realpath(row[0]).startswith(str(ROOT))])
    show("a plain step", found)
    assert "jaxserve/models/decoder.py" in found, "the step is not traced"
    assert len(found) <= MODEL_FILES
