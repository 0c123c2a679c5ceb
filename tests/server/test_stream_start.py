"""Streams begin when the engine has accepted a request: `status and headers` before the first token."""

from __future__ import annotations

import httpx
import pytest
from serving import wait_until

LONG = {"prompt": [50, 51], "max_tokens": 100_000, "ignore_eos": True}
USER = [{"role": "user", "content": "Hi"}]
STREAMS = [
    ("/v1/completions", {"prompt": [60, 61]}),
    ("/v1/chat/completions", {"messages": USER}),
    ("/v1/responses", {"input": "Hi"}),
    ("/v1/messages", {"messages": USER, "max_tokens": 5, "model": "test-model"}),
]


def load(server) -> int:
    return httpx.get(f"{server.url}/load").json()["server_load"]


@pytest.fixture
def queued(start_server):
    return start_server("QueueEngine", config={"max_model_len": 200_000})


@pytest.mark.slow
def test_headers_come_while_a_request_waits(queued):
    """Every kind of stream has its status while another request is served and no token of its own is there."""
    with queued.http().stream("POST", "/v1/completions", json={**LONG, "stream": True}) as first:
        lines = first.iter_lines()
        next(lines)
        for path, body in STREAMS:
            with queued.http().stream("POST", path, json={**body, "stream": True}) as waiting:
                assert waiting.status_code == 200
                assert waiting.headers["content-type"].startswith("text/event-stream")
                assert load(queued) == 2
            wait_until(lambda: load(queued) == 1)  # who leaves the queue is forgotten


def test_errors_before_acceptance_have_their_status(start_server, http, demo_server):
    """The checks of API server and engine, a queue that is full, and a grammar that does not compile."""
    assert http.post("/v1/completions", json={"prompt": [5] * 300, "stream": True}).status_code == 400
    full = start_server("QueueEngine", config={"max_model_len": 200_000, "max_waiting": 1})
    with full.http().stream("POST", "/v1/completions", json={**LONG, "stream": True}):
        answer = full.http().post("/v1/completions", json={"prompt": "Hi", "stream": True})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "queue_full")
        two = full.http().post("/v1/completions", json={"prompt": ["a", "b"], "stream": True})
        assert two.status_code == 503
    for path, body in STREAMS[:2]:
        broken = body | {"stream": True, "structured_outputs": {"regex": "("}}
        refused = demo_server.http().post(path, json=broken)
        assert (refused.status_code, refused.json()["error"]["type"]) == (400, "invalid_request_error")


def test_streams_with_a_grammar(demo_server):
    body = {"prompt": [50, 51], "stream": True, "max_tokens": 20, "structured_outputs": {"choice": ["yes", "no"]}}
    with demo_server.http().stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200
        text = answer.read().decode()
    assert text.endswith("data: [DONE]\n\n")
    assert "error" not in text


def test_the_official_client_skips_comments():
    """`:` lines between events are no events."""
    import openai

    def answer(request: httpx.Request) -> httpx.Response:
        chunk = b'data: {"id":"x","object":"text_completion","created":1,"model":"m","choices":[]}\n\n'
        body = b": keep-alive\n\n" * 2 + chunk + b"data: [DONE]\n\n"
        return httpx.Response(200, content=body, headers={"content-type": "text/event-stream"})

    client = openai.OpenAI(
        base_url="http://x/v1", api_key="none", http_client=httpx.Client(transport=httpx.MockTransport(answer))
    )
    chunks = list(client.completions.create(model="m", prompt="x", stream=True))
    assert [chunk.id for chunk in chunks] == ["x"]
