"""The scheduler against a simulated device; see `simulation` and `null_device`."""

import contextlib
from collections import Counter

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from null_device import VOCAB, each
from simulation import TOKENS_PER_CALL, Simulation

from jaxserve.execution.buckets import step_shapes
from jaxserve.execution.cost import StepCost
from jaxserve.execution.step_buffer import split
from jaxserve.limits import BACKGROUND
from jaxserve.scheduling import block_manager, sequence, waiting
from jaxserve.scheduling.block_manager import Chunk
from jaxserve.scheduling.row_choice import TokenBudget
from jaxserve.scheduling.sequence import Sequence
from jaxserve.scheduling.step_plan import StepPlan
from jaxserve.types import InvalidRequestError, Request, SamplingParams

# Random use

KINDS = ["scored", "masked", "masked", "beams", *["ordinary"] * 6]
CHUNKED = [(None, Chunk(4)), (None, Chunk(12)), (Chunk(8), None, 5, Chunk(8))]
FAMILIES = ([0] * 40, [1, 2] * 20, [3, 4, 5, 0, 1] * 8)  # prompts begin like one of these


class SchedulerMachine(RuleBasedStateMachine):
    """Requests come and go while steps run, one at a time or with one in flight."""

    @initialize(
        num_pages=st.integers(4, 24),
        page_size=st.sampled_from([1, 2, 4]),
        max_num_seqs=st.integers(1, 12),
        budget=st.integers(1, 24),
        prefix_caching=st.sampled_from([True, True, True, False]),
        windows=st.sampled_from([(None,), (None,), (2,), (5,), (9,), (None, 5), (3, None, 9), (2, 7), *CHUNKED]),
        snapshots=st.sampled_from([None, None, None, 0, 1, 5]),
        interval=st.sampled_from([0, 1, 3]),
        places=st.sampled_from([None, None, 1, 2, 3]),
        tiers=st.sampled_from([None, None, 2, 20]),
        files=st.booleans(),
        cost=st.sampled_from([None, StepCost(weights=0.003, token=0.001), StepCost(weights=1.0, token=0.001)]),
    )
    def create(self, **sizes):
        self.simulation = Simulation(**sizes)

    @rule(
        family=st.sampled_from(FAMILIES),
        shared=st.integers(0, 20),
        tail=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=3),
        n=st.sampled_from([1, 1, 2, 4]),
        max_tokens=st.integers(0, 20),
        priority=st.sampled_from([0, 0, 0, -1, 1, BACKGROUND, BACKGROUND]),
        stop_ids=st.sampled_from([(), (), (0,), (1, 2)]),
        salt=st.sampled_from([None, None, None, "a"]),
        kind=st.sampled_from(["plain", "plain", "scored", "masked", "beams"]),
        adapter=st.sampled_from([None, *"abcdef"]),
    )
    def add(self, family, shared, tail, n, max_tokens, kind, **options):
        prompt = (family[:shared] + tail)[: max(self.simulation.longest - max_tokens, 1)]
        max_tokens = min(max_tokens, self.simulation.longest - len(prompt))
        if kind == "beams" and (not max_tokens or self.simulation.scheduler.recurrent):
            kind = "plain"  # recurrent models have no beams
        if kind != "plain":
            options[kind] = True
        if self.simulation.adapters is None:
            del options["adapter"]
        with contextlib.suppress(InvalidRequestError):  # beams that have no room
            self.simulation.add(prompt, n=n if max_tokens else 1, max_tokens=max_tokens, **options)

    @precondition(lambda self: self.simulation.jobs)
    @rule(data=st.data())
    def abort_request(self, data):
        self.simulation.abort(data.draw(st.sampled_from(sorted(self.simulation.jobs))))

    @precondition(lambda self: self.simulation.jobs)
    @rule(data=st.data())
    def abort_completion(self, data):
        """Whether it runs, waits, is over, or was not made yet."""
        name = data.draw(st.sampled_from(sorted(self.simulation.jobs)))
        self.simulation.abort(name, data.draw(st.integers(0, self.simulation.jobs[name].request.params.n - 1)))

    @precondition(lambda self: self.simulation.jobs)
    @rule(data=st.data(), paused=st.booleans())
    def pause(self, data, paused):
        self.simulation.pause(data.draw(st.sampled_from(sorted(self.simulation.jobs))), paused)

    @precondition(lambda self: self.simulation.adapters)
    @rule(name=st.sampled_from("abcdef"))
    def lose_adapter(self, name):
        """Its files are gone."""
        self.simulation.disk.lost.add(f"digest of {name}")

    @rule(times=st.integers(1, 6), tokens_per_call=st.sampled_from(TOKENS_PER_CALL))
    def step(self, times, tokens_per_call):
        for _ in range(times):
            self.simulation.step(tokens_per_call)

    @rule(times=st.integers(1, 6), tokens_per_call=st.sampled_from(TOKENS_PER_CALL))
    def overlapped_step(self, times, tokens_per_call):
        for _ in range(times):
            self.simulation.overlapped_step(tokens_per_call)

    @rule(times=st.integers(1, 4), most=st.integers(1, 8), right=st.integers(0, 8), overlapped=st.booleans())
    def speculate(self, times, most, right, overlapped):
        for _ in range(times):
            self.simulation.propose(most, right)
            self.simulation.overlapped_step() if overlapped else self.simulation.dispatch()

    @precondition(lambda self: self.simulation.in_flight)
    @rule()
    def commit(self):
        self.simulation.commit()

    @precondition(lambda self: not self.simulation.in_flight)
    @rule()
    def reset_prefix_cache(self):
        self.simulation.reset_prefix_cache()

    @invariant()
    def is_whole(self):
        if hasattr(self, "simulation"):
            self.simulation.check()

    def teardown(self):
        if hasattr(self, "simulation"):
            self.simulation.drain()


