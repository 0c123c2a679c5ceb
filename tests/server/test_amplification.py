"""Small bodies may not cost much: at most 64 KB of JSON, 100 ms of the event loop or the engine's thread
(on a slow processor 500 ms), 64 MiB.

Here are the bodies known as the worst, and a short search for others; `benchmarks/amplification.py` searches longer.
"""

from __future__ import annotations

import importlib
import json
import sys

import pytest
from serving import DEMO, ROOT

from jaxserve.text.tokenizer import load_tokenizer

pytestmark = pytest.mark.skipif(not DEMO.is_dir(), reason="the bundled model is missing")

sys.path.append(str(ROOT / "benchmarks"))
amplification = importlib.import_module("amplification")

KNOWN = list(amplification.known_worst())
MOST_SECONDS = 5 * amplification.MAX_SECONDS  # a slow processor takes up to four times as long


@pytest.fixture(scope="module")
def api_server():
    return amplification.ApiServer(load_tokenizer(DEMO))


@pytest.mark.parametrize(("path", "name", "body"), KNOWN, ids=[f"{path}: {name}" for path, name, _ in KNOWN])
def test_the_worst_that_is_known(api_server, path, name, body):
    assert len(json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode()) <= amplification.LONGEST_BODY
    cost = amplification.steadily(api_server, path, body, times=2)
    assert cost.status < 500
    assert cost.loop_seconds < MOST_SECONDS
    assert cost.engine_seconds < MOST_SECONDS
    assert cost.memory < amplification.MAX_BYTES


def test_costs_are_measured(api_server):
    """The measure itself: a body that is dear to decode shows on the loop, and what it allocates in the memory."""
    body = {"prompt": "a", "unknown": [{}] * 10}
    cheap = amplification.steadily(api_server, "/v1/completions", body, times=2)
    dear = amplification.steadily(api_server, "/v1/completions", {"prompt": ["a"] * 1024, "max_tokens": 64}, times=2)
    assert cheap.status == dear.status == 200
    assert dear.loop_seconds > 3 * cheap.loop_seconds > 0
    assert dear.engine_seconds > 3 * cheap.engine_seconds > 0
    assert dear.memory > cheap.memory + 2**20


@pytest.mark.slow
@pytest.mark.parametrize("path", amplification.ENDPOINTS)
def test_a_short_search_finds_nothing_dearer(api_server, path):
    _, body = amplification.search(api_server, path, 8)
    cost = amplification.steadily(api_server, path, body, times=2)
    assert cost.worst < MOST_SECONDS, json.dumps(body)[:2000]
    assert cost.memory < amplification.MAX_BYTES, json.dumps(body)[:2000]


@pytest.mark.slow
@pytest.mark.parametrize("path", amplification.ENDPOINTS)
def test_a_long_search_finds_nothing_dearer(api_server, path):
    _, body = amplification.search(api_server, path, 300)
    cost = amplification.steadily(api_server, path, body, times=3)
    assert cost.worst < MOST_SECONDS, json.dumps(body)[:2000]
    assert cost.memory < amplification.MAX_BYTES, json.dumps(body)[:2000]
