"""The programs of accelerators, made on CPU: fixed in the sampler and in the tokens a call draws, and with the same
answers as the one program that decides at run time."""

from dataclasses import replace

import numpy as np
import pytest
from engines import generate, make_engine, request

from jaxserve.execution.buckets import step_shapes
from jaxserve.execution.cost import StepCost
from jaxserve.execution.programs import LENGTHS, PLAIN_ROWS, StepPrograms
from jaxserve.scheduling.step_plan import Sampler
from jaxserve.types import Grammar, SamplingParams

pytestmark = pytest.mark.compiles

CASE = "tp_gqa"
RNG = np.random.default_rng(3)
PROMPTS = [RNG.integers(5, 500, n).tolist() for n in (3, 9, 40)]
KINDS = {
    Sampler.GREEDY: {},
    Sampler.PLAIN: {"temperature": 0.9, "seed": 4},
    Sampler.FILTERED: {"temperature": 0.9, "top_p": 0.9, "top_k": 60, "min_p": 0.01, "seed": 4},
    Sampler.FULL: {
        "temperature": 0.9, "top_p": 0.9, "seed": 4, "frequency_penalty": 0.5, "logit_bias": {9: 3.0}, "logprobs": 3,
        "min_tokens": 4,
    },
}  # fmt: skip
LENGTH = 24


def requests(kind: Sampler, tag: str = ""):
    params = {"max_tokens": LENGTH, **KINDS[kind]}
    return [request(f"{tag}{kind.name}-{i}", prompt, **params) for i, prompt in enumerate(PROMPTS)]


def tokens(completions):
    return [one.token_ids for one in completions]


def small(model_folders, static: bool, **config):
    engine = make_engine(model_folders(CASE), rows=8, tokens=64, kv_pages=400, static_steps=static, **config)
    engine.ran = []  # the programs of all steps
    step = engine.runner.step
    engine.runner.step = lambda program, packed: engine.ran.append(program) or step(program, packed)
    return engine


@pytest.fixture(scope="module")
def expected(model_folders):
    engine = small(model_folders, static=False)
    return {kind: tokens(generate(engine, *requests(kind))) for kind in KINDS}


@pytest.fixture(scope="module")
def static(model_folders):
    return small(model_folders, static=True)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_each_sampler_gives_the_same_tokens(kind, static, expected):
    static.ran.clear()
    results = generate(static, *requests(kind))
    assert tokens(results) == expected[kind]
    stand_in = Sampler.FILTERED if kind is Sampler.PLAIN else kind
    assert {program.sampler for program in static.ran} == {stand_in}
    assert [len(one.logprobs) for one in results] == [LENGTH if kind is Sampler.FULL else 0] * len(PROMPTS)


@pytest.mark.slow
def test_a_sampler_that_can_do_more_gives_the_same_tokens(static, expected):
    """One row asks for everything, and the others run with it."""
    results = generate(
        static, *requests(Sampler.GREEDY, "beside-"), *requests(Sampler.PLAIN), *requests(Sampler.FULL)[:1]
    )
    assert tokens(results) == expected[Sampler.GREEDY] + expected[Sampler.PLAIN] + expected[Sampler.FULL][:1]


