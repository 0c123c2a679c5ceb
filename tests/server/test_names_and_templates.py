"""Names under which a model is served, chat templates, and the small endpoints that clients of vLLM know."""

from __future__ import annotations

import gzip
import json

import httpx
import pytest
import tokenizers_for_tests as kinds
from hypothesis import given, settings
from hypothesis import strategies as st
from serving import wait_until

from jaxserve.commands.cli import make_parser
from jaxserve.config import EngineConfig
from jaxserve.server.ipc.messages import Ready
from jaxserve.server.process.fingerprint import fingerprint
from jaxserve.server.process.flags import server_options
from jaxserve.server.schemas.chat import Conversation, Message
from jaxserve.text.chat_template import TEMPLATE_INPUTS, read_chat_template
from jaxserve.text.generation_defaults import GenerationDefaults
from jaxserve.types import InvalidRequestError

USER = [{"role": "user", "content": "Hi"}]
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{{ x | default('none') | tojson }}"


@pytest.fixture(scope="module")
def named(tiny_model_folder, tmp_path_factory):
    """A server with two names, a chat template from a file, and trust in those of requests."""
    from serving import running_server

    folder = tmp_path_factory.mktemp("named")
    (folder / "template.jinja").write_text(TEMPLATE)
    options = {
        "served_model_name": ["first", "second"],
        "chat_template": str(folder / "template.jinja"),
        "trust_request_chat_template": True,
        "config": {"max_model_len": 4096},
    }
    with running_server(tiny_model_folder, folder / "server.log", engine="ParrotEngine", **options) as server:
        yield server


def prompt_of(http, **body) -> str:
    """What a conversation is rendered to."""
    answer = http.post("/tokenize", json={"messages": USER, **body})
    assert answer.status_code == 200, answer.text
    return http.post("/detokenize", json={"tokens": answer.json()["tokens"]}).json()["prompt"]


@pytest.mark.slow
def test_several_names(named):
    """All are listed, the first is the default and the metrics' label, and answers carry the name asked for."""
    http = named.http()
    client = named.openai()
    for path in ("/v1/models", "/v1/models/"):
        assert [card["id"] for card in http.get(path).json()["data"]] == ["first", "second"]
    assert client.models.retrieve("second").id == "second"
    assert http.get("/v1/models/third").status_code == 404
    bodies = {
        "/v1/completions": {"prompt": "Hi", "max_tokens": 1},
        "/v1/chat/completions": {"messages": USER, "max_tokens": 1},
        "/v1/responses": {"input": "Hi", "max_output_tokens": 1},
        "/v1/messages": {"messages": USER, "max_tokens": 1},
        "/invocations": {"messages": USER, "max_tokens": 1},
    }
    for path, body in bodies.items():
        for asked, answered in ((None, "first"), ("first", "first"), ("second", "second")):
            answer = http.post(path, json=body if asked is None else body | {"model": asked})
            assert answer.status_code == 200, answer.text
            assert answer.json()["model"] == answered
        refused = http.post(path, json=body | {"model": "third"})
        assert refused.status_code == 404
        assert "'first', 'second'" in refused.json()["error"]["message"]
    for path, body in (("/tokenize", {"prompt": "Hi"}), ("/v1/messages/count_tokens", {"messages": USER})):
        for model in ({}, {"model": "second"}):
            assert http.post(path, json=body | model).status_code == 200
    chunks = list(client.chat.completions.create(model="second", messages=USER, max_tokens=2, stream=True))
    assert {chunk.model for chunk in chunks} == {"second"}
    wait_until(lambda: named.metric("num_requests_running", "first") == 0)


@pytest.mark.slow
def test_template_from_a_file(named):
    assert prompt_of(named.http()) == '<user>Hi"none"'
    assert named.http().get("/tokenizer_info").json()["chat_template"] == TEMPLATE


@pytest.mark.parametrize("value", [None, True, 3, 1e9, "a" * 5000, [1, [2, {"a": None}]], {"b": [True]}])
def test_template_variables_take_any_json(named, value):
    expected = json.dumps(value, ensure_ascii=False)
    assert (
        prompt_of(named.http(), chat_template_kwargs={"x": value, "y z": 1, "documents": []}) == f"<user>Hi{expected}"
    )


