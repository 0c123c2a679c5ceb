"""Stage `tune`: `jaxserve tune` for the 8B shape, and the tables that it wrote. In bf16 only the product of gates and
ups has several ways."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from jaxserve import entry
from light.decode import FORMS, SHAPE, SMALL, folder_of
from light.record import Record

MINUTES = {False: 2.0, True: 3.0}  # for each form, those in which it stands still included
LATE = {False: 20.0, True: 60.0}  # seconds after its time until it is killed
MOST_OUTPUT = 40_000  # characters


def run(record: Record, where: Path, *, rehearse: bool) -> None:
    for form in (FORMS[1], FORMS[0], FORMS[2]):
        if record.take(form):
            with record.row(form) as row:
                row |= _tune(form, where / form, rehearse)


def _tune(form: str, where: Path, rehearse: bool) -> dict[str, Any]:
    """Runs it. What it has written when its time is over counts."""
    model = folder_of(SMALL if rehearse else SHAPE, where)
    out = where / "table.json"
    said = where / "said.txt"
    scheme = ["--op", "matmul"] if form == FORMS[0] else ["--quantization", form]
    command = entry.command("jaxserve", "tune", str(model), "--load-format", "dummy", *scheme)
    command += ["--minutes", str(MINUTES[rehearse]), "--out", str(out)]
    with said.open("wb") as stream:
        process = subprocess.Popen(command, env=dict(os.environ), stdout=stream, stderr=subprocess.STDOUT)
        try:
            code: int | None = process.wait(60 * MINUTES[rehearse] + LATE[rehearse])
        except subprocess.TimeoutExpired:
            code = None
            process.kill()
            process.wait()
    found: dict[str, Any] = {"output": said.read_text(errors="replace")[-MOST_OUTPUT:]}
    if out.exists():
        found["table"] = json.loads(out.read_text())
    if code or (code is None and not out.exists()):
        found |= {"status": "failed", "reason": f"it ended with {code}" if code else "nothing was measured in time"}
    return found | {"ended": code is not None}
