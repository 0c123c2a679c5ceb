"""What is refused, how, and what is ignored: row "Errors" and row "Ranges" of the API."""

from __future__ import annotations

import pytest

from jaxserve.server.schemas.foreign_fields import NOT_SERVED

MODEL = "test-model"


def refused(http, path: str, status: int = 400, **body) -> dict:
    response = http.post(path, json=body)
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] is None or isinstance(error["code"], str)
    return error


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("temperature", {"temperature": 10.5}),
        ("temperature", {"temperature": "hot"}),
        ("top_p", {"top_p": -0.1}),
        ("top_k", {"top_k": -2}),
        ("min_p", {"min_p": 1.5}),
        ("n", {"n": 0}),
        ("n", {"n": 129}),
        ("max_tokens", {"max_tokens": -2}),
        ("max_tokens", {"max_tokens": 0}),
        ("max_tokens", {"max_tokens": 10**30}),
        ("min_tokens", {"min_tokens": 5, "max_tokens": 4}),
        ("stop", {"stop": ""}),
        ("stop", {"stop": ["a"] * 65}),
        ("stop", {"stop": "x" * 2000}),
        ("stop_token_ids", {"stop_token_ids": [10**6]}),
        ("logprobs", {"logprobs": 21}),
        ("logprobs", {"logprobs": -1}),
        ("logit_bias", {"logit_bias": {"x": 1}}),
        ("logit_bias", {"logit_bias": {"999999": 1}}),
        ("logit_bias", {"logit_bias": {str(i): 1 for i in range(600)}}),
        ("seed", {"seed": 2**70}),
        ("stream_options", {"stream_options": {"include_usage": True}}),
        ("best_of", {"best_of": 3}),
        ("suffix", {"suffix": "end"}),
        ("response_format", {"response_format": {"type": "xml"}}),
        ("bad_words", {"bad_words": [""]}),
        ("bad_words", {"bad_words": ["x"] * 129}),
        ("allowed_token_ids", {"allowed_token_ids": [10**6]}),
        ("allowed_token_ids", {"allowed_token_ids": [-1]}),
        ("use_beam_search", {"use_beam_search": "yes"}),
        ("response_format", {"use_beam_search": True, "response_format": {"type": "json_object"}}),
        ("repetition_penalty", {"use_beam_search": True, "repetition_penalty": 1.5}),
        ("length_penalty", {"length_penalty": 100}),
        ("response_format", {"response_format": {"type": "json_schema"}}),
        ("response_format", {"response_format": {"type": "json_schema", "json_schema": {"schema": [1]}}}),
        ("response_format", {"response_format": "json"}),
        ("structured_outputs", {"structured_outputs": {}}),
        ("structured_outputs", {"structured_outputs": {"json": {}, "regex": "a"}}),
        ("structured_outputs", {"structured_outputs": {"regex": 7}}),
        ("structured_outputs", {"structured_outputs": {"choice": ["a", 1]}}),
        ("structured_outputs", {"structured_outputs": {"json": "{"}}),
        ("structured_outputs", {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}),
        ("prompt", {"prompt": []}),
        ("prompt", {"prompt": ["a", 1]}),
        ("prompt", {"prompt": [[1], []]}),
        ("prompt", {"prompt": [10**6]}),
        ("prompt", {"prompt": [-1]}),
        ("prompt", {"prompt": ["a"] * 1025}),
        ("prompt", {"prompt": ""}),
        ("prompt", {"prompt": {"a": 1}}),
        ("cache_salt", {"cache_salt": ""}),
        ("request_id", {"request_id": "a b"}),
        ("truncate_prompt_tokens", {"truncate_prompt_tokens": 0}),
        ("truncation_side", {"truncate_prompt_tokens": 1, "truncation_side": "middle"}),
        ("prompt_logprobs", {"prompt_logprobs": -1}),
        ("logprob_token_ids", {"logprob_token_ids": [5]}),
        ("logprob_token_ids", {"logprob_token_ids": [10**6], "logprobs": 1}),
        ("logprob_token_ids", {"logprob_token_ids": list(range(21)), "logprobs": 1}),
        ("echo", {"logprob_token_ids": [5], "logprobs": 1, "echo": True}),
        ("regex", {"regex": 7}),
        ("grammar", {"grammar": {"type": "json"}}),
        ("json_schema", {"json_schema": {}, "grammar": 'root ::= "a"'}),
        ("json_schema", {"json_schema": "{"}),
        ("regex", {"regex": "a", "structured_outputs": {"choice": ["a"]}}),
        ("structured_outputs", {"structured_outputs": {"json": {}, "whitespace_pattern": " "}}),
    ],
)
def test_bad_completion_fields(http, param, fields):
    error = refused(http, "/v1/completions", **{"model": MODEL, "prompt": "Hi", **fields})
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("messages", {"messages": []}),
        ("messages", {"messages": [{"role": "user"}]}),
        ("messages", {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}),
        ("messages", {"messages": [{"role": "user", "content": "x", "tool_calls": [{"function": {"name": "f"}}]}]}),
        ("messages", {"messages": [{"role": "assistant", "tool_calls": [{"id": "c"}]}]}),
        ("top_logprobs", {"top_logprobs": 2}),
        ("top_logprobs", {"top_logprobs": 21, "logprobs": True}),
        ("logprobs", {"logprobs": 3}),
        ("tools", {"tools": [{"type": "function", "function": {"name": "f g"}}]}),
        ("tool_choice", {"tool_choice": {"type": "function", "function": {"name": "f"}}}),
        ("tool_choice", {"tool_choice": "required"}),
        ("chat_template", {"chat_template": "{{ 1 }}"}),
        ("chat_template_kwargs", {"chat_template_kwargs": {"messages": "x"}}),
        ("max_completion_tokens", {"max_completion_tokens": 0}),
        ("max_tokens", {"max_tokens": 0}),
        ("top_logprobs", {"logprobs": True, "top_logprobs": -1}),
        ("messages", {"messages": [{"role": "user", "content": [7]}]}),
        ("continue_final_message", {"continue_final_message": True}),
    ],
)
def test_bad_chat_fields(http, param, fields):
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], **fields}
    assert refused(http, "/v1/chat/completions", **body)["param"] == param


