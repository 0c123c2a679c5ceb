"""Numbers of slots, pages and penalty rows, and the buffers that carry them, for one or several groups of devices.

With data parallelism a model runs on several groups of devices, each with its own slots, pages and copy of attention. A
program runs on all groups at the same time, in lockstep. Every argument and result has the groups' arrays one after the
other along its first axis, so that a group's part is what a single group has. Only mixtures of experts exchange tokens
between groups (`devices.sharded_ops.experts_sharded`).

The host's numbers go through all groups: with n slots in each, group g has the slots from g * n on, and n times the
number of groups is the padding slot. Pages and rows of penalties are numbered in the same way. The devices get the
numbers within a group. With one group both are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxserve.execution.kv_cache import COPIES
from jaxserve.execution.sampling import Sampled
from jaxserve.execution.signatures import TABLE_COPIES, TABLE_UPDATES
from jaxserve.execution.slots import RowParams, padding_slot_params
from jaxserve.execution.step_shape import StepShape
from jaxserve.scheduling.block_manager import NULL_PAGE
from jaxserve.types import NO_PENALTY_ROW

SLOT, PENALTY_ROW = (RowParams._fields.index(name) for name in ("slot", "penalty_row"))  # words of a slot's row


@dataclass(frozen=True)
class GatheredRows:
    """What `pick` makes of arrays that the devices compute. Reading it with NumPy waits for them."""

    arrays: list[jax.Array]
    pick: Callable[..., np.ndarray]

    def copy_to_host_async(self) -> None:
        for x in self.arrays:
            x.copy_to_host_async()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self.pick(*map(np.asarray, self.arrays))


@dataclass(frozen=True)
class DeviceGroups:
    """count: how many groups there are. num_slots, penalty_rows, num_pages: those of each group."""

    count: int
    num_slots: int
    penalty_rows: int
    num_pages: int

    @property
    def padding_slot(self) -> int:
        """The number of the slot that no sequence owns, as the host says it."""
        return self.count * self.num_slots

    # Numbers within a group

    def slot(self, slot: Any) -> Any:
        return np.where(slot == self.padding_slot, self.num_slots, slot % self.num_slots)

    def page(self, page: Any) -> Any:
        return page % self.num_pages

    def penalty_row(self, row: Any) -> Any:
        return np.where(row == NO_PENALTY_ROW, NO_PENALTY_ROW, (row - 1) % max(self.penalty_rows, 1) + 1)

    # Buffers of programs: each of these cuts its arguments into calls, and yields a call's size and its buffers

    def slot_rows(self, rows: list[np.ndarray], sizes: list[int]) -> Iterator[tuple[int, np.ndarray]]:
        """For `set_slots`: rows as from `encode_slot`."""
        parts: list[list[np.ndarray]] = [[] for _ in range(self.count)]
        for row in rows:
            if self.count == 1:
                parts[0].append(row)
                continue
            local = row.copy()
            parts[int(row[SLOT]) // self.num_slots].append(local)
            local[SLOT] = self.slot(row[SLOT])
            local[PENALTY_ROW] = self.penalty_row(row[PENALTY_ROW])
        padding = padding_slot_params(self.num_slots)
        for some, size in self._calls(parts, sizes):
            yield size, np.stack([row for part in some for row in part + [padding] * (size - len(part))])

    def counted_tokens(
        self, counted: np.ndarray, sizes: list[int], vocab_size: int
    ) -> Iterator[tuple[int, np.ndarray]]:
        """For `count_tokens`: counted, int32 [3, n], as from `encode_counts`."""
        owner = (counted[0] - 1) // max(self.penalty_rows, 1)
        local = np.concatenate([self.penalty_row(counted[:1]), counted[1:]]).T
        for some, size in self._calls(self._by_owner(local, owner), sizes):
            packed = np.full((self.count, size, 3), vocab_size, np.int32)
            packed[:, :, 0] = NO_PENALTY_ROW
            yield size, self._filled(packed, some, columns=True)

    def table_changes(
        self, copies: list[tuple[int, int]], entries: np.ndarray
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """For `update_tables`, which has one size: rows of the block table to copy, and then entries of it."""
        pairs = np.reshape(np.asarray(copies, np.int32), (-1, 2))
        local = entries.T
        owners = pairs[:, 0] // self.num_slots, local[:, 0] // self.num_slots
        if self.count > 1:
            local = local.copy()
            local[:, 0] = self.slot(local[:, 0])
            local[:, 2] = self.page(local[:, 2])
            pairs = self.slot(pairs)
        nothing: list[Any] = [local[:0]] * self.count
        made = [(some, nothing) for some, _ in self._calls(self._by_owner(pairs, owners[0]), [TABLE_COPIES])]
        made += [(nothing, some) for some, _ in self._calls(self._by_owner(local, owners[1]), [TABLE_UPDATES])]
        for some_copies, some_entries in made:
            packed_copies = np.full((self.count, TABLE_COPIES, 2), self.num_slots, np.int32)
            packed = np.zeros((self.count, TABLE_UPDATES, 3), np.int32)
            packed[:, :, 0] = self.num_slots
            copied = [some[:, :2] for some in some_copies]
            yield self._filled(packed_copies, copied), self._filled(packed, some_entries, columns=True)

    def page_pairs(self, pairs: list[tuple[int, int]]) -> Iterator[np.ndarray]:
        """For `copy_pages`: sources and targets, int32 [2, groups * COPIES]."""
        pages = np.asarray(pairs, np.int32)
        parts = self._by_owner(self.page(pages), pages[:, 0] // self.num_pages)
        for some, _ in self._calls(parts, [COPIES]):
            yield self._filled(np.full((self.count, COPIES, 2), NULL_PAGE, np.int32), some).T.copy()

    def step_buffers(self, shape: StepShape, packed: np.ndarray) -> np.ndarray:
        """For steps: int32 [groups, words], or [words] with numbers within a group, which all groups then run. Returns
        the buffers one after the other, with numbers within a group."""
        if self.count == 1:
            return packed.reshape(-1)
        if packed.ndim == 1:
            return np.tile(packed, self.count)
        local = packed.copy()
        fields = shape.fields
        for name, convert in (("slot", self.slot), ("update_slot", self.slot), ("update_page", self.page)):
            at, size = fields[name]
            local[:, at : at + size] = convert(packed[:, at : at + size])
        return local.reshape(-1)

    def side_by_side(self, drawn: Sampled) -> Sampled:
        """Results of a step [groups * calls, rows, …] as [calls, groups * rows, …]: row r of group g samples in the
        column g * rows + r."""
        if self.count == 1:
            return drawn

        def joined(x: np.ndarray) -> np.ndarray:
            return np.concatenate(list(x.reshape(self.count, -1, *x.shape[1:])), axis=1)

        tokens, scores = (None if x is None else GatheredRows([x], joined) for x in drawn[:2])
        return drawn._replace(tokens=tokens, scores=scores)  # type: ignore[arg-type]

    def deferred_calls(self, draws: np.ndarray, sizes: list[int]) -> Iterator[tuple[list[np.ndarray], int]]:
        """For `sample_deferred`: cuts draws, int32 [n, DEFERRED_WORDS], into calls that hold whole rows. Yields each
        group's draws of a call, by index, and the smallest of these ascending sizes that holds them."""

        def whole_rows(index: np.ndarray) -> np.ndarray:
            """The first of these draws that one call has room for. It ends where a row ends."""
            starts = np.append(np.flatnonzero(draws[index, 1] == 0), len(index))
            return index[: int(starts[starts <= sizes[-1]][-1])]

        left = self._by_owner(np.arange(len(draws)), draws[:, 0] // self.num_slots)
        while any(map(len, left)):
            some = [whole_rows(index) for index in left]
            yield some, next(size for size in sizes if size >= max(map(len, some)))
            left = [index[len(taken) :] for index, taken in zip(left, some, strict=True)]

    def deferred_draws(self, given: np.ndarray, some: list[np.ndarray], size: int) -> np.ndarray:
        """The buffer of one of `deferred_calls`. given: draws and masks, int32 [n, words]."""
        packed = np.zeros((self.count, size, given.shape[1]), np.int32)
        packed[:, :, 0] = self.num_slots
        for group, index in enumerate(some):
            packed[group, : len(index)] = given[index]
            packed[group, : len(index), 0] -= group * self.num_slots
        return packed.reshape(-1, given.shape[1])

    def in_order(self, count: int, results: list[tuple[list[np.ndarray], int, Sampled]]) -> list[tuple[int, Sampled]]:
        """The results of all calls of `sample_deferred` for `count` draws: of each of `deferred_calls` the draws by
        index, its size, and what was sampled. Returns numbers of draws and their results, in the order of the draws;
        with several groups one result for all."""
        if self.count == 1:
            return [(len(some[0]), one) for some, _, one in results]
        place = np.empty(count, np.intp)
        before = 0
        for some, size, _ in results:
            for group, index in enumerate(some):
                place[index] = before + group * size + np.arange(len(index))
            before += self.count * size

        def picked(*parts: np.ndarray) -> np.ndarray:
            return np.concatenate(parts)[place]

        drawn = [one for _, _, one in results]
        tokens, scores = (GatheredRows([one[i] for one in drawn], picked) for i in range(2))  # type: ignore[misc]
        return [(count, Sampled(tokens, scores))] if drawn else []  # type: ignore[arg-type]

    def deferred_slots(self, draws: np.ndarray, some: list[np.ndarray], size: int) -> np.ndarray:
        """The slots of one of `deferred_calls`, int [groups * size], the padding slot where there is no draw."""
        slot = np.full((self.count, size), self.padding_slot)
        for own, index in zip(slot, some, strict=True):
            own[: len(index)] = draws[index, 0]
        return slot.ravel()

    def scored_rows(
        self, tokens: int, most: int, columns: list[np.ndarray]
    ) -> tuple[np.ndarray, Callable[[jax.Array], Any]]:
        """For `score_prompt`: columns [n] of which the first has the rows, of hidden states of `tokens` tokens in each
        group; there is room for `most` rows of each. Returns the buffer, and what puts its result in the order of the
        rows."""
        packed = np.zeros((self.count, 1 + len(columns) * most), np.int32)
        owner = columns[0] // tokens
        place = np.empty(len(owner), np.intp)
        for group, buffer in enumerate(packed):
            index = np.flatnonzero(owner == group)
            place[index] = group * most + np.arange(len(index))
            buffer[0] = len(index)
            for column, values in zip(buffer[1:].reshape(-1, most), columns, strict=True):
                column[: len(index)] = values[index]
            buffer[1 : 1 + len(index)] -= group * tokens
        if self.count == 1:
            return packed.reshape(-1), lambda scores: scores
        return packed.reshape(-1), lambda scores: GatheredRows([scores], lambda x: x[place])

    def _by_owner(self, items: np.ndarray, owner: np.ndarray) -> list[np.ndarray]:
        return [items] if self.count == 1 else [items[owner == group] for group in range(self.count)]

    def _calls(self, parts: list[Any], sizes: list[int]) -> Iterator[tuple[list[Any], int]]:
        """Cuts each group's items into the same number of calls. Yields every group's items of a call, and the smallest
        size that holds them."""
        for some, size in calls(max(map(len, parts)), sizes):
            yield [part[some] for part in parts], size

    @staticmethod
    def _filled(packed: np.ndarray, parts: list[np.ndarray], *, columns: bool = False) -> np.ndarray:
        """Writes each group's items over the padding [groups, size, width]. Returns the buffers of the groups one after
        the other, int32 [groups * size, width], or with `columns` [groups * width, size]."""
        for buffer, part in zip(packed, parts, strict=True):
            buffer[: len(part)] = part
        packed = packed.transpose(0, 2, 1) if columns else packed
        return packed.reshape(-1, packed.shape[2])


def calls(count: int, sizes: list[int]) -> Iterator[tuple[slice, int]]:
    """Cuts `count` items into as few calls as possible. `sizes` are ascending. Yields the items of each call, and the
    smallest size that holds them."""
    for at in range(0, count, sizes[-1]):
        some = min(sizes[-1], count - at)
        yield slice(at, at + some), next(size for size in sizes if size >= some)
