"""Proposals by a draft head, which reads the target's hidden states: "eagle3" and "mtp" (`models.drafter`).

The target's own steps keep the head's entries up to date (`execution.drafting`). So there is nothing to catch up with,
and all tokens for a step are proposed in one call. A sequence that was in a step too full for proposals, which the head
did not read, gets none until it ends.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as List
from weakref import WeakSet

import numpy as np

from jaxserve.execution.runner import ModelRunner
from jaxserve.execution.signatures import AuxProgram
from jaxserve.execution.slots import encode_slot
from jaxserve.execution.step_shape import StepShape
from jaxserve.scheduling.running_table import RunningTable
from jaxserve.scheduling.sequence import Sequence
from jaxserve.scheduling.step_plan import Sampler, StepPlan
from jaxserve.speculation.proposal import Method, Proposal
from jaxserve.speculation.step_times import CONTEXT, REPEATS, Curve
from jaxserve.types import SamplingParams


class DraftHead(Method):
    """runner: of the target, with its head. most: proposals of a sequence in a step."""

    chances = (0.6,)
    proposes_later = True

    def __init__(self, runner: ModelRunner, shapes: List[StepShape], most: int):
        self._runner = runner
        self._shapes = list(shapes)
        self._most = most
        self._curves: list[Curve] = []  # seconds of a call by rows, for one token each and for `most`
        self._unread: WeakSet[Sequence] = WeakSet()  # sequences of which the head did not read all tokens

    def measure(self) -> None:
        self._curves = [
            Curve.of({name.size: self._seconds(name, count) for name in self._programs(Sampler.GREEDY, count)})
            for count in (1, self._most)
        ]

    def seconds(self, rows: int, count: np.ndarray) -> np.ndarray:
        if not self._curves:
            return np.zeros(len(count))
        one, most = (curve(rows) for curve in self._curves)
        return one + (most - one) * (count - 1) / max(self._most - 1, 1)

    def propose(self, seq: Sequence, tokens: np.ndarray, count: int) -> Proposal | None:
        """Places for `count` tokens, which `prepare` computes when the step has pages for them."""
        if seq in self._unread:
            return None
        return Proposal(np.zeros(count, np.int32))

    def prepare(self, plan: StepPlan, running: RunningTable) -> None:
        if not running.draft_reads:
            self._unread.update(plan.rows.seqs)
        if not running.proposes:
            return
        self._runner.update_tables(plan.table_copies, plan.table_updates)
        plan.table_copies = []
        plan.table_updates = plan.table_updates[:, :0]
        rows = plan.rows.take(np.flatnonzero(plan.rows.checks))
        sampler = Sampler(running.sampler[rows.slot].max())
        programs = self._programs(min(sampler, Sampler.FILTERED), int(rows.num_new.max()) - 1)
        for at in range(0, len(rows), programs[-1].size):
            some = rows.take(np.arange(at, min(at + programs[-1].size, len(rows))))
            name = next(name for name in programs if name.size >= len(some))
            count = some.num_new - 1
            tokens = np.asarray(self._runner.propose(name, some.slot, int(count.max())))
            for i, (slot, known) in enumerate(zip(some.slot, running.known[some.slot], strict=True)):
                running.tokens[slot, known : known + count[i]] = tokens[: count[i], i]

    def _programs(self, sampler: Sampler, count: int) -> list[AuxProgram]:
        """The smallest programs that propose `count` tokens, by rows."""
        fitting = [
            name
            for name in self._runner.draft_programs(self._shapes)
            if name.passes >= count and name.sampler is not None and name.sampler >= sampler
        ]
        return [name for name in fitting if (name.passes, name.sampler) == (fitting[0].passes, fitting[0].sampler)]

    def _seconds(self, name: AuxProgram, count: int) -> float:
        """The least time of a call for sequences of CONTEXT tokens, whose pages are the null page."""
        slots = np.arange(min(name.size, self._runner.num_slots))
        best = np.inf
        length = max(min(CONTEXT, self._runner.max_len - count), 0)
        params = SamplingParams(temperature=0.0)
        self._runner.set_slots([encode_slot(slot, params, 0, (), 1, length=length) for slot in slots.tolist()])
        for _ in range(1 + REPEATS):
            start = time.perf_counter()
            np.asarray(self._runner.propose(name, slots, count))
            best = min(best, time.perf_counter() - start)
        return best
