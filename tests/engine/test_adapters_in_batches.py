"""Adapters in an engine: every kind of request has the answer that it has alone, through fewer places than adapters."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import tiny_models
from adapter_folders import MODULES, save_adapter
from draft_heads import write_eagle
from engines import drain, generate, make_engine, request

from jaxserve.engine import in_flight
from jaxserve.engine.engine import Engine
from jaxserve.types import Grammar, InvalidRequestError, Request

pytestmark = [pytest.mark.compiles, pytest.mark.slow]

CASE = "llama3_gqa"
RNG = np.random.default_rng(8)
SAMPLED = {"temperature": 0.9, "top_p": 0.95, "seed": 7, "repetition_penalty": 1.2}
KINDS = [
    {},
    SAMPLED,
    {**SAMPLED, "n": 3},
    {"n": 2, "logprobs": 2},
    {"prompt_logprobs": 1, **SAMPLED},
    {"grammar": Grammar("regex", "[a-z ]{200}")},
    {"use_beam_search": True, "n": 3, "max_tokens": 8},
]
ADAPTERS = 6
SIZES = {"rows": 8, "tokens": 96, "enable_lora": True, "max_loras": 2, "max_lora_rank": 8, "max_cpu_loras": 3}


@pytest.fixture(scope="module")
def paths(model_folders, tmp_path_factory) -> list[str]:
    root = tmp_path_factory.mktemp("adapters")
    options = {"model": model_folders(CASE), "modules": (*MODULES, "lm_head")}
    return [str(save_adapter(root / f"a{i}", i, rank=1 + i, **options)) for i in range(ADAPTERS)]


def make(model_folders, paths, **config) -> Engine:
    modules = [(f"a{i}", path) for i, path in enumerate(paths)]
    engine = make_engine(model_folders(CASE), **SIZES, lora_modules=modules, **config)
    engine.compile()
    engine.runner.frozen = True
    return engine


@pytest.fixture(scope="module")
def engine(model_folders, paths) -> Engine:
    return make(model_folders, paths, kv_pages=14)


def adapted(engine: Engine, one: Request, name: str | None) -> Request:
    """The request with an adapter; None: for the model itself."""
    if name is None:
        return msgspec.structs.replace(one)
    found = engine.adapters.registry.find(name)
    return msgspec.structs.replace(one, adapter=name, adapter_digest=found.digest)


def everybody(engine: Engine) -> list[Request]:
    """A request of each kind, under each adapter and without one; all begin alike."""
    names = [None, *(f"a{i}" for i in range(ADAPTERS))]
    prompts = [[9] * 20 + RNG.integers(5, 250, 3).tolist() for _ in KINDS]
    plain = [
        request(f"{kind}-{name}", prompts[kind], **{"max_tokens": 16, **params})
        for kind, params in enumerate(KINDS)
        for name in names
    ]
    ordered = [adapted(engine, one, name) for one, name in zip(plain, names * len(KINDS), strict=True)]
    return [ordered[i] for i in RNG.permutation(len(ordered))]


def said(results: dict) -> dict:
    return {key: (one.token_ids, one.finish_reason) for key, one in results.items()}


@pytest.fixture(scope="module")
def crowd(engine) -> list[Request]:
    return everybody(engine)


@pytest.fixture(scope="module")
def alone(engine, crowd) -> dict:
    found = {}
    for one in crowd:
        engine.reset_prefix_cache()
        engine.add_request(msgspec.structs.replace(one))
        found |= said(drain(engine, check=False))
    return found


def together(engine: Engine, crowd: list[Request], *others: Request) -> dict:
    for one in [*crowd[:10], *others, *crowd[10:]]:
        engine.add_request(msgspec.structs.replace(one))
    return drain(engine)


def test_company_changes_nothing(engine, crowd, alone):
    """With preemption, shared prefixes, siblings and beams, and two places for six adapters."""
    before = engine.stats()
    assert said(together(engine, crowd)) == alone
    after = engine.stats()
    assert after.preemptions > before.preemptions
    assert after.adapter_evictions - before.adapter_evictions >= ADAPTERS - 2
    for kind in range(len(KINDS)):
        assert len({tuple(alone[f"{kind}-{name}", 0][0]) for name in [None, *map("a{}".format, range(ADAPTERS))]}) > 4


def test_a_step_that_fails(engine, crowd, alone, monkeypatch):
    """Also where the devices lose the adapters."""
    original = in_flight.encode_slot
    restore = engine.runner.restore

    def poisoned(slot, params, *rest):
        if params.top_k == 13:
            raise ValueError("poison")
        return original(slot, params, *rest)

    def losing():
        restore()
        for place in range(2):
            for call in engine.runner.adapter_uploads(place, None):
                call()

    monkeypatch.setattr(in_flight, "encode_slot", poisoned)
    monkeypatch.setattr(engine.runner, "restore", losing)
    bad = adapted(engine, request("bad", [11, 12], max_tokens=4, top_k=13), "a3")
    results = together(engine, crowd, bad)
    assert results.pop(("bad", 0)).finish_reason == "error"
    assert said(results) == alone


SLOWER = [pytest.param(method, marks=pytest.mark.slow) for method in ("draft_model", "eagle3")]


@pytest.mark.parametrize("method", ["ngram", *SLOWER])
def test_speculation_changes_nothing(method, model_folders, paths, crowd, alone, tmp_path):
    """Drafts propose without adapters."""
    folder = model_folders(CASE)
    drafts = {"draft_model": lambda: folder, "eagle3": lambda: write_eagle(tmp_path, tiny_models.CASES[CASE].config)}
    of_method = {"model": str(drafts[method]())} if method in drafts else {"prompt_lookup_min": 1}
    speculative = {"method": method, "num_speculative_tokens": 5, **of_method}
    engine = make(model_folders, paths, kv_pages=40, speculative_config=speculative)
    engine.speculator.set_times(None)  # so that it proposes whatever it costs
    found = said(together(engine, crowd))
    assert engine.counters.spec_drafts > 0
    assert found == alone


def test_prompts_are_scored_with_the_adapter(engine):
    """An answer as the prompt of another request has the log-probabilities with which it was sampled."""
    names = [None, "a5", "a2"]
    asked = [
        adapted(engine, request(f"s{i}", [9, 8, 7], max_tokens=12, logprobs=0), name) for i, name in enumerate(names)
    ]
    answers = generate(engine, *asked)
    again = [
        adapted(engine, request(f"p{i}", [9, 8, 7, *one.token_ids], max_tokens=1, prompt_logprobs=0), name)
        for i, (one, name) in enumerate(zip(answers, names, strict=True))
    ]
    for one, scored in zip(answers, generate(engine, *again), strict=True):
        sampled = [entry.logprob for entry in one.logprobs]
        np.testing.assert_allclose([entry.logprob for entry in scored.prompt_logprobs[3:]], sampled, atol=1e-4)


def test_names_that_are_not_served(engine):
    with pytest.raises(InvalidRequestError, match="not loaded") as raised:
        engine.add_request(msgspec.structs.replace(request("r", [5]), adapter="b", adapter_digest="0"))
    assert raised.value.code == "model_not_found"
    with pytest.raises(InvalidRequestError, match="replaced"):
        engine.add_request(msgspec.structs.replace(request("r", [5]), adapter="a0", adapter_digest="0"))
    assert not engine.has_work


def test_a_lost_adapter_ends_its_requests(engine, paths, tmp_path):
    """Its files have changed, and it is no more in the host's memory, nor on the devices."""
    registry = engine.adapters.registry
    path = save_adapter(tmp_path / "mine", 50, model=engine.model_folder)
    registry.add(registry.read("mine", str(path)).result(), str(path))
    mine = request("mine", [5, 6], max_tokens=4, n=2)
    asked = adapted(engine, mine, "mine")
    first = generate(engine, msgspec.structs.replace(asked))[0].token_ids
    generate(engine, *(adapted(engine, request(f"r{i}", [5], max_tokens=2), f"a{i}") for i in range(ADAPTERS)))
    save_adapter(path, 51, model=engine.model_folder)
    engine.add_request(asked)
    errors = {}
    while engine.has_work:
        errors |= {update.index: update.error for update in engine.step().updates}
    assert errors.keys() == {0, 1}
    assert all("have changed; load it again" in error for error in errors.values())
    registry.add(registry.read("mine", str(path)).result(), str(path))
    assert generate(engine, adapted(engine, mine, "mine"))[0].token_ids != first
