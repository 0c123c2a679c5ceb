"""Ollama's API through its official client and LangChain's, and the bytes of its streams."""

from __future__ import annotations

import asyncio
import json
import re

import numpy as np
import pooling_models
import pytest
from serving import DEMO, ROOT, running_server
from test_clients import CITIES, CITY, say
from test_tools_http import CALL, WEATHER

from jaxserve.server.schemas.ollama import OllamaMessage, _messages, keep_seconds
from jaxserve.types import InvalidRequestError

ollama = pytest.importorskip("ollama")

MODEL = "test-model"
TEXT = "Grüße aus Köln: naïve café 😀."
needs_demo = pytest.mark.skipif(not DEMO.is_dir(), reason="the bundled model is missing")


@pytest.fixture(scope="module")
def client(scripted):
    return ollama.Client(scripted.url)


def user(text: str) -> list[dict]:
    return [{"role": "user", "content": say(text)}]


@pytest.mark.parametrize("name", [MODEL, f"{MODEL}:latest"])
def test_chat_whole_and_streamed(client, name):
    whole = client.chat(name, user(TEXT))
    *parts, last = client.chat(name, user(TEXT), stream=True)
    assert whole.message.content == "".join(part.message.content for part in parts) == TEXT
    assert len(parts) > 5
    assert not any(part.done for part in parts)
    assert last.message.content == ""
    for end in (whole, last):
        assert (end.model, end.message.role, end.done, end.done_reason) == (name, "assistant", True, "stop")
        assert end.prompt_eval_count > 10
        assert end.eval_count > 5
        assert end.total_duration >= end.prompt_eval_duration + end.eval_duration > 0
        assert end.load_duration == 0
    assert client.chat(name, user(TEXT), options={"num_predict": 2}).done_reason == "length"
    assert client.chat(name, user("one two"), options={"stop": ["two"], "num_predict": -1}).message.content == "one "


def test_async(scripted):
    async def run() -> list[str]:
        client = ollama.AsyncClient(scripted.url)
        answers = await asyncio.gather(*(client.chat(MODEL, user(f"number {i}")) for i in range(4)))
        streamed = [part.message.content async for part in await client.chat(MODEL, user("as it comes"), stream=True)]
        return [*(answer.message.content for answer in answers), "".join(streamed)]

    assert asyncio.run(run()) == [*(f"number {i}" for i in range(4)), "as it comes"]


def test_tools(client):
    """Calls have objects as arguments, each in one line; results go to the call of their name."""
    said = user(f"Let me look.\n{CALL}{CALL}")
    whole = client.chat(MODEL, said, tools=[WEATHER])
    parts = list(client.chat(MODEL, said, tools=[WEATHER], stream=True))
    assert "".join(part.message.content for part in parts).strip() == whole.message.content.strip() == "Let me look."
    calls = [call for part in parts for call in part.message.tool_calls or ()]
    for found in (whole.message.tool_calls, calls):
        assert [(call.function.name, call.function.arguments) for call in found] == [
            ("get_weather", {"city": "Köln"})
        ] * 2
    assert (whole.done_reason, parts[-1].done_reason) == ("stop", "stop")
    result = {"role": "tool", "content": say("Wet."), "tool_name": "get_weather"}
    assert client.chat(MODEL, [*said, whole.message, result], tools=[WEATHER]).message.content == "Wet."

    def get_weather(city: str) -> str:
        """The weather.

        Args:
            city: where
        """
        return city

    (call,) = client.chat(MODEL, user(CALL), tools=[get_weather]).message.tool_calls
    assert call.function.arguments == {"city": "Köln"}
    cut = client.chat(MODEL, user(CALL), tools=[WEATHER], options={"num_predict": 14})
    assert (cut.message.tool_calls, cut.done_reason) == (None, "length")


