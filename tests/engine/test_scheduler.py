"""The scheduler against a device that keeps, in every place of every page, what was written there.

The device obeys the packed buffers of `jaxserve.batch` alone, as the compiled step does. It "computes" a token as a
fingerprint of the whole prefix up to it, chained through the pages, and compares all that a row can see with what the
row's own sequence should have written. Wrong sharing, a missing copy, a page reused too early, a stale block table or a
wrong prefix hit all show at once.
"""

from collections import Counter, deque
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jaxserve.batch import Batch, pack, split
from jaxserve.block_manager import BlockManager
from jaxserve.running import Rows
from jaxserve.scheduler import Scheduler, StepPlan
from jaxserve.sequence import Sequence, Status, child_seed
from jaxserve.steps import StepShape
from jaxserve.types import Request, SamplingParams

VOCAB = 6
STEPS = (1, 3, 16)  # tokens that a row may draw in one call


def fingerprint(state: int, token: int) -> int:
    return hash((state, token))


def root_state(salt: str | None) -> int:
    return hash(tuple((salt or "").encode()))


def next_token(state: int, seed: int) -> int:
    return hash((state, seed, 1)) % VOCAB


@dataclass
class Job:
    """A request, and what must become of it: found by computing one completion at a time, without any batch."""

    request: Request
    seed: int
    stop_ids: frozenset[int]
    scored: list[int] = field(default_factory=list)  # positions whose hidden state was scored
    _known: dict[int, tuple[list[int], list[int]]] = field(default_factory=dict)

    def trace(self, index: int) -> tuple[list[int], list[int]]:
        """Tokens of a completion, prompt included, as if nothing stopped it, and the state after each."""
        if index not in self._known:
            seed, tokens, states = child_seed(self.seed, index), list(self.request.prompt_token_ids), []
            state = root_state(self.request.cache_salt)
            for position in range(len(tokens) + self.request.params.max_tokens):
                if position == len(tokens):
                    tokens.append(next_token(state, seed))
                state = fingerprint(state, tokens[position])
                states.append(state)
            self._known[index] = tokens, states
        return self._known[index]

    def answer(self, index: int) -> tuple[list[int], str]:
        """Output tokens and finish reason."""
        output = self.trace(index)[0][len(self.request.prompt_token_ids) :]
        for i, token in enumerate(output):
            if token in self.stop_ids:
                return output[: i + 1], "stop"
        return output, "length"


class Row(NamedTuple):
    seq: Sequence
    start: int
    count: int
    draws: int
    scores_prompt: bool

    @property
    def end(self) -> int:
        return self.start + self.count


def each(rows: Rows) -> list[Row]:
    columns = (rows.start, rows.count, rows.draws, rows.scores_prompt)
    return list(map(Row, rows.seqs, *(column.tolist() for column in columns)))


class CountingBlocks(BlockManager):
    evictions = 0

    def _evict(self) -> int:
        self.evictions += 1
        return super()._evict()


