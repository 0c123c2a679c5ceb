"""Speculation along grammars: masks behind every proposal, and proposals of text that a grammar forces."""

import json

import numpy as np
import pytest
from engines import make_engine, request, run_all
from json_schemas import PERSON, random_schema
from llguidance import LLMatcher
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

from jaxserve.grammars.grammar import Matcher
from jaxserve.speculation import speculator
from jaxserve.speculation.proposal import Method, Proposal
from jaxserve.speculation.speculator import Speculator
from jaxserve.types import Grammar

pytestmark = pytest.mark.compiles

CASE = "llama3_gqa"
NGRAM = {"method": "ngram", "num_speculative_tokens": 7, "prompt_lookup_min": 1}
GRAMMARS = [
    Grammar("json", json.dumps(PERSON)),
    Grammar("json_object"),
    Grammar("choice", json.dumps(["yes", "no, never", "no, not today"])),
    Grammar("regex", "(ab|cd){4}-[0-9]{2,4}"),
    Grammar("lark", 'start: "x" | "(" start ")"'),
]


def requests():
    """Two for each grammar and some schemas, with parameters that act on masks and penalties; others without."""
    rng = np.random.default_rng(5)
    made = []
    grammars = GRAMMARS + [Grammar("json", json.dumps(random_schema(seed))) for seed in range(4)]
    for i in range(20):
        params = {"max_tokens": 50, "seed": i, "temperature": float(rng.choice([0.0, 0.7, 1.5]))}
        if i % 10 < 9:
            params |= {"grammar": grammars[i % 10], "ignore_eos": bool(i % 4 == 1)}
        if rng.random() < 0.3:
            params |= {"repetition_penalty": 1.2, "frequency_penalty": 0.3}
        if rng.random() < 0.3:
            params |= {"logprobs": 2}
        if rng.random() < 0.2:
            params |= {"n": 2}
        if rng.random() < 0.2:
            params |= {"bad_words": ((40,), (12, 30)), "min_tokens": 3}
        made.append(request(f"g{i}", rng.integers(5, 60, 6).tolist(), **params))
    return made


class Oracle(Method):
    """Proposes the answers that are known, with errors here and there."""

    chances = (0.9,)

    def __init__(self, answers, errors):
        self._answers = answers
        self._errors = errors
        self._rng = np.random.default_rng(3)

    def propose(self, seq, tokens, count):
        known = tokens.tolist()
        fitting = [answer for answer in self._answers if answer[: len(known)] == known and len(answer) > len(known)]
        if not fitting:
            return None
        answer = np.asarray(fitting[0][len(known) :][:count], np.int32)
        return Proposal(np.where(self._rng.random(len(answer)) < self._errors, 77, answer))


class UnseenOracle(Oracle):
    """The same, but what it proposes is not checked against the grammar before the step, as with a draft model."""

    proposes_later = True


def outcome(results):
    return {key: (one.token_ids, one.finish_reason) for key, one in results.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "errors", "options"),
    [
        (None, 0.0, {}),
        pytest.param(Oracle, 0.0, {}, marks=pytest.mark.slow),
        (UnseenOracle, 0.3, {"kv_pages": 24}),
        pytest.param(Oracle, 0.2, {"static_steps": True, "rows": 12}, marks=pytest.mark.slow),
        pytest.param(UnseenOracle, 0.1, {"tensor_parallel_size": 2}, marks=pytest.mark.slow),
    ],
)
def test_the_same_tokens(method, errors, options, model_folders, monkeypatch):
    for name in ("MIN_ACCEPTANCE", "RETRY_TOKENS", "COOLDOWN", "MAX_COOLDOWN"):
        monkeypatch.setattr(speculator, name, 0)
    monkeypatch.setattr(speculator, "FEW_ROWS", 12)
    settings = {"rows": 6, "tokens": 64, "max_model_len": 96, **options}
    expected = run_all(make_engine(model_folders(CASE), **settings), *requests())
    quick = make_engine(model_folders(CASE), speculative_config=NGRAM, **settings)
    if method is not None:
        prompts = {one.request_id: one.prompt_token_ids for one in requests()}
        answers = [prompts[name] + one.token_ids for (name, _), one in expected.items()]
        quick.speculator = Speculator(method(answers, errors), 7, budget=64)
    found = run_all(quick, *requests())
    assert outcome(found) == outcome(expected)
    assert {one.finish_reason for one in found.values()} >= {"stop", "length"}
    for key, one in expected.items():
        ours = [entry.logprob for entry in found[key].logprobs]
        np.testing.assert_allclose(ours, [entry.logprob for entry in one.logprobs], atol=1e-4)
    assert quick.counters.spec_accepted > (200 if method is not None else 30)