@pytest.mark.parametrize("kind", [Sampler.GREEDY, Sampler.FILTERED])
def test_several_tokens_a_call_give_the_same_tokens(kind, model_folders, expected):
    engine = small(model_folders, static=True, latency_goal_ms=60_000.0)
    assert tokens(generate(engine, *requests(kind))) == expected[kind]
    lengths = {program.tokens_per_call for program in engine.ran if program.shape.decode_only}
    assert max(lengths) == 8
    assert lengths <= set(LENGTHS)
    # A stop token in the middle of a call ends a row there.
    stops = [ids[LENGTH // 2] for ids in expected[kind]]
    ended = [
        request(f"stop-{i}", prompt, max_tokens=LENGTH, stop_token_ids=(stop,), **KINDS[kind])
        for i, (prompt, stop) in enumerate(zip(PROMPTS, stops, strict=True))
    ]
    cut = [ids[: ids.index(stop) + 1] for ids, stop in zip(expected[kind], stops, strict=True)]
    assert tokens(generate(engine, *ended)) == cut


@pytest.mark.slow
def test_rows_shared_out_over_devices_give_the_same_tokens(model_folders, expected):
    """Three rows on eight devices, which pad them."""
    engine = small(model_folders, static=True, tensor_parallel_size=8)
    for kind in (Sampler.GREEDY, Sampler.FULL):
        assert tokens(generate(engine, *requests(kind))) == expected[kind]
    scored = request("scored", PROMPTS[2], max_tokens=4, prompt_logprobs=2, logprobs=2)
    (one,) = generate(engine, scored)
    (other,) = generate(small(model_folders, static=False), scored)
    assert [entry.token_id for entry in one.logprobs] == [entry.token_id for entry in other.logprobs]
    for mine, theirs in zip(
        one.logprobs + one.prompt_logprobs[1:], other.logprobs + other.prompt_logprobs[1:], strict=True
    ):
        assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-4)
        assert [token for token, _ in mine.top] == [token for token, _ in theirs.top]


@pytest.mark.slow
def test_masks_beams_and_prompt_scores(model_folders):
    """What draws apart from the step, or wants its hidden states."""
    some = [
        request("allowed", PROMPTS[1], max_tokens=9, allowed_token_ids=tuple(range(5, 300)), seed=3, temperature=1.0),
        request("search", PROMPTS[1], use_beam_search=True, n=2, max_tokens=7),
        request("scored", PROMPTS[2], max_tokens=4, prompt_logprobs=2),
        request("told", PROMPTS[0], max_tokens=9, allowed_token_ids=tuple(range(5, 300)), logprobs=3),
        *requests(Sampler.GREEDY),
    ]
    one, other = (generate(small(model_folders, static=static), *some) for static in (True, False))
    assert tokens(one) == tokens(other)
    assert [entry.token_id for entry in one[2].prompt_logprobs[1:]] == PROMPTS[2][1:]
    for mine, theirs in zip(one[2].prompt_logprobs[1:], other[2].prompt_logprobs[1:], strict=True):
        assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-4)
        assert [token for token, _ in mine.top] == [token for token, _ in theirs.top]
    assert [entry.token_id for entry in one[3].logprobs] == one[3].token_ids
    assert [len(entry.top) for entry in one[3].logprobs] == [3] * 9


@pytest.mark.slow
def test_log_probabilities_beside_rows_that_want_none(model_folders):
    """A row with a mask draws apart, so that the step's own program may have none: hers come with the draw."""
    alone = request("told", PROMPTS[0], max_tokens=9, allowed_token_ids=tuple(range(5, 300)), logprobs=3)
    one, other = (generate(small(model_folders, static=static), alone)[0] for static in (True, False))
    assert one.token_ids == other.token_ids
    for mine, theirs in zip(one.logprobs, other.logprobs, strict=True):
        assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-4)
        assert mine.token_id in range(5, 300)


def test_log_probabilities_are_never_left_out(model_folders):
    """A program without them, chosen by mistake, is found out at once."""
    engine = small(model_folders, static=True)
    engine.add_request(request("told", PROMPTS[0], max_tokens=9, logprobs=3))
    choose = engine.runner.programs.choose
    engine.runner.programs.choose = lambda shape, _, *rest, **options: choose(shape, Sampler.GREEDY, *rest, **options)
    while not (output := engine.step()).updates:
        pass
    assert output.updates[0].finish_reason == "error"


@pytest.mark.slow
def test_everything_is_compiled_before_the_engine_is_ready(model_folders):
    engine = small(model_folders, static=True, forbid_compile=True, decode_steps=2, latency_goal_ms=60_000.0)
    engine.compile()
    before = engine.programs.compilations
    for kind in KINDS:
        generate(engine, *requests(kind))
    generate(engine, *[one for kind in KINDS for one in requests(kind, "again-")])
    generate(engine, request("scored", PROMPTS[2], max_tokens=4, prompt_logprobs=2))
    assert engine.programs.compilations == before


