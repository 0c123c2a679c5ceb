"""benchmarks/abuse.py with a fiftieth of its clients: nothing is lost, wrongly refused, or kept."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter

import pytest
from serving import DEMO, ROOT

pytestmark = pytest.mark.skipif(not DEMO.is_dir(), reason="the bundled model is missing")


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> dict[str, dict]:
    path = tmp_path_factory.mktemp("abuse") / "rows.json"
    flags = ["--scale", "0.02", "--client-timeout", "2", "--drain-seconds", "3", "--json", str(path)]
    command = [sys.executable, str(ROOT / "benchmarks" / "abuse.py"), *flags]
    result = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert result.returncode == 0, result.stdout + result.stderr[-5000:]
    return {row["scenario"]: row for row in json.loads(path.read_text())}


@pytest.mark.slow
def test_nothing_is_kept(rows):
    assert list(rows) == [
        "streams", "storm", "slow-readers", "large-bodies", "amplification", "headers", "malformed", "terminate"
    ]  # fmt: skip
    for row in rows.values():
        assert row["bad"] == {}
        assert row["pages"] == 0
        if row["scenario"] != "terminate":
            grown = row["memory"]["after"] - row["memory"]["before"]
            assert grown <= max(0.1 * row["memory"]["before"], 96)


@pytest.mark.slow
def test_what_is_right_is_answered(rows):
    """One more than was sent, to see that the server lives."""
    assert rows["streams"]["good"] == {"exact": 21}
    assert rows["storm"]["good"]["exact"] == 21
    assert sum(rows["storm"]["good"].values()) == 41
    assert rows["slow-readers"]["good"]["exact"] == 17
    assert rows["terminate"]["good"]["exact"] == 8
    assert rows["terminate"]["good"]["exit code 0"] == 1


@pytest.mark.slow
def test_what_is_wrong_is_refused(rows):
    statuses: Counter[str] = Counter()
    for outcome, count in rows["malformed"]["good"].items():
        statuses[outcome.rpartition(": ")[2]] += count
    assert statuses.pop("exact") == 1
    assert set(statuses) <= {"400", "404", "405", "413", "421"}
    assert sum(statuses.values()) == rows["malformed"]["requests"] == 2000
    assert rows["headers"]["good"]["endless header: 431"] == rows["headers"]["good"]["a byte at a time: 408"] == 2
    assert rows["large-bodies"]["good"]["length of 1 TB: 413"] == 1


@pytest.mark.slow
def test_what_asks_for_too_much_is_refused_at_little_cost(rows):
    good = rows["amplification"]["good"]
    details = rows["amplification"]["details"]
    answered = [outcome for outcome in good if outcome.endswith(": 200")]
    assert answered == ["1,024 prompts, 131,072 allowed tokens: 200", "1,024 prompts: 200"]
    assert good["1,024 prompts with n of 128: 400"] == 1
    bombs = [figures for name, figures in details.items() if name.startswith("bomb in ")]
    assert len(bombs) == 6
    assert all(bomb["status"] == 400 and bomb["grown_MiB"] < 128 for bomb in bombs)  # they were a gigabyte
