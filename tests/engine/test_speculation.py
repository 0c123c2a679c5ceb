"""Speculative decoding changes no token: the same requests with and without it."""

from types import SimpleNamespace

import numpy as np
import pytest
from engines import make_engine, request, run_all

from jaxserve.config import ConfigError, EngineConfig
from jaxserve.execution.runner import ModelRunner
from jaxserve.execution.step_shape import StepShape
from jaxserve.scheduling.engine_stats import EngineStats
from jaxserve.scheduling.sequence import Sequence
from jaxserve.speculation import speculator, step_times
from jaxserve.speculation.draft_model import MOST_PLANS
from jaxserve.speculation.ngram import Ngram, Suffix
from jaxserve.speculation.proposal import Method, Proposal
from jaxserve.speculation.speculator import Acceptance, Speculator
from jaxserve.speculation.step_times import Curve, StepTimes
from jaxserve.types import Request, SamplingParams

pytestmark = pytest.mark.compiles

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}
# Each kind of recurrent layer.
RECURRENT = (
    *("qwen3_next_groups", "granite_hybrid_dense", "nemotron_h_pattern", "lfm2_odd", "kimi_linear_types"),
    *("falcon_h1_norm_behind", "falcon_mamba_tied", "minimax_lightning_first"),
)


def requests(seed, count):
    """Prompts that repeat themselves, with parameters of every kind."""
    rng = np.random.default_rng(seed)
    made = []
    for i in range(count):
        prompt = np.tile(rng.integers(5, 60, int(rng.integers(3, 12))), 6)[: int(rng.integers(4, 40))].tolist()
        params = {"max_tokens": int(rng.integers(1, 40)), "seed": i, "ignore_eos": bool(rng.integers(2))}
        params["temperature"] = float(rng.choice([0.0, 0.3, 1.0]))
        if rng.random() < 0.3:
            params |= {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2}
        if rng.random() < 0.3:
            params |= {"top_k": 5, "top_p": 0.9, "min_p": 0.05}
        if rng.random() < 0.3:
            params |= {"logprobs": 3}
        if rng.random() < 0.2:
            params |= {"min_tokens": min(5, params["max_tokens"]), "logit_bias": {7: 2.0, 9: -3.0}}
        if rng.random() < 0.2:
            params |= {"n": 3}
        elif rng.random() < 0.1:
            params |= {"allowed_token_ids": list(range(40))}
        elif rng.random() < 0.1:
            kept = {name: params[name] for name in ("max_tokens", "ignore_eos")}
            params = kept | {"n": 2, "use_beam_search": True, "temperature": 0.0}
        if "use_beam_search" not in params and rng.random() < 0.1:
            params |= {"prompt_logprobs": 1}
        made.append(request(f"r{i}", prompt, **params))
    return made


def outcome(results):
    return {key: (one.token_ids, one.finish_reason) for key, one in results.items()}


class Oracle(Method):
    """Proposes the answers that are known, with errors here and there."""

    chances = (0.9,)

    def __init__(self, answers, errors):
        self._answers = answers
        self._errors = errors
        self._rng = np.random.default_rng(3)

    def propose(self, seq, tokens, count):
        known = tokens.tolist()
        fitting = [answer for answer in self._answers if answer[: len(known)] == known]
        if not fitting:
            return None
        answer = np.asarray(fitting[self._rng.integers(len(fitting))][len(known) :][:count], np.int32)
        return Proposal(np.where(self._rng.random(len(answer)) < self._errors, 77, answer))


