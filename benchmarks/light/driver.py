"""Runs the processes of stages side by side, within a limit of time, of cores and of the device's memory.

The processes compile at the same time; while one measures, the others stand still (`pallas_kernels/alone.py`). A
process that dies is started again, behind the row that it died at. What runs at the end of the time is killed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from jaxserve.pallas_kernels.alone import Run
from light.record import RESTART, changed, end_rows, read

POLL = 0.1  # seconds
MOST_STARTS = 6  # of one stage's process
MOST_ALONE = 110.0  # seconds that one process may measure at a time
MOST_OUTPUT = 3000  # characters of a process's errors that are kept, from the end


@dataclass(frozen=True)
class Stage:
    """A process. gib: device memory that it takes. Several processes of one name share its rows."""

    name: str
    file: str
    gib: float


class Waiting(NamedTuple):
    """place: in the order of stages. starts: how often it has begun, the next time included."""

    place: int
    stage: Stage
    starts: int


@dataclass
class Process:
    place: int
    stage: Stage
    starts: int
    process: subprocess.Popen[bytes]
    errors: Path
    began: float = field(default_factory=time.monotonic)
    seen: float = field(default_factory=time.monotonic)  # when its row was looked at

    @property
    def number(self) -> int:
        return self.process.pid


# The command and the environment of a stage's process, given how often it has begun, this time included.
Command = Callable[[Stage, int], tuple[list[str], dict[str, str]]]


class Driver:
    """Args:
    stages: in the order in which they begin; one that does not fit waits, and lets later ones go first that will leave
        it room.
    command: see `Command`.
    scratch: a folder for locks and errors.
    deadline: by time.time().
    slots: most processes at a time. gib: the device's memory. row_seconds: a process that takes longer for a row is
        killed, and starts again behind it.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        command: Command,
        out: Path,
        scratch: Path,
        deadline: float,
        *,
        slots: int,
        gib: float,
        row_seconds: float,
    ) -> None:
        self.command = command
        self.out = out
        self.scratch = scratch
        self.deadline = deadline
        self.slots = slots
        self.gib = gib
        self.row_seconds = row_seconds
        self.waiting = [Waiting(place, stage, 1) for place, stage in enumerate(stages)]
        self.running: list[Process] = []
        self.ended: set[str] = set()  # how processes ended that were not started again
        self.group = Run(scratch)
        self._measures: tuple[int, float] | None = None

    def run(self) -> bool:
        """Runs all. Returns whether every stage came to its end."""
        try:
            while (self.waiting or self.running) and time.time() < self.deadline:
                with self.group.idle() as idle:
                    if idle:
                        self._measures = None
                        self._end()
                        self._start()
                        self.group.set_groups([one.number for one in self.running])
                    else:
                        self._watch()
                time.sleep(POLL)
        finally:
            self._stop()
        return not self.waiting and self.ended <= {"ok"}

    def _start(self) -> None:
        blocked: Waiting | None = None  # the first one that does not fit
        for one in sorted(self.waiting):
            if len(self.running) == self.slots:
                return
            behind = [x for x in self.running if blocked is None or x.place > blocked.place]
            kept = one.stage.gib + (0 if blocked is None else blocked.stage.gib)
            fits = one.stage.gib + sum(x.stage.gib for x in self.running) <= self.gib
            if not self.running or (fits and kept + sum(x.stage.gib for x in behind) <= self.gib):
                self.waiting.remove(one)
                self._begin(one)
            else:
                blocked = blocked or one

    def _begin(self, one: Waiting) -> None:
        command, environment = self.command(one.stage, one.starts)
        errors = self.scratch / f"{one.stage.name}-{time.monotonic_ns()}.txt"
        with errors.open("wb") as stream:
            process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stderr=stream, start_new_session=True
            )
        self.running.append(Process(one.place, one.stage, one.starts, process, errors))
        self._say(f"{one.stage.name} began")

    def _end(self) -> None:
        """Notes processes that ended, and ends those whose row takes too long."""
        for one in list(self.running):
            code = one.process.poll()
            why = "its process ended"
            if code is None and self._hangs(one):
                kill(one.number)
                code = one.process.wait()
                why = f"it took more than {self.row_seconds:.0f} s, and its process was ended"
            if code is None:
                continue
            self.running.remove(one)
            kill(one.number)  # processes that it started
            was_at_a_row = end_rows(self._file(one), [one.number], "crashed", f"{why} with {code}")
            if code == 0:
                self._note(one, "ok")
                # It found no more rows to measure, and so would others of its name.
                self.waiting = [other for other in self.waiting if other.stage.name != one.stage.name]
            elif (was_at_a_row or code == RESTART) and one.starts < MOST_STARTS:
                self._note(one, "restarted", code)
                self.waiting.append(Waiting(one.place, one.stage, one.starts + 1))
            else:
                self._note(one, "failed", code)

    def _hangs(self, one: Process) -> bool:
        if time.monotonic() - one.seen < 5:
            return False
        one.seen = time.monotonic()
        rows = (read(self._file(one)) or {"running": {}})["running"].values()
        return any(process == one.number and time.time() - since > self.row_seconds for process, since in rows)

    def _watch(self) -> None:
        """Kills a process that measures for too long, since all others stand still."""
        measures = self.group.measuring()
        if measures == self._measures and time.time() - measures[1] > MOST_ALONE:
            self._say(f"group {measures[0]} measured for more than {MOST_ALONE:.0f} s")
            kill(measures[0])
        self._measures = measures  # what is read once may be the holder before this one

    def _stop(self) -> None:
        for one in self.running:
            kill(one.number)
        for one in self.running:
            one.process.wait()
            end_rows(self._file(one), [one.number], "cut off", "the time was over")
            self._note(one, "cut off")
        for other in self.waiting:
            self._say(f"{other.stage.name} did not begin")

    def _note(self, one: Process, status: str, code: int | None = None) -> None:
        if status != "restarted":
            self.ended.add(status)
        row = {"key": f"{one.stage.name}, process {one.number}", "status": status}
        row |= {"began_s": round(one.began - BEGAN, 1), "seconds": round(time.monotonic() - one.began, 1)}
        if code is not None:
            said = one.errors.read_text(errors="replace")[-MOST_OUTPUT:]
            row |= {"reason": f"exit code {code}", "output": said}
        with changed(self.out / "run.json") as document:
            document["rows"].append(row)
        self._say(f"{one.stage.name}: {status}, after {row['seconds']} s" + ("" if code is None else f", code {code}"))

    def _file(self, one: Process) -> Path:
        return self.out / f"{one.stage.file}.json"

    @staticmethod
    def _say(text: str) -> None:
        print(f"[{time.monotonic() - BEGAN:5.0f} s] {text}", flush=True)


BEGAN = time.monotonic()


def kill(group: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def device_gib() -> float:
    """Memory of the first NVIDIA GPU, less what the driver takes; infinite without one."""
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
        return int(said.split()[0]) / 1024 - 3
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return float("inf")


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
