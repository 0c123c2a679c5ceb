"""The endpoints through the official client and through raw HTTP, on an engine that repeats its prompt."""

from __future__ import annotations

import asyncio
import json

import httpx
import openai
import pytest
from serving import wait_until

MODEL = "test-model"


@pytest.fixture(scope="module")
def client(parrot):
    return parrot.openai()


def events(response: httpx.Response) -> list[str]:
    """The data of each event of a stream, whose framing is checked."""
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.text.endswith("\n\n")
    blocks = response.text[:-2].split("\n\n")
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    return [block.removeprefix("data: ") for block in blocks]


def stream(http, path: str, **body) -> list[dict]:
    """The chunks of a stream, which ends with [DONE]; id, created and model are constant."""
    response = http.post(path, json={"model": MODEL, "stream": True, **body})
    assert response.status_code == 200, response.text
    *chunks, done = events(response)
    assert done == "[DONE]"
    parsed = [json.loads(chunk) for chunk in chunks]
    assert len({(c["id"], c["created"], c["model"], c["object"]) for c in parsed if "error" not in c}) == 1
    return parsed


# completions


def test_completion(client, http):
    ids = http.post("/tokenize", json={"prompt": "Once upon a time"}).json()["tokens"]
    result = client.completions.create(model=MODEL, prompt="Once upon a time", max_tokens=len(ids))
    assert result.object == "text_completion"
    assert result.choices[0].text == "Once upon a time"
    assert result.choices[0].finish_reason == "length"
    assert result.usage.prompt_tokens == result.usage.completion_tokens == len(ids)
    assert result.usage.total_tokens == 2 * len(ids)
    assert result.usage.prompt_tokens_details.cached_tokens == 1


def test_completions_default_to_16_tokens(client):
    assert client.completions.create(model=MODEL, prompt="Hello").usage.completion_tokens == 16


