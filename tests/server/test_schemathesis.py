"""Requests made up from /openapi.json: none may be answered with a 5xx, every refusal has the shape of an error, and
what the document allows is not refused."""

from __future__ import annotations

import pytest
import tokenizers_for_tests as kinds
from hypothesis import HealthCheck, Phase, given, settings
from serving import running_server

from jaxserve.limits import MAX_BAD_WORD_TOKENS
from jaxserve.server.endpoints.openapi import openapi_document
from jaxserve.server.http.errors import OLLAMA_PATHS, TRITON_PATHS

schemathesis = pytest.importorskip("schemathesis", reason="needs schemathesis: pip install 'jaxserve[test-slow]'")
GenerationMode = schemathesis.GenerationMode

ENDPOINTS = [
    "POST /v1/completions", "POST /v1/chat/completions", "POST /v1/responses", "POST /v1/messages",
    "POST /v1/messages/count_tokens", "POST /tokenize", "POST /detokenize", "POST /invocations", "GET /v1/models",
    "GET /load", "GET /tokenizer_info", "GET /health", "GET /v1/responses/{id}", "DELETE /v1/responses/{id}",
    "POST /v1/responses/{id}/cancel", "POST /reset_prefix_cache", "POST /profile",
    "POST /v1/responses/input_tokens", "GET /v1/responses/{id}/input_items",
]  # fmt: skip
WITH_BODIES = ENDPOINTS[:8]
PATHS = openapi_document("", ["test-model"], None, has_files=True)["paths"]
OTHERS = sorted(
    {f"{method.upper()} {path}" for path, methods in PATHS.items() for method in methods if method != "parameters"}
    - set(ENDPOINTS)
)
ADMIN = {"Authorization": "Bearer admin"}


@pytest.fixture(scope="module")
def with_files(tmp_path_factory):
    """As `scripted`, with files, batches and an admin key."""
    folder = tmp_path_factory.mktemp("with-files")
    kinds.save_byte_level(folder, kinds.TOOL_TEMPLATE)
    options = {"files_dir": str(folder / "files"), "admin_key": "admin", "config": {"max_model_len": 4096}}
    with running_server(folder, folder / "log", engine="ScriptEngine", **options) as server:
        yield server


def probe(server, endpoint: str, mode: GenerationMode, examples: int) -> None:
    method, path = endpoint.split()
    operation = schemathesis.openapi.from_url(f"{server.url}/openapi.json")[path][method]

    def check(case) -> None:
        if endpoint in WITH_BODIES and mode is GenerationMode.POSITIVE:
            obey(case.body)
        headers = ADMIN if path.startswith("/v2/repository/") else None
        response = case.call(base_url=server.url, timeout=60, headers=headers)
        assert response.status_code < 500, (case.body, response.text[:500])
        if response.status_code >= 400 and "application/json" in response.headers.get("content-type", ""):
            error = response.json()["error"]
            is_text = path.startswith((OLLAMA_PATHS, *TRITON_PATHS))
            assert isinstance(error, str) if is_text else {"message", "type"} <= set(error)
        if endpoint in WITH_BODIES and mode is GenerationMode.POSITIVE:
            assert response.status_code == 200, (case.body, response.text[:500])

    options = settings(
        max_examples=examples, deadline=None, database=None, derandomize=True, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    options(given(case=operation.as_strategy(generation_mode=mode))(check))()


def obey(body: dict) -> None:
    """Makes a body follow what descriptions say, because JSON Schema cannot."""
    for field in (
        "best_of",
        "logprob_token_ids",
        "continue_final_message",
        "previous_response_id",
        "functions",
        "function_call",
    ):
        body.pop(field, None)
    if least := body.get("min_tokens"):
        for field in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
            if field == "max_tokens" or body.get(field) is not None:
                body[field] = max(least, body.get(field) or 0)
    asks = {"text", "output_config", "output_format", "structured_outputs", "use_beam_search"} & body.keys()
    if asks or body.get("response_format") not in (None, {"type": "text"}):
        for field in ("regex", "ebnf", "grammar", "json_schema"):
            body.pop(field, None)
    if body.get("bad_words"):  # a character may take four tokens here
        body["bad_words"] = [word[: MAX_BAD_WORD_TOKENS // 4 - 1] for word in body["bad_words"]]
    if body.get("n") not in (None, 1) or body.get("use_beam_search"):
        body.pop("thinking_token_budget", None)
    if isinstance(body.get("prompt"), list):
        body.pop("n", None)
    if isinstance(items := body.get("input"), list) and all(item.get("type") == "reasoning" for item in items):
        body["input"] = "x"
    tools = {tool.get("name") or (tool.get("function") or {}).get("name"): tool for tool in body.get("tools") or ()}
    if tools:
        body["tools"] = list(tools.values())
    if not tools or not isinstance(body.get("tool_choice"), str):
        body.pop("tool_choice", None)
    for message in [*(body.get("messages") or ()), *(body["input"] if isinstance(body.get("input"), list) else ())]:
        older = message.get("function_call")
        for function in [
            *(call["function"] for call in message.get("tool_calls") or () if call.get("function")),
            *([older] if older else ()),
        ]:
            function["arguments"] = "{}"
        if message.get("type") == "function_call":
            message["arguments"] = "{}"


@pytest.mark.slow
@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_what_the_document_allows_is_not_refused(scripted, endpoint):
    probe(scripted, endpoint, GenerationMode.POSITIVE, 20 if endpoint in WITH_BODIES else 4)


@pytest.mark.slow
@pytest.mark.parametrize("endpoint", OTHERS)
def test_all_other_endpoints(with_files, endpoint):
    if endpoint.split()[1] not in with_files.http().get("/openapi.json").json()["paths"]:
        pytest.skip("it is for models that embed or score")
    method, path = endpoint.split()
    has_body = "requestBody" in PATHS[path][method.lower()]
    for mode in (GenerationMode.POSITIVE, *([GenerationMode.NEGATIVE] if has_body else ())):
        probe(with_files, endpoint, mode, 60 if has_body else 4)


@pytest.mark.slow
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
@pytest.mark.parametrize("endpoint", WITH_BODIES)
def test_many_requests(scripted, endpoint, mode):
    probe(scripted, endpoint, mode, 150)
