"""Steps that fail: the request that is to blame ends with an error, the others go on as if nothing had happened."""

from __future__ import annotations

from collections import defaultdict

import jax
import msgspec
import numpy as np
import pytest
from engines import Completion, drain, make_engine, request

from jaxserve.engine import engine as engine_module
from jaxserve.engine import in_flight
from jaxserve.engine.constraints import Constraints
from jaxserve.engine.engine import Engine
from jaxserve.engine.recovery import UNEXPLAINED
from jaxserve.scheduling.sequence import Sequence
from jaxserve.types import Grammar

pytestmark = pytest.mark.compiles

CASE = "llama3_gqa"
RNG = np.random.default_rng(5)
SAMPLED = {"temperature": 0.9, "top_p": 0.95, "seed": 7, "repetition_penalty": 1.2}
WORDS = Grammar("regex", "[a-z ]{200}")
LENGTH = 24


def everybody() -> list:
    """A request of each kind."""
    prompts = [RNG.integers(5, 250, n).tolist() for n in (1, 20, 40, 3, 17, 33, 5, 9, 12)]
    kinds = [
        {},
        SAMPLED,
        {**SAMPLED, "n": 3},
        {"n": 2, "logprobs": 2},
        {"prompt_logprobs": 1, **SAMPLED},
        {"grammar": WORDS},
        {"grammar": WORDS, **SAMPLED, "n": 2},
        {"use_beam_search": True, "n": 3, "max_tokens": 8},
        {"bad_words": ((9,),), "min_tokens": 4},
    ]
    return [
        request(f"r{i}", prompt, **{"max_tokens": LENGTH, **kind})
        for i, (prompt, kind) in enumerate(zip(prompts, kinds, strict=True))
    ]


EVERYBODY = everybody()


def bad(**params):
    return request("bad", [11, 12, 13, 14], **{"max_tokens": LENGTH, **params})


def fresh(one):
    """The engine may write to what it is given."""
    return msgspec.structs.replace(one)


def said(results: dict) -> dict:
    """What each completion came to; log-probabilities but for their last bits."""
    return {
        key: (
            one.token_ids,
            one.finish_reason,
            [round(entry.logprob, 3) for entry in one.logprobs],
            [entry and round(entry.logprob, 3) for entry in one.prompt_logprobs or []],
        )
        for key, one in results.items()
    }


@pytest.fixture(scope="module", params=[True, False], ids=["async", "sync"])
def engine(request, model_folders) -> Engine:
    engine = make_engine(model_folders(CASE), rows=12, tokens=96, async_scheduling=request.param)
    engine.compile()
    return engine


@pytest.fixture(scope="module")
def undisturbed(engine) -> dict:
    for one in EVERYBODY:
        engine.add_request(fresh(one))
    return said(drain(engine))


def run(engine, *others) -> tuple[dict, dict]:
    """What everybody came to, and the others; these stand in the middle of the queue."""
    engine.recovery._unexplained.clear()
    for one in [*EVERYBODY[:5], *others, *EVERYBODY[5:]]:
        engine.add_request(fresh(one))
    results = drain(engine)
    ids = {one.request_id for one in others}
    return (
        {key: one for key, one in results.items() if key[0] in ids},
        said({key: one for key, one in results.items() if key[0] not in ids}),
    )


class PoisonError(Exception):
    pass


def raising(original, is_poisoned):
    def call(*args, **kwargs):
        if is_poisoned(*args, **kwargs):
            raise PoisonError
        return original(*args, **kwargs)

    return call


def poison_mask(monkeypatch, at):
    """The matcher of the request raises when it is asked what may follow its first tokens."""

    def is_poisoned(self, seqs, draws, running):
        return any(
            seq.request_id == "bad" and position - seq.prompt_len >= at
            for seq, position in zip(seqs, draws[:, 2].tolist(), strict=True)
        )

    monkeypatch.setattr(Constraints, "_masks", raising(Constraints._masks, is_poisoned))
    return bad(grammar=WORDS)


def poison_matcher(monkeypatch, at):
    """It raises when it takes in a token."""
    taken: dict[int, int] = defaultdict(int)

    def is_poisoned(self, tokens):
        if self.request_id != "bad":
            return False
        known = len(self.tokens) - self.prompt_len if self.slot < 0 else 0
        taken[id(self)] = max(taken[id(self)] + len(tokens), known)
        return taken[id(self)] > at

    monkeypatch.setattr(Sequence, "advance", raising(Sequence.advance, is_poisoned))
    return bad(grammar=WORDS)


def poison_parameter(monkeypatch, at):
    """A parameter raises when it is to be sent to the devices."""
    is_poisoned = lambda slot, params, *rest: params.top_k == 13  # noqa: E731
    monkeypatch.setattr(in_flight, "encode_slot", raising(in_flight.encode_slot, is_poisoned))
    return bad(top_k=13, temperature=0.5)


def poison_admission(monkeypatch, at):
    """It raises when its pages are looked for in the prefix cache."""
    is_poisoned = lambda self, *rest: self.request_id == "bad"  # noqa: E731
    monkeypatch.setattr(Sequence, "page_hashes", raising(Sequence.page_hashes, is_poisoned))
    return bad()