@pytest.mark.slow
def test_forced_text_takes_few_steps(model_folders, monkeypatch):
    """Nothing repeats, so that all proposals are what the grammar forces."""
    monkeypatch.setattr(speculator, "MIN_ACCEPTANCE", 0)
    schema = {"type": "object", "properties": {"a": {"const": "a rather long text that nobody chose"}}}
    schema |= {"required": ["a"], "additionalProperties": False}
    asked = {"grammar": Grammar("json", json.dumps(schema)), "max_tokens": 80, "temperature": 0.0}
    settings = {"rows": 6, "tokens": 64, "max_model_len": 96}
    plain = make_engine(model_folders(CASE), **settings)
    quick = make_engine(model_folders(CASE), speculative_config={**NGRAM, "prompt_lookup_min": 16}, **settings)
    (expected,), (found,) = (run_all(one, request("a", [9, 8, 7], **asked)).values() for one in (plain, quick))
    assert found.token_ids == expected.token_ids
    assert quick.counters.spec_accepted > 0
    assert quick.counters.steps < 0.7 * plain.counters.steps


def test_masks_along_a_draft(model_folders):
    """`fill_behind` against a copy of the matcher that goes forward one token at a time, for random paths."""
    engine = make_engine(model_folders(CASE), rows=2)
    compiler = engine.grammars
    rng = np.random.default_rng(0)
    ended = refused = 0
    for grammar in GRAMMARS * 4:
        compiler.check(grammar)
        matcher = Matcher(compiler.compile(grammar).future.result())
        while not matcher.ended:
            path, followed, expected = _random_path(matcher.state, rng, compiler.vocab_size)
            masks = allocate_token_bitmask(len(path), compiler.vocab_size)
            assert matcher.fill_behind(path, masks) == followed
            np.testing.assert_array_equal(masks[:followed], expected[:followed])
            assert (masks[followed:] == -1).all()
            refused += followed < len(path)
            mask = allocate_token_bitmask(1, compiler.vocab_size)
            fill_next_token_bitmask(matcher.state, mask)  # the matcher stands where it stood
            fresh = matcher.state.deep_copy()
            again = allocate_token_bitmask(1, compiler.vocab_size)
            fill_next_token_bitmask(fresh, again)
            np.testing.assert_array_equal(mask, again)
            for token in path[: followed + 1]:
                if not matcher.state.try_consume_tokens([token]) or matcher.ended:
                    break
            ended += matcher.ended
            if rng.random() < 0.1:
                break
    assert ended > 3
    assert refused > 10


def _random_path(state: LLMatcher, rng, vocab_size):
    """Up to five tokens that mostly may follow; how many of them leave the grammar open; the masks behind these."""
    copy = state.deep_copy()
    path = []
    masks = []
    followed = 0
    open_ = True
    for _ in range(5):
        mask = allocate_token_bitmask(1, vocab_size)
        if open_:
            fill_next_token_bitmask(copy, mask)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[:vocab_size])
        token = int(rng.choice(allowed)) if rng.random() < 0.9 else int(rng.integers(vocab_size))
        path.append(token)
        if not open_:
            continue
        open_ = copy.try_consume_tokens([token]) == 1 and not copy.is_stopped()
        if open_:
            behind = allocate_token_bitmask(1, vocab_size)
            fill_next_token_bitmask(copy, behind)
            masks.append(behind[0])
            followed += 1
    return path, followed, np.asarray(masks, np.int32).reshape(followed, -(-vocab_size // 32))