SchedulerMachine.TestCase.settings = settings(
    max_examples=200, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestScheduler = SchedulerMachine.TestCase


PRESSED = [((None,), None), ((6,), None), ((None, 6, 6), None), ((None,), 6), ((None, Chunk(8), Chunk(8)), None)]


@pytest.mark.slow
@pytest.mark.parametrize(("windows", "snapshots"), PRESSED)
@pytest.mark.parametrize("overlapped", [False, True])
def test_under_pressure(overlapped, windows, snapshots):
    """Many requests in few pages, and proof that the hard cases did occur."""
    events: Counter[str] = Counter()
    without = None if snapshots is None else "beams"
    for seed in range(12):
        rng = np.random.default_rng(seed)
        choices = np.random.default_rng(seed)
        simulation = Simulation(
            num_pages={(None,): 13, (6,): 11}.get(windows, 32),
            page_size=4,
            max_num_seqs=5,
            budget=int(rng.integers(5, 20)),
            windows=windows,
            snapshots=snapshots,
            interval=1,
        )
        for _ in range(40):
            shared = FAMILIES[rng.integers(3)][: rng.integers(20)]
            tail = rng.integers(0, VOCAB, rng.integers(1, 4))
            with contextlib.suppress(InvalidRequestError):  # beams that have no room
                simulation.add(
                    shared + tail.tolist(),
                    n=int(rng.integers(1, 5)),
                    max_tokens=int(rng.integers(1, 20)),
                    priority=[-1, 0, BACKGROUND][rng.integers(3)],
                    stop_ids=() if rng.random() < 0.5 else (0,),
                    salt=["a", None][rng.integers(2)],
                    **{kind: True for kind in [str(rng.choice(KINDS))] if kind not in ("ordinary", without)},
                )
            for tokens_per_call in rng.choice(TOKENS_PER_CALL, rng.integers(0, 12)).tolist():
                if choices.random() < 0.2:
                    simulation.propose(int(choices.integers(1, 5)), int(choices.integers(0, 5)))
                simulation.overlapped_step(tokens_per_call) if overlapped else simulation.step(tokens_per_call)
        simulation.drain(overlapped=overlapped)
        events += simulation.events
    least = {
        "preemptions": 100 if windows == (None,) else 70,
        "evictions": 100,
        "copies": 100,
        "prefix hits": 100,
        "chunks": 50,
        "overflow": 10,
        "cut plans": 100,
        "loops": 100,
        "loops while others wait": 20,
        "loops beside single draws": 20,
        "late draws": 200,
        "beams": 15,
        "copied tables": 20,
        "kept proposals": 50,
        "lost proposals": 50,
    }
    if snapshots is not None:
        unshared = ("beams", "copies", "copied tables", "overflow")
        least = {name: n for name, n in least.items() if name not in unshared} | {"restored": 100, "kept": 300}
    if any(isinstance(window, Chunk) for window in windows):
        least["ends of chunks"] = 200
    if overlapped:
        least |= {"overlapped": 100, "unknown tokens": 500, "ended on the device": 50}
    assert {name: n for name, n in least.items() if events[name] < n} == {}, events


def test_recurrent_states_in_random_schedules():
    """200 schedules with preemption, proposals and snapshots. The device asserts that each row continues from the state
    behind the tokens before it."""
    events: Counter[str] = Counter()
    for seed in range(200):
        rng = np.random.default_rng(seed)
        sizes = {"num_pages": int(rng.integers(8, 14)), "page_size": 4, "max_num_seqs": int(rng.integers(2, 5))}
        kept = {"snapshots": int(rng.choice([1, 4, 9])), "interval": int(rng.choice([0, 1, 2]))}
        simulation = Simulation(**sizes, budget=int(rng.integers(5, 20)), **kept)
        for _ in range(4):
            prompt = FAMILIES[rng.integers(3)][: rng.integers(20)] + rng.integers(0, VOCAB, 2).tolist()
            most = int(rng.integers(1, simulation.longest - len(prompt) + 1))
            simulation.add(prompt, n=int(rng.integers(1, 3)), max_tokens=min(most, 20))
            for tokens_per_call in rng.choice(TOKENS_PER_CALL, rng.integers(0, 8)).tolist():
                if rng.random() < 0.4:
                    simulation.propose(int(rng.integers(1, 5)), int(rng.integers(0, 5)))
                simulation.overlapped_step(tokens_per_call) if seed % 2 else simulation.step(tokens_per_call)
        simulation.drain(overlapped=bool(seed % 2))
        events += simulation.events
    least = {"preemptions": 200, "restored": 200, "kept": 1000, "kept proposals": 200, "lost proposals": 200}
    assert {name: n for name, n in least.items() if events[name] < n} == {}, events


# One case at a time


def planned(plan: StepPlan) -> dict[str, int]:
    """Tokens of each request in a plan."""
    return {row.seq.request.request_id: row.count for row in each(plan.rows)}


def running(simulation: Simulation) -> list[str]:
    return [seq.request.request_id for seq in simulation.scheduler.running]


def test_arrival_decides_among_equals_and_priority_before_it():
    simulation = Simulation(max_num_seqs=2)
    names = [simulation.add([1, 2, 3], priority=priority, max_tokens=2) for priority in (1, 0, 0, -1)]
    simulation.step()
    assert running(simulation) == [names[3], names[1]]
    simulation.drain()
    assert list(dict.fromkeys(name for name, _ in simulation.reasons)) == [names[3], names[1], names[2], names[0]]


def test_short_requests_pass_one_that_waits_for_pages():
    simulation = Simulation(num_pages=9, page_size=4, budget=64)
    first = simulation.add([0] * 17, max_tokens=3)
    large = simulation.add([1] * 16, max_tokens=2)
    small = simulation.add([2], max_tokens=2)
    simulation.step()
    assert running(simulation) == [first, small]
    simulation.drain()
    assert [name for name, _ in simulation.reasons] == [small, first, large]


def start_of_long(monkeypatch, most_passed: int, **shorts) -> tuple[int, list[int]]:
    """Steps until a prompt that needs 9 of 10 pages begins, and the steps to the first token of those that passed it.
    Four sequences decode meanwhile, and a short request comes in every fourth step, without end."""
    monkeypatch.setattr(waiting, "MOST_PASSED", most_passed)
    simulation = Simulation(num_pages=201, page_size=4, max_num_seqs=16, budget=256, prefix_caching=False)
    for _ in range(4):
        simulation.add([0] * 60, max_tokens=70)
    simulation.step()
    long = simulation.add([1] * 720, max_tokens=4)
    came: dict[str, int] = {}
    waits: dict[str, int] = {}
    for step in range(1000):
        if step % 4 == 0:
            came[simulation.add([2, 3], **shorts)] = step
        simulation.step()
        if long in running(simulation):
            simulation.drain()
            return step, list(waits.values())
        started = {name for name in came if (name, 0) in simulation.outputs}
        waits |= {name: step - came[name] for name in started - waits.keys()}
    raise AssertionError("it starves")


@pytest.mark.parametrize(("max_tokens", "passing"), [(16, 16), (100, 7), (250, 2)])
def test_how_long_a_request_that_waits_for_pages_is_delayed(monkeypatch, max_tokens, passing):
    """No short one has its first token before the long one begins if none may pass. Else the long one begins later by
    at most as long as what passed it runs, and that is charged no more than itself and one request."""
    alone, none = start_of_long(monkeypatch, 0, max_tokens=max_tokens)
    start, waits = start_of_long(monkeypatch, 8, max_tokens=max_tokens)
    assert none == []
    assert len(waits) >= passing
    assert len(waits) * (2 + max_tokens) <= 720 + 4 + 2 + max_tokens
    assert alone <= start <= alone + max_tokens
    assert max(waits) <= 1


def test_those_that_were_preempted_are_not_passed():
    """New requests do not pass one that was preempted: they would take the pages that running ones need to grow."""
    simulation = Simulation(num_pages=21, page_size=4, budget=64, prefix_caching=False)
    first = simulation.add([0] * 30, max_tokens=40)
    second = simulation.add([1] * 30, max_tokens=40)
    while not simulation.scheduler.num_preemptions:
        simulation.step()
    small = simulation.add([2], max_tokens=3)
    simulation.step()
    assert running(simulation) == [first]
    simulation.drain()
    assert [name for name, _ in simulation.reasons] == [first, small, second]


def test_decodes_go_on_while_a_long_prompt_is_computed_in_chunks():
    simulation = Simulation(max_num_seqs=4, budget=5)
    short = [simulation.add([i, i], max_tokens=20) for i in (1, 2)]
    simulation.step()
    long = simulation.add([3] * 14, max_tokens=2)
    plans = [planned(simulation.step()) for _ in range(5)]
    assert all(plan[name] == 1 for plan in plans for name in short)
    assert [plan[long] for plan in plans] == [3, 3, 3, 3, 2]
    simulation.drain()


def test_short_prompts_do_not_wait_for_a_long_one():
    """A prompt that goes on lends half of its chunk to those that end thereby. No token of the budget is lost, and of
    two long prompts the first ends first."""
    simulation = Simulation(max_num_seqs=6, budget=8)
    long = simulation.add([1] * 40, max_tokens=1)
    other = simulation.add([2] * 40, max_tokens=1)
    assert planned(simulation.step()) == {long: 8}
    assert planned(simulation.step()) == {long: 8}
    simulation.drain()
    simulation = Simulation(max_num_seqs=6, budget=8)
    long = simulation.add([1] * 40, max_tokens=1)
    assert planned(simulation.step()) == {long: 8}
    shorts = [simulation.add([i + 3] * 3, max_tokens=1) for i in range(3)]
    assert planned(simulation.step()) == {long: 5, shorts[0]: 3}
    assert planned(simulation.step()) == {long: 5, shorts[1]: 3}
    less = simulation.add([9] * 2, max_tokens=1, priority=1)
    assert planned(simulation.step()) == {long: 5, shorts[2]: 3}
    assert planned(simulation.step()) == {long: 8}, "not to one of a lower priority"
    other = simulation.add([2] * 40, max_tokens=1)
    plans = [planned(simulation.step()) for _ in range(2)]
    assert plans == [{long: 8}, {long: 1, other: 7}]
    simulation.drain()
    assert [name for name, _ in simulation.reasons] == [*shorts, long, other, less]


def test_short_prompts_that_run_do_not_wait_for_a_long_one():
    """Half of the chunk goes to a prompt whose first tokens found room beside the end of an earlier one."""
    simulation = Simulation(max_num_seqs=6, budget=8)
    first = simulation.add([1] * 6, max_tokens=1)
    long = simulation.add([2] * 40, max_tokens=1)
    assert planned(simulation.step()) == {first: 6, long: 2}
    short = simulation.add([3] * 4, max_tokens=1)
    assert planned(simulation.step()) == {long: 4, short: 4}
    simulation.drain()


@pytest.mark.parametrize(
    ("decodes", "prompts", "on_cpu", "elsewhere"),
    [(0, 1, 2048, 2048), (1, 1, 127, 31), (16, 1, 16, 16), (16, 16, 112, 16), (26, 6, 26, 6), (200, 9, 200, 4)],
)
def test_tokens_for_prompts_beside_decodes(decodes, prompts, on_cpu, elsewhere):
    """With bursts, as on CPUs, at least as many as decodes: many decodes would starve prompts otherwise."""
    assert TokenBudget(2048, 32, bursts=True).for_prompts(decodes, prompts) == on_cpu
    assert TokenBudget(2048, 32, bursts=False).for_prompts(decodes, prompts) == elsewhere


@pytest.mark.slow
def test_steps_with_prompts_take_no_longer_than_the_goal_beside_decodes():
    """By an accelerator's costs, also where many prompts wait beside few that decode; without these, steps are full."""
    cost = StepCost(weights=3.5e-3, token=1.8e-5, attention=1e-6)
    goal = 0.010
    chunk = cost.chunk(goal)
    simulation = Simulation(num_pages=3000, page_size=16, max_num_seqs=64, budget=8192, cost=cost, chunk=chunk)
    simulation.device.shapes = step_shapes(64, 8192, 16, cost=cost, chunk=chunk)
    seconds = []
    alone = []

    def step():
        plan = simulation.step()
        count = plan.rows.count
        batches = list(split(plan.rows, simulation.device.shapes, cost))
        took = sum(cost(batch.shape.tokens) for batch in batches)
        if (count > 1).any() and (count == 1).any():
            assert int(count.sum()) <= chunk
            seconds.append(took + int(count[count > 1].sum()) * cost.attention)
            assert len(batches) == 1, "the weights are read once"
        elif (count > 1).any():
            alone.append(int(count.sum()))

    for i in range(20):
        simulation.add([i % VOCAB] * 3000, max_tokens=40)
    step()
    for i in range(20):
        simulation.add([i % VOCAB, 1] * 600, max_tokens=40)
    while simulation.scheduler.has_work:
        step()
    assert alone[0] == 8192
    assert len(seconds) > 20
    assert 0.9 * goal < max(seconds) <= goal


def test_every_decode_fits_in_a_step_whatever_the_budget():
    simulation = Simulation(max_num_seqs=6, budget=1)
    names = [simulation.add([i], max_tokens=9) for i in range(6)]
    simulation.step()
    assert planned(simulation.step()) == dict.fromkeys(names, 1)


def test_a_part_of_the_pages_is_kept_for_those_that_run():
    """One page in a hundred is not given to new requests, unless nobody runs."""
    simulation = Simulation(num_pages=301, page_size=1, budget=1000, prefix_caching=False)
    alone = simulation.add([0] * 300, max_tokens=0)
    simulation.step()
    assert simulation.reasons[alone, 0] == "length"
    runner = simulation.add([0] * 100, max_tokens=9)
    simulation.step()  # 199 pages are left once the runner has its next; 3 of them are kept
    large = simulation.add([1] * 197, max_tokens=3)
    simulation.step()
    assert running(simulation) == [runner]
    simulation.abort(large)
    fits = simulation.add([1] * 195, max_tokens=3)  # 198 are left
    simulation.step()
    assert running(simulation) == [runner, fits]
    simulation.drain()


@pytest.mark.parametrize("priorities", [(0, 0, 0), (0, 0, -1), (1, 0, 0), (0, 1, 0)])
def test_the_last_in_order_is_preempted(priorities):
    simulation = Simulation(num_pages=10, page_size=4, budget=64, prefix_caching=False)
    names = [simulation.add([i] * 10, max_tokens=10, priority=p) for i, p in enumerate(priorities)]
    simulation.step()
    assert len(running(simulation)) == 3
    while not simulation.scheduler.num_preemptions:
        simulation.step()
    order = sorted(range(3), key=lambda i: (priorities[i], i))
    assert running(simulation) == [names[i] for i in order[:2]]
    simulation.drain()
    assert simulation.scheduler.num_preemptions < 5


def test_what_was_preempted_comes_back_before_what_never_ran():
    simulation = Simulation(num_pages=10, page_size=4, budget=64, prefix_caching=False)
    names = [simulation.add([i] * 10, max_tokens=10) for i in range(3)]
    while not simulation.scheduler.num_preemptions:
        simulation.step()
    late = simulation.add([5] * 10, max_tokens=10)
    while late not in running(simulation):
        simulation.step()
        assert late not in running(simulation) or names[2] in running(simulation) or (names[2], 0) in simulation.reasons
    simulation.drain()


def test_a_higher_priority_preempts_lower_ones_to_grow():
    simulation = Simulation(num_pages=7, page_size=4, budget=64, prefix_caching=False)
    low = simulation.add([0] * 11, max_tokens=12, priority=5)
    simulation.step()
    high = simulation.add([1] * 11, max_tokens=12, priority=-5)
    while low in running(simulation):
        simulation.step()
    assert running(simulation) == [high]
    simulation.drain()
    assert [name for name, _ in simulation.reasons] == [high, low]


def test_background_sequences_step_aside():
    """They compute nothing while another prompt is computed, and give it a slot; then they go on."""
    simulation = Simulation(max_num_seqs=3, budget=8)
    batch = [simulation.add([i] * 4, max_tokens=30, priority=BACKGROUND) for i in range(3)]
    while len(planned(simulation.step())) < 3 or simulation.scheduler.waiting:
        pass
    live = simulation.add([9] * 20, max_tokens=4)
    assert [planned(simulation.step()) for _ in range(3)] == [{live: 8}, {live: 8}, {live: 4}]
    assert running(simulation) == [live, *batch[:2]]
    assert planned(simulation.step()) == {live: 1, batch[0]: 1, batch[1]: 1}
    simulation.drain()
    assert [name for name, _ in simulation.reasons] == [live, *batch]


def test_background_sequences_give_up_pages():
    simulation = Simulation(num_pages=9, page_size=4, max_num_seqs=4, budget=64, prefix_caching=False)
    batch = [simulation.add([i] * 10, max_tokens=3, priority=BACKGROUND) for i in range(2)]
    simulation.step()
    live = simulation.add([9] * 24, max_tokens=3)
    assert planned(simulation.step()) == {live: 24}
    assert live in running(simulation)
    assert len(running(simulation)) < 3
    simulation.drain()
    assert next(iter(simulation.reasons))[0] == live
    assert len(simulation.reasons) == 1 + len(batch)


@pytest.mark.parametrize("prompt_len", [1, 4, 5, 6, 8, 9])
@pytest.mark.parametrize("n", [2, 5])
def test_completions_of_one_prompt_share_its_pages(prompt_len, n):
    simulation = Simulation(page_size=4, max_num_seqs=n, budget=64)
    name = simulation.add([*range(prompt_len)], n=n, max_tokens=8)
    simulation.step()
    sequences = list(simulation.scheduler.running)
    assert len(sequences) == n
    full = (prompt_len - 1) // 4
    assert len({tuple(seq.pages[:full]) for seq in sequences}) == 1
    assert simulation.blocks.num_used == simulation.blocks.pages_for(prompt_len)
    simulation.step()
    # A shared page that is not full is copied by all but the last that writes to it; a full one, in the prefix cache,
    # by each child that computes the prompt's last token again.
    written = (prompt_len - 1) % 4
    assert simulation.events["copies"] == (0 if written == 0 else n - 1)
    assert len({seq.pages[full] for seq in sequences}) == n
    simulation.drain()
    assert len({tuple(simulation.outputs[name, i]) for i in range(n)}) > 1


def test_more_completions_than_slots():
    simulation = Simulation(max_num_seqs=2)
    name = simulation.add([1, 2, 3, 4, 5], n=7, max_tokens=5)
    simulation.drain()
    assert sorted(simulation.reasons) == [(name, i) for i in range(7)]


def test_completion_0_may_stop_at_once():
    """Its siblings are made all the same."""
    simulation = Simulation()
    name = simulation.add([1, 2, 3], n=3, max_tokens=4, stop_ids=range(VOCAB))
    simulation.drain()
    assert all(len(simulation.outputs[name, i]) == 1 for i in range(3))


def test_aborting_one_completion_leaves_its_siblings():
    simulation = Simulation(max_num_seqs=2)
    name = simulation.add([1, 2, 3, 4, 5], n=4, max_tokens=6)
    simulation.step()
    simulation.abort(name, 0)
    simulation.abort(name, 3)  # still waiting for a slot
    simulation.drain()
    assert sorted(simulation.reasons) == [(name, 1), (name, 2)]


@pytest.mark.parametrize("index", [0, 2])
@pytest.mark.parametrize("steps", [0, 1])
def test_aborting_one_completion_before_the_prompt_is_computed(index, steps):
    """The others are wanted still, and the one is not."""
    simulation = Simulation(budget=4)
    name = simulation.add([1, 2, 3, 4, 5, 0, 1], n=4, max_tokens=6)
    for _ in range(steps):
        simulation.step()
    simulation.abort(name, index)
    simulation.drain()
    assert sorted(simulation.reasons) == [(name, i) for i in range(4) if i != index]


def test_an_aborted_request_s_id_may_be_used_again_with_a_step_in_flight():
    simulation = Simulation()
    name = simulation.add([1, 2, 3], max_tokens=8)
    simulation.dispatch()
    old = simulation.in_flight[0][0].rows.seqs[0]
    simulation.abort(name)
    simulation.aborted.clear()
    simulation.scheduler.add(Sequence(old.request, 0, old.seed, old.max_tokens, old.stop_ids, 99))
    simulation.overlapped_step()
    simulation.drain()


def test_unknown_aborts_change_nothing():
    simulation = Simulation()
    simulation.add([1, 2, 3], max_tokens=2)
    simulation.scheduler.abort("nobody")
    simulation.scheduler.abort("r0", 5)
    simulation.drain()


def test_pages_of_a_prefix_are_found_but_never_all_of_a_prompt():
    simulation = Simulation(page_size=4, budget=64)
    prompt = [1, 2, 3, 4, 5, 0, 1, 2]
    simulation.add(prompt, max_tokens=1)
    simulation.drain()
    for other, hit in ((prompt, 4), ([*prompt, 3], 8), (prompt[:4], 0), ([1, 2, 3, 4, 0, 0, 0, 0, 0], 4)):
        simulation.add(other, max_tokens=1)
        plan = simulation.step()
        assert [(row.start, row.seq.num_cached) for row in each(plan.rows)] == [(hit, hit)]
    simulation.add([*prompt, 3], max_tokens=1, salt="other")
    assert simulation.step().rows.seqs[0].num_cached == 0
    assert simulation.scheduler.prefix_hits == 4 + 8 + 4
    assert simulation.scheduler.prefix_queries == 8 + 8 + 9 + 4 + 9 + 9


def test_what_a_preempted_prompt_computed_itself_is_no_prefix_hit():
    """`num_cached` tells the client what it did not cause; it is fixed at the first admission."""
    simulation = Simulation(num_pages=12, page_size=4, budget=8, max_num_seqs=3)
    simulation.add([0] * 6, max_tokens=30, priority=-1)
    simulation.step()
    long = simulation.add([1, 2] * 18, max_tokens=2)
    seqs = set()
    while simulation.scheduler.has_work:
        plan = simulation.step()
        seqs |= {seq for seq in plan.rows.seqs if seq.request.request_id == long}
    (seq,) = seqs
    assert simulation.scheduler.num_preemptions > 0, "this test needs the long prompt to be preempted half-way"
    assert seq.num_cached == 0
    assert simulation.scheduler.prefix_queries == 6 + 36
    simulation.drain()


def test_max_tokens_0_only_computes_the_prompt():
    simulation = Simulation(budget=4, max_num_seqs=2)
    name = simulation.add([1, 2, 3, 4, 5, 0, 1], max_tokens=0, scored=True)
    plan = simulation.step()
    assert not plan.rows.num_new.any()
    simulation.drain()
    assert simulation.reasons == {(name, 0): "length"}
    assert simulation.outputs == {}


def test_a_prompt_that_is_scored_takes_no_prefix_hits():
    simulation = Simulation(budget=64)
    simulation.add([1] * 12, max_tokens=1)
    simulation.drain()
    simulation.add([1] * 12, max_tokens=1, scored=True)
    assert planned(simulation.step()) == {"r1": 12}
    simulation.drain()


def test_nothing_to_do_is_no_plan():
    simulation = Simulation()
    assert simulation.scheduler.schedule() is None
    simulation.add([1], max_tokens=1)
    assert simulation.dispatch() is not None
    assert simulation.dispatch() is None, "its only token is on its way"
    simulation.commit()
    simulation.drain()


# Beams, grammars and those who wait


def test_beams_that_wait_for_a_place_give_way_beside_slots_that_were_left_in_the_middle_of_a_step(monkeypatch):
    """What the arrays hold of a free slot says nothing about the steps in flight."""
    monkeypatch.setattr(waiting, "MOST_PASSED", 0)
    simulation = Simulation(num_pages=30, page_size=4, max_num_seqs=20, budget=64, prefix_caching=False)
    names = [simulation.add([i % VOCAB], max_tokens=9) for i in range(20)]
    simulation.dispatch()
    for name in names:
        simulation.abort(name)
    simulation.commit()
    simulation.add([1] * 20, n=2, max_tokens=20, priority=1, beams=True)
    large = simulation.add([2] * 64, max_tokens=40)
    while not simulation.scheduler.num_preemptions:  # one of two beams loses its place
        simulation.step()
    first = simulation.add([3] * 100, max_tokens=4)
    simulation.abort(large)
    simulation.step()  # the other has drawn, and holds the pages that the first in the queue needs
    assert first in running(simulation)
    simulation.drain()


def test_aborted_requests_behind_a_blocked_one_leave_nothing_behind():
    simulation = Simulation(num_pages=9, page_size=4)
    simulation.add([1] * 12, max_tokens=20)
    simulation.step()
    blocked = simulation.add([2] * 28, max_tokens=4)
    scheduler = simulation.scheduler
    request = simulation.jobs[blocked].request
    for i in range(10_000):
        other = msgspec.structs.replace(request, request_id=f"other-{i}")
        scheduler.add(Sequence(other, 0, 0, 4, frozenset(), 100 + i))
        scheduler.abort(other.request_id)
    assert len(scheduler.waiting) == len(list(scheduler.waiting)) == 1
    assert scheduler.waiting.num_tokens == 28
    simulation.drain()


def test_a_row_that_waits_for_the_host_leaves_the_loop_to_the_others():
    simulation = Simulation(num_pages=300, max_num_seqs=6, budget=64)
    masked = simulation.add([1, 2, 3], max_tokens=50, masked=True)
    plain = [simulation.add([i], max_tokens=100) for i in range(3)]
    simulation.step()
    search = simulation.add([4, 4], n=2, max_tokens=30, beams=True)
    simulation.step()
    plan = simulation.step(16)
    draws = Counter(dict.fromkeys((masked, search, *plain), 0))
    for row in each(plan.rows):
        draws[row.seq.request.request_id] = max(draws[row.seq.request.request_id], row.num_new)
    assert draws == {masked: 1, search: 1, **dict.fromkeys(plain, 16)}
    simulation.drain(overlapped=True)


def test_a_request_that_finds_no_room_does_not_stop_the_loop():
    simulation = Simulation(num_pages=30, page_size=4, max_num_seqs=3, budget=64, prefix_caching=False)
    simulation.add([1, 2, 3], max_tokens=60)
    for _ in range(3):
        simulation.step()
    simulation.add([0] * 110, max_tokens=4)
    for _ in range(2):
        assert simulation.step(16).rows.num_new.tolist() == [16]
    small = simulation.add([5] * 30, max_tokens=5)
    plan = simulation.step(16)
    assert small in running(simulation)
    assert plan.rows.num_new.tolist() == [1, 1], "one that can begin does"
    simulation.drain()


def count_calls(monkeypatch, module, name) -> list:
    """Grows by one with every call of a module's function."""
    calls = []
    function = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *arguments: calls.append(0) or function(*arguments))
    return calls


