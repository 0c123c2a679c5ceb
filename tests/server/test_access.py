"""The access log and the traces, as an operator gets them."""

from __future__ import annotations

import contextlib
import gzip
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest
from serving import ROOT, wait_until

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
BODY = {"model": "test-model", "prompt": [50, 51, 52], "max_tokens": 5, "ignore_eos": True}


def lines(server) -> list[dict]:
    return [json.loads(line) for line in server.log.read_text().splitlines() if line.startswith("{")]


@contextlib.contextmanager
def collector() -> Iterator[tuple[str, list]]:
    """An OTLP collector: its URL, and the spans that it was sent."""
    proto = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
    spans: list = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            request = proto.ExportTraceServiceRequest.FromString(body)
            if self.path == "/v1/traces":
                spans.extend(span for r in request.resource_spans for s in r.scope_spans for span in s.spans)
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *arguments):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", spans
    finally:
        server.shutdown()
        server.server_close()


def attributes(span) -> dict:
    def value(any_value):
        kind = any_value.WhichOneof("value")
        if kind == "array_value":
            return [value(item) for item in any_value.array_value.values]
        return getattr(any_value, kind)

    return {pair.key: value(pair.value) for pair in span.attributes}


@pytest.fixture
def watched(start_server, tmp_path, monkeypatch):
    """A server with a key file, its log and a collector: (server, spans)."""
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")  # milliseconds
    (tmp_path / "keys").write_text("secret team-a\n")
    with collector() as (url, spans):
        yield start_server("SlowEngine", access_log=True, otlp_endpoint=url, api_key_file=str(tmp_path / "keys")), spans


def test_log_and_traces(watched):
    server, spans = watched
    http = server.http(headers={"Authorization": "Bearer secret"})
    for path in ("/metrics", "/pool", "/", "/ui/chat.js", "/health"):
        assert http.get(path).status_code == 200
    begin = time.time()
    headers = {"x-request-id": "mine-1", "traceparent": PARENT}
    body = {**BODY, "n": 2, "seed": 3, "temperature": 0.5}
    answer = http.post("/v1/completions?secret=1", json=body, headers=headers)
    assert (answer.status_code, answer.headers["x-request-id"]) == (200, "mine-1")
    assert httpx.get(server.url + "/metrics").status_code == 401
    assert httpx.post(server.url + "/v1/completions", json=BODY).status_code == 401
    assert http.post("/v1/completions", json={**BODY, "temperature": 11}).status_code == 400
    wait_until(lambda: len(lines(server)) == 4)
    done, prober, unknown, wrong = lines(server)

    assert {name: done[name] for name in list(done)[1:9]} == {
        "request_id": "mine-1", "key": "team-a", "method": "POST", "path": "/v1/completions", "status": 200,
        "model": "test-model", "prompt_tokens": 3, "output_tokens": 10,
    }  # fmt: skip
    assert 0 < done["ttft_seconds"] < done["duration_seconds"] < 30
    assert "secret" not in json.dumps(lines(server))
    assert (prober["path"], prober["status"]) == ("/metrics", 401)
    assert (unknown["status"], unknown["key"], unknown["model"], unknown["output_tokens"]) == (401, None, None, 0)
    assert (wrong["status"], wrong["key"]) == (400, "team-a")

    wait_until(lambda: len(spans) == 6)
    by_name = {span.name: span for span in spans if attributes(span).get("http.response.status_code", 200) == 200}
    root = by_name.pop("text_completion test-model")
    assert (root.trace_id.hex(), root.parent_span_id.hex()) == tuple(PARENT.split("-")[1:3])
    assert root.kind == 2  # server
    expected = {
        "gen_ai.operation.name": "text_completion", "gen_ai.provider.name": "jaxserve",
        "gen_ai.request.model": "test-model", "gen_ai.response.model": "test-model",
        "gen_ai.request.temperature": 0.5, "gen_ai.request.seed": 3, "gen_ai.request.max_tokens": 5,
        "gen_ai.request.choice.count": 2, "gen_ai.usage.input_tokens": 3, "gen_ai.usage.output_tokens": 10,
        "gen_ai.response.finish_reasons": ["length", "length"], "http.response.header.x-request-id": ["mine-1"],
    }  # fmt: skip
    assert expected.items() <= attributes(root).items()
    assert list(by_name) == ["queue", "prefill", "decode"]
    times = [root.start_time_unix_nano]
    for span in by_name.values():
        assert (span.trace_id, span.parent_span_id) == (root.trace_id, root.span_id)
        assert times[-1] <= span.start_time_unix_nano <= span.end_time_unix_nano <= root.end_time_unix_nano
        times.append(span.end_time_unix_nano)
    assert begin - 1 < times[0] / 1e9 < times[-1] / 1e9 < time.time() + 1
    decode = by_name["decode"]
    assert 0.06 < (decode.end_time_unix_nano - decode.start_time_unix_nano) / 1e9 < done["duration_seconds"]
    failed = [attributes(span)["error.type"] for span in spans if "error.type" in attributes(span)]
    assert sorted(failed) == ["400", "401"]


@pytest.mark.slow
def test_clients_that_leave_and_answers_in_the_background(watched):
    server, spans = watched
    http = server.http(headers={"Authorization": "Bearer secret"})
    with http.stream("POST", "/v1/completions", json={**BODY, "max_tokens": 200, "stream": True}) as response:
        next(response.iter_lines())
    wait_until(lambda: len(lines(server)) == 1)
    assert lines(server)[0]["status"] == 499
    assert lines(server)[0]["output_tokens"] >= 1
    wait_until(lambda: len(spans) == 4)

    spans.clear()
    body = {"model": "test-model", "input": "x", "max_output_tokens": 16, "background": True}
    assert http.post("/v1/responses", json=body).status_code == 200
    wait_until(lambda: len(spans) == 4)
    (root,) = [span for span in spans if span.name == "chat test-model"]
    (decode,) = [span for span in spans if span.name == "decode"]
    assert decode.parent_span_id == root.span_id
    assert decode.end_time_unix_nano > root.end_time_unix_nano


def test_a_wrong_endpoint():
    done = subprocess.run(
        [sys.executable, "-m", "jaxserve", "serve", "demo", "--port", "0", "--otlp-endpoint", "localhost:4318"],
        capture_output=True, text=True, timeout=60, env={"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (1, "")
    assert "--otlp-endpoint must be a URL" in done.stderr
