"""Proposals that the model decodes ahead itself, by its usual programs for decodes: `deterministic_mode` "verify".

They are nearly always kept, so nothing is learned from that: while all sequences decode, each gets as many proposals as
fill the step that checks them, or none if such steps decode faster themselves. The start measures which, by how many
sequences run. Where prompts are computed there are no proposals, so that nothing delays the prompts.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as List
from typing import NamedTuple

import numpy as np

from jaxserve.execution.row_check import check_rows
from jaxserve.execution.runner import ModelRunner
from jaxserve.execution.signatures import AuxProgram
from jaxserve.execution.slots import encode_slot
from jaxserve.execution.step_shape import StepShape
from jaxserve.execution.verifying import VerifyingRunner
from jaxserve.scheduling.running_table import RunningTable
from jaxserve.scheduling.scheduler import Scheduler
from jaxserve.scheduling.sequence import Sequence
from jaxserve.scheduling.stats import EngineStats
from jaxserve.scheduling.step_plan import Rows, Sampler, StepPlan
from jaxserve.speculation.step_times import CONTEXT, REPEATS, least_seconds
from jaxserve.types import SamplingParams


class Times(NamedTuple):
    """Measured seconds by the number of rows: of a step that computes a token of each, and of decoding `ahead` tokens
    of each and checking them."""

    rows: int
    ahead: int
    step: float
    checked: float

    def gains(self, host_seconds: float) -> bool:
        """Whether decoding ahead is faster. Steps alone overlap with the host's work, of `host_seconds` each."""
        return (self.checked + host_seconds) / (self.ahead + 1) < max(self.step, host_seconds)


class OwnDecodes:
    """Takes the place of a `Speculator`. most: tokens that a sequence decodes ahead."""

    def __init__(self, runner: VerifyingRunner, shapes: List[StepShape], most: int):
        self._runner = runner
        self._shapes = shapes
        self._most = most
        self._times: list[Times] = []  # ascending by rows

    def measure(self, _: ModelRunner, shapes: List[StepShape]) -> None:
        """Checks that rows have the same bits in any company, and measures the programs. There are no requests. Raises
        ConfigError."""
        runner = self._runner
        (step,) = runner.programs.of_steps(shapes)
        check_rows(runner, step)
        names = [name for name in runner.draft_programs(shapes) if name.sampler in (Sampler.GREEDY, Sampler.ANY)]
        program = runner.programs.largest(step)
        for name in names:
            rows = min(name.size, runner.num_slots, step.rows)
            if (ahead := self._fitting(rows)) > 0:
                alone = least_seconds(runner, program, [1] * rows)
                checked = least_seconds(runner, program, [ahead + 1] * rows)
                self._times.append(Times(rows, ahead, alone, checked + self._ahead_seconds(name, rows, ahead)))

    def _ahead_seconds(self, name: AuxProgram, rows: int, count: int) -> float:
        """The least time in which rows decode `count` tokens ahead. Their pages are the null page."""
        slots = np.arange(rows)
        best = np.inf
        length = max(min(CONTEXT, self._runner.max_len - count - 1), 0)
        params = SamplingParams(temperature=0.0)
        self._runner.set_slots([encode_slot(slot, params, 0, (), 1, length=length) for slot in slots.tolist()])
        for _ in range(1 + REPEATS):
            start = time.perf_counter()
            np.asarray(self._runner.decode_ahead(name, slots, slots * 0, np.full(rows, count)))
            best = min(best, time.perf_counter() - start)
        return best

    def _fitting(self, rows: int) -> int:
        """How many tokens so many rows may decode ahead so that one step checks them all."""
        return min(self._most, self._runner.tokens // rows - 1)

    def wants(self, scheduler: Scheduler, host_seconds: float) -> bool:
        """Whether some sequence may decode ahead, once the steps in flight are committed."""
        return self._count(scheduler, host_seconds) > 0

    def _count(self, scheduler: Scheduler, host_seconds: float) -> int:
        """How many tokens each sequence may decode ahead; 0 if steps decode faster, or prompts are computed or could
        be. host_seconds: between two steps of which the second one checks proposals."""
        running = scheduler.running
        slot = running.batch.slot
        rows = len(running)
        if not rows or (running.total[slot] - running.computed[slot] > 1).any() or scheduler.can_admit():
            return 0
        times = next((times for times in self._times if times.rows >= rows), None)
        if times is not None and not times.gains(host_seconds):
            return 0
        return max(self._fitting(rows), 0)

    def propose(self, scheduler: Scheduler, host_seconds: float) -> None:
        """Places for tokens, which `prepare` computes once the step has pages for them."""
        if not (count := self._count(scheduler, host_seconds)):
            return
        running = scheduler.running
        slot = running.batch.slot
        known = running.known[slot]
        total = running.total[slot]
        computed = running.computed[slot]
        room = np.minimum(np.minimum(running.limit[slot] - known, running.ahead(slot)) - 1, count)
        decodes = (known == total) & (total == computed + 1) & ~running.beams[slot]
        answers = np.fromiter((seq.num_outputs > 0 for seq in running.batch.seqs), bool, len(slot))
        fits = np.flatnonzero((room > 0) & decodes & answers)
        running.proposed[slot[fits]] = room[fits]
        running.proposes = len(fits) > 0

    def prepare(self, plan: StepPlan, running: RunningTable) -> None:
        """Decodes ahead for the rows of a plan with proposals. The devices know the tokens; the host waits for them,
        and writes them behind the known ones, only if grammars need them for their masks."""
        if not running.proposes:
            return
        self._runner.update_tables(plan.table_copies, plan.table_updates)
        plan.table_copies = []
        plan.table_updates = plan.table_updates[:, :0]
        rows = plan.rows.take(np.flatnonzero(plan.rows.checks))
        programs = self._programs(rows, running)
        most = programs[-1].size
        made = []
        for at in range(0, len(rows), most):  # all calls are sent before the first one's tokens are read
            some = rows.take(np.arange(at, min(at + most, len(rows))))
            name = next(name for name in programs if name.size >= len(some))
            last = running.tokens[some.slot, running.known[some.slot] - 1]
            made.append((some, self._runner.decode_ahead(name, some.slot, last, some.num_new - 1)))
        for some, tokens in made if running.masked[rows.slot].any() else ():
            for number, drawn in enumerate(np.asarray(tokens)[: some.num_new.max() - 1]):
                has = np.flatnonzero(some.num_new - 1 > number)
                slot = some.slot[has]
                running.tokens[slot, running.known[slot] + number] = drawn[has]

    def _programs(self, rows: Rows, running: RunningTable) -> list[AuxProgram]:
        """The least capable programs that serve all rows, by size."""
        needed = Sampler(running.sampler[rows.slot].max())
        if running.masked[rows.slot].any():
            needed = max(needed, Sampler.FILTERED)
        fitting = [name for name in self._runner.draft_programs(self._shapes) if (name.sampler or 0) >= needed]
        return [name for name in fitting if name.sampler == fitting[0].sampler]

    def learn(self, rows: Rows, tokens: np.ndarray, stats: EngineStats) -> None:
        """Counts what a step kept. tokens: int32 [rows, any], -1 where a row sampled none."""
        checks = rows.checks
        kept = np.count_nonzero(tokens[checks] >= 0, axis=1)
        stats.count_drafts(rows.num_new[checks] - 1, np.maximum(kept - 1, 0))

    def restore(self) -> None:
        """After a step that failed: nothing is kept on the devices."""

    def finished(self, seq: Sequence) -> None:
        """A sequence has ended."""