def test_a_blocked_request_is_looked_up_once():
    """In every step, the prefix cache is asked again only after something came into it."""
    simulation = Simulation(num_pages=40, page_size=4, max_num_seqs=4, budget=256)
    shared = [1, 2, 3, 4] * 20
    simulation.add(shared, max_tokens=1)
    simulation.drain()
    simulation.add([5] * 5, max_tokens=100)
    simulation.step()
    blocked = simulation.add([*shared, *[0] * 50], max_tokens=2)
    simulation.step()
    before = simulation.blocks.lookups
    for _ in range(20):
        simulation.step()
    assert blocked not in running(simulation)
    assert simulation.blocks.lookups == before
    simulation.add([*shared, *[0] * 48], max_tokens=1, priority=-1)  # brings more of it into the cache
    simulation.drain()
    assert simulation.blocks.lookups > before
    assert simulation.sequences[blocked, 0].num_cached >= 80


def test_pages_behind_a_window_are_given_up_one_after_the_other(monkeypatch):
    """Each time, all pages from the beginning of the text were looked at."""
    simulation = Simulation(num_pages=100, page_size=4, max_num_seqs=1, budget=64, windows=(None, 6))
    simulation.add([1] * 5, max_tokens=70)
    freed = []
    free = simulation.blocks.free
    monkeypatch.setattr(simulation.blocks, "free", lambda pages: freed.append(len(pages)) or free(pages))
    while simulation.scheduler.has_work:
        simulation.step(1)
    *behind, _ = freed
    assert len(behind) >= 15
    assert set(behind) == {1}


