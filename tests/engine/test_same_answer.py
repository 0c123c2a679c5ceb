"""A request's tokens depend on the request alone: not on its batch, the cache, chunking, preemption or the mesh."""

import numpy as np
import pytest
from engines import drain, generate, make_engine, request

pytestmark = pytest.mark.compiles

CASE = "tp_gqa"  # 8 query heads over 2 KV heads: with 8 devices each KV head stands on four of them
RNG = np.random.default_rng(7)
PROMPTS = [RNG.integers(5, 500, n).tolist() for n in (1, 9, 33, 70)]
SAMPLED = {
    "temperature": 0.9,
    "top_p": 0.95,
    "top_k": 80,
    "seed": 1234,
    "frequency_penalty": 0.3,
    "repetition_penalty": 1.1,
}
KINDS = {"greedy": {}, "sampled": SAMPLED}
LENGTH = 40


def requests(tag=""):
    return [
        request(f"{tag}{kind}-{i}", prompt, max_tokens=LENGTH, **params)
        for i, prompt in enumerate(PROMPTS)
        for kind, params in KINDS.items()
    ]


@pytest.fixture(scope="module")
def alone(model_folders):
    """Each request's tokens when it is by itself, in steps of one row."""
    engine = make_engine(model_folders(CASE), rows=1, tokens=128, prefix_caching=False)
    return [generate(engine, one)[0].token_ids for one in requests()]


def tokens(completions):
    return [completion.token_ids for completion in completions]


@pytest.mark.slow
def test_the_reference_is_not_trivial(alone):
    assert all(len(ids) == LENGTH for ids in alone)
    assert len({tuple(ids) for ids in alone}) == len(alone)
    assert all(len(set(ids)) > 10 for ids in alone)


@pytest.mark.slow
def test_in_a_batch_of_32(model_folders, alone):
    engine = make_engine(model_folders(CASE), rows=32, tokens=128, kv_pages=400)
    others = [request(f"other-{i}", RNG.integers(5, 500, 5 + i), max_tokens=50) for i in range(24)]
    results = generate(engine, *others[:12], *requests(), *others[12:])
    assert tokens(results[12 : 12 + len(alone)]) == alone


