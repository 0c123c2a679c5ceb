"""Requests made up from /openapi.json: none may be answered with a 5xx, and every refusal has the shape of an error."""

from __future__ import annotations

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode

ENDPOINTS = [
    "POST /v1/completions", "POST /v1/chat/completions", "POST /v1/responses", "POST /v1/messages",
    "POST /v1/messages/count_tokens", "POST /tokenize", "POST /detokenize", "GET /v1/models", "GET /load",
    "GET /tokenizer_info", "GET /health", "GET /v1/responses/{id}", "DELETE /v1/responses/{id}",
    "POST /v1/responses/{id}/cancel", "POST /reset_prefix_cache", "POST /profile",
    "POST /v1/responses/input_tokens", "GET /v1/responses/{id}/input_items",
]  # fmt: skip


def probe(server, endpoint: str, mode: GenerationMode, examples: int) -> None:
    method, path = endpoint.split()
    operation = schemathesis.openapi.from_url(f"{server.url}/openapi.json")[path][method]

    def check(case) -> None:
        if isinstance(case.body, dict) and mode is GenerationMode.POSITIVE:
            case.body |= {"model": "test-model", "max_tokens": 3, "max_output_tokens": 3}
        response = case.call(base_url=server.url, timeout=60)
        assert response.status_code < 500, (case.body, response.text[:500])
        if response.status_code >= 400 and "application/json" in response.headers.get("content-type", ""):
            assert {"message", "type"} <= set(response.json()["error"]), response.text[:500]

    options = settings(
        max_examples=examples, deadline=None, database=None, derandomize=True, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    options(given(case=operation.as_strategy(generation_mode=mode))(check))()


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_no_request_is_answered_with_a_server_error(scripted, endpoint):
    probe(scripted, endpoint, GenerationMode.POSITIVE, 6)


@pytest.mark.slow
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
@pytest.mark.parametrize("endpoint", ENDPOINTS[:7])
def test_many_requests(scripted, endpoint, mode):
    probe(scripted, endpoint, mode, 150)