def test_a_newcomer_is_looked_up_once():
    """A step that could sample several tokens a row asks first whether a new request can begin, then places it."""
    simulation = Simulation(num_pages=40, page_size=4, max_num_seqs=4, budget=256)
    simulation.add([5] * 5, max_tokens=100)
    simulation.step()
    before = simulation.blocks.lookups
    name = simulation.add([1, 2, 3, 4] * 5, max_tokens=2)
    simulation.step(4)
    assert name in running(simulation)
    assert simulation.blocks.lookups == before + 1


def test_a_newcomer_finds_no_page_that_was_evicted_since_it_was_looked_up():
    """The rows of running sequences get their pages between the first lookup and the new request's turn."""
    simulation = Simulation(num_pages=12, page_size=4, max_num_seqs=2, budget=256)
    shared = [1, 2, 3, 4] * 4
    new_sequences = 0
    simulation.add(shared, max_tokens=1)
    simulation.drain()
    simulation.add([5] * 5, max_tokens=34)
    while simulation.scheduler.has_work:
        if not simulation.scheduler.waiting and len(simulation.scheduler.running) < 2 and new_sequences < 9:
            new_sequences += 1
            simulation.add([*shared, 0], max_tokens=3)
        simulation.step(4)
    assert simulation.blocks.evictions
    simulation.check_end()


