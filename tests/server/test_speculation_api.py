"""Speculative decoding of a real server: its flag, its answers and its metrics."""

import json
import re
import time

import numpy as np
import pytest
from browser import CHROMIUM, open_page
from serving import running_server

from jaxserve.commands.cli import main

SIZES = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 128,
    "max_model_len": 512,
    "kv_pages": 100,
    "forbid_compile": True,
}
BODY = {"prompt": "x = 1\nx = 1\nx = 1\n" * 8, "max_tokens": 200, "temperature": 0, "ignore_eos": True}


NGRAM = {"method": "ngram", "num_speculative_tokens": 31, "prompt_lookup_min": 1}
QUESTION = "Repeat:\n" + "x = 1\n" * 29 + "x = 1"


@pytest.fixture(scope="module")
def checking(tmp_path_factory):
    """A server that always checks proposals, whatever pays on this machine."""
    options = {"engine": None, "engine_class": "checking_engine:CheckingEngine"}
    settings = SIZES | {"speculative_config": NGRAM}
    with running_server("demo", tmp_path_factory.mktemp("log") / "log", config=settings, **options) as server:
        yield server


def answers(server):
    http = server.http()
    bodies = [BODY, BODY | {"temperature": 0.8, "seed": 5}, BODY | {"logprobs": 2, "frequency_penalty": 0.5}]
    return [http.post("/v1/completions", json=body).json()["choices"] for body in bodies]


@pytest.mark.slow
def test_the_same_answers_and_counters(tmp_path):
    with running_server("demo", tmp_path / "log", engine=None, config=SIZES) as server:
        expected = answers(server)
        assert server.metric("spec_decode_num_drafts_total") == 0
    settings = SIZES | {"speculative_config": NGRAM}
    with running_server("demo", tmp_path / "log2", engine=None, config=settings) as server:
        assert [[one["text"] for one in some] for some in answers(server)] == [
            [one["text"] for one in some] for some in expected
        ]
        names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
        drafts, proposed, accepted = (server.metric(f"spec_decode_{name}_total") for name in names)
        text = server.http().get("/metrics").text
        by_position = [float(n) for n in re.findall(r"accepted_tokens_per_pos_total\{[^}]*\} (\S+)", text)]
        assert drafts <= proposed <= 31 * drafts
        assert sum(by_position) == accepted <= proposed
        assert by_position == sorted(by_position, reverse=True)


def chat(server, **fields):
    messages = [{"role": "user", "content": QUESTION}]
    body = {"messages": messages, "max_tokens": 120, "temperature": 0, "ignore_eos": True, **fields}
    return server.http().post("/v1/chat/completions", json=body)


def counters(server):
    """Drafts, proposed and accepted tokens, once they count all answers."""
    time.sleep(1)
    names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
    return np.array([server.metric(f"spec_decode_{name}_total") for name in names])


@pytest.mark.slow
def test_accepted_proposals_are_marked(checking):
    before = counters(checking)
    answer = chat(checking, logprobs=True, return_accepted_proposals=True).json()["choices"][0]
    marks = [entry["accepted"] for entry in answer["logprobs"]["content"]]
    assert len(marks) == 120
    assert not marks[0], "the prompt's step has no proposals"
    between = counters(checking)
    assert 0 < sum(marks) == (between - before)[2]
    lines = chat(checking, logprobs=True, return_accepted_proposals=True, stream=True).text.split("\n\n")
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    parts = [chunk["choices"][0]["logprobs"] for chunk in chunks if chunk["choices"]]
    streamed = [entry["accepted"] for part in parts if part for entry in part["content"]]
    assert (len(streamed), sum(streamed)) == (120, (counters(checking) - between)[2])
    plain = chat(checking, logprobs=True).json()["choices"][0]["logprobs"]["content"]
    assert all("accepted" not in entry for entry in plain), "it is no field of OpenAI's"
    refused = chat(checking, return_accepted_proposals=True)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "return_accepted_proposals")


@pytest.mark.slow
def test_bench_prints_the_mean_accepted_length(checking, tmp_path, capsys):
    chat(checking)  # counts before the run are none of its
    before = counters(checking)
    path = tmp_path / "results.json"
    load = ["--num-requests", "3", "--concurrency", "1", "--input-len", "40", "--output-len", "80", "--ignore-eos"]
    assert main(["bench", "serve", "--url", checking.url, *load, "--json", str(path)]) == 0
    drafts, proposed, accepted = counters(checking) - before
    summary = json.loads(path.read_text())["summary"]
    assert summary["mean_accepted_length"] == pytest.approx(1 + accepted / drafts)
    assert summary["proposals_kept_percent"] == pytest.approx(100 * accepted / proposed)
    assert "Mean accepted length" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine")
def test_the_page_tints_accepted_proposals(checking, tmp_path):
    before = counters(checking)[2]
    with open_page(tmp_path / "profile") as page:
        page.size(1280, 800)
        page.goto(checking.url)
        page.wait("document.body.dataset.state === 'ready'")
        page.run("document.querySelector('#sampling').open = true")
        for name, value in {"temperature": 0, "max_tokens": 100}.items():
            page.run(f"document.querySelector('[name={name}]').focus()")
            page.type(str(value))
        page.run(f"document.querySelector('#prompt').value = {json.dumps(QUESTION)}")
        page.run("document.querySelector('#prompt').focus()")
        page.press("Enter")
        page.wait("document.querySelector('.assistant .facts')?.textContent")
        tinted = page.run("document.querySelectorAll('.token.accepted').length")
        assert 0 < tinted == counters(checking)[2] - before
        assert f"{tinted} accepted proposals" in page.run("document.querySelector('.facts').textContent")
        colour = "getComputedStyle(document.querySelector('.token{}')).backgroundImage"
        assert page.run(colour.format(".accepted")) != page.run(colour.format(":not(.accepted)")) == "none"
        page.point(".token.accepted")
        assert "kept" in page.run("document.querySelector('#tip').textContent")
        page.wait("!document.querySelector('#speculation').hidden")
        assert "tokens a check" in page.run("document.querySelector('#spec-summary').textContent")
        assert page.run("document.querySelectorAll('#spec-bars li').length") > 1
        page.screenshot(tmp_path / "speculation.png")
        assert not page.errors