def poison_answer(monkeypatch, at):
    """It raises when what it came to is put together."""

    def is_poisoned(detail, *rest):
        return detail.seq.request_id == "bad" and detail.seq.num_outputs >= at

    monkeypatch.setattr(engine_module, "complete", raising(engine_module.complete, is_poisoned))
    return bad(logprobs=1, n=2)


@pytest.mark.slow
@pytest.mark.parametrize("at", [0, 9])
@pytest.mark.parametrize(
    "poison",
    [poison_mask, poison_matcher, poison_parameter, poison_admission, poison_answer],
    ids=lambda one: one.__name__,
)
def test_a_poisoned_request_fails_alone(engine, undisturbed, monkeypatch, poison, at):
    one = poison(monkeypatch, at)
    before = engine.counters.failed_requests
    errors: list[str] = []
    step = engine.step

    def noting():
        output = step()
        errors.extend(update.error for update in output.updates if update.error)
        return output

    monkeypatch.setattr(engine, "step", noting)
    results, others = run(engine, one)
    assert others == undisturbed
    assert {one.finish_reason for one in results.values()} == {"error"}
    assert len(results) == one.params.n
    assert errors
    assert all("internal_error: request bad failed" in error for error in errors)
    assert engine.counters.failed_requests - before == 1
    monkeypatch.undo()
    assert run(engine)[1] == undisturbed, "the engine is as before"


@pytest.mark.slow
def test_several_that_are_poisoned(engine, undisturbed, monkeypatch):
    is_poisoned = lambda slot, params, *rest: params.top_k == 13  # noqa: E731
    monkeypatch.setattr(in_flight, "encode_slot", raising(in_flight.encode_slot, is_poisoned))
    several = [request(f"bad-{i}", [11 + i], max_tokens=LENGTH, top_k=13) for i in range(3)]
    results, others = run(engine, *several)
    assert others == undisturbed
    assert [one.finish_reason for one in results.values()] == ["error"] * 3
    assert not any(one.token_ids for one in results.values())


def test_who_leaves_and_who_comes_meanwhile(engine, undisturbed, monkeypatch):
    """While some run alone, requests come, and others are aborted."""
    one = poison_parameter(monkeypatch, 0)
    results: dict[tuple[str, int], Completion] = defaultdict(Completion)
    for every in [*EVERYBODY[:5], one, *EVERYBODY[5:7], request("leaves", [7, 8], n=3, max_tokens=200)]:
        engine.add_request(fresh(every))
    came = left = False
    while engine.has_work:
        if engine.recovery.active and not came:
            for every in EVERYBODY[7:]:
                engine.add_request(fresh(every))
            engine.abort("leaves", 1)
            engine.abort("leaves", 0)
            came = True
        elif engine.recovery.active and not left:
            engine.abort("leaves")
            left = True
        for update in engine.step():
            mine = results[update.request_id, update.index]
            mine.token_ids += update.token_ids
            mine.finish_reason = update.finish_reason
        engine.scheduler.check_integrity()
    assert came
    assert left
    assert engine.blocks.num_used == 0
    tokens = {key: value[:2] for key, value in undisturbed.items()}
    assert {k: (v.token_ids, v.finish_reason) for k, v in results.items() if k[0] not in ("bad", "leaves")} == tokens
    assert results["bad", 0].finish_reason == "error"
    assert not engine.recovery.active


@pytest.mark.parametrize("lost", [True, False], ids=["cache lost", "cache kept"])
def test_a_step_that_fails_once(engine, undisturbed, monkeypatch, lost):
    """Nobody is to blame; also where the donated arrays are gone."""
    step = engine.runner.step
    calls = 0

    def failing(shape, packed):
        nonlocal calls
        calls += 1
        if calls == 6:
            for array in jax.tree.leaves((engine.runner.cache, engine.runner.slots)) if lost else ():
                array.delete()
            raise RuntimeError("a hiccup")
        return step(shape, packed)

    monkeypatch.setattr(engine.runner, "step", failing)
    before = engine.counters.failed_steps, engine.counters.failed_requests
    assert run(engine) == ({}, undisturbed)
    assert (engine.counters.failed_steps, engine.counters.failed_requests) == (before[0] + 1, before[1])


def test_a_device_that_is_gone(model_folders, monkeypatch):
    """The request is not to blame: the engine says so to its caller."""
    engine = make_engine(model_folders(CASE), rows=4)
    for i in range(4):
        engine.add_request(request(f"r{i}", [5, 6, 7 + i], max_tokens=20))
    for _ in range(4):
        engine.step()

    def failing(*args):
        raise RuntimeError("device lost")

    monkeypatch.setattr(engine.runner, "step", failing)
    with pytest.raises(RuntimeError, match="device lost"):
        drain(engine)
    assert engine.counters.failed_requests == 0, "nobody is to blame"


def test_failures_that_nobody_is_to_blame_for_come_to_an_end(model_folders, monkeypatch):
    engine = make_engine(model_folders(CASE), rows=4)
    for i in range(4):
        engine.add_request(request(f"r{i}", [5, 6, 7 + i], max_tokens=200))
    step = engine.runner.step

    def failing(shape, packed):
        if len(engine.scheduler.running) > 2:
            raise RuntimeError("too many")
        return step(shape, packed)

    monkeypatch.setattr(engine.runner, "step", failing)
    with pytest.raises(RuntimeError, match="too many"):
        drain(engine)
    assert len(engine.recovery._unexplained) == UNEXPLAINED + 1