@pytest.mark.parametrize("prompt", ["Hello 😀 wörld 你好!", [20, 30, 40]])
def test_streamed_completion_is_the_whole_one(client, prompt):
    whole = client.completions.create(model=MODEL, prompt=prompt, max_tokens=40)
    chunks = list(client.completions.create(model=MODEL, prompt=prompt, max_tokens=40, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason] == ["length"]
    assert all(chunk.choices[0].text or chunk.choices[0].finish_reason for chunk in chunks)
    assert all("\ufffd" not in chunk.choices[0].text for chunk in chunks[:-1])


def test_batch_of_prompts_and_n(client):
    result = client.completions.create(model=MODEL, prompt=[[40, 41], [50, 51]], n=2, max_tokens=2)
    assert [choice.index for choice in result.choices] == [0, 1, 2, 3]
    assert result.choices[0].text == result.choices[1].text != result.choices[2].text == result.choices[3].text
    assert result.usage.completion_tokens == 8


def test_stop_strings(client):
    for options in ({"stop": "upon"}, {"stop": ["time", "upon"]}):
        result = client.completions.create(model=MODEL, prompt="Once upon a time", max_tokens=50, **options)
        assert result.choices[0].text == "Once "
        assert (result.choices[0].finish_reason, result.choices[0].stop_reason) == ("stop", "upon")
        assert result.usage.completion_tokens < 50
    result = client.completions.create(
        model=MODEL,
        prompt="Once upon a time",
        max_tokens=50,
        stop="upon",
        extra_body={"include_stop_str_in_output": True},
    )
    assert result.choices[0].text == "Once upon"


def test_stop_tokens_and_eos(client, http):
    result = client.completions.create(
        model=MODEL, prompt=[50, 51, 52], max_tokens=9, extra_body={"stop_token_ids": [52], "return_token_ids": True}
    )
    assert (result.choices[0].finish_reason, result.choices[0].stop_reason) == ("stop", 52)
    assert result.choices[0].token_ids == [50, 51, 52]
    assert result.choices[0].prompt_token_ids == [50, 51, 52]
    result = client.completions.create(model=MODEL, prompt=[50, 51, 2], max_tokens=9)
    assert (result.choices[0].finish_reason, result.choices[0].stop_reason) == ("stop", None)
    result = client.completions.create(model=MODEL, prompt=[50, 2], max_tokens=9, extra_body={"ignore_eos": True})
    assert result.choices[0].finish_reason == "length"


@pytest.mark.parametrize("streamed", [False, True])
def test_completion_logprobs_with_echo(http, streamed):
    body = {"prompt": [50, 51, 52], "max_tokens": 2, "logprobs": 1, "echo": True}
    if streamed:
        pieces = [chunk["choices"][0] for chunk in stream(http, "/v1/completions", **body)]
        logprobs = {key: [x for p in pieces for x in p["logprobs"][key]] for key in pieces[0]["logprobs"]}
        text = "".join(piece["text"] for piece in pieces)
    else:
        choice = http.post("/v1/completions", json={"model": MODEL, **body}).json()["choices"][0]
        logprobs = choice["logprobs"]
        text = choice["text"]
    assert set(logprobs) == {"tokens", "token_logprobs", "top_logprobs", "text_offset"}
    assert logprobs["token_logprobs"] == [None, -0.5, -0.5, -0.5, -0.5]
    assert logprobs["top_logprobs"][0] is None
    assert all(len(top) == 2 for top in logprobs["top_logprobs"][1:])  # the best one and the sampled one
    assert "".join(logprobs["tokens"]) == text
    for offset, token in zip(logprobs["text_offset"], logprobs["tokens"], strict=True):
        assert text[offset:].startswith(token)


def test_echo_alone_and_harness_scoring(client):
    result = client.completions.create(model=MODEL, prompt="Once upon", max_tokens=0, echo=True)
    assert result.choices[0].text == "Once upon"
    assert result.usage.completion_tokens == 0
    result = client.completions.create(
        model=MODEL, prompt=[[50, 51], [60, 61, 62]], max_tokens=1, echo=True, logprobs=1
    )
    assert [len(choice.logprobs.token_logprobs) for choice in result.choices] == [3, 4]


def test_minus_infinity_is_a_number(http):
    body = {"model": MODEL, "prompt": [50], "max_tokens": 1, "logprobs": 3}
    top = http.post("/v1/completions", json=body).json()["choices"][0]["logprobs"]["top_logprobs"][0]
    assert min(top.values()) == -9999.0


def test_prompt_logprobs(http):
    body = {"model": MODEL, "prompt": [50, 51], "max_tokens": 1, "prompt_logprobs": 1}
    entries = http.post("/v1/completions", json=body).json()["choices"][0]["prompt_logprobs"]
    assert entries[0] is None
    assert entries[1]["51"]["rank"] == 2
    assert entries[1]["10"]["logprob"] == -0.25


def test_usage_in_streams(http):
    body = {"prompt": [50, 51], "max_tokens": 3}
    assert all("usage" not in chunk for chunk in stream(http, "/v1/completions", **body))
    *chunks, last = stream(http, "/v1/completions", **body, stream_options={"include_usage": True})
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 3
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = stream(http, "/v1/completions", **body, stream_options=options)
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks][-1] == 3
    assert all(chunk["usage"]["prompt_tokens"] == 2 for chunk in chunks)


def test_lengths(client, http):
    with pytest.raises(openai.BadRequestError, match="maximum context length is 256 tokens") as caught:
        client.completions.create(model=MODEL, prompt=[5] * 256)
    assert caught.value.code == "context_length_exceeded"
    result = client.completions.create(model=MODEL, prompt=[50] * 250, max_tokens=100)
    assert (result.usage.completion_tokens, result.choices[0].finish_reason) == (6, "length")
    body = {"model": MODEL, "prompt": [5] * 300, "max_tokens": 4, "truncate_prompt_tokens": 7}
    assert http.post("/v1/completions", json=body).json()["usage"]["prompt_tokens"] == 7
    body["truncate_prompt_tokens"] = -1
    assert http.post("/v1/completions", json=body).json()["usage"]["prompt_tokens"] == 252


def test_no_limit_and_which_end_is_cut(http):
    """`max_tokens` -1 is what the context leaves. `truncation_side` is the end that is cut off, "left" by default."""
    unlimited = {"model": MODEL, "prompt": [50] * 250, "max_tokens": -1}
    assert http.post("/v1/completions", json=unlimited).json()["usage"]["completion_tokens"] == 6
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "ignore_eos": True}
    for limits in ({"max_tokens": -1}, {"max_completion_tokens": -1, "max_tokens": 2}):
        usage = http.post("/v1/chat/completions", json=chat | limits).json()["usage"]
        assert usage["total_tokens"] == 256
    body = {"prompt": [5, 6, 7, 8], "max_tokens": 1, "truncate_prompt_tokens": 2, "return_token_ids": True}
    for side, kept in ((None, [7, 8]), ("left", [7, 8]), ("right", [5, 6])):
        answer = http.post("/v1/completions", json={"model": MODEL, "truncation_side": side, **body}).json()
        assert answer["choices"][0]["prompt_token_ids"] == kept


