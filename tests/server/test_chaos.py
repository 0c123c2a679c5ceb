"""benchmarks/chaos.py, one round of each kind: nothing is lost, wrongly answered, or left."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from serving import DEMO, ROOT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not DEMO.is_dir(), reason="the bundled model is missing"),
]


def test_a_round_of_each_kind(tmp_path):
    path = tmp_path / "rows.json"
    flags = ["--rounds", "4", "--clients", "4", "--no-long", "--json", str(path)]
    command = [sys.executable, str(ROOT / "benchmarks" / "chaos.py"), *flags]
    result = subprocess.run(command, capture_output=True, text=True, timeout=580)
    assert result.returncode == 0, result.stdout + result.stderr[-5000:]
    rows = {row["kind"]: row for row in json.loads(path.read_text())}
    assert list(rows) == ["engine killed", "front killed", "engine stopped", "full disk"]
    for row in rows.values():
        assert row["bad"] == {}
        assert row["pages"] == 0
        assert len(row["recovery"]) == row["rounds"] == 1
    assert rows["full disk"]["good"]["batch: exact"] == 60
    for kind in ("engine killed", "front killed", "engine stopped"):
        assert rows[kind]["good"]["exact"] >= 4
