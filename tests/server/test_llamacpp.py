"""llama.cpp's own endpoints: their bodies as its tools send them, and their answers."""

from __future__ import annotations

import json

import msgspec
import pytest
import tokenizers_for_tests as kinds
from serving import running_server, wait_until
from test_clients import CITIES, CITY, needs_demo, say

from jaxserve.server.endpoints.llamacpp import _Choice
from jaxserve.server.schemas.llamacpp import LlamaCompletionRequest
from jaxserve.text.detokenizer import ChoiceDelta
from jaxserve.types import InvalidRequestError

MODEL = "test-model"


@pytest.fixture(scope="module")
def llama(scripted):
    return scripted.http()


def events(http, path: str, body: dict) -> list[dict]:
    with http.stream("POST", path, json=body | {"stream": True}) as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        return [json.loads(line.removeprefix("data: ")) for line in stream.iter_lines() if line]


def test_completion_whole_and_streamed(llama):
    body = {"prompt": say("one two three"), "seed": -1, "id_slot": -1, "cache_prompt": True, "n_keep": 0}
    whole = llama.post("/completion", json=body).json()
    *parts, last = events(llama, "/completion", body)
    assert whole["content"] == "".join(part["content"] for part in [*parts, last]) == "one two three"
    assert len(parts) > 5
    assert not any(part["stop"] for part in parts)
    for end in (whole, last):
        assert (end["stop"], end["stop_type"], end["stopping_word"]) == (True, "eos", "")
        assert (end["model"], end["truncated"], end["has_new_line"]) == (MODEL, False, False)
        assert end["prompt"] == body["prompt"]
        assert end["tokens_predicted"] > 5
        assert end["tokens_evaluated"] == end["timings"]["prompt_n"] + end["timings"]["cache_n"]
        assert end["timings"]["predicted_n"] == end["tokens_predicted"]
        assert end["generation_settings"]["top_k"] == 7  # the model's own
    assert whole["tokens"] == []
    assert sum(len(part["tokens"]) for part in [*parts, last]) == last["tokens_predicted"]
    tokens = llama.post("/completion", json=body | {"return_tokens": True}).json()["tokens"]
    assert llama.post("/detokenize", json={"tokens": tokens}).json()["content"].startswith("one two three")
    timed = events(llama, "/completion", body | {"timings_per_token": True})
    assert all("timings" in part for part in timed)


def test_ends(llama):
    def ask(text: str, **body) -> dict:
        return llama.post("/completion", json={"prompt": say(text), **body}).json()

    stopped = ask("one two three", stop=["two"])
    assert (stopped["content"], stopped["stop_type"], stopped["stopping_word"]) == ("one ", "word", "two")
    limited = ask("one two three", n_predict=2)
    assert (limited["stop_type"], limited["tokens_predicted"]) == ("limit", 2)
    nothing = ask("one", n_predict=0)
    assert (nothing["content"], nothing["tokens_predicted"]) == ("", 0)
    indented = ask("x = 1\n    y = 2\n\n    z = 3\nw = 4", n_indent=4)
    assert (indented["content"], indented["stop_type"]) == ("x = 1\n    y = 2\n\n    z = 3", "limit")
    slow = f"SAYSLOWLY({'a' * 5}\n{'b' * 500})SAY"
    timed = llama.post("/completion", json={"prompt": slow, "t_max_predict_ms": 1}).json()
    assert timed["stop_type"] == "limit"
    assert timed["tokens_predicted"] < 100
    assert "\n" in timed["content"]


@pytest.mark.parametrize("size", [1, 3, 50])
def test_indentation_in_pieces(size):
    text = "a\n\n  b\n    c\n   d\ne\n  f"
    choice = _Choice(LlamaCompletionRequest(prompt="", n_indent=2))
    shown = ""
    for at in range(0, len(text), size):
        delta = ChoiceDelta(index=0, text=text[at : at + size])
        choice.take(delta)
        shown += delta.text
        if choice.end:
            break
    assert shown == "a\n\n  b\n    c\n   d"
    last = ChoiceDelta(index=0, text="x\n  ", finish_reason="stop")
    choice = _Choice(LlamaCompletionRequest(prompt="", n_indent=2))
    choice.take(last)
    assert (last.text, last.finish_reason) == ("x\n  ", "stop")