# Which programs there are


@pytest.mark.parametrize("costly", [False, True])
@pytest.mark.parametrize("most", [1, 2, 3, 16])
@pytest.mark.parametrize("rows", [1, 5, 100, 256])
def test_whatever_is_chosen_was_compiled(rows, most, costly):
    shapes = step_shapes(rows, 2048, 16, cost=StepCost(weights=0.003, token=1e-5), chunk=512)
    programs = StepPrograms(static=True, most=most, costly_filters=costly)
    compiled = programs.all(shapes)
    assert any(program.sampler is Sampler.PLAIN for program in compiled) == (costly and rows >= PLAIN_ROWS)
    assert len(set(compiled)) == len(compiled)
    assert len(compiled) <= 5 * len(shapes) + 3 * 2 * 4 + 1, "as many as the description says, and no more"
    for sampler in list(Sampler)[: Sampler.ANY]:
        for count in range(1, rows + 1):
            lengths = programs.lengths(shapes, count, sampler)
            assert lengths[0] == 1
            assert max(lengths) <= most
            shape = next(shape for shape in shapes if shape.decode_only and shape.rows >= count)
            for steps in range(1, max(lengths) + 1):  # rows near their ends draw fewer
                program = programs.choose(shape, sampler, steps, False)
                assert program in compiled
                assert program.sampler >= sampler
                assert program.tokens_per_call >= steps
        for shape in shapes:
            if not shape.decode_only:
                assert programs.choose(shape, sampler, 1, False) in compiled
    assert programs.choose(shapes[-1], Sampler.GREEDY, 1, True) in compiled


@pytest.mark.parametrize("static", [True, False])
def test_steps_without_the_draft_head(static):
    shapes = step_shapes(64, 2048, 16)
    programs = StepPrograms(static=static, has_head=True, proposals=3)
    compiled = programs.all(shapes)
    for shape in shapes:
        reading, other = (programs.choose(shape, Sampler.GREEDY, 1, False, drafts=drafts) for drafts in (True, False))
        assert {reading, other} <= set(compiled)
        assert reading.drafts
        assert other == (reading if static and shape.rows <= 8 else replace(reading, drafts=False))
    assert all(one.drafts for one in StepPrograms(static=static).all(shapes)), "models without a head"


def test_a_cpu_has_one_program_per_bucket():
    shapes = step_shapes(256, 2048, 16)
    programs = StepPrograms(static=False)
    assert len(programs.all(shapes)) == len(shapes)
    assert {programs.choose(shape, sampler, 1, False) for shape in shapes for sampler in KINDS} == set(
        programs.all(shapes)
    )


@pytest.mark.parametrize(
    ("params", "sampler"),
    [
        ({"temperature": 0.0, "top_k": 5}, Sampler.GREEDY),
        ({"temperature": 1.0, "top_p": 0.0}, Sampler.GREEDY),
        ({"temperature": 1.0}, Sampler.PLAIN),
        ({"temperature": 1.0, "top_k": -1}, Sampler.PLAIN),
        ({"temperature": 1.0, "top_k": 5}, Sampler.FILTERED),
        ({"temperature": 1.0, "top_p": 0.9}, Sampler.FILTERED),
        ({"temperature": 1.0, "min_p": 0.1}, Sampler.FILTERED),
        ({"temperature": 0.0, "presence_penalty": 0.1}, Sampler.FULL),
        ({"temperature": 0.0, "logit_bias": {1: 1.0}}, Sampler.FULL),
        ({"temperature": 0.0, "min_tokens": 1}, Sampler.FULL),
        ({"temperature": 0.0, "logprobs": 0}, Sampler.FULL),
        ({"temperature": 0.0, "logprobs": 0, "grammar": Grammar("regex", "a*")}, Sampler.GREEDY),  # draws apart
    ],
)
def test_the_least_sampler_of_a_request(params, sampler):
    assert Sampler.of(SamplingParams(**params)) is sampler
