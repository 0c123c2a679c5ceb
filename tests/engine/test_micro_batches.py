"""Micro-batches of a pipeline, planned by the real scheduler for devices that only take time: how long stages idle.

The devices are a model of time: a stage computes one step at a time, in the order in which they were sent, and begins
when the stage before has finished the step. The first stage also waits for the last stage's tokens that the step reads.
The host sends steps as `Engine.advance` does: so many that each stage has one, and one ahead.
"""

from collections import deque
from dataclasses import dataclass, field

import numpy as np
import pytest
from engines import request

from jaxserve.scheduling.block_manager import BlockManager
from jaxserve.scheduling.scheduler import Scheduler
from jaxserve.scheduling.sequence import Sequence
from jaxserve.scheduling.step_plan import Rows

WEIGHTS = 1.0  # time of a stage for a step: reading weights
TOKEN = 0.002  # each token
HOST = 0.05  # the host's own


@dataclass
class Stages:
    """When each stage is free, and how long it has worked."""

    count: int
    free: list[float] = field(default_factory=list)
    begun: list[float] = field(default_factory=list)
    worked: float = 0.0
    sampled: dict[int, float] = field(default_factory=dict)  # slot -> when its last token leaves the last stage

    def run(self, rows: Rows, now: float) -> float:
        """Sends a step at a time; returns when its tokens are there."""
        self.free = self.free or [0.0] * self.count
        seconds = WEIGHTS + TOKEN * rows.num_tokens
        begin = max([now, *(self.sampled.get(int(slot), 0.0) for slot in rows.slot)])
        for stage in range(self.count):
            begin = max(begin, self.free[stage])
            self.begun.append(begin)
            begin = self.free[stage] = begin + seconds
            self.worked += seconds
        self.sampled |= dict.fromkeys(rows.slot[rows.num_new > 0].tolist(), begin)
        return begin


def simulate(stages: int, sequences: int, prompt: int = 40, output: int = 150, *, arrive: int = 10**6) -> Stages:
    """Runs requests to their end; `arrive` of them come at a time. Checks the invariants of each plan."""
    blocks = BlockManager(-(-(prompt + output + 1) // 16) * sequences + 1, 16)
    options = {"max_model_len": prompt + output + 1, "prefill_chunk": 256, "prefill_bursts": False}
    budget = max(1024, sequences)
    scheduler = Scheduler(blocks, max_num_seqs=sequences, max_num_batched_tokens=budget, stages=stages, **options)
    devices = Stages(stages)
    now = 0.0
    flight = deque()
    left = list(range(sequences))

    def commit() -> None:
        nonlocal now
        rows, ready = flight.popleft()
        now = max(now, ready)
        scheduler.commit(rows, np.where(rows.num_new > 0, 7, -1)[:, None].astype(np.int32))

    while left or scheduler.has_work or flight:
        for i in left[:arrive]:
            one = request(str(i), [i % 200 + 1, *range(1, prompt)], max_tokens=output)
            scheduler.add(Sequence(one, 0, 0, output, frozenset(), i))
        left = left[arrive:]
        now += HOST
        plan = scheduler.schedule()
        if plan is not None:
            known = scheduler.running.known[plan.rows.slot]
            prompts = plan.rows.count > 1
            assert (plan.rows.end[prompts] <= known[prompts]).all()
            flight.append((plan.rows, devices.run(plan.rows, now)))
        if len(flight) > stages or (flight and plan is None):
            commit()
        scheduler.check_integrity()
    assert blocks.num_used == 0
    return devices


def bubbles(stages: int, sequences: int) -> float:
    """The part of the stages' time, from the tenth of all steps to the ninth tenth, in which they do not work."""
    devices = simulate(stages, sequences)
    per_step = stages
    begins = np.asarray(devices.begun).reshape(-1, per_step)
    some = slice(len(begins) // 10, len(begins) * 9 // 10)
    spent = np.diff(begins[some, 0])
    if not len(spent):
        return 0.0
    each = np.asarray([begins[i, 1] - begins[i, 0] for i in range(len(begins))])[some][:-1] if stages > 1 else spent
    return float(1 - np.minimum(each, spent).sum() / spent.sum())


@pytest.mark.parametrize(
    ("stages", "sequences", "most"),
    [(2, 4, 0.05), (4, 8, 0.05), (4, 16, 0.05), (4, 64, 0.05), (4, 67, 0.05), (8, 16, 0.05), (3, 7, 0.05)],
)
def test_stages_have_work(stages, sequences, most):
    assert bubbles(stages, sequences) <= most


def test_too_few_sequences_leave_stages_idle():
    """One sequence is in one stage at a time; without groups all sequences would be in one stage at a time."""
    assert bubbles(4, 1) == pytest.approx(0.75, abs=0.02)
    assert bubbles(4, 2) == pytest.approx(0.5, abs=0.02)


def test_groups_are_equal():
    """From an unequal start: sequences that arrive one after the other."""
    simulate(4, 13, arrive=1)


def test_prompts_follow_each_other():
    """A prompt is cut, so that its parts are in all stages at the same time; it takes less time than in one piece."""
    whole = simulate(1, 1, prompt=4000, output=1).free[-1]
    divided = simulate(4, 1, prompt=4000, output=1).free[-1]
    pieces = -(-4000 // 256)
    assert divided < (pieces + 3) * (WEIGHTS + 256 * TOKEN) * 1.1
    assert whole < divided  # a stage of four takes as long as one device of one here, so four are never faster