@pytest.mark.parametrize(
    ("case", "options", "errors"),
    [
        ("llama3_gqa", {}, 0.0),
        ("llama3_gqa", {}, 1.0),
        ("llama3_gqa", {"static_steps": True}, 0.2),
        ("mistral_window", {"kv_pages": 20}, 0.2),
        ("mixtral_experts", {"async_scheduling": False}, 0.2),
        *(
            pytest.param(case, options, errors, marks=pytest.mark.slow)
            for case in (
                "llama3_gqa",
                "mistral_window",
                "mixtral_experts",
                "deepseek_v3_groups",
                "gpt_oss_sinks",
                "llama4_chunks",
                *RECURRENT,
            )
            for options in (
                {},
                {"static_steps": True},
                {"kv_pages": 50},
                {"kv_cache_dtype": "int8"},
                {"tensor_parallel_size": 2},
            )
            for errors in (0.1, 0.3)
        ),
    ],
)
def test_the_same_tokens(case, options, errors, model_folders, monkeypatch):
    for name in ("MIN_ACCEPTANCE", "RETRY_TOKENS", "COOLDOWN", "MAX_COOLDOWN"):
        monkeypatch.setattr(speculator, name, 0)  # as many proposals as can be
    settings = {"rows": 4, "tokens": 32, "max_model_len": 96, **options}
    plain = make_engine(model_folders(case), **settings)
    quick = make_engine(model_folders(case), speculative_config=NGRAM, **settings)
    asked = requests(1, 16)
    recurrent = plain.scheduler.recurrent
    if recurrent:
        asked = [one for one in asked if not one.params.use_beam_search]  # which such models do not serve
    expected = run_all(plain, *asked)
    prompts = {one.request_id: one.prompt_token_ids for one in asked}
    answers = [prompts[name] + one.token_ids for (name, _), one in expected.items()]
    quick.speculator = Speculator(Oracle(answers, errors), 4, budget=32)
    found = run_all(quick, *asked)
    assert outcome(found) == outcome(expected)
    if recurrent:  # from snapshots behind what has the same beginning
        assert outcome(run_all(quick, *asked)) == outcome(expected)
    tolerance = 1e-3 if "kv_cache_dtype" in options else 1e-4
    for key, one in expected.items():
        ours = [entry.logprob for entry in found[key].logprobs]
        np.testing.assert_allclose(ours, [entry.logprob for entry in one.logprobs], atol=tolerance)
    counters = quick.counters
    assert counters.spec_proposed > 100
    least, most = {0.0: (0.9, 1.0), 1.0: (0.0, 0.01)}.get(errors, (0.2, 0.95))
    assert least <= counters.spec_accepted / counters.spec_proposed <= most
    assert counters.spec_accepted == sum(counters.spec_accepted_at)


@pytest.mark.slow
def test_fewer_steps_for_text_that_repeats(model_folders):
    """With measured steps, and programs that are compiled before."""
    settings = {"rows": 2, "tokens": 16, "max_model_len": 96, "decode_steps": True}
    engine = make_engine(model_folders("llama3_gqa"), speculative_config=NGRAM, **settings)
    engine.compile()
    engine.runner.frozen = True
    assert engine.speculator.times is not None
    wanted = request("a", [5, 6, 7, 8] * 4, max_tokens=60, logit_bias={9: 100.0})  # the answer is a single token
    (one,) = run_all(engine, wanted).values()
    assert one.token_ids == [9] * 60
    if engine.counters.spec_drafts:  # what pays depends on this machine's times
        assert engine.counters.spec_accepted > 0.8 * engine.counters.spec_proposed
    engine.speculator.set_times(StepTimes(Curve.of({1: 1.0, 2: 1.0}), Curve.of({16: 1.0})))
    before = engine.counters.steps
    run_all(engine, request("b", [5, 6, 7, 8] * 4, max_tokens=60, logit_bias={9: 100.0}))
    assert engine.counters.steps - before <= 60 / 5 + 6


# How many proposals


def times(decode, check):
    return StepTimes(Curve.of(decode), Curve.of(check))