def test_a_prompt_s_pages_are_hashed_as_they_are_looked_up_or_computed(monkeypatch):
    hashed = count_calls(monkeypatch, sequence, "page_hash")
    simulation = Simulation(num_pages=200, page_size=4, budget=40)
    simulation.add([1, 2, 3, 4] * 100, max_tokens=1)
    for _ in range(10):
        before = len(hashed)
        simulation.step()
        assert len(hashed) - before <= 11, "pages that nobody can find yet were hashed"
    assert len(hashed) == 100
    simulation.drain()


def test_hashes_that_came_with_a_prompt_are_used(monkeypatch):
    prompt = list(range(70))
    stops = frozenset()
    plain = Request(request_id="plain", prompt_token_ids=prompt, params=SamplingParams(), cache_salt="s")
    brought = msgspec.structs.replace(plain, page_hashes=block_manager.hash_pages(prompt, "s", 4))
    first, second = (Sequence(request, 0, 0, 5, stops, 0) for request in (plain, brought))
    expected = list(first.page_hashes(first.tokens, 17, 4))
    hashed = count_calls(monkeypatch, sequence, "page_hash")
    assert list(second.page_hashes(second.tokens, 17, 4)) == expected
    assert list(second.fork(1, 0, 4).page_hashes(second.tokens, 17, 4)) == expected
    assert not hashed


