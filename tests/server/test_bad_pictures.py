"""benchmarks/pictures.py with each kind once: bad pictures are refused at little cost, and nobody waits for them."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from serving import ROOT


@pytest.mark.slow
def test_bad_pictures_beside_a_stream(tmp_path):
    path = tmp_path / "rows.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "pictures.py"), "--times", "1", "--json", str(path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert result.returncode == 0, result.stdout + result.stderr[-5000:]
    rows = json.loads(path.read_text())
    assert len(rows) == 23
    assert {status for row in rows for status in row["statuses"]} == {200, 400, 413}