def test_proposals_fill_what_costs_nothing():
    """Steps of up to 8 tokens take as long as one of 1; twice as long beyond."""
    free = times({1: 1.0, 4: 1.0, 8: 1.0, 16: 2.0}, {8: 1.0, 16: 2.0})
    speculates = Speculator(Ngram(), 5, budget=100)
    speculates.set_times(free)
    assert speculates._most_rows == 4
    chances = np.sort([0.9**i for i in range(1, 6)] * 4)[::-1]
    assert (
        speculates._num_worthwhile(chances, 4, np.full(20, 0.0)) == 4
    )  # four rows and four proposals are eight tokens
    assert speculates._num_worthwhile(chances, 1, np.full(20, 0.0)) == 7
    assert speculates._num_worthwhile(np.full(2, 0.01), 1, np.full(20, 0.0)) == 0  # less than what they must gain
    assert speculates._num_worthwhile(chances, 4, np.full(20, 10.0)) == 0  # the host would hold up the devices
    narrow = Speculator(Ngram(), 5, budget=6)
    narrow.set_times(free)
    assert narrow._num_worthwhile(chances, 4, np.full(20, 0.0)) == 2


def test_no_proposals_where_each_token_costs_its_share():
    speculates = Speculator(Ngram(), 5, budget=100)
    linear = {n: float(n) for n in range(1, 65)}
    speculates.set_times(times(linear, linear))
    assert speculates._most_rows == 0
    speculates.set_times(times(linear, {n: 1 + 0.4 * n for n in range(1, 65)}))
    assert speculates._most_rows > 0
    assert speculates._num_worthwhile(np.full(5, 0.3), 1, np.full(20, 0.0)) == 0
    assert speculates._num_worthwhile(np.array([0.9, 0.8, 0.3]), 1, np.full(20, 0.0)) == 2


def test_a_row_more_costs_its_attention():
    """Steps of as many tokens in more rows take longer, and none is shorter than one without proposals."""
    one = StepTimes(Curve.of({4: 1.0, 8: 4.0}), Curve.of({8: 2.0, 16: 3.0}), each=4, row=0.5)
    np.testing.assert_allclose(one.check(2, np.array([5, 8, 9, 16])), [2.0, 2.0, 3.0, 3.0])
    np.testing.assert_allclose(one.check(4, np.array([5, 8, 9, 16])), [3.0, 3.0, 3.5, 3.0])
    np.testing.assert_allclose(one.check(6, np.array([8])), [4.0])


class Timed:
    """A runner of four slots, whose steps take a second, 1/4 s for each token and 1/8 s for each row, by its clock."""

    num_slots = 4
    max_len = 100

    def __init__(self):
        self.now = 0.0
        self.programs = self
        self.mesh = None

    def perf_counter(self) -> float:
        return self.now

    def choose(self, shape, sampler, num_new, scores):
        return SimpleNamespace(shape=shape, length=num_new)

    def choose_checking(self, shape, sampler):
        return SimpleNamespace(shape=shape, length=1)

    def lengths(self, shapes, rows, sampler):
        return 1, 4, 64

    def set_slots(self, params) -> None:
        assert len(params) <= self.num_slots

    def step(self, program, packed):
        at = program.shape.fields["q_start"][0]
        starts = packed[at : at + program.shape.rows + 1]
        rows = np.count_nonzero(np.diff(starts))
        self.now += program.length * (1 + starts[-1] / 4 + rows / 8)
        return SimpleNamespace(tokens=np.zeros(1)), None


