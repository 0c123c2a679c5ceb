"""Speculation by lookup in pipelines: the answers are those of one device that does not speculate."""

import numpy as np
import pytest
from engines import make_engine, request, run_all
from test_speculation_at_random import (
    CASE,
    KNOWN,
    LOOKUP,
    SETTINGS,
    Asked,
    Known,
    everything,
    logprobs,
    requests,
)

from jaxserve import LLM
from jaxserve.config import ConfigError, EngineConfig
from jaxserve.engine.engine import Engine
from jaxserve.speculation import speculator
from jaxserve.speculation.speculator import Speculator
from jaxserve.types import Grammar

pytestmark = pytest.mark.compiles

SLOW = pytest.mark.slow
FEW_PAGES = {"kv_pages": 24}


@pytest.fixture
def eager(monkeypatch):
    """As many proposals as can be, whether they pay or not."""
    for name in ("MIN_ACCEPTANCE", "RETRY_TOKENS", "COOLDOWN", "MAX_COOLDOWN"):
        monkeypatch.setattr(speculator, name, 0)
    monkeypatch.setattr(speculator, "FEW_ROWS", 8)


def sizes(stages, tensor=1, groups=1):
    return {"pipeline_parallel_size": stages, "tensor_parallel_size": tensor, "data_parallel_size": groups}


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize(
    ("split", "method", "options", "count"),
    [
        (sizes(2), "mixed", FEW_PAGES, 60),
        *(
            pytest.param(*case, marks=SLOW)
            for case in (
                (sizes(2), "suffix", {}, 400),
                (sizes(2), "always right", FEW_PAGES, 400),
                (sizes(2), "always wrong", {}, 400),
                (sizes(2), "mixed", {"async_scheduling": False}, 400),
                (sizes(2, 2), "mixed", FEW_PAGES, 400),
                (sizes(4), "ngram", {"prefix_caching": False}, 400),
                (sizes(4), "mixed", FEW_PAGES, 400),
                (sizes(2, groups=2), "mixed", {}, 200),
            )
        ),
    ],
)
def test_random_requests_have_the_same_answers(split, method, options, count, deep_folders, eager):
    folder = str(deep_folders(CASE, 4))
    asked = requests(count)
    if split["data_parallel_size"] > 1:  # groups of devices refuse beam search
        kept = [i for i, params in enumerate(asked.params) if not params.use_beam_search]
        asked = Asked(*([column[i] for i in kept] for column in asked))
    expected = LLM(folder, **SETTINGS).generate(*asked, progress=False)
    llm = LLM(folder, **SETTINGS | options | split, speculative_config={"method": "ngram", **LOOKUP})
    engine = llm.engine
    assert engine.speculator is not None
    engine.speculator.set_times(None)
    if method in KNOWN:
        answers = {
            (params.seed, one.index): one.token_ids
            for params, output in zip(asked.params, expected, strict=True)
            for one in output.outputs
        }
        known = Known(answers, **KNOWN[method])
        engine.speculator = Speculator(known, 6, budget=64, stages=split["pipeline_parallel_size"])
    found = llm.generate(*asked, progress=False)
    assert everything(found) == everything(expected)
    np.testing.assert_allclose(logprobs(found), logprobs(expected), atol=2e-4)
    counters = engine.stats()
    assert counters.spec_proposed > len(found)
    assert counters.pages_used == 0
    assert counters.preemptions > 0 or options != FEW_PAGES


@pytest.mark.slow
def test_right_proposals_take_fewer_steps_and_nothing_compiles(deep_folders, eager):
    """Two sequences, one for each stage at a time. Most proposals are kept, and wrong ones do no harm."""
    folder = deep_folders(CASE, 4)
    settings = {"rows": 4, "tokens": 64, "max_model_len": 128, **sizes(2)}
    asked = [request(str(i), [5 + i, 6, 7] * 6, max_tokens=60, ignore_eos=True, seed=i) for i in range(2)]
    expected = {key: one.token_ids for key, one in run_all(make_engine(folder, **settings), *asked).items()}
    steps = {}
    for errors in (0.0, 1.0):
        engine = make_engine(folder, speculative_config={"method": "ngram", **LOOKUP}, **settings)
        engine.compile()
        engine.runner.frozen = True
        answers = {(int(name), index): tokens for (name, index), tokens in expected.items()}
        engine.speculator = Speculator(Known(answers, errors), 6, budget=64, stages=2)
        assert {key: one.token_ids for key, one in run_all(engine, *asked).items()} == expected
        counters = engine.counters
        assert counters.spec_proposed > 80
        assert counters.spec_accepted == (counters.spec_proposed if errors == 0 else 0)
        steps[errors] = counters.steps
    assert 3 * steps[0.0] < steps[1.0]


@pytest.mark.slow
def test_text_that_a_grammar_forces(deep_folders, eager):
    """Nothing repeats, so that all proposals are what the grammar forces."""
    folder = deep_folders(CASE, 4)
    forced = Grammar("choice", '["a rather long text that nobody chose"]')
    asked = [request(str(i), [5 + i, 6, 7], max_tokens=60, grammar=forced) for i in range(3)]
    expected = run_all(make_engine(folder, rows=4, tokens=64, max_model_len=128), *asked)
    engine = make_engine(
        folder, rows=4, tokens=64, max_model_len=128, speculative_config={"method": "ngram", **LOOKUP}, **sizes(2)
    )
    found = run_all(engine, *asked)
    assert {key: one.token_ids for key, one in found.items()} == {key: one.token_ids for key, one in expected.items()}
    assert engine.counters.spec_accepted > 20


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"method": "draft_model", "model": "x"}, "pipeline_parallel_size 2 cannot be combined with speculation by"),
        ({"method": "eagle3", "model": "x"}, "choose one of ngram, suffix, or leave pipeline_parallel_size at 1"),
    ],
)
def test_refusals(given, message, model_folders):
    with pytest.raises(ConfigError, match=message):
        Engine.load(EngineConfig(model=str(model_folders(CASE)), speculative_config=given, **sizes(2)), progress=False)