def test_harmless_and_unknown_fields_are_ignored(http):
    body = {
        "model": MODEL, "prompt": "Hi", "max_tokens": 1, "user": "u", "metadata": {"a": "b"}, "store": True,
        "best_of": 1, "suffix": None, "a_field_of_next_year": [1, 2], "tools": [], "response_format": {"type": "text"},
    }  # fmt: skip
    assert http.post("/v1/completions", json=body).status_code == 200


FOREIGN = {
    "guided_regex": ("a", "structured_outputs"),
    "repeat_penalty": (1.1, "repetition_penalty"),
    "typical_p": (0.9, "set it to 1"),
    "mirostat": (2, "set it to 0"),
    "dry_multiplier": (0.8, "set it to 0"),
    "xtc_probability": (0.5, "set it to 0"),
    "no_repeat_ngram_size": (3, "frequency_penalty"),
    "logits_processors": (["x"], "logit_bias"),
    "custom_logit_processor": ("x", "logit_bias"),
    "vllm_xargs": ({"a": 1}, "leave it out"),
    "samplers": (["top_k"], "leave it out"),
    "stop_regex": ("a+", "structured_outputs"),
    "max_new_tokens": (5, "max_tokens"),
    "n_predict": (5, "max_tokens"),
    "lora_path": ("adapter", "model"),
    "do_sample": (False, "temperature 0"),
    "separate_reasoning": (False, "include_reasoning"),
}
BODIES = {
    "/v1/completions": {"prompt": "Hi", "max_tokens": 1},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 1},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1},
}


@pytest.mark.parametrize("path", BODIES)
def test_what_changes_answers_elsewhere_is_refused_by_name(http, path):
    """Each field with a value that asks for something: the message names it, and what to use instead."""
    for name, (value, instead) in FOREIGN.items():
        response = http.post(path, json={"model": MODEL, **BODIES[path], name: value})
        assert response.status_code == 400, (name, response.text)
        message = response.json()["error"]["message"]
        assert message.startswith(f"{name} is not supported"), message
        assert instead in message