@pytest.mark.slow
def test_with_its_prefix_cached(model_folders, alone):
    engine = make_engine(model_folders(CASE), rows=8, tokens=128)
    generate(engine, *requests("first-"))
    results = generate(engine, *requests("again-"))
    assert tokens(results) == alone
    assert [r.num_cached for r in results] == [(len(p) - 1) // 16 * 16 for p in PROMPTS for _ in KINDS]


@pytest.mark.slow
def test_when_chunked(model_folders, alone):
    engine = make_engine(model_folders(CASE), rows=8, tokens=16)
    plans = []
    schedule = engine.scheduler.schedule
    engine.scheduler.schedule = lambda steps: plans.append(schedule(steps)) or plans[-1]
    assert tokens(generate(engine, *requests())) == alone
    rows = [row for plan in plans if plan for row in zip(plan.rows.seqs, plan.rows.start, strict=True)]
    longest = [start for seq, start in rows if seq.prompt_len == 70 and start < 70]
    assert len(longest) > 6, "the 70-token prompts were not computed in chunks"


@pytest.mark.slow
def test_after_preemption(model_folders, alone):
    engine = make_engine(model_folders(CASE), rows=8, tokens=128, kv_pages=20, max_model_len=200)
    assert tokens(generate(engine, *requests())) == alone
    assert engine.stats().preemptions > 3


@pytest.mark.slow
@pytest.mark.parametrize("pages", [400, 20])
def test_with_few_penalty_rows(pages, model_folders, alone):
    """Sequences with penalties wait for a row of token counts, and take over rows that others have used."""
    engine = make_engine(model_folders(CASE), rows=8, tokens=128, kv_pages=pages, max_model_len=200, max_penalty_seqs=2)
    assert engine.runner.slots.counts.shape[0] == 2 + 1
    most = []
    schedule = engine.scheduler.schedule

    def watch(steps):
        plan = schedule(steps)
        most.append(sum(seq.params.has_penalties for seq in engine.scheduler.running))
        return plan

    engine.scheduler.schedule = watch
    assert tokens(generate(engine, *requests())) == alone
    assert max(most) == 2


@pytest.mark.slow
@pytest.mark.parametrize("devices", [2, 8])
def test_under_tensor_parallelism(devices, model_folders, alone):
    engine = make_engine(model_folders(CASE), rows=8, tokens=128, tensor_parallel_size=devices)
    assert tokens(generate(engine, *requests())) == alone
    kernel = engine.runner.params["layers_0"]["mlp"]["down"]["kernel"]
    assert kernel.addressable_shards[0].data.shape[1] == kernel.shape[1] // devices
    pages = engine.runner.cache[0]
    assert pages.kv_heads == max(2, devices)
    assert pages.data.addressable_shards[0].data.shape[2] == max(2, devices) // devices


@pytest.mark.slow
def test_completions_of_one_prompt(model_folders):
    """n > 1: completion 0 is what n = 1 gives; the others differ, and repeat with the seed."""
    engine = make_engine(model_folders(CASE), rows=8, tokens=128)
    prompt = PROMPTS[3]
    copies = []
    copy_pages = engine.runner.copy_pages
    engine.runner.copy_pages = lambda pairs: copies.extend(pairs) or copy_pages(pairs)

    def run(n, name):
        engine.add_request(request(name, prompt, n=n, max_tokens=LENGTH, temperature=1.0, seed=5))
        results = drain(engine)
        return [results[name, i].token_ids for i in range(n)]

    (one,) = run(1, "one")
    four = run(4, "four")
    assert four[0] == one
    assert len({tuple(ids) for ids in four}) == 4
    assert copies, "completions that share a half-filled page must copy it before they write"
    assert run(4, "again") == four
    # More completions than slots: the rest waits, and comes out the same.
    assert run(12, "twelve")[:4] == four


def test_greedy_completions_are_equal(model_folders):
    engine = make_engine(model_folders(CASE), rows=4)
    engine.add_request(request("r", PROMPTS[1], n=3, max_tokens=20))
    results = drain(engine)
    assert results["r", 0].token_ids == results["r", 1].token_ids == results["r", 2].token_ids


def test_aborting_frees_everything(model_folders):
    engine = make_engine(model_folders(CASE), rows=4)
    for one in requests():
        engine.add_request(one)
    engine.add_request(request("many", PROMPTS[1], n=6, max_tokens=30))
    for _ in range(5):
        engine.step()
    assert engine.blocks.num_used > 0
    for one in requests():
        engine.abort(one.request_id)
    engine.abort("many")
    engine.abort("never heard of")
    drain(engine)
    assert engine.stats().num_waiting == engine.stats().num_running == 0


@pytest.mark.slow
@pytest.mark.parametrize("pages", [400, 20])
def test_asynchronous_scheduling_changes_nothing(pages, model_folders, alone):
    engine = make_engine(
        model_folders(CASE), rows=8, tokens=64, kv_pages=pages, max_model_len=200, async_scheduling=False
    )
    assert tokens(generate(engine, *requests())) == alone
    assert not engine.in_flight


@pytest.mark.slow
@pytest.mark.parametrize("pages", [400, 20])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_several_tokens_per_call_change_nothing(pages, asynchronous, model_folders, alone):
    """The loop on the device: whatever ends within a call, and however the calls are cut."""
    engine = make_engine(
        model_folders(CASE),
        rows=8,
        tokens=64,
        kv_pages=pages,
        max_model_len=200,
        async_scheduling=asynchronous,
        latency_goal_ms=60_000.0,
    )
    drawn = []
    dispatch = engine.dispatch
    engine.dispatch = lambda plan: drawn.append(int(plan.rows.num_new.max())) or dispatch(plan)
    assert tokens(generate(engine, *requests())) == alone
    assert max(drawn) == 16
    # Stop tokens end a row within a call.
    stops = [ids[LENGTH // 2] for ids in alone]
    stopping = [
        request(f"stop-{one.request_id}", one.prompt_token_ids, **with_stop(one.params, stop))
        for one, stop in zip(requests(), stops, strict=True)
    ]
    results = generate(engine, *stopping)
    assert tokens(results) == [ids[: ids.index(stop) + 1] for ids, stop in zip(alone, stops, strict=True)]
    assert {r.finish_reason for r in results} == {"stop"}
    assert [r.stop_token for r in results] == stops


def with_stop(params, token):
    return {name: getattr(params, name) for name in params.__struct_fields__} | {"stop_token_ids": (token,)}


def test_calls_are_short_while_a_client_streams(model_folders):
    """One token per call where a step takes longer than the latency goal; more where nobody watches."""
    engine = make_engine(model_folders(CASE), latency_goal_ms=10.0)
    for streams, step_ms, expected in ((True, 6, 1), (True, 2, 5), (False, 6, 6), (False, 50, 1), (False, 0.1, 16)):
        one = request("r", PROMPTS[0], max_tokens=4)
        one.streams = streams
        engine.add_request(one)
        engine.pace.step_seconds = step_ms / 1000 * 0.999
        assert engine._tokens_per_call() == expected
        engine.abort("r")
    engine.add_request(request("waits", PROMPTS[0], max_tokens=20))
    engine.pace.step_seconds = 1e-6
    assert engine.scheduler.schedule(engine._tokens_per_call()).rows.num_new.tolist() == [1], "a prompt is computed"


@pytest.mark.slow
@pytest.mark.parametrize("config", [{}, {"prefix_caching": False}, {"async_scheduling": False}])
def test_paused_and_gone_on(model_folders, alone, config):
    """In the middle, twice; meanwhile it holds no pages, and others go on."""
    engine = make_engine(model_folders(CASE), rows=8, tokens=128, **config)
    all_sequences = requests()
    for one in all_sequences:
        engine.add_request(one)
    names = [one.request_id for one in all_sequences]
    gained = {}

    def run(steps: int) -> None:
        for _ in range(steps):
            if not engine.has_work:
                return
            for update in engine.step():
                gained.setdefault(update.request_id, []).extend(update.token_ids)
            engine.scheduler.check_integrity()

    for first in (0, 1):
        run(6)
        paused = names[first::2]
        for name in paused:
            engine.pause(name, True)
            engine.pause(name, True)
        run(2)  # steps in flight land
        before = {name: len(gained.get(name, ())) for name in paused}
        run(3)
        assert {name: len(gained.get(name, ())) for name in paused if before[name]} == {
            n: c for n, c in before.items() if c
        }
        for name in paused:
            engine.pause(name, False)
    run(6)
    for name in names:
        engine.pause(name, True)
    while engine.has_work:
        run(1)
    assert engine.blocks.num_used == 0
    for name in names:
        engine.pause(name, False)
        engine.pause(name, False)
    run(1000)
    assert not engine.has_work
    assert [gained[name] for name in names] == alone
    engine.pause("unknown", True)


def test_paused_and_aborted(model_folders):
    engine = make_engine(model_folders(CASE), rows=4, tokens=128)
    one = request("one", PROMPTS[1], max_tokens=50, n=2)
    engine.add_request(one)
    for _ in range(5):
        engine.step()
    engine.pause("one", True)
    engine.abort("one", 0)
    engine.abort("one")
    engine.scheduler.check_integrity()
    assert drain(engine) == {}
    assert "one" not in engine.scheduler


@pytest.mark.slow
def test_rows_that_wait_for_the_host_draw_beside_the_loop_of_the_others(model_folders, alone):
    """Masks, beams and a queue do not stop the loop on the device, and none of it changes an answer."""
    engine = make_engine(model_folders(CASE), rows=8, tokens=64, kv_pages=400, max_model_len=200)
    masked = [
        request(
            "allowed", PROMPTS[1], max_tokens=LENGTH, allowed_token_ids=tuple(range(5, 300)), seed=3, temperature=1.0
        ),
        request("bad", PROMPTS[2], max_tokens=LENGTH, bad_words=((7,), (9, 11))),
    ]
    search = request("search", PROMPTS[1], use_beam_search=True, n=2, max_tokens=12)
    expected = tokens(generate(engine, *masked)), generate(engine, search)[0].token_ids
    calls = []
    schedule = engine.scheduler.schedule

    def looped(_steps):
        plan = schedule(16)
        if plan is not None:
            single = [seq.params.has_mask or seq.params.use_beam_search for seq in plan.rows.seqs]
            calls.append((plan.rows.num_new.tolist(), single, len(engine.scheduler.waiting)))
        return plan

    engine.scheduler.schedule = looped
    results = tokens(generate(engine, *masked, search, *requests()))
    assert results[:2] == expected[0]
    assert results[2] == expected[1]
    assert results[3:] == alone
    beside = [draws for draws, single, _ in calls if any(single) and max(draws) > 1]
    assert len(beside) > 2
    assert all(draw <= 1 for draws, single, _ in calls for draw, one in zip(draws, single, strict=True) if one)
    assert any(max(draws) > 1 for draws, _, waiting in calls if waiting), "eleven requests in eight slots"


def test_the_loop_takes_no_longer_than_the_host_while_it_keeps_others_waiting(model_folders):
    engine = make_engine(model_folders(CASE))
    pace = engine.pace
    pace.step_seconds = pace.device_seconds = 0.001
    for host_ms, expected in ((0.5, 1), (3.5, 4), (100, 16)):
        pace.host_seconds = host_ms / 1000
        assert pace.tokens_per_call(range(1, 17), watched=True, holds_up=True) == expected
    assert pace.tokens_per_call(range(1, 17), watched=False, holds_up=False) == 16