def test_prompts(llama):
    """Text, token ids, both in one prompt, and several prompts."""
    ids = llama.post("/tokenize", json={"content": say("mixed")}).json()["tokens"]
    text = llama.post("/detokenize", json={"tokens": ids[:3]}).json()["content"]
    mixed = [text, *ids[3:]]
    assert llama.post("/completion", json={"prompt": mixed}).json()["content"] == "mixed"
    several = llama.post("/completion", json={"prompt": [say("a"), ids, mixed], "n_cmpl": 2}).json()
    assert [answer["content"] for answer in several] == ["a", "a", *["mixed"] * 4]
    assert [answer["index"] for answer in several] == [*range(6)]
    parts = events(llama, "/completion", {"prompt": [say("a"), say("b")]})
    assert ["".join(part["content"] for part in parts if part["index"] == i) for i in (0, 1)] == ["a", "b"]


def test_probabilities_and_fields(llama):
    body = {"prompt": say("Hi"), "n_probs": 2}
    entries = llama.post("/completion", json=body).json()["completion_probabilities"]
    assert entries[0]["logprob"] == -0.5
    assert [len(entry["top_logprobs"]) for entry in entries] == [2] * len(entries)
    assert bytes(entries[0]["bytes"]).decode() == entries[0]["token"]
    chosen = llama.post("/completion", json=body | {"response_fields": ["content", "timings/predicted_n", "none"]})
    assert chosen.json() == {"content": "Hi", "predicted_n": len(entries)}


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"samplers": ["top_p", "top_k"], "top_p": 0.5}, "samplers has an order"),
        ({"samplers": ["top_p", "temperature", "min_p"], "temperature": 0.7, "top_p": 0.5}, "samplers has an order"),
        ({"samplers": ["mirostat"]}, "samplers names 'mirostat'"),
        ({"samplers": "kz"}, "samplers names 'z'"),
        ({"samplers": ["infill"]}, "samplers names 'infill'"),
        ({"mirostat": 1}, "mirostat is not supported"),
        ({"dry_multiplier": 0.8}, "dry_multiplier is not supported"),
        ({"xtc_probability": 0.1}, "xtc_probability is not supported"),
        ({"post_sampling_probs": True}, "post_sampling_probs is not supported"),
        ({"lora": [{"id": 0, "scale": 0.5}]}, "name the adapter as model"),
        ({"return_progress": True}, "return_progress is not supported"),
        ({"repeat_penalty": 1.1, "repeat_last_n": 64}, "penalties look at the whole text"),
        ({"n_probs": 21}, "n_probs"),
        ({"n_predict": -3}, "n_predict"),
        ({"logit_bias": [[5, True]]}, "logit_bias must hold numbers"),
        ({"logit_bias": [[-5, 1.0]]}, "negative"),
        ({"logit_bias": [[10**6, 1.0]]}, "logit_bias holds id 1000000"),
        ({"prompt": []}, "prompt must not be an empty list"),
        ({"prompt": [{"prompt_string": "x", "multimodal_data": ["aGk="]}]}, "prompt must be text"),
        ({"prompt": [1, [2]]}, "prompt must be text"),
        ({"prompt": [10**6]}, "token ids outside"),
        ({"grammar": 'root ::= "a"', "json_schema": {}}, "both ask for a form"),
        ({"model": "other"}, "'other' does not exist"),
    ],
)
def test_refused(llama, body, words):
    answer = llama.post("/completion", json={"prompt": say("x"), **body})
    assert 400 <= answer.status_code < 500
    assert words in answer.json()["error"]["message"]


def settings(**body) -> dict:
    """What a body asks of a completion, beside the defaults."""
    given = msgspec.convert({"prompt": "x", **body}, LlamaCompletionRequest)
    made = given.completion([[1]], [9], lambda text: [ord(char) for char in text], {"temperature": 0.5})
    return {name: getattr(made, name) for name in made.__struct_fields__ if getattr(made, name) is not None}


def test_samplers():
    names = {"top_k": 5, "top_p": 0.5, "temperature": 0.7}
    assert settings(**names, samplers=["temperature"]).items() >= {"top_k": 0, "top_p": 1.0, "min_p": 0.0}.items()
    assert settings(**names, samplers="ektp")["top_p"] == 0.5
    default = ["penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"]
    assert settings(top_k=5, temperature=0.7, samplers=default)["top_k"] == 5  # without top_p, the order is the same
    assert settings(**names | {"temperature": 0}, samplers=default)["top_p"] == 0.5
    assert settings(**names, samplers=default)["top_p"] == 0.5  # the order that llama.cpp has without samplers
    with pytest.raises(InvalidRequestError, match="order"):
        settings(**names, samplers=["top_p", "temperature", "top_k"])
    with pytest.raises(InvalidRequestError, match="order"):
        settings(top_p=0.5, samplers=["min_p", "temperature", "top_p"])  # the model recommends a temperature
    assert settings()["stop_token_ids"] == [9]
    assert settings(ignore_eos=True)["stop_token_ids"] == []
    assert settings(logit_bias=[[5, 1.5], ["AB", False]])["logit_bias"] == {"5": 1.5, "65": -100.0, "66": -100.0}
    assert settings(logit_bias={"5": 1, "A": -1})["logit_bias"] == {"5": 1.0, "65": -1.0}
    assert settings(cache_prompt=False)["cache_salt"] != settings(cache_prompt=False)["cache_salt"]
    assert settings(repeat_penalty=1.2, n_predict=-1).items() >= {"repetition_penalty": 1.2, "max_tokens": -1}.items()


