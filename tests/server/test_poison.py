"""A request for which the engine's steps fail, beside others, over HTTP."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from poisoned_engine import POISON
from serving import DEMO, SMALL, wait_until

pytestmark = pytest.mark.skipif(not DEMO.is_dir(), reason="the bundled model is missing")
BODY = {"model": "test-model", "max_tokens": 60, "ignore_eos": True}
BODIES = [BODY | {"prompt": f"{i} times", "temperature": i % 2, "seed": i} for i in range(8)]


@pytest.mark.slow
def test_it_fails_alone(start_server):
    server = start_server(None, engine_class="poisoned_engine:PoisonedEngine", config={**SMALL, "model": "demo"})
    url = server.url + "/v1/completions"

    def ask(body) -> httpx.Response:
        return httpx.post(url, json=body, timeout=120)

    def text_of(body) -> str:
        return ask(body).json()["choices"][0]["text"]

    is_over = threading.Event()

    def keep_asking(body) -> set[str]:
        texts = {text_of(body)}
        while not is_over.is_set():
            texts.add(text_of(body))
        return texts

    with ThreadPoolExecutor(20) as pool:
        undisturbed = list(pool.map(text_of, BODIES))
        others = [pool.submit(keep_asking, body) for body in BODIES]
        try:
            wait_until(lambda: server.metric("num_requests_running") >= 4, seconds=30)
            bad = [BODY | {"prompt": "bad", "top_k": POISON, "stream": i % 2 == 0} for i in range(4)]
            poisoned = list(pool.map(ask, bad))
        finally:
            is_over.set()
    assert [one.result() for one in others] == [{text} for text in undisturbed]
    for i, answer in enumerate(poisoned):
        # A stream begins when the engine accepts its request. The status is still free to tell of the failure where
        # the API server reads the acceptance and the failure together.
        has_begun = i % 2 == 0 and answer.status_code == 200
        assert has_begun or answer.status_code == 500
        text = answer.text.removeprefix("data: ").partition("\n")[0] if has_begun else answer.text
        error = json.loads(text)["error"]
        assert error["code"] == "internal_error"
        assert "failed inside the engine" in error["message"]
    wait_until(lambda: server.metric("failed_requests_total") == 4)  # the engine reports its counters at intervals
    assert server.metric("engine_restarts_total") == 0
    wait_until(lambda: server.metric("num_requests_running") == 0 == server.metric("kv_cache_usage_perc"))
    assert "poison" in server.log.read_text()
    assert server.stop() == 0