# chat


def test_chat(client):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi there"}]
    result = client.chat.completions.create(model=MODEL, messages=messages, max_completion_tokens=5, max_tokens=2)
    assert result.object == "chat.completion"
    assert result.choices[0].message.role == "assistant"
    assert result.usage.completion_tokens == 5
    parts = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hi there"}]},
    ]
    again = client.chat.completions.create(model=MODEL, messages=parts, max_tokens=5)
    assert again.choices[0].message.content == result.choices[0].message.content
    assert again.usage.prompt_tokens == result.usage.prompt_tokens


def test_chat_runs_to_the_end_of_the_context(client):
    result = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Hi"}], extra_body={"ignore_eos": True}
    )
    assert result.usage.total_tokens == 256
    assert result.choices[0].finish_reason == "length"


def test_chat_stream(http, client):
    body = {"messages": [{"role": "user", "content": "Hi 😀 there"}], "n": 2, "max_tokens": 12, "ignore_eos": True}
    chunks = [chunk["choices"][0] for chunk in stream(http, "/v1/chat/completions", **body)]
    for index in (0, 1):
        mine = [choice for choice in chunks if choice["index"] == index]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert all("role" not in choice["delta"] for choice in mine[1:])
        assert [c["finish_reason"] for c in mine if c["finish_reason"]] == ["length"] == [mine[-1]["finish_reason"]]
        assert all(choice["delta"].get("content") for choice in mine[1:-1])
        whole = client.chat.completions.create(
            model=MODEL, messages=body["messages"], max_tokens=12, extra_body={"ignore_eos": True}
        )
        assert "".join(choice["delta"].get("content", "") for choice in mine) == whole.choices[0].message.content


def test_chat_logprobs(client):
    messages = [{"role": "user", "content": "Hi"}]
    result = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=4, logprobs=True, top_logprobs=2)
    content = result.choices[0].logprobs.content
    assert len(content) == result.usage.completion_tokens
    assert all(len(entry.top_logprobs) == 2 for entry in content)
    assert all(bytes(entry.bytes).decode() == entry.token for entry in content)
    result = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=4, logprobs=True)
    assert all(entry.top_logprobs == [] for entry in result.choices[0].logprobs.content)


def test_usage_of_the_chunk_with_the_role(http):
    """Its usage counts no output yet, whatever the same step has sampled."""
    body = {"messages": [{"role": "user", "content": "Hi"}], "n": 2, "max_tokens": 2, "ignore_eos": True}
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = stream(http, "/v1/chat/completions", **body, stream_options=options)
    prompt = last["usage"]["prompt_tokens"]
    roles = [chunk["usage"] for chunk in chunks if chunk["choices"][0]["delta"].get("role")]
    assert [usage["completion_tokens"] for usage in roles] == [0, 0]
    assert all(usage["total_tokens"] == usage["prompt_tokens"] == prompt for usage in roles)
    assert last["usage"]["completion_tokens"] == 4


def test_texts_in_a_list_of_parts(http):
    def tokens(content) -> list[int]:
        body = {"model": MODEL, "messages": [{"role": "user", "content": content}]}
        return http.post("/tokenize", json=body).json()["tokens"]

    assert tokens(["a", {"type": "text", "text": "b"}]) == tokens("a\nb")


def test_continuing_excludes_a_new_message(http):
    """`continue_final_message` with an explicit `add_generation_prompt` true is a contradiction; each alone is not."""
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well"}]
    for path in ("/v1/chat/completions", "/tokenize"):
        body = {"model": MODEL, "messages": messages, "max_tokens": 1, "continue_final_message": True}
        answer = http.post(path, json=body | {"add_generation_prompt": True})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "continue_final_message")
        for fields in (body, body | {"add_generation_prompt": False}, body | {"continue_final_message": False}):
            assert http.post(path, json=fields).status_code == 200


