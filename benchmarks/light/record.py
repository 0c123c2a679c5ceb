"""The results of stages: JSON files that are whole after every row, which several processes may add rows to.

A document has: file, its name; facts; rows, each with a unique key and a status ("ok", "wrong", "failed", "crashed" or
"cut off"); running, key -> [process, seconds since 1970] of rows that processes work at. A row that is there is not
measured again, so that a later run goes on where one was cut off.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import time
import traceback
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxserve.pallas_kernels.alone import held

RESTART = 75  # exit code of a process whose stage must go on in a new one
BROKEN = ("CUDA_ERROR", "CUDNN_STATUS", "illegal memory access", "misaligned address", "launch failure", "device halt")
MOST_TRACEBACK = 2000  # characters that are kept, from the end
MOST_BYTES = 1_000_000  # of a file
BULKY = (
    "order",
    "traceback",
    "samples_us",
    "findings",
    "kernels",
    "output",
)  # what rows lose where a file is too large


class OutOfTimeError(Exception):
    """No row begins any more."""


class Record:
    """The file of a stage, for one of the processes that work at it. deadline: by time.time(); no row begins later."""

    def __init__(self, path: Path, deadline: float = math.inf) -> None:
        self.path = path
        self.deadline = deadline

    @property
    def data(self) -> dict[str, Any]:
        return read(self.path) or new(self.path.stem)

    def has(self, key: str) -> bool:
        return any(row["key"] == key for row in self.data["rows"])

    def note(self, **facts: Any) -> None:
        with changed(self.path) as document:
            document["facts"] |= facts

    def add(self, row: Mapping[str, Any]) -> None:
        """Adds a row, which ends the work at it."""
        with changed(self.path) as document:
            document["running"].pop(row["key"], None)
            document["rows"].append(dict(row))
        print(f"  {one_line(row)}", flush=True)

    def take(self, key: str) -> bool:
        """Whether this process is to measure a row: nobody has, and nobody is at it. Raises OutOfTimeError after the
        deadline."""
        if time.time() > self.deadline:
            raise OutOfTimeError
        if is_taken(self.data, key):
            return False
        with changed(self.path) as document:
            if is_taken(document, key):  # since then
                return False
            document["running"][key] = [os.getpid(), time.time()]
        return True

    @contextlib.contextmanager
    def row(self, key: str) -> Iterator[dict[str, Any]]:
        """Yields a row to fill in, after `take`. If the body fails, the row gets the traceback, and the stage goes on.
        If the device is broken for this process, the process ends with RESTART."""
        row: dict[str, Any] = {"key": key, "status": "ok"}
        began = time.monotonic()
        try:
            yield row
        except OutOfTimeError:
            with changed(self.path) as document:
                document["running"].pop(key, None)
            raise
        except Exception as error:  # a compiler, driver or peer may raise anything
            row |= {"status": "failed", "reason": one_line(f"{type(error).__name__}: {error}")[:500]}
            row["traceback"] = traceback.format_exc()[-MOST_TRACEBACK:]
        row["seconds"] = round(time.monotonic() - began, 2)
        self.add(row)
        if row["status"] == "failed" and any(word in row["traceback"] for word in BROKEN):
            sys.exit(RESTART)


def is_taken(document: Mapping[str, Any], key: str) -> bool:
    return key in document["running"] or any(row["key"] == key for row in document["rows"])


def end_rows(path: Path, processes: Collection[int], status: str, reason: str) -> bool:
    """Ends the rows that these processes, which have ended, worked at. Returns whether there were any."""
    with changed(path) as document:
        mine = [key for key, (process, _) in document["running"].items() if process in processes]
        for key in mine:
            _, since = document["running"].pop(key)
            seconds = round(time.time() - since, 2)
            document["rows"].append({"key": key, "status": status, "reason": reason, "seconds": seconds})
    return bool(mine)


def reopen(path: Path) -> None:
    """Before a run that goes on: rows that were cut off are measured again."""
    if path.exists():
        with changed(path) as document:
            document["running"] = {}
            document["rows"] = [row for row in document["rows"] if row["status"] != "cut off"]


@contextlib.contextmanager
def changed(path: Path) -> Iterator[dict[str, Any]]:
    """The document of a file, which is written at the end. Meanwhile no other process changes a file of its folder."""
    import fcntl

    with held():  # a process that were stopped with the folder's lock would stop all others
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            document = read(path) or new(path.stem)
            yield document
            write(path, document)
        finally:
            os.close(folder)


def new(name: str) -> dict[str, Any]:
    return {"file": name, "facts": {}, "running": {}, "rows": []}


def read(path: Path) -> dict[str, Any] | None:
    """The document, or None if there is no whole one."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and "rows" in found else None


def write(path: Path, document: Mapping[str, Any]) -> None:
    """Replaces the file atomically."""
    new_file = path.with_suffix(".new")
    new_file.write_text(as_text(document), encoding="utf-8")
    os.replace(new_file, path)


def as_text(document: Mapping[str, Any], most: int = MOST_BYTES) -> str:
    """JSON with a line for each row, of at most so many bytes: where there would be more, the last rows lose what is
    bulky, and the facts say so."""
    rows = [json.dumps(plain(row), allow_nan=False) for row in document["rows"]]
    facts = plain(document["facts"])
    size = 10_000 + len(json.dumps(facts)) + sum(len(row) + 2 for row in rows)
    for field in BULKY:
        for i in reversed(range(len(rows))):
            if size > most and f'"{field}":' in rows[i]:
                kept = json.dumps({name: x for name, x in json.loads(rows[i]).items() if name != field})
                size -= len(rows[i]) - len(kept)
                rows[i] = kept
                facts["left_out"] = f"rows have lost {field} and what comes before it in {', '.join(BULKY)}"
    head = json.dumps({"file": document["file"], "facts": facts, "running": document["running"]}, allow_nan=False)
    return head[:-1] + ', "rows": [\n' + ",\n".join(rows) + "\n]}\n"


def plain(value: Any) -> Any:
    """Converts a value for JSON: infinities and NaN to text, NumPy's numbers to Python's."""
    if isinstance(value, Mapping):
        return {str(key): plain(x) for key, x in value.items()}
    if isinstance(value, list | tuple):
        return [plain(x) for x in value]
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else str(value)
    return str(value) if isinstance(value, Path) else value


def one_line(value: Any) -> str:
    if isinstance(value, Mapping):
        shown = {name: x for name, x in value.items() if name not in BULKY and not isinstance(x, list | dict)}
        value = ", ".join(f"{name} {x:.4g}" if isinstance(x, float) else f"{name} {x}" for name, x in shown.items())
    return " ".join(str(value).split())