def test_calls_and_results_belong_together():
    call = {"function": {"name": "a", "arguments": {}}}
    other = {"function": {"name": "b", "arguments": {}}, "id": "own"}
    given = [
        {"role": "assistant", "tool_calls": [call, other, call]},
        {"role": "tool", "tool_name": "b", "content": "of b"},
        {"role": "tool", "tool_name": "a", "content": "of the first a"},
        {"role": "tool", "content": "of what is left"},
        {"role": "tool", "content": "of none"},
    ]
    import msgspec

    assistant, *results = _messages(msgspec.convert(given, list[OllamaMessage]))
    assert [one.id for one in assistant.tool_calls] == ["call00000", "own", "call00002"]
    assert [one.tool_call_id for one in results] == ["own", "call00000", "call00002", None]


def test_thinking(client):
    said = user("<think>Hm.</think>Yes.|THEN|No.")
    for options in ({}, {"think": True}, {"think": "high"}):
        message = client.chat(MODEL, said, tools=[WEATHER], **options).message
        assert (message.thinking, message.content) == ("Hm.", "Yes.")
        parts = list(client.chat(MODEL, said, tools=[WEATHER], stream=True, **options))
        assert "".join(part.message.thinking or "" for part in parts) == "Hm."
        assert "".join(part.message.content for part in parts) == "Yes."
    message = client.chat(MODEL, said, tools=[WEATHER], think=False).message
    assert (message.thinking, message.content) == (None, "No.")
    generated = client.generate(MODEL, say("<think>Hm.</think>Yes."), think=True)
    assert (generated.thinking, generated.response) == ("Hm.", "Yes.")


