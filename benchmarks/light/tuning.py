"""Stage `tune`: `jaxserve tune` with a limit of time, and the table that it wrote."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from jaxserve import entry
from light.record import MOST_TRACEBACK, Record

SECONDS = {False: 170.0, True: 60.0}


def run(record: Record, *, rehearse: bool) -> None:
    if not record.take("table"):
        return
    with record.row("table") as row, tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "table.json"
        row |= _tune(out, rehearse)
        if out.exists():
            row["table"] = json.loads(out.read_text())


def _tune(out: Path, rehearse: bool) -> dict[str, Any]:
    """Runs it. What it has written when the time is over counts."""
    command = entry.command("jaxserve", "tune", "--sizes", "small" if rehearse else "full", "--out", str(out))
    said = out.with_suffix(".txt")
    with said.open("wb") as stream:
        process = subprocess.Popen(command, env=dict(os.environ), stdout=stream, stderr=subprocess.STDOUT)
        try:
            code: int | None = process.wait(SECONDS[rehearse])
        except subprocess.TimeoutExpired:
            code = None
            process.kill()
            process.wait()
    found: dict[str, Any] = {"output": said.read_text(errors="replace")[-20 * MOST_TRACEBACK :]}
    if code:
        found |= {"status": "failed", "reason": f"it ended with {code}"}
    return found | {"ended": code is not None}