def test_sequences_end_without_their_pages_being_hashed(monkeypatch):
    """And what they generated is found all the same, when somebody goes on with it."""
    hashed = [count_calls(monkeypatch, module, "page_hash") for module in (block_manager, sequence)]
    simulation = Simulation(num_pages=400, page_size=4, max_num_seqs=20, budget=100)
    names = [simulation.add([i % VOCAB, i // VOCAB], max_tokens=42) for i in range(20)]
    simulation.drain()
    assert sum(map(len, hashed)) <= 20
    for name in names[::5]:
        prompt = [*simulation.jobs[name].request.prompt_token_ids, *simulation.outputs[name, 0]]
        again = simulation.add(prompt, max_tokens=1)
        simulation.step()
        assert simulation.sequences[again, 0].num_cached == 40
    assert sum(map(len, hashed)) < 20 + 4 * 2 * 11 + 20
    simulation.drain()


def test_forks_copy_their_parent_s_block_table():
    simulation = Simulation(num_pages=300, page_size=4, max_num_seqs=8, budget=1000)
    simulation.add([1, 2, 3, 4, 5] * 80, n=8, max_tokens=20)
    simulation.step()
    entries = simulation.events["table entries"]
    simulation.step()
    assert simulation.events["copied tables"] == 7
    assert simulation.events["table entries"] - entries <= 2 * 8
    simulation.drain()


def test_beams_send_what_changed_of_their_block_tables():
    simulation = Simulation(num_pages=500, page_size=4, max_num_seqs=4, budget=1000)
    name = simulation.add([1, 2, 3, 4, 5] * 80, n=4, max_tokens=40, beams=True)
    simulation.step()
    entries = simulation.events["table entries"]
    steps = 0
    while name in simulation.beams:
        simulation.step()
        steps += 1
    assert steps >= 39
    assert simulation.events["table entries"] - entries <= 3 * 4 * steps
    assert simulation.events["copied tables"] >= 3
    simulation.drain()


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("overlapped", [False, True])
def test_a_window_fits_a_pool_of_its_size(overlapped, n):
    """Whatever the length of a prompt, also with siblings to come, and with pages of it in the prefix cache."""
    simulation = Simulation(num_pages=4, page_size=1, max_num_seqs=1, budget=1, windows=(2,))
    for _ in range(3):
        simulation.add([0] * 9, n=n, max_tokens=3)
        simulation.drain(overlapped=overlapped)