def test_generate(client, scripted):
    whole = client.generate(MODEL, say(TEXT), system="Be brief.")
    *parts, last = client.generate(MODEL, say(TEXT), system="Be brief.", stream=True)
    assert whole.response == "".join(part.response for part in parts) == TEXT
    assert whole.context == last.context
    rendered = scripted.http().post("/detokenize", json={"tokens": whole.context}).json()["prompt"]
    assert rendered.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nSAY(")
    assert TEXT in rendered.partition("assistant\n")[2]
    more = client.generate(MODEL, say("more"), context=whole.context)
    assert more.response == "more"
    assert more.context[: len(whole.context)] == whole.context
    raw = client.generate(MODEL, f"no template {say('raw')}", raw=True)
    assert (raw.response, raw.context) == ("raw", None)
    assert "".join(part.response for part in client.generate(MODEL, say("raw"), raw=True, stream=True)) == "raw"


def test_nothing_to_answer(client):
    """A request without a prompt asks whether the model is there."""
    assert client.generate(MODEL).done_reason == "load"
    assert client.generate(MODEL, keep_alive=0).done_reason == "unload"
    answer = client.chat(MODEL, [], keep_alive="1h30m")
    assert (answer.done_reason, answer.message.content) == ("load", "")
    assert [part.done for part in client.chat(MODEL, stream=True)] == [True]


def test_models(client, scripted):
    (listed,) = client.list().models
    (running,) = client.ps().models
    shown = client.show(MODEL)
    assert listed.model == running.model == f"{MODEL}:latest"
    assert len(listed.digest) == 64
    assert listed.size > 0
    assert running.context_length == 4096
    assert {"completion", "tools", "thinking"} == set(shown.capabilities)
    assert "<tool_call>" in shown.template
    lines = [re.match(r'^(\S+)\s+((?:".*")|\S+)$', line).groups() for line in shown.parameters.splitlines()]
    assert dict(lines).items() >= {"num_ctx": "4096", "top_k": "7"}.items()  # as Continue reads them
    assert client.pull(MODEL).status == "success"
    assert [part.status for part in client.pull(f"{MODEL}:latest", stream=True)] == ["success"]
    http = scripted.http()
    assert http.get("/api/version").json()["version"].count(".") == 2
    assert http.head("/").status_code == http.head("/api/tags").status_code == 200


def test_the_bytes_of_a_stream(scripted):
    """Lines of JSON, also for a request that does not say that it is JSON, as curl sends it."""
    http = scripted.http()
    data = json.dumps({"model": MODEL, "prompt": say("Hi there"), "options": {"temperature": 0}})
    with http.stream("POST", "/api/generate", content=data) as stream:
        assert stream.headers["content-type"] == "application/x-ndjson"
        lines = [json.loads(line) for line in stream.iter_lines()]
    assert "".join(line["response"] for line in lines) == "Hi there"
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    form = {"content-type": "application/x-www-form-urlencoded"}
    assert http.post("/api/generate", content=data, headers=form).status_code == 200


def test_logprobs(client):
    answer = client.chat(MODEL, user("Hi there"), logprobs=True, top_logprobs=2)
    assert answer.logprobs[0].logprob == -0.5
    assert len(answer.logprobs[0].top_logprobs) == 2
    parts = list(client.generate(MODEL, say("Hi there"), logprobs=True, stream=True))
    assert sum(len(part.logprobs or ()) for part in parts) >= len(answer.logprobs) - 1


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("chat", {"model": "other"}, "'other' does not exist"),
        ("chat", {"model": ""}, "model is required"),
        ("chat", {}, "model"),
        ("chat", {"think": "very"}, "think must be true, false, 'low'"),
        ("chat", {"keep_alive": "5 parsecs"}, "keep_alive must be a number of seconds"),
        ("chat", {"format": "xml"}, 'format must be "json"'),
        ("chat", {"options": {"mirostat": 2}}, "mirostat is not supported"),
        ("chat", {"options": {"typical_p": 0.5}}, "typical_p is not supported"),
        ("chat", {"options": {"tfs_z": 0.5}}, "tfs_z is not supported"),
        ("chat", {"options": {"repeat_penalty": 1.1, "repeat_last_n": 64}}, "penalties look at the whole text"),
        ("chat", {"options": {"repeat_penalty": 1.1, "penalize_newline": False}}, "penalize_newline"),
        ("chat", {"options": {"temperature": -1}}, "options.temperature must be"),
        ("chat", {"options": {"num_predict": -3}}, "options.num_predict must be"),
        ("chat", {"options": {"num_ctx": 8}}, "maximum context length is 8 tokens"),
        ("chat", {"truncate": True}, "truncate is not supported"),
        ("chat", {"shift": True}, "shift is not supported"),
        ("chat", {"top_logprobs": 2}, "logprobs is true"),
        ("chat", {"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]}, "served for text only"),
        ("chat", {"tools": [{"type": "function"}]}, "function"),
        ("generate", {"prompt": "x", "template": "{{ .Prompt }}"}, "template is not supported"),
        ("generate", {"prompt": "x", "raw": True, "system": "y"}, "system cannot be combined with raw"),
        ("generate", {"prompt": "x", "context": [1], "images": ["aGk="]}, "context cannot be combined with images"),
        ("generate", {"prompt": "x", "context": [10**6]}, "token ids outside"),
        ("generate", {"prompt": "x", "suffix": "y"}, "none of the known markers"),
        ("embed", {"input": "x"}, "needs --task embed"),
        ("embeddings", {"prompt": "x"}, "needs --task embed"),
        ("show", {"model": "other"}, "'other' does not exist"),
        ("pull", {"model": "other"}, "downloads no others"),
        ("create", {"model": "x", "from": "y"}, "the operator of this server chooses its models"),
        ("push", {"model": "x"}, "the operator"),
        ("copy", {"source": "x", "destination": "y"}, "the operator"),
    ],
)
def test_refused(scripted, path, body, words):
    """In Ollama's shape."""
    given = {"model": MODEL, "messages": user("x"), **body} if path == "chat" and body else {"model": MODEL, **body}
    given = {} if not body else given
    answer = scripted.http().post(f"/api/{path}", json=given)
    assert 400 <= answer.status_code < 500
    assert words in answer.json()["error"]


def test_errors_through_the_client(client):
    with pytest.raises(ollama.ResponseError, match="'other' does not exist") as error:
        client.chat("other", user("x"))
    assert error.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match="maximum context"):
        list(client.generate(MODEL, "word " * 9000, stream=True))
    with pytest.raises(ollama.ResponseError, match="the operator"):
        client.delete(MODEL)
    assert client.chat(MODEL, user("x"), options={"num_ctx": 10**6, "num_gpu": 1, "repeat_last_n": 64}).done