def test_chats_of_llama_cpps_page_and_editor(scripted):
    """They send all samplers' parameters, and llama.cpp's own order of the samplers."""
    off = {
        "dynatemp_range": 0, "dynatemp_exponent": 1, "top_k": 40, "top_p": 0.95, "min_p": 0.05, "typical_p": 1,
        "xtc_probability": 0, "xtc_threshold": 0.1, "repeat_last_n": 64, "repeat_penalty": 1, "presence_penalty": 0,
        "frequency_penalty": 0, "dry_multiplier": 0, "dry_base": 1.75, "dry_allowed_length": 2, "max_tokens": -1,
        "dry_penalty_last_n": -1, "timings_per_token": False, "cache_prompt": True, "temperature": 0.8,
    }  # fmt: skip
    page = {"stream": False, "return_progress": True, "reasoning_format": "auto", "backend_sampling": False}
    for more in (page, {"samplers": "edkypmxt"}, {"samplers": ["top_k", "typ_p", "top_p", "min_p", "temperature"]}):
        body = {"messages": [{"role": "user", "content": say("Hi")}], **off, **more}
        answer = scripted.http().post("/v1/chat/completions", json=body)
        assert answer.json()["choices"][0]["message"]["content"] == "Hi", answer.text


def test_both_forms_of_completions(llama):
    prompt = say("Hi")
    assert llama.post("/completions", json={"prompt": prompt}).json()["content"] == "Hi"
    openai = llama.post("/completions", json={"prompt": prompt, "max_tokens": 9, "model": MODEL}).json()
    assert openai["choices"][0]["text"] == "Hi"
    both = llama.post("/completions", json={"prompt": prompt, "max_tokens": 9, "n_predict": 9})
    assert both.status_code == 400
    assert "use one of these paths" in both.json()["error"]["message"]


def test_tokens(llama):
    text = "Grüße <|im_end|> 😀"
    ids = llama.post("/tokenize", json={"content": text}).json()["tokens"]
    assert ids == llama.post("/tokenize", json={"prompt": text}).json()["tokens"]
    assert 2 in ids
    plain = llama.post("/tokenize", json={"content": text, "parse_special": False}).json()["tokens"]
    assert 2 not in plain
    assert llama.post("/detokenize", json={"tokens": plain}).json() == {"prompt": text, "content": text}
    pieces = llama.post("/tokenize", json={"content": text, "with_pieces": True}).json()["tokens"]
    assert [piece["id"] for piece in pieces] == ids
    data = (one if isinstance(one, list) else list(one.encode()) for one in (piece["piece"] for piece in pieces))
    assert bytes(byte for some in data for byte in some).decode() == text
    for body in ({"content": "x", "prompt": "x"}, {}):
        assert llama.post("/tokenize", json=body).status_code == 400
    assert llama.post("/tokenize", json={"content": ""}).json() == {"tokens": []}


def test_facts(llama, scripted):
    props = llama.get("/props").json()
    assert props["default_generation_settings"]["n_ctx"] == 4096
    params = props["default_generation_settings"]["params"]
    assert (params["top_k"], params["n_predict"], params["seed"], params["mirostat"]) == (7, -1, 2**32 - 1, 0)
    answer = llama.post("/completion", json={"prompt": {"prompt_string": say("Hi")}, "temperature": 0.7}).json()
    assert answer["content"] == "Hi"
    assert answer["generation_settings"].keys() == params.keys() | {"stream"}
    assert answer["generation_settings"]["temperature"] == 0.7
    assert llama.get("/v1/health").json() == {"status": "ok"}
    assert props["modalities"] == {"vision": False, "audio": False}
    assert "<tool_call>" in props["chat_template"]
    assert props["eos_token"] == "<|endoftext|>"
    wait_until(lambda: not any(slot["is_processing"] for slot in llama.get("/slots").json()))
    assert len(llama.get("/slots").json()) == props["total_slots"]
    assert llama.get("/slots?fail_on_no_slot=1").status_code == 200
    assert llama.post("/slots/0?action=erase").status_code == 400
    rendered = llama.post("/apply-template", json={"messages": [{"role": "user", "content": "Hi"}]}).json()
    assert rendered == {"prompt": "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"}
    refused = llama.post("/apply-template", json={"messages": [{"role": "clown", "content": "Hi"}]})
    assert (refused.status_code, "no clowns" in refused.text) == (400, True)