def test_template_of_a_request(named, http):
    """Only where the operator trusts those."""
    assert prompt_of(named.http(), chat_template="{{ messages[0].content }}!") == "Hi!"
    body = {"messages": USER, "max_tokens": 1, "chat_template": "{{ 1"}
    refused = named.http().post("/v1/chat/completions", json=body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "messages")
    for path in ("/tokenize", "/v1/chat/completions"):
        refused = http.post(path, json={"messages": USER, "chat_template": "x"})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "chat_template")
        assert "--trust-request-chat-template" in refused.json()["error"]["message"]


@settings(max_examples=50, deadline=None)
@given(name=st.one_of(st.sampled_from(sorted(TEMPLATE_INPUTS)), st.text(max_size=8)))
def test_names_of_template_variables(name):
    """Whatever it is called, a variable either reaches the template or is refused by name."""
    tokenizer = kinds.byte_level(chat_template="{{ messages | length }}")
    chat = Conversation(messages=[Message("user", "Hi")], chat_template_kwargs={name: [{}]})
    if name in TEMPLATE_INPUTS:
        with pytest.raises(InvalidRequestError, match=f"must not hold {name}"):
            chat.template_kwargs()
    else:
        assert tokenizer.render_chat(chat.template_messages(), **chat.template_kwargs()) == "1"


def test_the_renderer_has_no_options_that_requests_could_set():
    assert kinds.byte_level()._renderer_options - TEMPLATE_INPUTS <= {"kwargs"}


def test_template_files(tmp_path):
    assert read_chat_template("{{ messages }}") == "{{ messages }}"
    with pytest.raises(ValueError, match=r"nowhere\.jinja' cannot be read"):
        read_chat_template(str(tmp_path / "nowhere.jinja"))
    (tmp_path / "bad.txt").write_text("{% for %}")
    with pytest.raises(ValueError, match=r"bad\.txt' is not valid"):
        read_chat_template(str(tmp_path / "bad.txt"))


def test_a_template_that_is_missing_ends_the_start(capsys):
    from jaxserve.commands.cli import main

    assert main(["serve", "demo", "--chat-template", "/nowhere/template.jinja"]) == 1
    assert "/nowhere/template.jinja' cannot be read" in capsys.readouterr().err


@pytest.mark.slow
def test_variables_that_requests_do_not_set(start_server):
    """They have the operator's values."""
    template = "{{ x }}{{ enable_thinking }}"
    server = start_server(chat_template=template, default_chat_template_kwargs={"x": 1, "enable_thinking": True})
    http = server.http()
    assert prompt_of(http) == "1True"
    assert prompt_of(http, chat_template_kwargs={"x": 2}) == "2True"
    for body in ({"reasoning_effort": "none"}, {"chat_template_kwargs": {"enable_thinking": False}}):
        answer = http.post("/v1/chat/completions", json={"messages": USER, "max_tokens": 2} | body)
        assert answer.json()["choices"][0]["message"]["content"] == "1False", answer.text


def test_variables_that_no_template_can_have(capsys):
    from jaxserve.commands.cli import main

    assert main(["serve", "demo", "--default-chat-template-kwargs", '{"messages": []}']) == 1
    assert "default_chat_template_kwargs must not hold messages" in capsys.readouterr().err