def test_steps_are_measured(monkeypatch):
    """Those that check proposals by their tokens, in as few rows as hold them, and for each row more; those that only
    decode by their rows."""
    runner = Timed()
    monkeypatch.setattr(step_times, "time", runner)
    shapes = [StepShape.of(4, 4, 8, decode_only=True), StepShape.of(16, 4, 8, decode_only=False)]
    found = Speculator(Ngram(1, 3), 3, 16)
    found.measure(runner, shapes)
    times = found.times
    assert times.full.sizes.tolist() == [1, 2, 3, 4, 5, 6, 8, 10, 12, 16]
    np.testing.assert_allclose(times.full.seconds, 1 + times.full.sizes / 4 + -(-times.full.sizes // 4) / 8)
    assert times.decode.sizes.tolist() == [1, 2, 3, 4]
    np.testing.assert_allclose(times.decode.seconds, 1 + times.decode.sizes * 3 / 8)
    assert (times.each, times.row) == (4, 1 / 8)
    assert found._most_rows == 4  # a step hardly takes longer for a token more


def test_steps_overlap_while_nothing_is_proposed(model_folders):
    """The next step is sent before the one before is read, as without speculation."""
    engine = make_engine(model_folders("llama3_gqa"), rows=4, tokens=32, max_model_len=96, speculative_config=NGRAM)
    engine.speculator = Speculator(Oracle([], 0.0), 4, budget=32)
    engine.add_request(request("a", [5, 6, 7], max_tokens=60, ignore_eos=True))
    engine.step()
    for _ in range(5):
        engine.step()
        assert len(engine.in_flight) == 1


def test_acceptance_follows_what_is_kept():
    acceptance = Acceptance(0.5)
    for _ in range(20):
        acceptance.learn(4, 4)
    assert acceptance.chance > 0.95
    for _ in range(10):
        acceptance.learn(4, 0)  # the three behind the first were not judged
    assert acceptance.chance < 0.2
    for _ in range(20):
        acceptance.learn(4, 1)
    assert 0.45 < acceptance.chance < 0.55


def test_prompt_lookup_prefers_the_longest_then_the_latest_place():
    tokens = np.array([1, 2, 3, 9, 8, 2, 3, 7, 7, 1, 2, 3], np.int32)
    assert Ngram(2, 4).propose(None, tokens, 3).tokens.tolist() == [9, 8, 2]
    assert Ngram(2, 2).propose(None, tokens, 3).tokens.tolist() == [7, 7, 1]
    assert Ngram(2, 4).propose(None, np.array([1, 2, 3], np.int32), 3) is None
    assert Ngram(1, 1).propose(None, np.array([4, 4, 4], np.int32), 3).tokens.tolist() == [4, 4, 4]
    assert Ngram(2, 4).propose(None, np.array([5, 1, 2, 3, 1, 2], np.int32), 5).tokens.tolist() == [3, 1, 2, 3, 1]


@pytest.mark.parametrize(("length", "kind"), [(2, 0), (3, 1), (4, 2), (7, 2), (8, 3), (15, 3), (16, 4), (30, 4)])
def test_longer_copies_are_of_another_kind(length, kind):
    copied = np.arange(10, 10 + length)
    tokens = np.concatenate([[1], copied, [2, 3, 4], copied]).astype(np.int32)
    assert Ngram().propose(None, tokens, 2).kind == kind
    assert Ngram().propose(None, tokens, 2).tokens.tolist() == [2, 3]


def sequence(tenant, salt, *outputs):
    asked = Request(request_id="a", prompt_token_ids=[90], params=SamplingParams(), tenant=tenant, cache_salt=salt)
    seq = Sequence(asked, 0, 0, 100, frozenset(), 0)
    seq.append(list(outputs))
    return seq


def test_recent_outputs_of_the_same_tenant():
    suffix = Suffix(2, 16)
    tokens = np.array([90, 5, 6, 7], np.int32)
    suffix.finished(sequence("a", None, 5, 6, 7, 8, 9))
    suffix.finished(sequence("a", None, 1, 5, 6, 7))
    assert suffix.propose(sequence("b", None), tokens, 4) is None
    assert suffix.propose(sequence("a", "salt"), tokens, 4) is None
    found = suffix.propose(sequence("a", None), tokens, 4)  # the second output ends where the copy does
    assert (found.tokens.tolist(), found.kind) == ([8, 9], 6)
    suffix.finished(sequence("a", None, 2, 6, 7, 3, 4))
    assert suffix.propose(sequence("a", None), tokens, 4).tokens.tolist() == [8, 9]  # three tokens are more than two
    suffix.finished(sequence("a", None, 5, 6, 7, 3, 4))
    found = suffix.propose(sequence("a", None), tokens, 4)
    assert (found.tokens.tolist(), found.kind) == ([3, 4], 6)
    own = np.array([1, 2, 5, 6, 7, 8, 8, 2, 5, 6, 7], np.int32)  # four tokens of its own are more
    assert suffix.propose(sequence("a", None), own, 2).tokens.tolist() == [8, 8]


def test_little_is_remembered():
    suffix = Suffix(1, 4)
    for i in range(3):
        suffix.finished(sequence("a", None, *range(30_000 * i, 30_000 * (i + 1))))
    assert suffix.propose(sequence("a", None), np.array([10], np.int32), 1) is None
    assert suffix.propose(sequence("a", None), np.array([80_000], np.int32), 1).tokens.tolist() == [80_001]
    for i in range(100):
        suffix.finished(sequence(f"tenant {i}", None, 1, 2))
    assert suffix.propose(sequence("a", None), np.array([80_000], np.int32), 1) is None
    assert len(suffix._outputs) == 64


def test_an_engine_learns_from_outputs(model_folders):
    settings = {"rows": 2, "tokens": 32, "max_model_len": 96}
    engine = make_engine(model_folders("llama3_gqa"), speculative_config=NGRAM | {"method": "suffix"}, **settings)
    asked = {"max_tokens": 40, "temperature": 0.7, "seed": 3}
    (first,) = run_all(engine, request("a", [5, 6, 7], **asked)).values()
    kept = engine.counters.spec_accepted
    (second,) = run_all(engine, request("b", [5, 6, 7], **asked)).values()
    assert second.token_ids == first.token_ids
    assert engine.counters.spec_accepted - kept >= 15


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "draft", "least", "options"),
    [
        ("llama3_gqa", "llama3_gqa", 0.95, {}),
        ("llama3_gqa", "qwen3_tied", 0.0, {}),
        ("llama3_gqa", "llama3_gqa", 0.9, {"kv_pages": 20}),
        pytest.param("llama3_gqa", "llama3_gqa", 0.95, {"static_steps": True}, marks=pytest.mark.slow),
        pytest.param("llama3_gqa", "llama3_gqa", 0.95, {"tensor_parallel_size": 2}, marks=pytest.mark.slow),
        pytest.param("mixtral_experts", "mixtral_experts", 0.95, {}, marks=pytest.mark.slow),
        pytest.param("deepseek_v3_groups", "deepseek_v3_groups", 0.95, {}, marks=pytest.mark.slow),
        pytest.param("qwen3_next_groups", "qwen3_tied", 0.0, {"kv_pages": 20}, marks=pytest.mark.slow),
    ],
)
def test_a_draft_model(target, draft, least, options, model_folders, monkeypatch):
    """A draft that is the target itself is always right, at any temperature; another one is mostly wrong."""
    for name in ("MIN_ACCEPTANCE", "RETRY_TOKENS", "COOLDOWN", "MAX_COOLDOWN"):
        monkeypatch.setattr(speculator, name, 0)
    settings = {"rows": 4, "tokens": 32, "max_model_len": 96, **options}
    plain = make_engine(model_folders(target), **settings)
    speculation = {"method": "draft_model", "model": str(model_folders(draft)), "num_speculative_tokens": 4}
    quick = make_engine(model_folders(target), speculative_config=speculation, **settings)
    quick.speculator._method._shapes = quick.shapes  # few programs
    asked = [one for one in requests(2, 24) if not one.params.has_penalties and not one.params.logit_bias]
    asked = [one for one in asked if not (plain.scheduler.recurrent and one.params.use_beam_search)]
    assert outcome(run_all(quick, *asked)) == outcome(run_all(plain, *asked))
    counters = quick.counters
    assert counters.spec_proposed > 100
    assert counters.spec_accepted >= least * counters.spec_proposed


