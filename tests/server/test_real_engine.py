"""The whole path, HTTP to kernels, on the bundled model: what the stand-in engines cannot show."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from serving import DEMO, wait_until

MODEL = "test-model"

pytestmark = pytest.mark.skipif(not DEMO.is_dir(), reason="the bundled model is missing")


@pytest.fixture(scope="module")
def client(demo_server):
    return demo_server.openai()


def complete(client, prompt="def add(a, b):\n", **options):
    options = {"max_tokens": 24, "temperature": 0, **options}
    return client.completions.create(model=MODEL, prompt=prompt, **options)


def test_streamed_and_whole_answers_are_the_same(client):
    whole = complete(client)
    chunks = list(complete(client, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole.choices[0].text != ""
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_answers_do_not_depend_on_company(demo_server, client):
    prompts = [f"class Thing{i}:\n    def __init__(self" for i in range(12)]
    alone = [complete(client, prompt=prompt).choices[0].text for prompt in prompts]

    async def together() -> list[str]:
        async with demo_server.openai_async() as busy:
            answers = await asyncio.gather(
                *(busy.completions.create(model=MODEL, prompt=p, max_tokens=24, temperature=0) for p in prompts)
            )
        return [answer.choices[0].text for answer in answers]

    assert asyncio.run(together()) == alone


def test_seed_repeats_and_children_differ(client):
    first = complete(client, temperature=1.0, seed=7, n=3)
    again = complete(client, temperature=1.0, seed=7, n=3)
    texts = [choice.text for choice in first.choices]
    assert texts == [choice.text for choice in again.choices]
    assert len(set(texts)) > 1


def test_chat_and_logprobs(client):
    result = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Hello"}],
        max_tokens=6,
        temperature=0,
        logprobs=True,
        top_logprobs=3,
    )
    for entry in result.choices[0].logprobs.content:
        assert entry.logprob == max(top.logprob for top in entry.top_logprobs) <= 0


def test_scoring_matches_generation(client):
    text = "import os\n"
    made = complete(client, prompt=text, max_tokens=8, logprobs=0)
    tokens = made.choices[0].logprobs
    scored = (
        complete(client, prompt=text + made.choices[0].text, max_tokens=0, echo=True, logprobs=0).choices[0].logprobs
    )
    if scored.tokens[-len(tokens.tokens) :] == tokens.tokens:  # the text may tokenize in another way
        pairs = zip(scored.token_logprobs[-len(tokens.tokens) :], tokens.token_logprobs, strict=True)
        assert all(abs(a - b) < 1e-3 for a, b in pairs)


def test_stop_string(client):
    whole = complete(client).choices[0].text
    stop = whole[5:8]
    result = complete(client, stop=[stop]).choices[0]
    assert result.text == whole[: whole.index(stop)]
    assert (result.finish_reason, result.stop_reason) == ("stop", stop)


def test_length_limit_of_the_context(client):
    result = complete(client, prompt=[40] * 250, max_tokens=100, extra_body={"ignore_eos": True})
    assert (result.usage.completion_tokens, result.choices[0].finish_reason) == (6, "length")


def test_leaving_frees_the_pages(demo_server):
    body = {"model": MODEL, "prompt": "x", "max_tokens": 200, "n": 4, "ignore_eos": True, "stream": True}
    with demo_server.http().stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        next(lines)
    wait_until(
        lambda: demo_server.metric("num_requests_running") == demo_server.metric("kv_cache_usage_perc") == 0, seconds=5
    )


def test_nothing_compiles_after_readiness(demo_server, client):
    before = demo_server.metric("compilations_total")
    complete(client, temperature=0.7, top_p=0.9, n=2, logprobs=2, presence_penalty=0.5, logit_bias={"40": 5})
    complete(client, prompt=["a" * 50, "b", "c" * 200], max_tokens=40, extra_body={"prompt_logprobs": 1, "min_p": 0.1})
    wait_until(lambda: demo_server.metric("num_requests_running") == 0)
    assert demo_server.metric("compilations_total") == before


def test_many_streams_at_once(demo_server):
    async def run() -> list[int]:
        async with httpx.AsyncClient(base_url=demo_server.url, timeout=120) as http:

            async def one(i: int) -> int:
                body = {"model": MODEL, "prompt": [40 + i], "max_tokens": 10, "ignore_eos": True, "stream": True}
                response = await http.post("/v1/completions", json=body)
                assert response.text.endswith("data: [DONE]\n\n")
                return response.status_code

            return await asyncio.gather(*(one(i) for i in range(40)))

    assert set(asyncio.run(run())) == {200}