def test_tokens_as_ids(http):
    body = {"max_tokens": 2, "temperature": 0, "return_tokens_as_token_ids": True}
    whole = http.post("/v1/completions", json=body | {"prompt": [50, 51], "logprobs": 2, "echo": True}).json()
    logprobs = whole["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["token_id:50", "token_id:51", "token_id:50", "token_id:51"]
    assert {"token_id:10", "token_id:50"} == set(logprobs["top_logprobs"][2])
    chat = http.post("/v1/chat/completions", json=body | {"messages": USER, "logprobs": True, "top_logprobs": 1}).json()
    entry = chat["choices"][0]["logprobs"]["content"][0]
    assert entry["token"].startswith("token_id:")
    assert entry["top_logprobs"][0]["token"] == "token_id:10"
    assert bytes(entry["bytes"])


def test_ping_invocations_and_server_info(http):
    for answer in (http.get("/ping"), http.post("/ping")):
        assert answer.status_code == 200
    text = http.post("/invocations", json={"prompt": "Hi", "max_tokens": 1}).json()
    assert text["object"] == "text_completion"
    with http.stream("POST", "/invocations", json={"messages": USER, "max_tokens": 1, "stream": True}) as stream:
        assert stream.read().endswith(b"data: [DONE]\n\n")
    for body in ({}, {"prompt": "Hi", "messages": USER}):
        assert http.post("/invocations", json=body).status_code == 400
    assert http.get("/v1").json()["models"] == ["test-model"]
    assert http.get("/models").json() == http.get("/v1/models").json()
    info = http.get("/server_info").json()
    assert (info["models"], info["max_model_len"]) == (["test-model"], 256)
    assert info["system_fingerprint"].startswith("fp_")


def test_compressed_bodies(http):
    """gzip is read within the limits of bodies; other encodings are refused in words."""
    body = json.dumps({"prompt": "Hi", "max_tokens": 1}).encode()
    others = {"/v1/responses": {"input": "Hi"}, "/v1/messages": {"messages": USER, "max_tokens": 1}}
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    members = gzip.compress(body[:9]) + gzip.compress(body[9:])
    for path in ("/v1/completions", "/completions", "/invocations", *others):
        given = json.dumps(others[path]).encode() if path in others else body
        assert http.post(path, content=gzip.compress(given), headers=headers).status_code == 200
        if given is body:
            assert http.post(path, content=members, headers=headers).status_code == 200
        refused = http.post(path, content=body, headers=headers | {"content-encoding": "zstd"})
        assert refused.status_code == 415
        assert "'zstd'" in refused.json()["error"]["message"]

    def error(content: bytes, path: str = "/v1/completions") -> tuple[int, str]:
        answer = http.post(path, content=content, headers=headers)
        return answer.status_code, answer.json()["error"]["message"]

    assert error(body) == (400, "the body is declared as gzip, but its data are damaged or none of gzip")
    assert error(gzip.compress(body)[:-9]) == (400, "the body is declared as gzip, and its data end too early")
    damaged = bytearray(gzip.compress(body * 9))
    damaged[30] ^= 255
    assert error(bytes(damaged))[0] == 400
    bomb = gzip.compress(b'{"prompt": "' + bytes(2**26))
    assert len(bomb) < 2**17
    assert error(bomb) == (413, "the body is longer than 33554432 bytes")
    long = b'{"max_tokens": 1, "prompt": "Hi", "user": "%b"}' % (b"x" * (2**25 - 50))
    assert http.post("/v1/completions", content=gzip.compress(long, 1), headers=headers).status_code == 200
    plain = {"content-type": "application/json", "content-encoding": "identity"}
    assert http.post("/v1/completions", content=b'{"prompt":"Hi"}', headers=plain).status_code == 200


def test_fingerprint_names_weights_and_settings(http, parrot, tmp_path):
    client = parrot.openai()
    answer = client.chat.completions.create(model="test-model", messages=USER, max_tokens=1)
    chunks = list(client.completions.create(model="test-model", prompt="Hi", max_tokens=1, stream=True))
    assert {answer.system_fingerprint, *(chunk.system_fingerprint for chunk in chunks)} == {
        http.get("/server_info").json()["system_fingerprint"]
    }
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(bytes(4 * 2**20))
    info = Ready(
        model_folder=str(tmp_path), tokenizer_folder="", dtype="float32", max_model_len=9, vocab_size=9,
        eos_token_ids=(), page_size=16,
        max_num_seqs=1,
    )  # fmt: skip
    config = EngineConfig(model=str(tmp_path))
    first = fingerprint(info, config, "1", None)
    assert fingerprint(info, config, "1", None) == first
    assert fingerprint(info, EngineConfig(model="other name"), "1", None) == first
    others = {
        fingerprint(info, config, "2", None),
        fingerprint(info, config, "1", "template"),
        fingerprint(info, config, "1", None, {"enable_thinking": False}),
        fingerprint(info, EngineConfig(model=str(tmp_path), kv_cache_dtype="int8"), "1", None),
    }
    weights.write_bytes(bytes(2**20) + b"\1" * 2**20 + bytes(2 * 2**20))
    others.add(fingerprint(info, config, "1", None))
    assert len(others | {first}) == 6


def test_fields_that_clients_send(http):
    """What clients set without a need: accepted, because it asks for nothing that is not done."""
    chat = {"messages": USER, "max_tokens": 2}
    for fields in (
        {"stop": [f"stop {i}" for i in range(64)]},
        {"top_p": 0},
        {"logprobs": False, "top_logprobs": 0},
        {"top_logprobs": 0},
        {"temperature": 10},
        {"max_tokens": 2.0, "n": 1.0},
        {"prediction": {"type": "content", "content": "x"}, "service_tier": "auto", "verbosity": "low"},
        {"tools": [{"type": "function", "function": {"name": f"f{i}"}} for i in range(512)], "tool_choice": "none"},
    ):
        answer = http.post("/v1/chat/completions", json=chat | fields)
        assert answer.status_code == 200, (fields, answer.text)


def test_a_top_p_of_zero_takes_the_most_likely(demo_server):
    http = demo_server.http()
    body = {"prompt": "import os\n", "max_tokens": 8}
    texts = {
        http.post("/v1/completions", json=body | options).json()["choices"][0]["text"]
        for options in ({"temperature": 0}, {"temperature": 10, "top_p": 0}, {"temperature": 5, "top_p": 0, "seed": 4})
    }
    assert len(texts) == 1


def test_json_object_with_a_schema(demo_server):
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    body = {"messages": USER, "max_tokens": 30, "response_format": {"type": "json_object", "schema": schema}}
    content = demo_server.http().post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
    assert json.loads(content) in ({"a": 1}, {"a": 2})


def test_no_sampling_is_greedy(tmp_path):
    for recommended, temperature in (
        ({"do_sample": False}, 0.0),
        ({"do_sample": False, "temperature": 0.6}, 0.0),
        ({"do_sample": True, "temperature": 0.6}, 0.6),
        ({"temperature": 0.6}, 0.6),
    ):
        (tmp_path / "generation_config.json").write_text(json.dumps(recommended))
        assert GenerationDefaults.load(tmp_path).temperature == temperature


@pytest.mark.slow
def test_a_proxy_that_serves_the_server_below_a_path(start_server):
    """Whether the proxy takes its path off requests or not, checks and answers are those of the same paths without."""
    server = start_server("CachingEngine", root_path="/v1/llm", api_keys=["a", "b"], admin_key="admin")
    http = server.http(headers={"Authorization": "Bearer a"})
    plain = httpx.Client(base_url=server.url)
    for path in ("/v1/models", "/v1/llm/v1/models"):
        assert http.get(path).json()["data"][0]["id"] == "test-model"
        assert plain.get(path).status_code == 401
    for path in ("/health", "/v1/llm/health", "/v1/llm/", "/v1/llm", "/v1/llm/ui/app.css"):
        assert plain.get(path).status_code == 200
    assert [http.get(path).status_code for path in ("/metrics", "/v1/llm/metrics", "/v1/llmmetrics")] == [403, 403, 404]
    page = plain.get("/v1/llm")
    assert '<base href="/v1/llm/">' in page.text
    assert "base-uri 'self'" in page.headers["content-security-policy"]
    refused = http.post("/v1/llm/v1/messages", json={})
    assert refused.json()["type"] == "error", "not in Anthropic's shape"
    moved = http.get("/health/", follow_redirects=False)
    assert moved.headers["location"] == f"{server.url}/v1/llm/health"
    document = http.get("/v1/llm/openapi.json").json()
    assert document["servers"] == [{"url": "/v1/llm"}]
    assert "/v1/models" in document["paths"]
    admin = {"Authorization": "Bearer admin"}
    answers = [plain.post("/v1/llm/reset_prefix_cache", headers=admin, json={}).status_code for _ in range(3)]
    assert answers[0] == 200
    assert 429 in answers


def test_root_path_is_a_path(capsys):
    parser = make_parser()
    for text, path in (("/llm/", "/llm"), ("/a/b-1", "/a/b-1"), ("/", ""), ("", "")):
        assert server_options(parser.parse_args(["serve", "demo", "--root-path", text]))["root_path"] == path
    for text in ("llm", "/a b", "//host", "http://host/llm", '/"'):
        with pytest.raises(SystemExit):
            parser.parse_args(["serve", "demo", "--root-path", text])
        assert "not a path of letters" in capsys.readouterr().err