def test_a_context_of_its_own(client):
    """num_ctx bounds prompt and answer together."""
    whole = client.chat(MODEL, user(TEXT))
    room = 6
    cut = client.chat(MODEL, user(TEXT), options={"num_ctx": whole.prompt_eval_count + room})
    raw = client.generate(MODEL, say(TEXT), raw=True)
    raw_cut = client.generate(MODEL, say(TEXT), raw=True, options={"num_ctx": raw.prompt_eval_count + room})
    for answer in (cut, raw_cut):
        assert (answer.eval_count, answer.done_reason) == (room, "length")


def test_durations():
    assert [keep_seconds(value) for value in (None, 5, -1, "0", "5m", "1h30m", "-1s", "2", "1.5s", "300ms")] == [
        None, 5, -1, 0, 300, 5400, -1, 2, 1.5, 0.3
    ]  # fmt: skip
    for wrong in ("", "m", "5x", "5m5", "--1s", "5m!"):
        with pytest.raises(InvalidRequestError, match="keep_alive"):
            keep_seconds(wrong)


@pytest.mark.slow
@needs_demo
class TestTheRealEngine:
    @pytest.fixture(scope="class")
    def demo(self, demo_server):
        return ollama.Client(demo_server.url)

    def test_same_answer_as_openai(self, demo, demo_server):
        messages = [{"role": "user", "content": "Write a function."}]
        options = {"temperature": 0, "num_predict": 12}
        ours = demo.chat(MODEL, messages, options=options)
        theirs = demo_server.openai().chat.completions.create(
            model=MODEL, messages=messages, temperature=0, max_tokens=12
        )
        assert ours.message.content == theirs.choices[0].message.content
        assert ours.eval_count == theirs.usage.completion_tokens
        seeded = [
            demo.generate(MODEL, "def f", raw=True, options={"seed": 5, "temperature": 1.0, "num_predict": 12}).response
            for _ in range(2)
        ]
        assert seeded[0] == seeded[1]

    def test_formats(self, demo):
        options = {"num_predict": 100}
        asked = [{"role": "user", "content": "Weather?"}]
        assert json.loads(demo.chat(MODEL, asked, format=CITY, options=options).message.content) in CITIES
        assert demo.chat(MODEL, asked, format="json", options=options).message.content.strip().startswith("{")
        with pytest.raises(ollama.ResponseError, match="Invalid type: nonsense"):
            demo.generate(MODEL, "Weather?", format={"type": "nonsense"})
        assert json.loads(demo.generate(MODEL, "Weather?", format=CITY, options=options).response) in CITIES
        assert json.loads(demo.generate(MODEL, "Weather?", raw=True, format=CITY, options=options).response) in CITIES

    def test_files_tell_about_the_model(self, demo):
        details = demo.show(MODEL).details
        assert (details.format, details.family, details.quantization_level) == ("safetensors", "llama", "BF16")
        assert details.parameter_size == "4.7M"
        assert demo.list().models[0].size > 9_000_000

    def test_no_thinking(self, demo):
        with pytest.raises(ollama.ResponseError, match="does not support thinking"):
            demo.chat(MODEL, [{"role": "user", "content": "Hi"}], think=True)


