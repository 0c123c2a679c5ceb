"""Random requests of every kind with and without speculation, and the distribution of what is sampled."""

import itertools
import json
from typing import NamedTuple

import numpy as np
import pytest
from engines import drain, make_engine, request, run_all
from json_schemas import PERSON
from scipy.stats import chisquare

from jaxserve import LLM, SamplingParams
from jaxserve.execution.verify import Draws
from jaxserve.speculation import speculator
from jaxserve.speculation.proposal import Method, Proposal
from jaxserve.speculation.speculator import Speculator
from jaxserve.types import Grammar

pytestmark = pytest.mark.compiles

CASE = "llama3_gqa"
DRAFT = "qwen3_tied"
LOOKUP = {"num_speculative_tokens": 6, "prompt_lookup_min": 1}
SETTINGS = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 128, "kv_pages": 150}
GRAMMARS = [
    Grammar("json", json.dumps(PERSON)),
    Grammar("choice", json.dumps(["yes", "no, never", "no, not today"])),
    Grammar("regex", "(ab|cd){4}-[0-9]{2,4}"),
]


class Asked(NamedTuple):
    prompts: list[list[int]]
    params: list[SamplingParams]


def requests(count: int) -> Asked:
    """Prompts that repeat themselves and share beginnings. The seed of request i is i."""
    rng = np.random.default_rng(7)
    beginnings = [rng.integers(5, 60, int(rng.integers(16, 40))).tolist() for _ in range(12)]
    asked = Asked([], [])
    for i in range(count):
        ending = np.tile(rng.integers(5, 60, int(rng.integers(2, 9))), 8)[: int(rng.integers(3, 24))].tolist()
        asked.prompts.append((beginnings[rng.integers(12)] if rng.random() < 0.5 else []) + ending)
        asked.params.append(SamplingParams(**parameters(rng, i)))
    return asked


def parameters(rng, seed):
    given = {"max_tokens": int(rng.integers(1, 40)), "ignore_eos": bool(rng.integers(2))}
    if rng.random() < 0.03:
        return given | {"n": 2, "use_beam_search": True, "temperature": 0.0, "logprobs": 0}
    given |= {"seed": seed, "temperature": float(rng.choice([0.0, 0.5, 1.0, 1.5]))}
    kinds = {
        "penalties": {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2},
        "filters": {"top_k": int(rng.integers(2, 20)), "top_p": 0.9, "min_p": 0.02},
        "logprobs": {"logprobs": int(rng.integers(4))},
        "bias": {"logit_bias": {7: 2.0, 9: -3.0, 11: 4.0}},
        "minimum": {"min_tokens": min(5, given["max_tokens"])},
        "stops": {"stop": ("e", "th"), "include_stop_str_in_output": bool(rng.integers(2))},
        "stop tokens": {"stop_token_ids": tuple(rng.integers(5, 300, 12).tolist())},
        "several": {"n": int(rng.integers(2, 4))},
        "prompt": {"prompt_logprobs": 1},
        "lists": {"bad_words": ((11,), (9, 30))} if rng.random() < 0.5 else {"allowed_token_ids": tuple(range(80))},
        "grammar": {"grammar": GRAMMARS[rng.integers(len(GRAMMARS))]},
    }
    for kind, fields in kinds.items():
        if rng.random() < 0.15 and not (kind == "grammar" and "allowed_token_ids" in given):
            given |= fields
    return given


class Known(Method):
    """Proposes the answers that are known, by (seed, index), with errors of the given share."""

    chances = (0.9,)

    def __init__(self, answers, errors):
        self._answers = answers
        self._errors = errors
        self._rng = np.random.default_rng(3)

    def propose(self, seq, tokens, count):
        answer = self._answers.get((seq.params.seed, seq.index), [])
        following = np.asarray(answer[len(tokens) - seq.prompt_len :][:count], np.int32)
        if not len(following):
            return None
        return Proposal(np.where(self._rng.random(len(following)) < self._errors, 77, following))


