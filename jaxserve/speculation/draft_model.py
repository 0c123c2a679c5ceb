"""Proposals by a second, smaller model.

The draft model has a cache of its own with as many pages as the target's. A page has the same number in both, so that
the draft needs no pages of its own: it sees what its block tables show, which follow the target's. Its tokens are
sampled with the target's random numbers (seed, position, token), so that similar distributions often sample the same.

What is wrong in the draft's cache costs proposals, and never a token of an answer. So nothing is taken back there: the
draft computes each sequence from the first token that it may not know.
"""

from __future__ import annotations

from collections.abc import Sequence as List
from weakref import WeakKeyDictionary

import numpy as np

from jaxserve.execution.programs import StepProgram
from jaxserve.execution.runner import ModelRunner
from jaxserve.execution.sampling import Sampled
from jaxserve.execution.signatures import ProgramName
from jaxserve.execution.slots import encode_slot
from jaxserve.execution.step_buffer import StepBatch, split
from jaxserve.execution.step_shape import StepShape
from jaxserve.scheduling.running_table import RunningTable
from jaxserve.scheduling.sequence import Sequence
from jaxserve.scheduling.step_plan import Rows, Sampler, StepPlan
from jaxserve.speculation.proposal import Method, Proposal
from jaxserve.speculation.step_times import Curve, decode_seconds
from jaxserve.types import SamplingParams

NO_GENERATION = -1
MOST_PLANS = 64  # whose changes of pages are kept until something is proposed
NO_UPDATES = np.empty((3, 0), np.int32)


class DraftModel(Method):
    """runner: of the draft, for as many slots as the target's. most: proposals of a sequence in a step."""

    chances = (0.6,)
    proposes_later = True

    def __init__(self, runner: ModelRunner, shapes: List[StepShape], most: int):
        self._runner = runner
        self._shapes = list(shapes)
        self._most = most
        self._curve: Curve | None = None
        self._params: WeakKeyDictionary[Sequence, SamplingParams] = WeakKeyDictionary()
        self._plans: list[StepPlan] = []  # plans whose changes of pages the draft does not know yet
        self._computed = np.zeros(runner.num_slots, np.int32)  # tokens with keys and values in the draft's cache
        self._generation = np.full(runner.num_slots, NO_GENERATION, np.int32)  # whose they are, as in `RunningTable`

    def allocate(self) -> None:
        self._runner.allocate()
        self._plans = []
        self._generation[:] = NO_GENERATION

    @property
    def programs(self) -> list[ProgramName]:
        """The names of the programs that the draft needs."""
        auxiliary = "set_slots", "update_tables", "copy_pages"
        names = self._runner.names(self._shapes)
        return [name for name in names if isinstance(name, StepProgram) or name.kind in auxiliary]

    def measure(self) -> None:
        self._runner.compile(self.programs)
        self._curve = decode_seconds(self._runner, self._shapes, self._most + 1)

    def seconds(self, rows: int, count: np.ndarray) -> np.ndarray:
        return np.zeros(len(count)) if self._curve is None else self._curve(rows) * (count + 1)

    def propose(self, seq: Sequence, tokens: np.ndarray, count: int) -> Proposal | None:
        """Places for `count` tokens, which `prepare` computes when the step has pages for them."""
        return Proposal(np.zeros(count, np.int32))

    def prepare(self, plan: StepPlan, running: RunningTable) -> None:
        if plan.copies or plan.table_copies or plan.table_updates.size:
            self._plans.append(plan)
        if running.proposes or len(self._plans) == MOST_PLANS:
            for one in self._plans:
                self._runner.copy_pages(one.copies)
                self._runner.update_tables(one.table_copies, one.table_updates)
            self._plans = []
        if running.proposes:
            self._fill(plan.rows.take(np.flatnonzero(plan.rows.checks)), running)

    def _fill(self, rows: Rows, running: RunningTable) -> None:
        """Computes the proposals of rows that check some, and writes them behind the known tokens."""
        slot = rows.slot
        known = running.known[rows.slot]
        count = rows.num_new - 1
        mine = self._generation[slot] == rows.slot_generation
        start = np.where(mine, np.minimum(self._computed[slot], known - 1), 0)
        self._runner.set_slots(
            [self._encoded(*one) for one in zip(rows.seqs, slot.tolist(), start.tolist(), strict=True)]
        )
        while (behind := np.flatnonzero(start < known - 1)).size:
            start[behind] += self._catch_up(rows.take(behind), start[behind], (known - 1 - start)[behind], running)
        self._decode(rows, count, running)
        self._computed[slot] = known + count
        self._generation[slot] = rows.slot_generation

    def _encoded(self, seq: Sequence, slot: int, length: int) -> np.ndarray:
        """The slot of a sequence: its temperature and filters, but neither penalties nor ends."""
        params = self._params.get(seq)
        if params is None:
            names = ("temperature", "top_k", "top_p", "min_p")
            params = self._params[seq] = SamplingParams(**{name: getattr(seq.params, name) for name in names})
        return encode_slot(slot, params, seq.seed, (), seq.prompt_len, length=length)

    def _catch_up(self, rows: Rows, start: np.ndarray, left: np.ndarray, running: RunningTable) -> np.ndarray:
        """Computes the next tokens of sequences that are `left` tokens behind; returns how many of each."""
        most = max(shape.tokens for shape in self._shapes if not shape.decode_only)
        count = np.clip(most - (np.cumsum(left) - left), 0, left).astype(np.int32)
        some = np.flatnonzero(count)
        zeros = np.zeros(len(some), np.int32)
        part = rows.take(some)
        part = Rows(part.seqs, part.slot, part.slot_generation, start[some], count[some], zeros, zeros > 0)
        for batch in split(part, self._shapes):
            self._step(batch, running)
        return count

    def _decode(self, rows: Rows, count: np.ndarray, running: RunningTable) -> None:
        """Samples `count` tokens behind the known ones of each row. One more pass, whose token is not used, writes the
        keys and values of the last, so that the next round begins with one token, too."""
        done = 0
        known = running.known[rows.slot]
        while done <= count.max():
            going = np.flatnonzero(done <= count)
            part = rows.take(going)
            length = int(self._runner.programs.lengths(self._shapes, len(going), self._sampler(part))[-1])
            zeros = np.zeros(len(going), np.int32)
            start = known[going] - 1 + done
            num_new = np.minimum(count[going] + 1 - done, length)
            columns = part.slot, part.slot_generation, start, zeros + 1, num_new, zeros > 0
            for batch in split(Rows(part.seqs, *columns, only_decodes=True), self._shapes):
                tokens = np.asarray(self._step(batch, running).tokens)
                some = batch.rows
                for i, (slot, first, new) in enumerate(zip(some.slot, some.end, some.num_new, strict=True)):
                    running.tokens[slot, first : first + new] = tokens[:new, i]
            done += length

    def _sampler(self, rows: Rows) -> Sampler:
        return max(Sampler.of(self._params[seq]) for seq in rows.seqs)

    def _step(self, batch: StepBatch, running: RunningTable) -> Sampled:
        length = max(int(batch.rows.num_new.max()), 1)
        program = self._runner.programs.choose(batch.shape, self._sampler(batch.rows), length, False)
        return self._runner.step(program, batch.pack(running, NO_UPDATES, defers=False))[0]
