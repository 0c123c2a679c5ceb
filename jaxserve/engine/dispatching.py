"""What dispatching a step takes: the slots of newcomers, and the programs of batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from jaxserve.execution.cost import StepCost
from jaxserve.execution.group_batches import split_groups
from jaxserve.execution.programs import StepProgram, StepPrograms
from jaxserve.execution.runner import ModelRunner
from jaxserve.execution.slots import encode_counts, encode_slot
from jaxserve.execution.step_buffer import StepBatch, split
from jaxserve.execution.step_shape import StepShape
from jaxserve.scheduling.running_table import RunningTable
from jaxserve.scheduling.sampler import Sampler
from jaxserve.scheduling.sequence import Sequence
from jaxserve.scheduling.step_plan import Rows


def fill_slots(
    placed: list[Sequence], running: RunningTable, runner: ModelRunner, place_of: Callable[[Sequence], int]
) -> None:
    """Writes the slots of these sequences, and counts their tokens if they have penalties. place_of: the places of
    their adapters."""
    rows = []
    for seq in placed:
        length = int(running.start[seq.slot])
        numbers = seq.prompt_len, seq.penalty_row, length, place_of(seq)
        rows.append(encode_slot(seq.slot, seq.params, seq.seed, tuple(seq.stop_ids), *numbers))
    runner.set_slots(rows)
    penalized = [seq for seq in placed if seq.params.has_penalties]
    if penalized:
        counted = [encode_counts(seq.penalty_row, seq.tokens, seq.prompt_len) for seq in penalized]
        runner.count_tokens(np.concatenate(counted, axis=1))


def batches_of(
    rows: Rows, running: RunningTable, shapes: list[StepShape], cost: StepCost | None
) -> Iterator[StepBatch]:
    """Cuts the rows of a plan into batches, each for one call of a step."""
    return split(rows, shapes, cost) if running.device_groups == 1 else split_groups(rows, running, shapes, cost)


def program_of(batch: StepBatch, running: RunningTable, programs: StepPrograms) -> StepProgram:
    """The least capable program that serves a batch's rows."""
    rows = batch.rows
    sampler = running.lineup.sampler
    if rows.seqs is not running.lineup.seqs:  # the lineup's sampler may do more than these rows need
        sampler = Sampler((running.sampler[rows.slot] * (rows.num_new > 0)).max())
    if not rows.only_decodes and rows.checks.any():
        return programs.choose_checking(batch.shape, sampler)
    return programs.choose(batch.shape, sampler, int(rows.num_new.max()), rows.scores, drafts=running.draft_reads)