def everything(outputs):
    """What a caller can see of the outputs, but log-probabilities."""
    return [
        [(one.token_ids, one.text, one.finish_reason, one.stop_reason) for one in output.outputs] for output in outputs
    ]


def logprobs(outputs):
    found = [entry for output in outputs for one in output.outputs for entry in one.logprobs or []]
    found += [entry for output in outputs for entry in output.prompt_logprobs or [] if entry is not None]
    return np.asarray([entry.logprob for entry in found])


KNOWN: dict[str, dict] = {"always right": {"errors": 0.0}, "always wrong": {"errors": 1.0}, "mixed": {"errors": 0.2}}
METHODS = ["ngram", "suffix", "draft_model", *KNOWN]
OPTIONS: list[dict] = [{}, {"kv_pages": 24}, {"async_scheduling": False}, {"prefix_caching": False}]


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("count", [150, pytest.param(10_000, marks=pytest.mark.slow)])
def test_random_requests_have_the_same_answers(count, model_folders, monkeypatch):
    """The requests are dealt out to all methods and settings; each is answered without speculation, too."""
    for name in ("MIN_ACCEPTANCE", "RETRY_TOKENS", "COOLDOWN", "MAX_COOLDOWN"):
        monkeypatch.setattr(speculator, name, 0)  # as many proposals as can be
    monkeypatch.setattr(speculator, "FEW_ROWS", 8)
    asked = requests(count)
    expected = LLM(str(model_folders(CASE)), **SETTINGS).generate(*asked, progress=False)
    answers = {
        (params.seed, one.index): one.token_ids
        for params, output in zip(asked.params, expected, strict=True)
        for one in output.outputs
    }
    whole = count > 1000
    cases = list(itertools.product(METHODS if whole else ["suffix", "mixed"], OPTIONS if whole else OPTIONS[1:2]))
    checked = preemptions = 0
    for i, (method, options) in enumerate(cases):
        mine = slice(i, None, len(cases))
        config = {"method": "ngram" if method in KNOWN else method, **LOOKUP}
        if method == "draft_model":
            config = {"method": method, "num_speculative_tokens": 6, "model": str(model_folders(DRAFT))}
        llm = LLM(str(model_folders(CASE)), **SETTINGS | options, speculative_config=config)
        llm.engine.speculator.set_times(None)  # whatever pays on this machine, proposals are checked
        if method in KNOWN:
            llm.engine.speculator = Speculator(Known(answers, **KNOWN[method]), 6, budget=64)
        found = llm.generate(asked.prompts[mine], asked.params[mine], progress=False)
        for one, other in zip(found, expected[mine], strict=True):
            assert everything([one]) == everything([other]), (method, options)
            np.testing.assert_allclose(logprobs([one]), logprobs([other]), atol=2e-4)
        counters = llm.engine.stats()
        assert counters.spec_proposed > len(found)
        assert counters.pages_used == 0
        checked = checked + len(found)
        preemptions = preemptions + counters.preemptions
    assert checked == count
    assert preemptions > 0


# The distribution

PROMPT = [5, 6, 7, 8, 9]
FEW = 3
SAMPLES = 3000


class Always(Method):
    """Proposes the same tokens whenever it is asked."""

    chances = (0.9,)

    def __init__(self, tokens):
        self._tokens = np.asarray(tokens, np.int32)

    def propose(self, seq, tokens, count):
        return Proposal(self._tokens[:count])


def sampled(engine):
    """Answers to PROMPT at temperature 1, by (seed, index)."""
    for i in range(SAMPLES):
        engine.add_request(request(f"{i}", PROMPT, seed=i, max_tokens=4, temperature=1.0, top_k=FEW))
    return {(int(name), index): one.token_ids for (name, index), one in drain(engine, check=False).items()}


