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
SEQUENCE = re.compile(r"module_\d+\.(.+?)\.(?:sm_|gpu|thunk).*thunk_sequence_after_thunk_passes")
KIND = re.compile(r"\bk[A-Z]\w+")


def environment(dump: Path, *, in_profiles: bool) -> dict[str, str]:
    """What XLA reads when it starts: it writes compiled programs into a folder, and logs what command buffers do.
    in_profiles: whether they run while a profile is taken; else XLA launches their operations one by one then."""
    flags = f"--xla_dump_to={dump} --xla_dump_hlo_pass_re=NOPASS {IN_PROFILES}={str(in_profiles).lower()}"
    return {
        DUMP: str(dump),
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}",
        "TF_CPP_VMODULE": "command_buffer_thunk=3",
        "TF_CPP_MIN_LOG_LEVEL": "0",
    }


def in_profiles() -> bool:
    return f"{IN_PROFILES}=true" in os.environ.get("XLA_FLAGS", "")


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
    """Counts of a dumped sequence. Lines that begin at the margin are launched on their own, lines below one of
    kCommandBuffer are recorded in it, and others are below a loop or a conditional."""
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
        self.stream, self.start, self.text = stream, 0, ""

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
    """How often command buffers ran and were recorded anew in a step, and how long that took; from XLA's log."""
    micros = [int(number) for number in re.findall(r"Updated command buffer in (\d+)", text)]
    return {
        "ran_per_step": len(re.findall(r"Execute command buffer", text)) / steps,
        "updated_per_step": len(re.findall(r"(?:Initialize|Update) command buffer", text)) / steps,
        "update_us_per_step": sum(micros) / steps,
    }