class Simulation:
    """A scheduler, the device below it, and the requests above it. Every operation checks all it can."""

    def __init__(self, *, num_pages=200, page_size=4, max_num_seqs=4, budget=16, prefix_caching=True):
        self.blocks = CountingBlocks(num_pages, page_size, prefix_caching=prefix_caching)
        self.scheduler = Scheduler(
            self.blocks, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, max_model_len=self.longest
        )
        self.budget, self.max_num_seqs = max(budget, max_num_seqs), max_num_seqs
        half = -(-max_num_seqs // 2)  # buckets below the engine's limits, so that plans are cut into several batches
        decodes = [StepShape(rows, rows, rows, decode_only=True) for rows in (1, half)]
        mixed = [StepShape(tokens, min(tokens, half), 2, decode_only=False) for tokens in (2, 7)]
        self.shapes = decodes + mixed
        # The device. The last slot is nobody's, as in `jaxserve.slots`.
        self.memory: list[list[object]] = [["never written"] * page_size for _ in range(num_pages)]
        self.tables = [[0] * num_pages for _ in range(max_num_seqs + 1)]
        self.last_token = [-1] * (max_num_seqs + 1)
        self.slot_params = [(0, 0, frozenset())] * (max_num_seqs + 1)  # root state, seed, stop ids
        # The requests.
        self.flights: deque[list[tuple[Rows, np.ndarray]]] = deque()
        self.jobs: dict[str, Job] = {}
        self.sequences: dict[tuple[str, int], Sequence] = {}
        self.outputs: dict[tuple[str, int], list[int]] = {}
        self.reasons: dict[tuple[str, int], str] = {}
        self.aborted: set[tuple[str, int]] = set()
        self.events: Counter[str] = Counter()
        self._arrivals = count()

    @property
    def longest(self) -> int:
        """Tokens of the longest request that an engine with so many pages admits."""
        return self.blocks.capacity * self.blocks.page_size

    # Requests

    def add(self, prompt, *, n=1, max_tokens=8, priority=0, stop_ids=(), salt=None, scored=False) -> str:
        arrival = next(self._arrivals)
        assert len(prompt) + max_tokens <= self.longest, "the engine would not have accepted this"
        params = SamplingParams(n=n, max_tokens=max_tokens, prompt_logprobs=0 if scored else None)
        name = f"r{arrival}"
        request = Request(
            request_id=name, prompt_token_ids=list(prompt), params=params, priority=priority, cache_salt=salt
        )
        self.jobs[name] = Job(request, 1000 + arrival, frozenset(stop_ids))
        seq = Sequence(request, 0, 1000 + arrival, max_tokens, frozenset(stop_ids), arrival)
        self.scheduler.add(seq)
        self.check()
        return name

    def abort(self, name: str, index: int | None = None) -> None:
        indices = range(self.jobs[name].request.params.n) if index is None else [index]
        self.aborted |= {(name, i) for i in indices if (name, i) not in self.reasons}
        self.scheduler.abort(name, index)
        self.check()

    # Steps

    def dispatch(self, steps: int = 1) -> StepPlan | None:
        """Schedules a step and runs it; its tokens wait in `flights`."""
        waiting = list(self.scheduler.waiting)
        preemptions = self.scheduler.num_preemptions
        before = {seq: self.left(seq) for seq in self.scheduler.running}
        plan = self.scheduler.schedule(steps)
        self._check_schedule(plan, waiting, preemptions, before)
        if plan is not None:
            self.flights.append(self._run(plan))
        self.check()
        return plan

    def commit(self) -> None:
        for rows, tokens in self.flights.popleft():
            output, notable = self.scheduler.commit(rows, tokens)
            assert [one.update for one in notable] == output.updates
            assert all(rows.seqs[one.row] is one.seq for one in notable)
            for update in output:
                key = update.request_id, update.index
                assert key not in self.reasons, "an update after the last one"
                assert key not in self.aborted, "an update after an abort"
                assert update.token_ids or update.finish_reason
                if key not in self.outputs or update.finish_reason:
                    (one,) = (one for one in notable if one.update is update)
                    assert self.sequences.setdefault(key, one.seq) is one.seq, "a completion was made twice"
                    assert one.is_first is (key not in self.outputs)
                if update.token_ids:
                    self.outputs.setdefault(key, []).extend(update.token_ids)
                if update.finish_reason is not None:
                    self.reasons[key] = update.finish_reason
        self.check()

    def step(self, steps: int = 1) -> StepPlan | None:
        """One step, with nothing in flight before and after."""
        while self.flights:
            self.commit()
        if (plan := self.dispatch(steps)) is not None:
            self.commit()
        return plan

    def overlapped_step(self, steps: int = 1) -> None:
        """Dispatches a step before the one in flight is committed."""
        self.events["overlapped"] += bool(self.flights)
        if (self.dispatch(steps) is None or len(self.flights) == 2) and self.flights:
            self.commit()

    def drain(self, *, overlapped: bool = False) -> None:
        """Steps to the end, which must come in bounded time: the first running sequence advances in every step."""
        work = sum(
            job.request.params.n * (len(job.request.prompt_token_ids) + job.request.params.max_tokens + 2)
            for job in self.jobs.values()
        )
        for i in range(2 * work + 2):
            if not self.scheduler.has_work and not self.flights:
                break
            self.overlapped_step(STEPS[i % 3]) if overlapped else self.step(STEPS[i % 3])
        assert not self.scheduler.has_work, "a request starves"
        self.check_end()

    # The device

    def _run(self, plan: StepPlan) -> list[tuple[Rows, np.ndarray]]:
        """Rows in the order in which they ran, and the tokens that they drew."""
        for seq in plan.placed:
            self.last_token[seq.slot] = 0
            self.slot_params[seq.slot] = root_state(seq.request.cache_salt), child_seed(seq.seed, 0), seq.stop_ids
        self._copy(plan.copies)
        batches = list(split(plan.rows, self.shapes))
        self.events["cut plans"] += len(batches) > 1
        updates, results = plan.table_updates, []
        for batch in batches:
            room = batch.shape.table_updates
            self._update_tables(updates[:, room:])
            self.events["overflow"] += updates[:, room:].shape[1]
            results.append((batch.rows, self._run_batch(batch, updates[:, :room])))
            updates = updates[:, :0]
        self._check_split(plan, [row for batch in batches for row in each(batch.rows)])
        return results

    def _update_tables(self, updates) -> None:
        for slot, index, page in np.asarray(updates).T.tolist():
            self.tables[slot][index] = page

    def _run_batch(self, batch: Batch, updates: np.ndarray) -> np.ndarray:
        assert batch.shape in self.shapes
        rows = each(batch.rows)
        ones = [row.count == 1 for row in rows]
        assert ones == sorted(ones, reverse=True), "rows of one token come first"
        for row in rows:
            first, end = max(row.start, row.seq.num_scored), min(row.end, row.seq.prompt_len - 1)
            if row.seq.scores_prompt and first < end:
                assert row.scores_prompt, "a row that is wanted for its hidden states does not say so"
            if row.scores_prompt and first < end:
                assert not batch.shape.decode_only, "a decode step keeps no hidden states to score"
                self.jobs[row.seq.request.request_id].scored += range(first, end)
                row.seq.num_scored = end
        packed = pack(batch, self.scheduler.running, updates)
        fields = {name: packed[at : at + size].tolist() for name, (at, size) in batch.shape.fields.items()}
        self._update_tables([fields["update_slot"], fields["update_index"], fields["update_page"]])
        assert fields["num_decodes"] == [sum(ones)]
        assert fields["q_start"][len(rows) :] == [sum(row.count for row in rows)] * (batch.shape.rows + 1 - len(rows))
        assert set(fields["slot"][len(rows) :]) <= {self.max_num_seqs}
        (steps,) = fields["steps"]
        assert 1 <= steps <= batch.shape.max_steps
        slots = fields["slot"]
        ended = [self.last_token[slots[i]] < 0 for i in range(len(rows))]
        self.events["ended on the device"] += sum(ended)
        going = [fields["draws"][i] > 0 and not ended[i] for i in range(len(rows))]
        drawn = np.full((len(rows), steps), -1, np.int32)
        for step in range(steps):
            written: set[tuple[int, int]] = set()
            advancing = [i for i in range(len(rows)) if going[i] or (step == 0 and not ended[i])]
            for i in advancing:
                self._write_row(fields, i, written, step)
            self._scribble()
            for i in advancing:
                token = self._read_row(fields, i, rows[i].seq, step)
                if going[i]:
                    stops = token in self.slot_params[slots[i]][2]
                    drawn[i, step] = token
                    self.last_token[slots[i]] = -1 if stops else token
                    going[i] = not stops and step + 1 < fields["draws"][i]
        self.events["loops"] += steps > 1
        return drawn

    def _copy(self, pairs: list[tuple[int, int]]) -> None:
        """All are read before any is written; one after the other must give the same, as there may be many."""
        expected = [self.memory[source][:] for source, _ in pairs]
        for source, target in pairs:
            self.memory[target] = self.memory[source][:]
        assert [self.memory[target] for _, target in pairs] == expected, "copies overlap"
        self.events["copies"] += len(pairs)

    def _write_row(self, batch: dict[str, list[int]], i: int, written: set[tuple[int, int]], step: int) -> None:
        (first, last), slot, length = batch["q_start"][i : i + 2], batch["slot"][i], batch["kv_len"][i] + step
        state = self._read(slot, length - (last - first) - 1)
        for at in range(first, last):
            position = length - last + at
            token = batch["tokens"][at]
            if token < 0 or step > 0:
                token = self.last_token[slot]
                self.events["unknown tokens"] += step == 0
            page, offset = self._place(slot, position)
            assert page != 0, "a real token would be written to the null page"
            assert (page, offset) not in written, "two rows write to the same place"
            written.add((page, offset))
            state = self.memory[page][offset] = fingerprint(state, token)

    def _read_row(self, batch: dict[str, list[int]], i: int, seq: Sequence, step: int) -> int:
        """Looks at all that the row can attend to; returns the token that follows."""
        slot, length = batch["slot"][i], batch["kv_len"][i] + step
        seen = [self._read(slot, position) for position in range(length)]
        states = self.jobs[seq.request.request_id].trace(seq.index)[1]
        assert seen == states[:length], f"{seq.request.request_id}[{seq.index}] reads what is not its own"
        return next_token(seen[-1], self.slot_params[slot][1])

    def _place(self, slot: int, position: int) -> tuple[int, int]:
        return self.tables[slot][position // self.blocks.page_size], position % self.blocks.page_size

    def _read(self, slot: int, position: int):
        if position < 0:
            return self.slot_params[slot][0]
        page, offset = self._place(slot, position)
        return self.memory[page][offset]

    def _scribble(self) -> None:
        """What nobody owns and nobody can find again may be overwritten at any time."""
        for page in [0, *self.blocks._free]:
            self.memory[page] = [f"scribble {page}"] * self.blocks.page_size

    # Checks

    def check(self) -> None:
        self.scheduler.check_integrity()
        self._scribble()

    def left(self, seq: Sequence) -> int:
        """Tokens that a running sequence has to compute; 0 where that has to wait for a step in flight."""
        running, slot = self.scheduler.running, seq.slot
        if running.total[slot] > running.known[slot] and running.total[slot] == running.limit[slot]:
            return 0
        return int(running.total[slot] - running.computed[slot])

    def _check_schedule(self, plan: StepPlan | None, waiting: list[Sequence], preemptions: int, before: dict) -> None:
        """`before`: what was left to compute of the running sequences."""
        rows = each(plan.rows) if plan else []
        scheduled = {row.seq: row for row in rows}
        if plan is not None:
            assert rows
            assert sum(row.count for row in rows) <= self.budget
            assert len(rows) <= self.max_num_seqs
            assert all(row.count > 0 for row in rows)
            assert len(scheduled) == len(rows)
            limits = {row.seq: row.seq.prompt_len + row.seq.max_tokens for row in rows}
            assert all(row.end + row.draws <= limits[row.seq] for row in rows)
            looped = any(row.draws > 1 for row in rows)
            assert not looped or not waiting, "newcomers wait for a loop to end"
        for seq in self.scheduler.running:
            full = sum(row.count for row in rows) == self.budget
            assert seq in scheduled or full or before.get(seq) == 0, "a running sequence was left out for no reason"
            assert seq in scheduled or before[seq] != 1, "a decoding sequence was left out"
        admitted = [seq for seq in waiting if seq.status is Status.RUNNING]
        left = [seq for seq in waiting if seq.status is Status.WAITING]
        assert all(a.order < b.order for a in admitted for b in left), "admission out of order"
        self.events["preemptions"] += self.scheduler.num_preemptions - preemptions
        self.events["chunks"] += any(row.count > 1 and row.draws == 0 for row in rows)

    @staticmethod
    def _check_split(plan: StepPlan, rows: list[Row]) -> None:
        """The pieces that ran make up the plan."""
        assert all(row.count > 0 for row in rows)
        for whole in each(plan.rows):
            pieces = [row for row in rows if row.seq is whole.seq]
            assert [piece.start for piece in pieces] == [whole.start, *(piece.end for piece in pieces[:-1])]
            assert pieces[-1].end == whole.end
            assert [piece.draws for piece in pieces] == [0] * (len(pieces) - 1) + [whole.draws]
        assert {row.seq for row in rows} == set(plan.rows.seqs)

    def check_end(self) -> None:
        assert not self.flights
        assert not self.scheduler.running
        assert self.scheduler.num_waiting == 0
        assert self.blocks.num_used == 0
        assert not any(name in self.scheduler for name in self.jobs)
        for name, job in self.jobs.items():
            for index in range(job.request.params.n):
                if (name, index) not in self.aborted:
                    output, reason = job.answer(index)
                    assert self.outputs.get((name, index), []) == output
                    assert self.reasons[name, index] == reason
            if job.request.params.prompt_logprobs is not None and (name, 0) not in self.aborted:
                assert sorted(job.scored) == list(range(len(job.request.prompt_token_ids) - 1))
        self.events["evictions"] = self.blocks.evictions
        self.events["prefix hits"] = self.scheduler.prefix_hits


# Random use

FAMILIES = ([0] * 40, [1, 2] * 20, [3, 4, 5, 0, 1] * 8)  # prompts begin like one of these


class SchedulerMachine(RuleBasedStateMachine):
    """Requests come and go while steps run, one at a time or with one in flight."""

    @initialize(
        num_pages=st.integers(4, 24),
        page_size=st.sampled_from([1, 2, 4]),
        max_num_seqs=st.integers(1, 6),
        budget=st.integers(1, 24),
        prefix_caching=st.sampled_from([True, True, True, False]),
    )
    def create(self, **sizes):
        self.simulation = Simulation(**sizes)

    @rule(
        family=st.sampled_from(FAMILIES),
        shared=st.integers(0, 20),
        tail=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=3),
        n=st.sampled_from([1, 1, 2, 4]),
        max_tokens=st.integers(0, 20),
        priority=st.sampled_from([0, 0, 0, -1, 1]),
        stop_ids=st.sampled_from([(), (), (0,), (1, 2)]),
        salt=st.sampled_from([None, None, None, "a"]),
        scored=st.sampled_from([False, False, False, True]),
    )
    def add(self, family, shared, tail, n, max_tokens, **options):
        prompt = (family[:shared] + tail)[: max(self.simulation.longest - max_tokens, 1)]
        max_tokens = min(max_tokens, self.simulation.longest - len(prompt))
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

    @rule(times=st.integers(1, 6), steps=st.sampled_from(STEPS))
    def step(self, times, steps):
        for _ in range(times):
            self.simulation.step(steps)

    @rule(times=st.integers(1, 6), steps=st.sampled_from(STEPS))
    def overlapped_step(self, times, steps):
        for _ in range(times):
            self.simulation.overlapped_step(steps)

    @precondition(lambda self: self.simulation.flights)
    @rule()
    def commit(self):
        self.simulation.commit()

    @precondition(lambda self: not self.simulation.flights)
    @rule()
    def reset_prefix_cache(self):
        self.simulation.blocks.reset_prefix_cache()

    @invariant()
    def is_whole(self):
        if hasattr(self, "simulation"):
            self.simulation.check()

    def teardown(self):
        if hasattr(self, "simulation"):
            self.simulation.drain()


SchedulerMachine.TestCase.settings = settings(
    max_examples=120, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestScheduler = SchedulerMachine.TestCase


@pytest.mark.parametrize("overlapped", [False, True])
def test_under_pressure(overlapped):
    """Many requests in few pages, and proof that the hard cases did occur."""
    events: Counter[str] = Counter()
    for seed in range(12):
        rng = np.random.default_rng(seed)
        simulation = Simulation(num_pages=13, page_size=4, max_num_seqs=5, budget=int(rng.integers(5, 20)))
        for _ in range(40):
            shared, tail = FAMILIES[rng.integers(3)][: rng.integers(20)], rng.integers(0, VOCAB, rng.integers(1, 4))
            simulation.add(
                shared + tail.tolist(),
                n=int(rng.integers(1, 5)),
                max_tokens=int(rng.integers(1, 20)),
                priority=int(rng.integers(-1, 2)),
                stop_ids=() if rng.random() < 0.5 else (0,),
                salt=["a", None][rng.integers(2)],
                scored=bool(rng.random() < 0.2),
            )
            for steps in rng.choice(STEPS, rng.integers(0, 12)).tolist():
                simulation.overlapped_step(steps) if overlapped else simulation.step(steps)
        simulation.drain(overlapped=overlapped)
        events += simulation.events
    least = {
        "preemptions": 100,
        "evictions": 100,
        "copies": 100,
        "prefix hits": 100,
        "chunks": 50,
        "overflow": 10,
        "cut plans": 100,
        "loops": 100,
    }
    if overlapped:
        least |= {"overlapped": 100, "unknown tokens": 500, "ended on the device": 50}
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


def test_a_waiting_request_does_not_pass_one_that_needs_more():
    simulation = Simulation(num_pages=9, page_size=4, budget=64)
    first = simulation.add([0] * 17, max_tokens=3)
    large, small = simulation.add([1] * 16, max_tokens=2), simulation.add([2], max_tokens=2)
    simulation.step()
    assert running(simulation) == [first]
    simulation.drain()
    assert [name for name, _ in simulation.reasons] == [first, large, small]


def test_decodes_go_on_while_a_long_prompt_is_computed_in_chunks():
    simulation = Simulation(max_num_seqs=4, budget=5)
    short = [simulation.add([i, i], max_tokens=20) for i in (1, 2)]
    simulation.step()
    long = simulation.add([3] * 14, max_tokens=2)
    plans = [planned(simulation.step()) for _ in range(5)]
    assert all(plan[name] == 1 for plan in plans for name in short)
    assert [plan[long] for plan in plans] == [3, 3, 3, 3, 2]
    simulation.drain()


def test_every_decode_fits_in_a_step_whatever_the_budget():
    simulation = Simulation(max_num_seqs=6, budget=1)
    names = [simulation.add([i], max_tokens=9) for i in range(6)]
    simulation.step()
    assert planned(simulation.step()) == dict.fromkeys(names, 1)


def test_a_part_of_the_pages_is_kept_for_those_that_run():
    """One page in a hundred is not given to newcomers, unless nobody runs."""
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
    old = simulation.flights[0][0][0].seqs[0]
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
    assert not plan.rows.draws.any()
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