def p_value(engine, most, chances):
    """Of a chi-square test of 27 cells: the next three tokens of answers that begin with the most likely one. 0.0 if a
    token was sampled that the model never samples there."""
    counts = np.zeros((FEW,) * 3, int)
    for first, *others in sampled(engine).values():
        path = (first,)
        places = []
        if first == most[()][0]:
            for token in others:
                if token not in most[path]:
                    return 0.0
                places.append(most[path].index(token))
                path += (token,)
            counts[tuple(places)] += 1
    assert counts.sum() > SAMPLES / 5
    return chisquare(counts.ravel(), expectation(most, chances).ravel() * counts.sum()).pvalue


def likely(engine):
    """The FEW most likely tokens behind each path of likely tokens from PROMPT, and their probabilities."""
    most = {}
    chances = {}
    paths = [()]
    for _ in range(4):
        asked = [request(f"p{path}", PROMPT + list(path), max_tokens=1, logprobs=FEW) for path in paths]
        found = run_all(engine, *asked)
        for path in paths:
            (entry,) = found[f"p{path}", 0].logprobs
            top = entry.top[:FEW]
            most[path] = [token for token, _ in top]
            weight = np.exp([logprob for _, logprob in top])
            chances[path] = weight / weight.sum()
        paths = [(*path, token) for path in paths for token in most[path] if path or token == most[()][0]]
    return most, chances


def expectation(most, chances):
    first = (most[()][0],)
    expected = np.zeros((FEW,) * 3)
    for places in itertools.product(range(FEW), repeat=3):
        path = first
        chance = 1.0
        for place in places:
            chance *= chances[path][place]
            path += (most[path][place],)
        expected[places] = chance
    return expected


@pytest.fixture(scope="module")
def engines(model_folders):
    settings = {"rows": 8, "tokens": 64, "max_model_len": 64, "async_scheduling": False}
    return [
        make_engine(model_folders(CASE), **settings, speculative_config=config)
        for config in (None, {**LOOKUP, "method": "ngram"})
    ]


@pytest.fixture(scope="module")
def model(engines):
    return likely(engines[0])


SLOWER = [pytest.param(name, marks=pytest.mark.slow) for name in ("accept-all", "reject-all")]


@pytest.mark.slow
@pytest.mark.parametrize("drafter", [None, "most likely", *SLOWER])
def test_sampling_follows_the_model(drafter, engines, model, monkeypatch):
    if drafter is None:
        assert p_value(engines[0], *model) > 1e-3
        return
    speculate(drafter, engines, model[0], monkeypatch)
    before = engines[1].counters.spec_accepted
    assert p_value(engines[1], *model) > 1e-3
    kept = engines[1].counters.spec_accepted - before
    assert kept == 0 if drafter == "reject-all" else kept > SAMPLES / 5


def speculate(drafter, engines, most, monkeypatch):
    for name, value in (
        ("MIN_ACCEPTANCE", 0),
        ("RETRY_TOKENS", 0),
        ("COOLDOWN", 0),
        ("MAX_COOLDOWN", 0),
        ("FEW_ROWS", 8),
    ):
        monkeypatch.setattr(speculator, name, value)
    path = (most[()][0],)
    for _ in range(2):
        path += (most[path][0],)
    never = next(token for token in range(500) if all(token not in some for some in most.values()))
    method = {"reject-all": Always([never]), "most likely": Always(path[1:])}.get(drafter)
    engines[1].speculator = Speculator(method or Known(sampled(engines[0]), 0.0), 6, budget=64)


@pytest.mark.slow
def test_a_wrong_verifier_is_seen(engines, model, monkeypatch):
    """One that keeps what stands behind a proposal which was not drawn."""
    speculate("most likely", engines, model[0], monkeypatch)
    monkeypatch.setattr(Draws, "kept", lambda draws, tokens, stopped, num_new: np.arange(7) < num_new[:, None])
    engines[1].runner.executables.clear()
    try:
        assert p_value(engines[1], *model) < 1e-6
    finally:
        engines[1].runner.executables.clear()
