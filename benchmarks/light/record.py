"""The results of a stage: a JSON file that is complete after every row. A later run continues from it."""

from __future__ import annotations

import json
import math
import os
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

RESTART = 75  # exit code of a stage that must continue in a new process
BROKEN = ("CUDA_ERROR", "CUDNN_STATUS", "illegal memory access", "misaligned address", "launch failure", "device halt")
TRIES = 2  # maximum of attempts at a row in which a process ended
MOST_TRACEBACK = 4000  # characters that are kept, from the end


class OutOfTimeError(Exception):
    """The stage's time is used up. The remaining rows are skipped."""


class Record:
    """The file of one stage.

    Attributes:
      data: stage, status ("running", "complete" or "failed"), seconds (over all runs), facts, rows. Each row has a
        unique key, and a status: "ok", "wrong", "failed", "crashed" or "left out".
      deadline: by time.monotonic(); no row begins after it.
    """

    def __init__(self, path: Path, stage: str, seconds: float = math.inf) -> None:
        self.path = path
        self.data = read(path) or new(stage)
        self._began, self._before = time.monotonic(), float(self.data["seconds"])
        self.deadline = self._began + seconds
        self.tries: dict[str, int] = self.data.setdefault("tries", {})
        crashed = self.data.pop("at", None)
        if crashed is not None and self.tries.get(crashed, 0) >= TRIES:
            self.add({"key": crashed, "status": "crashed", "reason": "the process ended, or was stopped, at this one"})

    def write(self) -> None:
        self.data["seconds"] = round(self._before + time.monotonic() - self._began, 2)
        write(self.path, self.data)

    def has(self, key: str) -> bool:
        return any(row["key"] == key for row in self.data["rows"])

    def add(self, row: Mapping[str, Any]) -> None:
        self.data["rows"].append(dict(row))
        self.write()
        print(f"  {one_line(row)}", flush=True)

    def note(self, **facts: Any) -> None:
        self.data["facts"] |= facts
        self.write()

    @contextmanager
    def row(self, key: str) -> Iterator[dict[str, Any]]:
        """Yields a row to fill in. If the body fails, the row gets the traceback, and the stage continues. If the
        device is broken for this process, the process ends with RESTART. Raises OutOfTimeError after the deadline."""
        if time.monotonic() > self.deadline:
            raise OutOfTimeError
        row: dict[str, Any] = {"key": key, "status": "ok"}
        self.data["at"], self.tries[key] = key, self.tries.get(key, 0) + 1
        self.write()
        began = time.monotonic()
        try:
            yield row
        except Exception as error:  # a compiler, driver or peer may raise anything
            row |= {"status": "failed", "reason": one_line(f"{type(error).__name__}: {error}")[:500]}
            row["traceback"] = traceback.format_exc()[-MOST_TRACEBACK:]
        row["seconds"] = round(time.monotonic() - began, 2)
        del self.data["at"], self.tries[key]
        self.add(row)
        if row["status"] == "failed" and any(word in row["traceback"] for word in BROKEN):
            sys.exit(RESTART)

    def finish(self, status: str = "complete") -> None:
        self.data.pop("at", None)
        self.data["status"] = status
        self.write()


def one_line(value: Any) -> str:
    if isinstance(value, Mapping):
        shown = {name: x for name, x in value.items() if name not in ("traceback", "findings", "samples_us")}
        value = ", ".join(f"{name} {x:.4g}" if isinstance(x, float) else f"{name} {x}" for name, x in shown.items())
    return " ".join(str(value).split())


def new(stage: str) -> dict[str, Any]:
    return {"stage": stage, "status": "running", "seconds": 0.0, "facts": {}, "rows": []}


def read(path: Path) -> dict[str, Any] | None:
    """The document, or None if there is no complete one."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and "stage" in found else None


def write(path: Path, document: Mapping[str, Any]) -> None:
    """Replaces the file atomically."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps(plain(document), indent=1, allow_nan=False) + "\n", encoding="utf-8")
    os.replace(new, path)


def plain(value: Any) -> Any:
    """Converts a value for JSON: infinities and NaN to text, NumPy's numbers to Python's."""
    if isinstance(value, Mapping):
        return {str(key): plain(x) for key, x in value.items()}
    if isinstance(value, list | tuple):
        return [plain(x) for x in value]
    if hasattr(value, "item"):
        value = value.item()
    return str(value) if isinstance(value, Path) or (isinstance(value, float) and not math.isfinite(value)) else value
