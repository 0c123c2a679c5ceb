"""Proposals that the model decodes ahead itself, by its usual programs for decodes: `deterministic_mode` "verify".

They are nearly always kept, so nothing is measured or learned: while all sequences decode, each gets as many proposals
as fill the step that checks them. Where prompts are computed, or where so many sequences run that they fill such a step
with a token each, there are no proposals: the step decodes.
"""

from __future__ import annotations

from collections.abc import Sequence as List

import numpy as np

from jaxserve.execution.row_check import check_rows
from jaxserve.execution.signatures import Upkeep
from jaxserve.execution.step_shape import StepShape
from jaxserve.execution.verifying import VerifyingRunner
from jaxserve.scheduling.running_table import RunningTable
from jaxserve.scheduling.sampler import Sampler
from jaxserve.scheduling.scheduler import Scheduler
from jaxserve.scheduling.sequence import Sequence
from jaxserve.scheduling.stats import EngineStats
from jaxserve.scheduling.step_plan import Rows, StepPlan


class OwnDecodes:
    """Takes the place of a `Speculator`. most: tokens that a sequence decodes ahead."""

    def __init__(self, runner: VerifyingRunner, shapes: List[StepShape], scheduler: Scheduler, most: int):
        self._runner, self._shapes, self._scheduler, self._most = runner, shapes, scheduler, most

    def measure(self, runner: VerifyingRunner, shapes: List[StepShape]) -> None:
        """Checks that rows have the same bits in any company. Raises ConfigError. There are no requests."""
        for shape in runner.programs.of_steps(shapes):
            check_rows(runner, shape)

    def wants(self, running: RunningTable, host_seconds: float) -> bool:
        """Whether some sequence may decode ahead, once the steps in flight are committed."""
        return bool(len(running)) and self._count(running) > 0

    def _count(self, running: RunningTable) -> int:
        """How many tokens each sequence may decode ahead; 0 while prompts are computed or could be."""
        slot = running.lineup.slot
        if (running.total[slot] - running.computed[slot] > 1).any() or self._scheduler.next_admissible():
            return 0
        return min(self._most, self._runner.tokens // len(slot) - 1)

    def propose(self, running: RunningTable, host_seconds: float) -> None:
        """Places for tokens, which `prepare` computes once the step has pages for them. No step is in flight."""
        if not len(running) or (count := self._count(running)) <= 0:
            return
        for seq in running.lineup.seqs:
            slot, known = seq.slot, int(running.known[seq.slot])
            room = min(count, int(running.limit[slot]) - known - 1, int(running.ahead(slot)) - 1)
            decodes = known == running.total[slot] == running.computed[slot] + 1
            if room > 0 and decodes and seq.num_outputs and not seq.params.use_beam_search:
                running.propose(slot, np.zeros(room, np.int32))

    def prepare(self, plan: StepPlan, running: RunningTable) -> None:
        """Decodes ahead for the rows of a plan with proposals, and writes the tokens behind the known ones."""
        if not running.proposes:
            return
        self._runner.update_tables(plan.table_copies, plan.table_updates)
        plan.table_copies, plan.table_updates = [], plan.table_updates[:, :0]
        rows = plan.rows.take(np.flatnonzero(plan.rows.checks))
        programs = self._programs(rows, running)
        most, made = programs[-1].size, []
        for at in range(0, len(rows), most):  # all calls are sent before the first one's tokens are read
            some = rows.take(np.arange(at, min(at + most, len(rows))))
            name = next(name for name in programs if name.size >= len(some))
            last = running.tokens[some.slot, running.known[some.slot] - 1]
            made.append((some, self._runner.decode_ahead(name, some.slot, last, some.num_new - 1)))
        for some, tokens in made:
            ahead = np.maximum(np.asarray(tokens), 0)  # behind a stop token, which ends the row, any token will do
            for i, (slot, known, new) in enumerate(
                zip(some.slot, running.known[some.slot], some.num_new - 1, strict=True)
            ):
                running.tokens[slot, known : known + new] = ahead[:new, i]

    def _programs(self, rows: Rows, running: RunningTable) -> list[Upkeep]:
        """The least capable programs that serve all rows, by size."""
        needed = Sampler(running.sampler[rows.slot].max())
        if running.masked[rows.slot].any():
            needed = max(needed, Sampler.FILTERED)
        fitting = [name for name in self._runner.draft_programs(self._shapes) if (name.sampler or 0) >= needed]
        return [name for name in fitting if name.sampler == fitting[0].sampler]

    def learn(self, rows: Rows, tokens: np.ndarray, stats: EngineStats) -> None:
        """Counts what a step kept. tokens: int32 [rows, any], -1 where a row sampled none."""
        for i in np.flatnonzero(rows.checks).tolist():
            stats.count_draft(int(rows.num_new[i]) - 1, max(int(np.count_nonzero(tokens[i] >= 0)) - 1, 0))

    def restore(self) -> None:
        """After a step that failed: nothing is kept on the devices."""

    def finished(self, seq: Sequence) -> None:
        """A sequence has ended."""