def test_metrics(llama):
    llama.post("/completion", json={"prompt": say("counted")})
    lines = llama.get("/metrics").text.splitlines()
    values = {}
    for line in lines:
        name, _, rest = line.partition("{")
        if name.startswith(("llamacpp:", "jaxserve:")) and rest:
            values.setdefault(name, float(rest.rsplit(" ", 1)[1]))
    assert values["llamacpp:tokens_predicted_total"] == values["jaxserve:generation_tokens_total"] > 0
    assert values["llamacpp:requests_processing"] == values["jaxserve:num_requests_running"]
    assert values["llamacpp:prompt_seconds_total"] == values["jaxserve:request_prefill_time_seconds_sum"]
    assert sum(line.startswith("# TYPE llamacpp:") for line in lines) == 8


FIM = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>", "<|file_sep|>"]


@pytest.fixture(scope="module")
def infilling(tmp_path_factory):
    """A server that repeats prompts, of a model with Qwen's markers."""
    folder = tmp_path_factory.mktemp("coder")
    kinds.save_byte_level(folder)
    kinds.add_special_tokens(folder, FIM)
    with running_server(folder, folder / "server.log", engine="ParrotEngine") as server:
        yield server


def test_infill(infilling, llama):
    """As llama.vim asks for it."""
    http = infilling.http()
    body = {
        "input_prefix": "def a():\n", "input_suffix": "\n    return x\n", "prompt": "    x = ", "input_extra": [],
        "n_predict": 8, "n_indent": 4, "top_k": 40, "top_p": 0.9, "samplers": ["top_k", "top_p", "infill"],
        "cache_prompt": True, "t_max_prompt_ms": 500, "t_max_predict_ms": 1000, "id_slot": 0, "stream": False,
        "response_fields": ["content", "prompt", "timings/prompt_n", "tokens_cached", "truncated"],
    }  # fmt: skip
    answer = http.post("/infill", json=body).json()
    assert answer["prompt"] == "<|fim_prefix|>def a():\n    x = <|fim_suffix|>\n    return x\n<|fim_middle|>"
    assert answer.keys() == {"content", "prompt", "prompt_n", "tokens_cached", "truncated"}
    files = [{"filename": "b.py", "text": "y = 1"}, {"text": "z = 2"}]
    extra = http.post("/infill", json=body | {"input_extra": files}).json()["prompt"]
    assert extra == f"<|file_sep|>b.py\ny = 1\n<|file_sep|>file\nz = 2\n<|file_sep|>{answer['prompt']}"
    parts = events(http, "/infill", body | {"input_prefix": "abc<|file_sep|>def", "samplers": ["top_k"]})
    assert (parts[-1]["stop"], parts[-1]["stop_type"]) == (True, "eos")
    assert http.post("/infill", json={"input_prefix": "x"}).json()["error"]["param"] == "input_suffix"
    refused = llama.post("/infill", json={"input_prefix": "x", "input_suffix": "y"}).json()["error"]
    assert "none of the known markers" in refused["message"]
    assert refused["param"] == "input_suffix"


@pytest.mark.slow
@needs_demo
def test_the_real_engine(demo_server):
    http = demo_server.http()
    body = {"prompt": "def main():", "temperature": 0, "n_predict": 10}
    whole = http.post("/completion", json=body).json()
    openai = demo_server.openai().completions.create(model=MODEL, prompt=body["prompt"], temperature=0, max_tokens=10)
    assert whole["content"] == openai.choices[0].text
    assert whole["timings"]["predicted_ms"] > 0
    first = http.post("/completion", json=body | {"n_predict": 1, "return_tokens": True}).json()["tokens"]
    banned = http.post("/completion", json=body | {"logit_bias": [[first[0], False]], "return_tokens": True}).json()
    assert banned["tokens"][0] != first[0]
    form = http.post("/completion", json={"prompt": "Weather?", "json_schema": CITY, "n_predict": 100}).json()
    assert json.loads(form["content"]) in CITIES
    gbnf = http.post("/completion", json={"prompt": "x", "grammar": 'root ::= "yes" | "no"', "n_predict": 9}).json()
    assert gbnf["content"] in ("yes", "no")
    long = {"prompt": [*range(20, 120)], "n_predict": 1}
    http.post("/completion", json=long)
    assert http.post("/completion", json=long).json()["tokens_cached"] > 0
    assert http.post("/completion", json=long | {"cache_prompt": False}).json()["tokens_cached"] == 0
