"""Data parallelism on the host: a scheduler of several groups against simulated devices, and who begins where."""

import contextlib
from collections import Counter

import numpy as np
import pytest
from null_device import VOCAB, Device, Ran, each
from simulation import TOKENS_PER_CALL, Simulation

from jaxserve.execution.cost import StepCost
from jaxserve.execution.group_batches import split_groups
from jaxserve.execution.step_buffer import StepBatch
from jaxserve.limits import BACKGROUND
from jaxserve.scheduling.block_manager import BlockManager
from jaxserve.scheduling.groups import GroupBlocks, GroupScheduler
from jaxserve.scheduling.row_choice import TokenBudget
from jaxserve.types import InvalidRequestError

pytestmark = pytest.mark.compiles

FAMILIES = ([0] * 40, [1, 2] * 20, [3, 4, 5, 0, 1] * 8)  # prompts begin like one of these


class GroupDevices(Device):
    """The devices of all groups, with the slots and pages of all. Every batch of a step runs on each group."""

    def run(self, plan, running) -> list[Ran]:
        for seq in plan.placed:
            self.slot_place[seq.slot] = None
            self.last_token[seq.slot] = 0
            self.length[seq.slot] = int(running.start[seq.slot])
            self.slot_params[seq.slot] = self.params_of(seq)
        assert all(a // self.pages_each == b // self.pages_each for a, b in plan.copies), "a copy leaves its group"
        self._copy(plan.copies)
        for source, target in plan.table_copies:
            assert running.group_of(source) == running.group_of(target)
            self.tables[target] = self.tables[source].copy()
        self.events["copied tables"] += len(plan.table_copies)
        updates = plan.table_updates
        results = []
        ran = []
        owners = running.group_of(updates[0]), updates[2] // self.pages_each
        assert (owners[0] == owners[1])[updates[2] > 0].all(), "a block table names a page of another group"
        batches = list(split_groups(plan.rows, running, self.shapes, self.cost))
        self.events["cut plans"] += len(batches) > 1
        self.events["idle groups"] += any(len(np.unique(batch.group)) < running.device_groups for batch in batches)
        for batch in batches:
            assert (batch.group == running.group_of(batch.rows.slot)).all()
            room = batch.shape.table_updates
            self._update_tables(updates[:, room:])
            packed = batch.pack(running, updates[:, :room])
            at, _ = batch.shape.fields["tokens_per_call"]
            assert len(set(packed[:, at].tolist())) == 1, "groups would leave the loop at different times"
            for group, buffer in enumerate(packed):
                index = np.flatnonzero(batch.group == group)
                some = StepBatch(batch.shape, batch.rows.take(index))
                fields = {name: buffer[at : at + size] for name, (at, size) in batch.shape.fields.items()}
                self._update_tables([fields[name] for name in ("update_slot", "update_index", "update_page")])
                if len(index):
                    self.packed = buffer
                    results.append(self._run_batch(some, running, updates[:, :0]))
            ran += each(batch.rows)
            updates = updates[:, :0]
        self._check_split(plan, ran)
        return results

    def buffer_of(self, batch, running, updates):
        return self.packed

    def scribble(self) -> None:
        for part in self.blocks.parts:
            for page in [0, *part._free]:
                self.memory[page] = [f"scribble {page}"] * self.blocks.page_size


class GroupSimulation(Simulation):
    """Sizes are those of each group."""

    def __init__(
        self, groups: int, *, num_pages=60, page_size=4, max_num_seqs=4, budget=16, windows=(None,), cost=None
    ):
        super().__init__(num_pages=num_pages, page_size=page_size, max_num_seqs=max_num_seqs, budget=budget)
        self.groups = groups
        self.cost = cost
        self.blocks = GroupBlocks(groups, num_pages, page_size, windows=windows)
        self.most = self._longest(self.blocks.parts[0])
        self.scheduler = GroupScheduler(
            self.blocks,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=self.budget,
            max_model_len=self.most,
            penalty_rows=max_num_seqs,
            prefill_bursts=cost is None,
        )
        self.device = GroupDevices(self.blocks, groups * max_num_seqs, self._check_read, cost, self.most)
        self.device.pages_each = num_pages
        self.device.shapes = Device(self.blocks.parts[0], max_num_seqs, self._check_read, cost, self.most).shapes
        self.events = self.device.events
        self.blocks.evictions = 0

    def _longest(self, part) -> int:
        self.blocks, whole = part, self.blocks
        try:
            return Simulation.longest.fget(self)
        finally:
            self.blocks = whole

    @property
    def longest(self) -> int:
        return getattr(self, "most", 0) or super().longest

    def _check_schedule(self, plan, waiting, admissible, preemptions, before, placing) -> None:
        rows = each(plan.rows) if plan else []
        tokens = Counter()
        count = Counter()
        for row in rows:
            tokens[row.seq.group] += row.count
            count[row.seq.group] += 1
        assert plan is not None or self.in_flight or not self.scheduler.has_work, "there is work, and nothing is done"
        assert all(n <= self.budget for n in tokens.values())
        assert all(n <= self.max_num_seqs for n in count.values())
        scheduled = {row.seq for row in rows}
        for seq in self.scheduler.running:
            full = tokens[seq.group] == self.budget
            aside = seq.is_background and self.scheduler.running.steps_aside
            assert seq in scheduled or full or aside or before.get(seq) == 0, (
                "a running sequence was left out for no reason"
            )
        looped = any(row.num_new > 1 and not row.checks for row in rows)
        assert not looped or not admissible, "a newcomer waits for a loop to end"
        admitted = [seq for seq in waiting if seq.slot >= 0]
        left = [seq for seq in waiting if seq in set(self.scheduler.waiting)]
        self.check_order(admitted, left)
        self.events["preemptions"] += self.scheduler.num_preemptions - preemptions
        self.events["chunks"] += any(row.count > 1 and row.num_new == 0 for row in rows)
        self.events["groups at work"] = max(self.events["groups at work"], len(count))


@pytest.mark.parametrize("windows", [(None,), (None, 6)])
@pytest.mark.parametrize("overlapped", [False, True])
def test_under_pressure(overlapped, windows):
    """Many requests in few pages: each computes what it would alone, and the hard cases did occur."""
    events: Counter[str] = Counter()
    for seed in range(8):
        rng = np.random.default_rng(seed)
        cost = [None, StepCost(weights=0.003, token=0.001), StepCost(weights=1.0, token=0.001)][seed % 3]
        simulation = GroupSimulation(
            2 + seed % 3, num_pages=13 if windows == (None,) else 22, max_num_seqs=3,
            budget=int(rng.integers(5, 20)), windows=windows, cost=cost,
        )  # fmt: skip
        for _ in range(40):
            shared = FAMILIES[rng.integers(3)][: rng.integers(20)]
            tail = rng.integers(0, VOCAB, rng.integers(1, 4))
            kind = str(rng.choice(["scored", "masked", *["ordinary"] * 6]))
            with contextlib.suppress(InvalidRequestError):
                simulation.add(
                    shared + tail.tolist(), n=int(rng.integers(1, 5)), max_tokens=int(rng.integers(1, 20)),
                    priority=[-1, 0, BACKGROUND][rng.integers(3)], stop_ids=() if rng.random() < 0.5 else (0,),
                    **{kind: True for kind in [kind] if kind != "ordinary"},
                )  # fmt: skip
            for tokens_per_call in rng.choice(TOKENS_PER_CALL, rng.integers(0, 8)).tolist():
                if rng.random() < 0.2:
                    simulation.propose(int(rng.integers(1, 5)), int(rng.integers(0, 5)))
                if rng.random() < 0.05:
                    simulation.abort(str(rng.choice(sorted(simulation.jobs))))
                simulation.overlapped_step(tokens_per_call) if overlapped else simulation.step(tokens_per_call)
        simulation.drain(overlapped=overlapped)
        assert simulation.events["groups at work"] == simulation.groups
        events += simulation.events
    least = {
        "preemptions": 30, "copies": 50, "prefix hits": 100, "chunks": 50, "cut plans": 50, "loops": 20,
        "late draws": 50, "idle groups": 50, "copied tables": 10, "kept proposals": 20, "lost proposals": 20,
    }  # fmt: skip
    assert {name: n for name, n in least.items() if events[name] < n} == {}, events


def groups_of(simulation: GroupSimulation) -> dict[str, int]:
    return {seq.request_id: seq.group for seq in simulation.scheduler.running}


def test_newcomers_go_where_the_fewest_run():
    simulation = GroupSimulation(3, budget=64)
    names = [simulation.add([i] * 5, max_tokens=20) for i in range(6)]
    simulation.step()
    assert Counter(groups_of(simulation).values()) == {0: 2, 1: 2, 2: 2}
    gone = groups_of(simulation)[names[0]]
    simulation.abort(names[0])
    new = simulation.add([4, 4, 4], max_tokens=5)
    simulation.step()
    assert groups_of(simulation)[new] == gone


def test_newcomers_go_to_the_longest_cached_prefix_within_a_bound():
    simulation = GroupSimulation(2, budget=64, max_num_seqs=8)  # a group may run one sequence more than the other
    first = simulation.add([1, 2, 3, 4, 5, 4, 3, 2, 1], max_tokens=30)
    simulation.step()
    own = groups_of(simulation)[first]
    again = simulation.add([1, 2, 3, 4, 5, 4, 3, 2, 0], max_tokens=30)
    simulation.step()
    assert groups_of(simulation)[again] == own
    assert simulation.scheduler.prefix_hits == 8
    others = [simulation.add([1, 2, 3, 4, 5, 4, 3, 2, 5, i], max_tokens=30) for i in range(4)]
    simulation.step()
    placed = groups_of(simulation)
    assert placed[others[0]] != own, "the group with the prefix runs two sequences more than the other"
    counts = Counter(placed.values())
    assert max(counts.values()) - min(counts.values()) <= 2


def test_each_group_has_a_budget_of_tokens():
    simulation = GroupSimulation(2, budget=16, max_num_seqs=4)
    for i in range(4):
        simulation.add([i] * 12, max_tokens=4)
    plan = simulation.dispatch()
    tokens = Counter()
    for row in each(plan.rows):
        tokens[row.seq.group] += row.count
    assert tokens == {0: 16, 1: 16}
    assert simulation.scheduler.budget == TokenBudget(16)


def test_a_group_without_pages_preempts_its_own():
    simulation = GroupSimulation(2, num_pages=7, max_num_seqs=2, budget=32)
    for i in range(4):
        simulation.add([i] * 4, max_tokens=16)
    while simulation.scheduler.has_work or simulation.in_flight:
        simulation.step()
    simulation.check_end()
    assert simulation.events["preemptions"] >= 2


def test_a_blocked_request_is_looked_up_once_in_each_group(monkeypatch):
    """It was looked up in every group at every step."""
    simulation = GroupSimulation(2, num_pages=12, max_num_seqs=3, budget=64)
    for i in range(2):
        simulation.add([i] * 5, max_tokens=16)
    simulation.step()
    blocked = simulation.add([2] * 36, max_tokens=2)
    for _ in range(3):
        simulation.step()
    lookups = []
    match = BlockManager.match
    monkeypatch.setattr(BlockManager, "match", lambda *arguments: lookups.append(1) or match(*arguments))
    for _ in range(8):
        simulation.step()
    assert blocked not in groups_of(simulation)
    assert not lookups
    simulation.drain()
