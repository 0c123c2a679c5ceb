"""Rows of the API that no other test walks through: every field, endpoint and metric that it names."""

from __future__ import annotations

import pytest
from serving import wait_until
from test_http import stream

MODEL = "test-model"
COMPLETION_FIELDS = {
    "best_of": 1, "echo": True, "frequency_penalty": 0.5, "presence_penalty": 0.5, "logit_bias": {"50": 120},
    "logprobs": 2, "max_tokens": 3, "n": 1, "seed": -5, "stop": ["zz"], "temperature": 0.5, "top_p": 0.9, "user": "u",
    "top_k": -1, "min_p": 0.1, "repetition_penalty": 1.1, "stop_token_ids": [77], "include_stop_str_in_output": True,
    "ignore_eos": True, "min_tokens": 2, "skip_special_tokens": False, "truncate_prompt_tokens": 5,
    "prompt_logprobs": 1, "add_special_tokens": False, "length_penalty": 1.0, "use_beam_search": False,
    "allowed_token_ids": [50, 51], "bad_words": ["worse"], "response_format": {"type": "text"},
    "structured_outputs": {"choice": ["a", "b"]}, "priority": -3, "request_id": "r-1", "cache_salt": "s",
    "return_token_ids": True, "suffix": None,
}  # fmt: skip
CHAT_FIELDS = {
    name: value for name, value in COMPLETION_FIELDS.items() if name not in ("logprobs", "echo", "best_of", "suffix")
} | {
    "logprobs": True, "top_logprobs": 20, "max_completion_tokens": 4, "chat_template_kwargs": {"enable_thinking": True},
    "tools": None, "tool_choice": None, "parallel_tool_calls": True, "reasoning_effort": "low", "echo": True,
    "continue_final_message": False, "add_generation_prompt": True, "add_special_tokens": True,
    "stream_options": None, "truncate_prompt_tokens": 50, "include_reasoning": True,
}  # fmt: skip


def test_every_field_of_completions(http):
    """Row "Request fields": all of them at once, and each alone."""
    for fields in (COMPLETION_FIELDS, *({name: value} for name, value in COMPLETION_FIELDS.items())):
        body = {"model": MODEL, "prompt": "better and worse", "max_tokens": 3, **fields}
        response = http.post("/v1/completions", json=body)
        assert response.status_code == 200, (fields, response.text)


def test_every_field_of_chats(http):
    for fields in (CHAT_FIELDS, *({name: value} for name, value in CHAT_FIELDS.items() if name != "top_logprobs")):
        body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, **fields}
        response = http.post("/v1/chat/completions", json=body)
        assert response.status_code == 200, (fields, response.text)


def test_ids_of_choices(http):
    """`index = prompt_index × n + i; accepted at temperature 0 too`."""
    body = {"prompt": [[50], [60], [70]], "n": 2, "max_tokens": 1, "temperature": 0, "return_token_ids": True}
    pieces = [chunk["choices"][0] for chunk in stream(http, "/v1/completions", **body)]
    tokens = {piece["index"]: piece["token_ids"] for piece in pieces if piece["token_ids"]}
    assert tokens == {0: [50], 1: [50], 2: [60], 3: [60], 4: [70], 5: [70]}


def test_usage_counts_a_prompt_once(http):
    """`Prompt tokens counted once for n > 1, completion tokens summed`, also in the stream's last chunk."""
    body = {"prompt": [50, 51], "n": 3, "max_tokens": 4, "stream_options": {"include_usage": True}}
    usage = stream(http, "/v1/completions", **body)[-1]["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (2, 12, 14)
    assert usage["prompt_tokens_details"]["cached_tokens"] == 1


@pytest.mark.slow
def test_no_chat_template_is_the_clients_error(start_server, tmp_path):
    """`no chat template: 400`."""
    import tokenizers_for_tests as kinds

    kinds.byte_level_backend().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    server = start_server(config={"model": str(tmp_path)})
    response = server.http().post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "Hi"}]})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "messages")
    assert "chat template" in response.json()["error"]["message"]


def test_template_that_raises(scripted):
    """`a template's own error: 400`."""
    body = {"messages": [{"role": "clown", "content": "Hi"}]}
    response = scripted.http().post("/v1/chat/completions", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "messages")
    assert "no clowns" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    "path", ["/v1/models", "/health", "/ready", "/metrics", "/version", "/openapi.json", "/tokenizer_info", "/load"]
)
def test_endpoints_to_get(http, path):
    response = http.get(path)
    assert response.status_code == 200
    assert response.text


def test_tokenizer_info(http):
    info = http.get("/tokenizer_info").json()
    assert info["eos_token_ids"]
    assert (info["bos_token"], info["eos_token"]) == (None, "<|endoftext|>")
    assert info["max_model_len"] == 256
    assert "messages" in info["chat_template"]
    assert http.get("/load").json() == {"server_load": 0}


GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "cache_config_info", "executables")
COUNTERS = (
    "prompt_tokens", "generation_tokens", "request_success", "num_preemptions", "prefix_cache_queries",
    "prefix_cache_hits", "admission_rejections", "compilations", "moe_routed_tokens",
    "moe_mean_expert_tokens", "moe_busiest_expert_tokens", "moe_active_experts",
)  # fmt: skip
HISTOGRAMS = (
    "time_to_first_token_seconds", "inter_token_latency_seconds", "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds", "request_queue_time_seconds", "request_prefill_time_seconds",
    "request_decode_time_seconds", "request_inference_time_seconds", "request_prompt_tokens",
    "request_generation_tokens", "request_max_num_generation_tokens", "request_params_n", "request_params_max_tokens",
    "iteration_tokens_total",
)  # fmt: skip


def test_metrics_of_the_engine(demo_server):
    """Row "Metrics": every name is there with its type, and the request's histograms have counted one request."""
    http = demo_server.http()
    wait_until(lambda: demo_server.metric("num_requests_running") == 0)  # what other tests have left
    before = {name: demo_server.metric(f"{name}_count") for name in HISTOGRAMS}
    sums = [f"request_{part}_time_seconds_sum" for part in ("queue", "prefill", "decode")]
    sums.append("e2e_request_latency_seconds_sum")
    seconds_before = [demo_server.metric(name) for name in sums]
    assert http.post("/v1/completions", json={"prompt": [50] * 20, "max_tokens": 8}).status_code == 200
    wait_until(lambda: demo_server.metric("num_requests_running") == 0)
    text = http.get("/metrics").text
    for names, kind, suffix in ((GAUGES, "gauge", ""), (COUNTERS, "counter", "_total"), (HISTOGRAMS, "histogram", "")):
        for name in names:
            assert f"# TYPE jaxserve:{name}{suffix} {kind}\n" in text, name
    assert 'model_name="test-model"' in text
    for name in HISTOGRAMS:
        if name not in ("inter_token_latency_seconds", "iteration_tokens_total", "request_params_max_tokens"):
            assert demo_server.metric(f"{name}_count") == before[name] + 1, name
    *parts, whole = (demo_server.metric(name) - at_first for name, at_first in zip(sums, seconds_before, strict=True))
    assert sum(parts) == pytest.approx(whole, rel=0.01)
