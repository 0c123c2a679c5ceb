"""Beam search finds what Hugging Face transformers' finds (tests/goldens/record_beams.py), in whatever company."""

import json
import math

import numpy as np
import pytest
from engines import drain, make_engine, request
from test_conformance import GOLDENS
from tiny_models import fingerprint

from jaxserve.types import InvalidRequestError

pytestmark = pytest.mark.compiles

RECORDED = json.loads((GOLDENS / "beams.json").read_text())
CASE = "llama3_gqa"


def searches(case):
    """Requests, and what they should find."""
    content = RECORDED[case]
    assert content["fingerprint"] == fingerprint(case), "the weights differ from the recorded ones"
    requests = []
    outputs = []
    for i, one in enumerate(content["searches"]):
        params = {
            "use_beam_search": True,
            "n": one["settings"]["num_beams"],
            "max_tokens": one["settings"]["max_new_tokens"],
            "length_penalty": one["settings"]["length_penalty"],
            "stop_token_ids": tuple(content["stops"]),
            "ignore_eos": False,
        }
        requests.append(request(f"search-{i}", one["prompt"], **params))
        outputs.append(one["outputs"])
    return requests, outputs


def run(engine, *requests):
    for one in requests:
        engine.add_request(one)
    return drain(engine)


def found(engine, *requests):
    results = run(engine, *requests)
    return [[results[one.request_id, i].token_ids for i in range(one.params.n)] for one in requests]


@pytest.mark.slow
@pytest.mark.parametrize("case", RECORDED)
def test_as_transformers(case, model_folders):
    requests, outputs = searches(case)
    assert sum(output[-1] in RECORDED[case]["stops"] for beams in outputs for output in beams) >= 10
    engine = make_engine(model_folders(case), rows=16, kv_pages=300)
    for one, expected in zip(requests, outputs, strict=True):
        assert found(engine, one) == [expected]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"rows": 32},
        {"rows": 32, "async_scheduling": False},
        {"rows": 32, "decode_steps": False},
        {"rows": 32, "prefix_caching": False},
        {"rows": 7},  # the beams of several searches compete for slots
        {"rows": 32, "kv_pages": 45},  # and for pages
        {"rows": 8, "page_size": 8, "tokens": 16},
    ],
    ids=str,
)
def test_together(model_folders, options):
    requests, outputs = searches(CASE)
    engine = make_engine(model_folders(CASE), **options)
    others = [request(f"other-{i}", [40 + i] * (3 + 7 * i), max_tokens=45, temperature=1.0, seed=i) for i in range(5)]
    alone = [run(engine, one)[one.request_id, 0].token_ids for one in others]
    results = run(engine, *requests[:10], *others, *requests[10:])
    for one, expected in zip(requests, outputs, strict=True):
        assert [results[one.request_id, i].token_ids for i in range(one.params.n)] == expected
    assert [results[one.request_id, 0].token_ids for one in others] == alone
    if options.get("kv_pages") or options["rows"] == 7:
        assert engine.scheduler.num_preemptions


def test_log_probabilities_and_ends(model_folders):
    engine = make_engine(model_folders(CASE))
    one = request("a", range(50, 80), use_beam_search=True, n=4, max_tokens=12, logprobs=2, length_penalty=0.5)
    results = run(engine, one)
    values = []
    for index in range(4):
        output = results["a", index]
        assert output.finish_reason == "length"
        assert [entry.token_id for entry in output.logprobs] == output.token_ids
        assert all(len(entry.top) == 2 for entry in output.logprobs)
        values.append(sum(entry.logprob for entry in output.logprobs) / math.sqrt(12))
    assert values == sorted(values, reverse=True)
    # The same tokens, scored as a prompt.
    whole = request("b", [*range(50, 80), *results["a", 2].token_ids], max_tokens=0, prompt_logprobs=0)
    scored = run(engine, whole)["b", 0].prompt_logprobs[-12:]
    ours = [entry.logprob for entry in results["a", 2].logprobs]
    np.testing.assert_allclose(ours, [entry.logprob for entry in scored], atol=1e-4)


@pytest.mark.slow
def test_pages_are_shared(model_folders):
    """Eight beams of a long prompt take little more than one."""
    engine = make_engine(model_folders(CASE), rows=8, tokens=256)
    engine.add_request(request("a", [60 + i % 90 for i in range(250)], use_beam_search=True, n=8, max_tokens=20))
    most = 0
    while engine.has_work:
        engine.step()
        most = max(most, engine.blocks.num_used)
    assert 16 + 8 <= most <= 16 + 3 * 8


def test_abort(model_folders):
    engine = make_engine(model_folders(CASE))
    for steps in (0, 1, 2, 7):
        engine.add_request(request("a", [9] * 20, use_beam_search=True, n=3, max_tokens=30))
        for _ in range(steps):
            engine.step()
        engine.abort("a", 1)  # they end together
        assert engine.has_work
        engine.abort("a")
        assert drain(engine) == {}


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"logit_bias": {5: 1.0}}, "logit_bias"),
        ({"min_tokens": 3}, "min_tokens"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"max_tokens": 0, "n": 1}, "max_tokens"),
        ({"n": 5}, "n"),  # of four slots
        ({"length_penalty": math.inf}, "length_penalty"),
        ({"max_tokens": 400, "n": 4}, "n"),  # 4 x 27 pages
    ],
    ids=str,
)
def test_refusals(model_folders, params, field):
    engine = make_engine(model_folders(CASE), kv_pages=80)
    with pytest.raises(InvalidRequestError) as caught:
        engine.add_request(request("a", [9] * 20, **{"use_beam_search": True, "n": 2, "max_tokens": 8, **params}))
    assert caught.value.param == field
