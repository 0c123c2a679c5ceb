"""Log-probabilities: right, of all prompts of a step in one call, and read once, when the step is taken in."""

import numpy as np
import pytest
from engines import drain, make_engine, request

from jaxserve.execution.steps import CPU_SCORED_ROWS

RNG = np.random.default_rng(3)
PROMPTS = {f"r{n}": RNG.integers(5, 500, n).tolist() for n in (2, 17, 40, 90)}


@pytest.fixture(scope="module")
def engine(model_folders):
    return make_engine(model_folders("qwen3_tied"), rows=8, tokens=160, decode_steps=False)


class Watched:
    """An array on the devices that notes what is done with it."""

    def __init__(self, array, notes: list[str]):
        self.array = array
        self.notes = notes

    def copy_to_host_async(self):
        self.notes.append("copy")
        self.array.copy_to_host_async()

    def __array__(self, *args, **kwargs):
        self.notes.append("read")
        return np.asarray(self.array)


def scored(engine, *names):
    for name in names:
        engine.add_request(request(name, PROMPTS[name], max_tokens=2, prompt_logprobs=3))
    return {name: result.prompt_logprobs for (name, _), result in drain(engine).items()}


def test_all_prompts_of_a_step_are_scored_in_one_call(engine, monkeypatch):
    alone = {name: scored(engine, name)[name] for name in PROMPTS}
    calls = []
    score = engine.runner.score_prompt

    def count(rows, targets, adapters):
        calls.append(len(rows))
        return score(rows, targets, adapters)

    monkeypatch.setattr(engine.runner, "score_prompt", count)
    together = scored(engine, *PROMPTS)
    assert calls == [sum(len(prompt) - 1 for prompt in PROMPTS.values())]
    assert calls[0] > 2 * CPU_SCORED_ROWS
    for name, prompt in PROMPTS.items():
        assert together[name][0] is None
        assert [entry.token_id for entry in together[name][1:]] == prompt[1:]
        for one, other in zip(together[name][1:], alone[name][1:], strict=True):
            assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
            assert [token for token, _ in one.top] == [token for token, _ in other.top]
            assert one.rank == 1 + sum(value > one.logprob for _, value in one.top) or one.rank > 3


def test_scores_are_not_waited_for_when_a_step_is_dispatched(engine, monkeypatch):
    """Nothing is read between dispatch and commit; the copy to the host is under way by then."""
    started = []

    engine.add_request(request("r90", PROMPTS["r90"], max_tokens=1, prompt_logprobs=1))
    scores = []
    run = engine.runner.score_prompt

    def watched(*call):
        scores.append(Watched(run(*call), started))
        return scores[-1]

    monkeypatch.setattr(engine.runner, "score_prompt", watched)
    engine.in_flight.append(engine.dispatch(engine.scheduler.schedule(1)))
    assert started == ["copy"]
    drain(engine)
    assert started == ["copy", "read"]


@pytest.mark.parametrize("wanted", [True, False])
def test_scores_of_outputs_are_sent_with_the_tokens_and_read_once(engine, monkeypatch, wanted):
    """Each row read them for itself: nothing had asked for them before, and groups of devices joined theirs anew."""
    notes = []
    run = engine.runner.step

    def watched(*call):
        drawn, hidden = run(*call)
        return drawn._replace(scores=Watched(drawn.scores, notes)), hidden

    monkeypatch.setattr(engine.runner, "step", watched)
    for i in range(4):
        engine.add_request(request(f"s{i}", PROMPTS["r17"], max_tokens=1, logprobs=2 if wanted else None))
    engine.in_flight.append(engine.dispatch(engine.scheduler.schedule(1)))
    assert notes == (["copy"] if wanted else [])
    results = drain(engine)
    assert notes == (["copy", "read"] if wanted else [])
    assert all(bool(result.logprobs) is wanted for result in results.values())