def test_continue_final_message_with_echo(client):
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well"}]
    extra = {"continue_final_message": True, "echo": True}
    result = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=2, extra_body=extra)
    assert result.choices[0].message.content.startswith("Well")
    streamed = client.chat.completions.create(
        model=MODEL, messages=messages, max_tokens=2, extra_body=extra, stream=True
    )
    assert "".join(c.choices[0].delta.content or "" for c in streamed) == result.choices[0].message.content


def test_async_client_many_at_once(parrot):
    async def run() -> list[str]:
        async with parrot.openai_async() as client:

            async def one(i: int) -> str:
                chunks = await client.completions.create(
                    model=MODEL, prompt=f"Request number {i} says hello", max_tokens=30, stream=True
                )
                return "".join([chunk.choices[0].text async for chunk in chunks])

            return await asyncio.gather(*(one(i) for i in range(32)))

    for i, text in enumerate(asyncio.run(run())):
        assert text.startswith(f"Request number {i} says hello"[: len(text)])


# the small endpoints


def test_models_tokens_and_the_rest(client, http):
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    assert http.get("/v1/models").json()["data"][0]["max_model_len"] == 256
    answer = http.post("/tokenize", json={"prompt": "Hi 😀", "return_token_strs": True}).json()
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert http.post("/detokenize", json={"tokens": answer["tokens"]}).json() == {"prompt": "Hi 😀", "content": "Hi 😀"}
    chat = http.post("/tokenize", json={"messages": [{"role": "user", "content": "Hi"}]}).json()["tokens"]
    assert "Hi" in http.post("/detokenize", json={"tokens": chat}).json()["prompt"]
    assert http.get("/health").status_code == http.get("/ready").status_code == 200
    assert "version" in http.get("/version").json()
    assert "/v1/completions" in http.get("/openapi.json").json()["paths"]


def test_metrics(client, http, parrot):
    client.completions.create(model=MODEL, prompt=[50, 51], max_tokens=3)
    text = http.get("/metrics").text
    for name in (
        "time_to_first_token_seconds_count",
        "request_success_total",
        "prompt_tokens_total",
        "cache_config_info",
    ):
        assert f"jaxserve:{name}" in text
    wait_until(lambda: parrot.metric("num_requests_running") == parrot.metric("kv_cache_usage_perc") == 0)
    assert parrot.metric("generation_tokens_total") > 0


def test_request_ids(http):
    assert http.get("/health", headers={"X-Request-Id": "abc-1"}).headers["x-request-id"] == "abc-1"
    assert http.get("/health", headers={"X-Request-Id": "bad id\t!"}).headers["x-request-id"] != "bad id\t!"
    body = {"model": MODEL, "prompt": [50], "max_tokens": 1, "request_id": "mine"}
    assert http.post("/v1/completions", json=body).json()["id"] == "cmpl-mine"


def test_no_cors_by_default(http):
    response = http.get("/health", headers={"Origin": "https://example.org"})
    assert not any(name.startswith("access-control") for name in response.headers)


@pytest.mark.slow
def test_long_prompts_come_to_the_engine_with_the_hashes_of_their_pages(start_server):
    server = start_server("HashingEngine", config={"max_model_len": 10_000})
    long = [5] * 5001
    short = [6] * 40
    for body in ({"prompt": long}, {"prompt": short}, {"prompt": [short, long, long]}, {"prompt": long, "n": 2}):
        for salt in (None, "salt"):
            answer = httpx.post(
                f"{server.url}/v1/completions", json={**body, "max_tokens": 1, "cache_salt": salt}, timeout=30
            )
            assert answer.status_code == 200, answer.text


@pytest.mark.slow
def test_most_alternatives_of_a_token(start_server):
    server = start_server(config={"max_model_len": 256, "max_logprobs": 3})
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "logprobs": True}
    response = {"model": MODEL, "input": "x", "max_output_tokens": 16}
    for path, body in (("/v1/chat/completions", chat), ("/v1/responses", response)):
        assert server.http().post(path, json=body | {"top_logprobs": 3}).status_code == 200
        answer = server.http().post(path, json=body | {"top_logprobs": 4})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "top_logprobs"
        assert "top_logprobs is 4; this server gives at most 3" in answer.json()["error"]["message"]