@pytest.mark.parametrize("path", BODIES)
def test_neutral_values_of_other_engines_are_accepted(http, path):
    neutral = {
        name: field.harmless[-1] if field.harmless else None for name, field in NOT_SERVED.items()
    } | {"dry_base": 1.75, "mirostat_tau": 5.0, "xtc_threshold": 0.1, "repeat_last_n": 64}  # fmt: skip
    response = http.post(path, json={"model": MODEL, **BODIES[path], **neutral})
    assert response.status_code == 200, response.text


def test_the_range_of_penalties_matters_where_there_are_penalties(http):
    body = {"model": MODEL, "prompt": "Hi", "max_tokens": 1, "repeat_last_n": 64, "repetition_penalty": 1.0}
    assert http.post("/v1/completions", json=body).status_code == 200
    assert refused(http, "/v1/completions", **body | {"presence_penalty": 0.5})["param"] == "repeat_last_n"


def test_messages_name_the_key_and_the_bound(http):
    """Of a dictionary the key that is wrong; of -1, which asks for all tokens, the server's bound."""

    def message(**fields) -> str:
        return refused(http, "/v1/completions", model=MODEL, prompt="Hi", **fields)["message"]

    assert 'the key "x1" of logit_bias' in message(logit_bias={"5": 1, "x1": 1})
    assert 'logit_bias["6"] must be a number' in message(logit_bias={"5": 1, "6": "a"})
    assert message(logprobs=-1).startswith("logprobs is -1, for all")
    assert "at most 20 (--max-logprobs)" in message(logprobs=-1)


def test_bad_requests_in_general(http):
    assert refused(http, "/v1/completions", status=404, model="other", prompt="Hi")["code"] == "model_not_found"
    assert refused(http, "/v1/completions", model=MODEL)["param"] == "prompt"
    assert http.get("/nowhere").json()["error"]["type"] == "not_found_error"
    assert http.get("/v1/completions").status_code == 405
    for content, kind in (
        (b"{", "application/json"),
        (b'{"prompt": "\\ud800"}', "application/json"),
        (b'{"prompt": "\xff"}', "application/json"),
        (b'{"prompt": "x", "unknown": "\xff"}', "application/json"),
        (b"{}", "text/plain"),
    ):
        response = http.post("/v1/completions", content=content, headers={"content-type": kind})
        assert response.status_code == 400
        assert response.json()["error"]["type"] == "invalid_request_error"
    for content in (b'{"temperature": NaN}', b'{"temperature": 1e999}', b"[" * 10**5, b'{"suffix":' + b"[" * 10**5):
        response = http.post("/v1/completions", content=content, headers={"content-type": "application/json"})
        assert response.status_code == 400


def test_error_before_the_first_token_of_a_stream_has_its_status(http):
    assert refused(http, "/v1/completions", model=MODEL, prompt=[5] * 300, stream=True)["param"] == "prompt"


def test_texts_that_are_not_tokenized(http):
    """Ten million characters take a tokenizer gigabytes; where they are to be truncated, the end will do."""
    text = "some words, " * 900_000
    user = [{"role": "user", "content": text}]
    for path, fields in (
        ("/v1/completions", {"prompt": text}),
        ("/tokenize", {"prompt": text}),
        ("/tokenize", {"messages": user}),
        ("/v1/chat/completions", {"messages": user}),
    ):
        error = refused(http, path, model=MODEL, **fields)
        assert error["code"] == "context_length_exceeded"
        assert "at least" in error["message"]
    ends = []
    body = {"model": MODEL, "max_tokens": 1, "truncate_prompt_tokens": 100, "return_token_ids": True}
    for prompt in (text, text[-600:]):
        answer = http.post("/v1/completions", json=body | {"prompt": prompt}).json()
        ends.append(answer["choices"][0]["prompt_token_ids"])
    assert ends[0] == ends[1]
    assert len(ends[0]) == 100
