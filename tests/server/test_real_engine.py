"""The whole path, HTTP to kernels, on the bundled model: what the stand-in engines cannot show."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import httpx
import openai
import pytest
from serving import DEMO, SMALL, running_server, wait_until

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


def test_the_timeline_of_steps(demo_server, client):
    before = {phase: demo_server.metric("step_seconds_count", phase) for phase in PHASES}
    complete(client)
    wait_until(lambda: demo_server.metric("step_seconds_count", "commit") > before["commit"])
    for phase in PHASES:
        assert demo_server.metric("step_seconds_count", phase) > before[phase]
        assert 0 < demo_server.metric("step_seconds_sum", phase) < 1000
    assert demo_server.metric("step_seconds_bucket", "device", "+Inf") == demo_server.metric(
        "step_seconds_count", "device"
    )
    assert demo_server.metric("iteration_tokens_total_count") > 0


PHASES = ("schedule", "upload", "device", "commit", "mask")


def test_a_trace_of_the_next_steps(demo_server, client):
    headers = {"Authorization": "Bearer admin", "Content-Type": "application/json"}
    with demo_server.http(headers=headers) as http:
        answer = http.post("/profile", params={"steps": 3})
        assert answer.status_code == 200
        assert answer.json()["steps"] == 3
        folder = Path(answer.json()["folder"])
        complete(client, max_tokens=40)
        wait_until(lambda: any(folder.rglob("*.xplane.pb")), seconds=30)
        assert all(path.stat().st_size > 1000 for path in folder.rglob("*.xplane.pb"))
        for wrong in ("0", "10001", "-1", "x"):
            assert http.post("/profile", params={"steps": wrong}).status_code == 400
    complete(client)  # the engine goes on


@pytest.mark.slow
def test_the_next_process_compiles_nothing(tmp_path, monkeypatch):
    """What one server compiled, the next one reads."""
    monkeypatch.setenv("JAXSERVE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    figures = []
    for _ in range(2):
        with running_server(DEMO, tmp_path / "server.log", engine=None, config=SMALL) as server:
            names = ("executables", "compilations_total", "compilation_cache_hits_total")
            wait_until(lambda server=server: server.metric("executables") > 0)
            figures.append({name: server.metric(name) for name in names})
    cold, warm = figures
    assert cold["compilation_cache_hits_total"] == 0
    assert cold["compilations_total"] >= cold["executables"] >= 5
    assert warm["compilations_total"] == 0
    assert warm["compilation_cache_hits_total"] == cold["compilations_total"]


def test_allowed_tokens(client):
    ids = [40, 50, 60, 70]
    extra = {"allowed_token_ids": ids, "return_token_ids": True}
    for temperature in (0, 1):
        choice = complete(client, temperature=temperature, extra_body=extra).choices[0]
        assert set(choice.token_ids) <= set(ids)
        assert choice.finish_reason == "length"  # the end of a sequence is not among them


def test_bad_words(client):
    """Words of one token and of several never come, alone or after a space; what else is drawn goes on as before."""
    whole = complete(client, max_tokens=60)
    words = [word for word in whole.choices[0].text.split() if word.isalpha()]
    bad = [max(words, key=len), words[0]]
    choice = complete(client, max_tokens=60, extra_body={"bad_words": bad}).choices[0]
    assert choice.text != whole.choices[0].text
    assert not set(bad) & set(choice.text.split())
    harmless = complete(client, max_tokens=60, extra_body={"bad_words": ["Rhabarberbarbara"]})
    assert harmless.choices[0].text == whole.choices[0].text


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "paint"}}])
@pytest.mark.parametrize("stream", [False, True])
def test_forced_tool_calls(client, choice, stream):
    """A model that knows nothing of tools calls one all the same, because its grammar leaves nothing else."""
    colour = {"type": "object", "properties": {"colour": {"enum": ["red", "blue"]}}, "required": ["colour"]}
    tool = {"type": "function", "function": {"name": "paint", "parameters": {**colour, "additionalProperties": False}}}
    options = {"messages": [{"role": "user", "content": "Paint."}], "tools": [tool], "tool_choice": choice}
    options |= {"model": MODEL, "max_tokens": 60, "parallel_tool_calls": False, "temperature": 1, "seed": 3}
    if stream:
        with client.chat.completions.stream(**options) as events:
            result = events.get_final_completion().choices[0]
    else:
        result = client.chat.completions.create(**options).choices[0]
    (call,) = result.message.tool_calls
    assert call.function.name == "paint"
    assert json.loads(call.function.arguments)["colour"] in ("red", "blue")
    assert result.finish_reason == "tool_calls"


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 10},
        "age": {"type": "integer", "minimum": 1, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


def test_structured_output_in_chats(client):
    form = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": PERSON}}
    ask = {"model": MODEL, "messages": [{"role": "user", "content": "Who?"}], "max_tokens": 150, "seed": 4}
    whole = client.chat.completions.create(**ask, response_format=form, n=2, temperature=1.5)
    for choice in whole.choices:
        assert choice.finish_reason == "stop"
        person = json.loads(choice.message.content)
        assert person.keys() == {"name", "age"}
        assert 1 <= person["age"] <= 99
    stream = client.chat.completions.create(**ask, response_format=form, temperature=1.5, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert text == whole.choices[0].message.content


@pytest.mark.parametrize(
    ("structured", "pattern"),
    [
        ({"regex": "[a-f]{4}-[0-9]{2}"}, "[a-f]{4}-[0-9]{2}"),
        ({"choice": ["north", "south"]}, "north|south"),
        ({"grammar": 'start: "<" /[a-z]{1,9}/ ">"'}, "<[a-z]{1,9}>"),
        ({"json": PERSON}, r'(?s)\{.*"name".*"age".*\}'),
        ({"json_object": True}, r"(?s)\{.*"),
    ],
    ids=str,
)
def test_structured_outputs_of_completions(client, structured, pattern):
    made = complete(client, max_tokens=150, temperature=1, seed=2, extra_body={"structured_outputs": structured})
    assert re.fullmatch(pattern, made.choices[0].text)


@pytest.mark.parametrize("stream", [False, True])
def test_a_schema_that_cannot_be_met_is_a_bad_request(client, stream):
    form = {"type": "json_schema", "json_schema": {"schema": {"type": "integer", "minimum": 5, "maximum": 3}}}
    with pytest.raises(openai.BadRequestError, match=r"minimum \(5\) is greater than maximum \(3\)"):
        complete(client, extra_body={"response_format": form}, n=2, stream=stream)
    complete(client, max_tokens=2)


def test_a_grammar_without_an_allowed_token_is_a_bad_request(demo_server, client):
    """The other completions of the request end with the one that fails first."""
    extra = {"structured_outputs": {"choice": ["a"]}, "allowed_token_ids": [50]}
    with pytest.raises(openai.BadRequestError, match="allowed_token_ids") as refused:
        complete(client, n=3, extra_body=extra)
    assert refused.value.param == "structured_outputs"
    wait_until(lambda: demo_server.metric("num_requests_running") == 0)


def test_beam_search(client):
    options = {"extra_body": {"use_beam_search": True, "ignore_eos": True}, "max_tokens": 12, "logprobs": 0}
    found = complete(client, n=3, **options).choices
    sums = [sum(choice.logprobs.token_logprobs) for choice in found]
    assert sums == sorted(sums, reverse=True)
    assert len({choice.text for choice in found}) == 3
    greedy = complete(client, max_tokens=12, logprobs=0, extra_body={"ignore_eos": True}).choices[0]
    assert sums[0] >= sum(greedy.logprobs.token_logprobs) - 1e-3
    assert [choice.text for choice in complete(client, n=3, **options).choices] == [choice.text for choice in found]