def test_both_caches_leave_their_memory_to_the_compiler(model_folders, monkeypatch):
    """Also when it fails. XLA:GPU tries products while it compiles them."""
    folder = model_folders("llama3_gqa")
    speculation = {"method": "draft_model", "model": str(folder), "num_speculative_tokens": 4}
    engine = make_engine(folder, rows=4, tokens=32, max_model_len=96, speculative_config=speculation)
    runners = (engine.runner, engine._draft)
    seen = []

    def fail(self, name, lowered):
        seen.extend("cache" in vars(one) for one in runners)
        raise RuntimeError("no memory")

    monkeypatch.setattr(ModelRunner, "_compile", fail)
    for one in runners:
        monkeypatch.setattr(one, "_on_cpu", False)
        with pytest.raises(RuntimeError, match="no memory"):
            one.compile(one.names(engine.shapes)[-1:])
        assert ["cache" in vars(one) for one in runners] == [True, True]
    assert seen == [False] * 4
    with engine.runner.room_to_compile([]):
        assert ["cache" in vars(one) for one in runners] == [True, True]


@pytest.mark.slow
def test_a_draft_model_after_a_long_rest(model_folders):
    """Pages that change while nothing is proposed are known when something is; few plans are kept until then."""
    settings = {"rows": 4, "tokens": 32, "max_model_len": 96, "page_size": 8, "decode_steps": False}
    speculation = {"method": "draft_model", "model": str(model_folders("llama3_gqa")), "num_speculative_tokens": 4}
    engine = make_engine(model_folders("llama3_gqa"), speculative_config=speculation, **settings)
    method = engine.speculator._method
    method._shapes = engine.shapes  # few programs
    engine.speculator.set_times(StepTimes(Curve.of({4: 1.0}), Curve.of({32: 9.0})))
    for i in range(8):
        run_all(engine, *(request(f"{i} {j}", [5 + i, 6, 7 + j] * 5, max_tokens=70, ignore_eos=True) for j in range(4)))
        assert len(method._plans) < MOST_PLANS
    assert engine.counters.steps > 500
    assert engine.counters.spec_drafts == 0
    engine.speculator.set_times(None)
    run_all(engine, *(request(f"last {j}", [9, 6, 7 + j] * 5, max_tokens=70, ignore_eos=True) for j in range(4)))
    assert engine.counters.spec_accepted >= 0.95 * engine.counters.spec_proposed > 100


