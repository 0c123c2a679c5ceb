"""Batches of several groups of devices (data parallelism, host side): every call runs the same bucket on all groups.

A group without rows for a call runs padding, which writes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, reduce
from itertools import zip_longest
from typing import Any

import numpy as np

from jaxserve.execution.cost import StepCost
from jaxserve.execution.device_groups import GatheredRows
from jaxserve.execution.sampling import Sampled
from jaxserve.execution.step_buffer import StepBatch, fitting, split_mixed
from jaxserve.execution.step_shape import StepShape
from jaxserve.scheduling.running_table import RunningTable
from jaxserve.scheduling.step_plan import Rows


@dataclass(frozen=True)
class GroupBatch(StepBatch):
    """The rows that one call advances in all groups. `group`, intp [rows]: the group of each."""

    group: np.ndarray
    num_groups: int

    @cached_property
    def _indices(self) -> list[np.ndarray]:
        """The rows of each group."""
        return [np.flatnonzero(self.group == number) for number in range(self.num_groups)]

    @property
    def first_tokens(self) -> np.ndarray:
        """The place of each row's first token among the tokens of all groups, with padding."""
        first = np.empty(len(self.rows), np.intp)
        for number, index in enumerate(self._indices):
            count = self.rows.count[index]
            first[index] = number * self.shape.tokens + np.cumsum(count) - count
        return first

    def pack(self, running: RunningTable, table_updates: np.ndarray, *, defers: bool = True) -> np.ndarray:
        """The buffers of all groups, int32 [groups, shape.words], see `StepBatch.pack`. All say the same number of
        tokens per call."""
        packed = np.stack([self.shape.empty(running.num_slots)] * self.num_groups)
        owner = running.group_of(table_updates[0])
        for number, index in enumerate(self._indices):
            updates = table_updates[:, owner == number]
            if len(index):
                rows = self.rows if len(index) == len(self.rows) else self.rows.take(index)
                packed[number] = StepBatch(self.shape, rows).pack(running, updates, defers=defers)
            else:
                for name, column in zip(("update_slot", "update_index", "update_page"), updates, strict=True):
                    at, _ = self.shape.fields[name]
                    packed[number, at : at + len(column)] = column
        at, _ = self.shape.fields["tokens_per_call"]
        packed[:, at] = max(self.rows.num_new.max(), 1)
        return packed

    def of_rows(self, sampled: Sampled) -> Sampled:
        """The samples of the batch's rows, in their order."""
        column = np.empty(len(self.rows), np.intp)
        for number, index in enumerate(self._indices):
            column[index] = number * self.shape.rows + np.arange(len(index))

        def picked(x: Any) -> Any:
            return None if x is None else GatheredRows(x.arrays, lambda *given: x.pick(*given)[:, column])

        return sampled._replace(tokens=picked(sampled.tokens), scores=picked(sampled.scores))


def split_groups(
    rows: Rows, running: RunningTable, shapes: list[StepShape], cost: StepCost | None = None
) -> Iterator[GroupBatch]:
    """As `step_buffer.split`, for the rows of all groups."""
    cut = _Cut(running, shapes, cost)
    if rows.only_decodes and (whole := cut.of_decodes(rows)) is not None:
        yield whole
        return
    decodes = (rows.count == 1) & ~rows.scores_prompt & bool(cut.decode_shapes)
    checks = rows.checks & rows.scores  # the program that keeps hidden states for scores checks no proposals
    batches = [*cut.of_rows(rows, decodes, decode_only=True), *cut.of_rows(rows, ~decodes & ~checks)]
    if decodes.any() and (~decodes & ~checks).any() and rows.num_new[decodes].max() <= 1:
        together = [*cut.of_rows(rows, ~checks)]
        if cut.price(together) <= cut.price(batches):
            batches = together
    yield from batches
    yield from cut.of_rows(rows, checks)


class _Cut:
    """Cuts rows into batches that fit the buckets `shapes`."""

    def __init__(self, running: RunningTable, shapes: list[StepShape], cost: StepCost | None):
        self._running = running
        self._groups = running.device_groups
        self._cost = cost
        self.decode_shapes = [shape for shape in shapes if shape.decode_only]
        self._mixed_shapes = [shape for shape in shapes if not shape.decode_only]

    def price(self, batches: list[GroupBatch]) -> float:
        """The estimated time of these batches; without a cost their tokens, padding included."""
        return sum(batch.shape.tokens if self._cost is None else self._cost(batch.shape.tokens) for batch in batches)

    def of_decodes(self, rows: Rows) -> GroupBatch | None:
        """One batch of all rows, which only decode; None if there are too many of a group."""
        group = self._running.group_of(rows.slot)
        most = int(np.bincount(group).max())
        shape = fitting(self.decode_shapes, most, most)
        return None if shape is None else GroupBatch(shape, rows, group, self._groups)

    def of_rows(self, rows: Rows, some: np.ndarray, *, decode_only: bool = False) -> Iterator[GroupBatch]:
        """Batches of `some` rows, bool [rows], all for decodes or all mixed. The n-th of all groups are one batch."""
        group = self._running.group_of(rows.slot)
        parts = [rows.take(np.flatnonzero(some & (group == number))) for number in range(self._groups)]
        cuts = [list(self._decodes(part) if decode_only else self._mixed(part)) if len(part) else [] for part in parts]
        for pieces in zip_longest(*cuts):
            yield self._joined(pieces, self.decode_shapes if decode_only else self._mixed_shapes)

    def _decodes(self, rows: Rows) -> Iterator[Rows]:
        most = self.decode_shapes[-1].rows
        for at in range(0, len(rows), most):
            yield rows.take(np.arange(at, min(at + most, len(rows))))

    def _mixed(self, rows: Rows) -> Iterator[Rows]:
        return (batch.rows for batch in split_mixed(rows, self._mixed_shapes, self._cost))

    def _joined(self, pieces: tuple[Rows | None, ...], shapes: list[StepShape]) -> GroupBatch:
        given = [piece for piece in pieces if piece is not None]
        sizes = max(int(piece.count.sum()) for piece in given), max(map(len, given))
        rows = reduce(Rows.extend, given)
        shape = fitting(shapes[-1:] if rows.scores_prompt.any() else shapes, *sizes)
        assert shape is not None
        group = np.repeat(np.arange(self._groups), [0 if piece is None else len(piece) for piece in pieces])
        return GroupBatch(shape, rows, group, self._groups)
