"""What XLA:GPU records in command buffers (CUDA graphs): from what it dumps of each program and logs of each step."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

DUMP = "FIRST_LIGHT_DUMP"  # the environment's variable with the folder that XLA writes to
IN_PROFILES = "--xla_enable_command_buffers_during_profiling"
MOST_PROGRAMS = 24
SEQUENCE = re.compile(r"module_\d+\.(.+)\.thunk_sequence_after_thunk_passes")
KIND = re.compile(r"\bk[A-Z]\w+")


def environment(dump: Path, *, in_profiles: bool) -> dict[str, str]:
    """What XLA reads when it starts: it writes compiled programs into a folder, and logs what command buffers do.
    in_profiles: whether they run while a profile is taken; else XLA launches their operations one by one then."""
    flags = f"--xla_dump_to={dump} --xla_dump_hlo_pass_re=NOPASS {IN_PROFILES}={str(in_profiles).lower()}"
    return {
        DUMP: str(dump),
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}",
        "TF_CPP_VMODULE": "command_buffer_thunk=3,command_executor=1",
        "TF_CPP_MIN_LOG_LEVEL": "0",
    }


def in_profiles() -> bool:
    return re.findall(rf"{IN_PROFILES}=(\w+)", os.environ.get("XLA_FLAGS", ""))[-1:] == ["true"]


def programs() -> list[dict[str, Any]]:
    """The largest programs that XLA has dumped: their names, operations that are launched on their own, by kind, and
    those that are recorded in command buffers."""
    files = [path for path in Path(os.environ[DUMP]).rglob("*") if SEQUENCE.search(path.name)]
    files.sort(key=lambda path: -path.stat().st_size)
    return [{"program": _name(path), **operations(path.read_text(errors="replace"))} for path in files[:MOST_PROGRAMS]]


def _name(path: Path) -> str:
    match = SEQUENCE.search(path.name)
    return match[1] if match else path.name


def operations(text: str) -> dict[str, Any]:
    """Counts of a dumped sequence. Lines below one of kCommandBuffer are recorded in it; all others are launched on
    their own, those below a loop once for each of its rounds."""
    alone: Counter[str] = Counter()
    inside: Counter[str] = Counter()
    buffer: int | None = None  # the margin of the command buffer that the lines are in
    for line in text.splitlines():
        kind = KIND.search(line)
        if kind is None:
            continue
        margin = len(line) - len(line.lstrip())
        if buffer is not None and margin <= buffer:
            buffer = None
        (alone if buffer is None else inside)[kind[0]] += 1
        if buffer is None and kind[0] == "kCommandBuffer":
            buffer = margin
    return {"launched": dict(alone), "recorded": dict(inside)}


class Said:
    """What was written to standard error after `mark`."""

    def __init__(self, stream: IO[bytes]) -> None:
        self.stream = stream
        self.start = 0
        self.text = ""

    def mark(self) -> None:
        self.start = os.fstat(self.stream.fileno()).st_size


@contextlib.contextmanager
def captured() -> Iterator[Said]:
    """Keeps what this process writes to standard error, also from C++. `text` is set at the end."""
    sys.stderr.flush()
    before = os.dup(2)
    with tempfile.TemporaryFile() as stream:
        said = Said(stream)
        try:
            os.dup2(stream.fileno(), 2)
            yield said
        finally:
            sys.stderr.flush()
            os.dup2(before, 2)
            os.close(before)
            stream.seek(said.start)
            said.text = stream.read().decode(errors="replace")
            sys.stderr.write(said.text)


def updates(text: str, steps: int) -> dict[str, float]:
    """How often command buffers ran in a step, how often they were recorded anew, and how many of their operations
    were, by XLA's log. A loop or conditional counts besides what is in it."""
    parts = re.findall(r"Updated (\d+) commands in .* \(skipped (\d+) command updates\)", text)
    return {
        "ran_per_step": len(re.findall(r"Execute command buffer(?! thunk)", text)) / steps,
        "updated_per_step": len(re.findall(r"Initialize command buffer on|executions since last update", text)) / steps,
        "operations_updated_per_step": sum(int(all_) - int(skipped) for all_, skipped in parts) / steps,
    }