def test_statistics_continue_after_a_restart():
    past = EngineStats()
    present = EngineStats()
    past.count_drafts(np.array([4]), np.array([2]))
    present.count_drafts(np.array([3]), np.array([3]))
    both = present.after(past)
    assert (both.spec_drafts, both.spec_proposed, both.spec_accepted) == (2, 7, 5)
    assert both.spec_accepted_at == [2, 2, 1, 0]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"method": "magic"}, "method must be ngram or suffix or draft_model or eagle3 or mtp, got 'magic'"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens must be between 1 and 31, got 0"),
        ({"prompt_lookup_min": 5, "prompt_lookup_max": 4}, "prompt_lookup_max must be between 5 and 64, got 4"),
        (
            {"tokens": 3},
            "must have only method, model, num_speculative_tokens, prompt_lookup_min, prompt_lookup_max, got tokens",
        ),
        ([1], "must be an object of settings"),
    ],
)
def test_bad_settings(given, message):
    with pytest.raises(ConfigError, match="speculative_config.*" + message.replace("[", r"\[")):
        EngineConfig(model="demo", speculative_config=given)


def test_drafts_without_recurrent_layers(model_folders):
    draft = {"method": "draft_model", "num_speculative_tokens": 2, "model": str(model_folders("lfm2_tied"))}
    with pytest.raises(ConfigError, match="must keep no recurrent states"):
        make_engine(model_folders("llama3_gqa"), speculative_config=draft)