@pytest.mark.slow
@needs_demo
class TestLangChain:
    @pytest.fixture(scope="class")
    def chat(self):
        langchain = pytest.importorskip("langchain_ollama")

        def make(server, **options):
            return langchain.ChatOllama(
                model=MODEL, base_url=server.url, temperature=0, validate_model_on_init=True, **options
            )

        return make

    def test_text_whole_and_streamed(self, chat, scripted):
        model = chat(scripted)
        whole = model.invoke(say(TEXT))
        chunks = list(model.stream(say(TEXT)))
        total = sum(chunks[1:], chunks[0])
        assert whole.content == total.content == TEXT
        assert whole.usage_metadata["output_tokens"] == total.usage_metadata["output_tokens"] > 5
        assert whole.response_metadata["done_reason"] == "stop"
        assert asyncio.run(model.ainvoke(say("later"))).content == "later"

    def test_tools_and_reasoning(self, chat, scripted):
        from langchain_core.messages import HumanMessage, ToolMessage

        model = chat(scripted, reasoning=True).bind_tools([WEATHER])
        question = HumanMessage(say(f"<think>Hm.</think>{CALL}"))
        answer = model.invoke([question])
        assert [(call["name"], call["args"]) for call in answer.tool_calls] == [("get_weather", {"city": "Köln"})]
        assert answer.additional_kwargs["reasoning_content"] == "Hm."
        result = ToolMessage(say("Wet."), tool_call_id=answer.tool_calls[0]["id"])
        assert model.invoke([question, answer, result]).content == "Wet."

    def test_objects(self, chat, demo_server):
        model = chat(demo_server, num_predict=100).with_structured_output(CITY, method="json_schema")
        assert model.invoke("Weather?") in CITIES

    def test_unknown_model(self, demo_server):
        langchain = pytest.importorskip("langchain_ollama")
        with pytest.raises(ValueError, match="other"):
            langchain.ChatOllama(model="other", base_url=demo_server.url, validate_model_on_init=True)


@pytest.mark.slow
def test_pictures(tmp_path):
    from test_seeing import SETTINGS, file_of

    folder = ROOT / "checkpoints" / "demo-vision"
    with running_server(folder, tmp_path / "log", engine=None, config=SETTINGS) as server:
        client = ollama.Client(server.url)
        options = {"temperature": 0, "num_predict": 32}
        for shape in ("circle", "square"):
            picture = file_of(("red", shape))
            asked = {"role": "user", "content": "What is in the picture?", "images": [picture]}
            chatted = client.chat(MODEL, [asked], options=options).message.content
            generated = client.generate(MODEL, asked["content"], images=[picture], options=options)
            assert f"red {shape}" in chatted
            assert generated.response == chatted
            assert generated.context is None
        assert "vision" in client.show(MODEL).capabilities
        with pytest.raises(ollama.ResponseError, match="its data is not base64"):
            client.chat(MODEL, [{"role": "user", "content": "x", "images": ["aGk=aGk="]}])


@pytest.mark.slow
def test_embeddings(tmp_path):
    folder = pooling_models.build("embed_last", tmp_path)
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 256, "kv_pages": 60}
    with running_server(folder, tmp_path / "log", engine=None, config=sizes) as server:
        client = ollama.Client(server.url)
        ours = client.embed(MODEL, ["the sea", "the sky"])
        theirs = server.openai().embeddings.create(model=MODEL, input=["the sea", "the sky"])
        assert np.allclose(ours.embeddings, [one.embedding for one in theirs.data], atol=1e-6)
        assert ours.prompt_eval_count == theirs.usage.prompt_tokens
        assert client.embeddings(MODEL, "the sea").embedding == pytest.approx(list(ours.embeddings[0]), abs=1e-6)
        assert len(client.embed(MODEL, "the sea", dimensions=4).embeddings[0]) == 4
        assert len(client.embed(MODEL, "word " * 1000).embeddings) == 1
        with pytest.raises(ollama.ResponseError, match="maximum context length"):
            client.embed(MODEL, "word " * 1000, truncate=False)
        assert client.embed(MODEL, []).embeddings == []
        assert client.show(MODEL).capabilities == ["embedding"]
        with pytest.raises(ollama.ResponseError, match="it does not generate"):
            client.generate(MODEL, "x")
