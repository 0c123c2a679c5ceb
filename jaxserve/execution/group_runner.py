"""Data parallelism: one runner for several groups of devices, each with its own slots, pages and copy of attention.

A program runs on all groups at the same time, in lockstep. Every argument and result has the groups' arrays one after
the other along its first axis, so that a group's part is what a `ModelRunner` of one group has. Only mixtures of
experts exchange tokens between groups (`devices.sharded_ops.experts_sharded`).

The host's numbers go through all groups: with n slots in each, group g has the slots from g * n on, and n times the
number of groups is the padding slot. Pages and rows of penalties are numbered in the same way. The methods here take
these numbers, and the devices get those within a group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from jaxserve.devices.mesh import by_group, for_each_group, num_groups, spans_hosts
from jaxserve.execution import commands, steps
from jaxserve.execution.aux_programs import calls
from jaxserve.execution.kv_cache import COPIES
from jaxserve.execution.programs import StepProgram
from jaxserve.execution.runner import ModelRunner
from jaxserve.execution.sampling import Sampled
from jaxserve.execution.signatures import TABLE_COPIES, TABLE_UPDATES, AuxProgram, ProgramName, Signature, Signatures
from jaxserve.execution.slots import RowParams, padding_slot_params
from jaxserve.execution.step_shape import StepShape
from jaxserve.scheduling.block_manager import NULL_PAGE
from jaxserve.types import NO_PENALTY_ROW

_SLOT, _PENALTY_ROW = (RowParams._fields.index(name) for name in ("slot", "penalty_row"))  # words of a slot


class GroupSignatures(Signatures):
    """The programs of all groups, made from those of one.

    If the groups span several hosts, every host gives a program the whole of each array that comes from the host, and
    a group takes its part on its devices: JAX accepts NumPy arrays of several processes only whole. And what the host
    reads is gathered, so that it is whole on every host.
    """

    def of(self, name: ProgramName) -> Signature:
        made = super().of(name)
        groups = num_groups(self.mesh)

        def of_all(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            assert isinstance(x.sharding, NamedSharding)
            place = by_group(self.mesh, x.sharding.spec)
            return jax.ShapeDtypeStruct((groups * x.shape[0], *x.shape[1:]), x.dtype, sharding=place)

        given = tuple(one if one is self.params else jax.tree.map(of_all, one) for one in made.arguments)
        run = for_each_group(made.function, self.mesh, given)
        results = jax.tree.map(lambda place: by_group(self.mesh, place.spec), made.results)
        if spans_hosts(self.mesh):
            given = tuple(map(self._whole_from_host, given))
            results = self._whole_for_host(name, results)
        return Signature(run, made.donated, given, results)

    def _whole_from_host(self, argument: Any) -> Any:
        """The same argument, on all devices if it comes from the host: a single array of integers, as hidden states
        are floats, and others are trees."""
        if not isinstance(argument, jax.ShapeDtypeStruct) or argument.dtype != jnp.int32:
            return argument
        return jax.ShapeDtypeStruct(argument.shape, argument.dtype, sharding=self._everywhere)

    def _whole_for_host(self, name: ProgramName, results: Any) -> Any:
        """The places of a program's results, everywhere for those that the host reads."""
        if isinstance(name, StepProgram):
            return results._replace(drawn=self._everywhere)
        if name.kind == "sample_deferred":
            return self._everywhere, results
        return self._everywhere if name.kind == "score_prompt" else results


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


class GroupRunner(ModelRunner):
    """A `ModelRunner` of several groups. `num_slots`, `penalty_rows` and the pages of `layout` are those of each."""

    signatures_kind = GroupSignatures

    @property
    def num_groups(self) -> int:
        return num_groups(self.mesh)

    @property
    def padding_slot(self) -> int:
        return self.num_groups * self.num_slots

    def step(self, program: StepProgram, packed: np.ndarray) -> tuple[Sampled, jax.Array | None]:
        """Runs one step over int32 [groups, program.shape.words]; or over [program.shape.words] with numbers within a
        group, which all groups then run. Row r of group g samples in the column g * program.shape.rows + r of the
        results. Hidden states of all groups follow each other."""
        self.tell(commands.Step, program, packed)
        result = self._get(program)(self._arrays, self.cache, self.slots, self._of_devices(program.shape, packed))
        self.cache = result.cache
        self.slots = result.slots
        self._hidden = result.hidden
        self._show(result.drawn)
        return self._side_by_side(result.drawn), result.hidden

    def _of_devices(self, shape: StepShape, packed: np.ndarray) -> np.ndarray:
        """The buffers of `step`, one after the other, with numbers within a group."""
        if packed.ndim == 1:
            return np.tile(packed, self.num_groups)
        local = packed.copy()
        fields = shape.fields
        for name, convert in (("slot", self._slot), ("update_slot", self._slot), ("update_page", self._page)):
            at, size = fields[name]
            local[:, at : at + size] = convert(packed[:, at : at + size])
        return local.reshape(-1)

    def _side_by_side(self, drawn: Sampled) -> Sampled:
        """Results of a step [groups * calls, rows, …] as [calls, groups * rows, …]."""

        def joined(x: np.ndarray) -> np.ndarray:
            return np.concatenate(list(x.reshape(self.num_groups, -1, *x.shape[1:])), axis=1)

        tokens, scores = (None if x is None else GatheredRows([x], joined) for x in drawn[:2])
        return drawn._replace(tokens=tokens, scores=scores)  # type: ignore[arg-type]

    def sample_deferred(self, draws: np.ndarray, masks: np.ndarray) -> list[tuple[int, Sampled]]:
        """As in `ModelRunner`. All draws are in one result."""
        self.tell(commands.SampleDeferred, draws, masks)
        given = np.concatenate([draws, masks], axis=1)
        drawn = []
        place = np.empty(len(draws), np.intp)
        before = 0
        for some, size in self._deferred_calls(draws):
            packed = np.zeros((self.num_groups, size, given.shape[1]), np.int32)
            packed[:, :, 0] = self.num_slots
            for group, index in enumerate(some):
                packed[group, : len(index)] = given[index]
                packed[group, : len(index), 0] -= group * self.num_slots
                place[index] = before + group * size + np.arange(len(index))
            name = AuxProgram("sample_deferred", size)
            one, self.slots = self._get(name)(self._arrays, self.slots, packed.reshape(-1, given.shape[1]))
            drawn.append(one)
            before += self.num_groups * size
            self._show(one)

        def in_order(*parts: np.ndarray) -> np.ndarray:
            return np.concatenate(parts)[place]

        tokens, scores = (GatheredRows([one[i] for one in drawn], in_order) for i in range(2))  # type: ignore[misc]
        return [(len(draws), Sampled(tokens, scores))] if drawn else []  # type: ignore[arg-type]

    def _deferred_calls(self, draws: np.ndarray) -> Iterator[tuple[list[np.ndarray], int]]:
        """Cuts draws into calls. Yields each group's draws of a call, by index, and the smallest of `deferred_sizes`
        that holds them."""
        owner = draws[:, 0] // self.num_slots
        left = [np.flatnonzero(owner == group) for group in range(self.num_groups)]
        while any(map(len, left)):
            some = [self._whole_rows(index, draws) for index in left]
            yield some, next(size for size in self.deferred_sizes if size >= max(map(len, some)))
            left = [index[len(taken) :] for index, taken in zip(left, some, strict=True)]

    def _whole_rows(self, index: np.ndarray, draws: np.ndarray) -> np.ndarray:
        """The first of these draws that one call has room for. It ends where a row ends."""
        most = self.deferred_sizes[-1]
        starts = np.append(np.flatnonzero(draws[index, 1] == 0), len(index))
        return index[: int(starts[starts <= most][-1])]

    def score_prompt(self, rows: np.ndarray, targets: np.ndarray, places: np.ndarray | None = None) -> Any:
        """As in `ModelRunner`, at `rows` of the hidden states of all groups."""
        self.tell(commands.ScorePrompt, rows, targets, None)
        assert self._hidden is not None, "the latest step kept no hidden states"
        tokens = self._hidden.shape[0] // self.num_groups
        most, _ = steps.scored_words(tokens, self._on_cpu)
        packed = np.zeros((self.num_groups, 1 + 2 * most), np.int32)
        owner = rows // tokens
        place = np.empty(len(rows), np.intp)
        for group, buffer in enumerate(packed):
            index = np.flatnonzero(owner == group)
            place[index] = group * most + np.arange(len(index))
            buffer[0] = len(index)
            buffer[1 : 1 + len(index)] = rows[index] - group * tokens
            buffer[1 + most : 1 + most + len(index)] = targets[index]
        scores = self._get(AuxProgram("score_prompt", tokens))(self._arrays, self._hidden, packed.reshape(-1))
        return GatheredRows([scores], lambda x: x[place])

    # Upkeep

    def set_slots(self, rows: list[np.ndarray]) -> None:
        if rows:
            self.tell(commands.SetSlots, rows)
        parts: list[list[np.ndarray]] = [[] for _ in range(self.num_groups)]
        for row in rows:
            local = row.copy()
            parts[int(row[_SLOT]) // self.num_slots].append(local)
            local[_SLOT], local[_PENALTY_ROW] = self._slot(row[_SLOT]), self._penalty_row(row[_PENALTY_ROW])
        for some, size in self._calls(parts, self.slot_sizes):
            given = [row for part in some for row in part + [padding_slot_params(self.num_slots)] * (size - len(part))]
            self.slots = self._get(AuxProgram("set_slots", size))(self.slots, np.stack(given))

    def count_tokens(self, counted: np.ndarray) -> None:
        self.tell(commands.CountTokens, counted)
        owner = (counted[0] - 1) // self.penalty_rows
        local = np.concatenate([self._penalty_row(counted[:1]), counted[1:]])
        parts = [local[:, owner == group].T for group in range(self.num_groups)]
        for some, size in self._calls(parts, self.count_sizes):
            packed = np.full((self.num_groups, size, 3), self.model.config.vocab_size, np.int32)
            packed[:, :, 0] = NO_PENALTY_ROW
            self.slots = self._get(AuxProgram("count_tokens", size))(
                self.slots, self._filled(packed, some, columns=True)
            )

    def update_tables(self, copies: list[tuple[int, int]], entries: np.ndarray) -> None:
        if not copies and not entries.size:
            return
        self.tell(commands.UpdateTables, copies, entries)
        pairs = np.reshape(np.asarray(copies, np.int32), (-1, 2))
        local = entries.T.copy()
        owners = pairs[:, 0] // self.num_slots, local[:, 0] // self.num_slots
        local[:, 0], local[:, 2] = self._slot(local[:, 0]), self._page(local[:, 2])
        of_rows, of_entries = (
            [x[owner == group] for group in range(self.num_groups)]
            for x, owner in zip((self._slot(pairs), local), owners, strict=True)
        )
        nothing: list[Any] = [of_entries[0][:0]] * self.num_groups
        made = [(some, nothing) for some, _ in self._calls(of_rows, [TABLE_COPIES])]
        made += [([], some) for some, _ in self._calls(of_entries, [TABLE_UPDATES])]
        for rows, some in made:
            packed_rows = np.full((self.num_groups, TABLE_COPIES, 2), self.num_slots, np.int32)
            packed = np.zeros((self.num_groups, TABLE_UPDATES, 3), np.int32)
            packed[:, :, 0] = self.num_slots
            given = self._filled(packed_rows, rows), self._filled(packed, some, columns=True)
            self.slots = self._get(AuxProgram("update_tables"))(self.slots, *given)

    def copy_pages(self, pairs: list[tuple[int, int]]) -> None:
        if not pairs:
            return
        self.tell(commands.CopyPages, pairs)
        pages = np.asarray(pairs, np.int32)
        owner = pages[:, 0] // self.layout.num_pages
        parts = [self._page(pages[owner == group]) for group in range(self.num_groups)]
        for some, _ in self._calls(parts, [COPIES]):
            packed = self._filled(np.full((self.num_groups, COPIES, 2), NULL_PAGE, np.int32), some)
            sources, targets = packed.T.copy()
            self.cache = self._get(AuxProgram("copy_pages"))(self.cache, sources, targets)

    def _calls(self, parts: list[Any], sizes: list[int]) -> Iterator[tuple[list[Any], int]]:
        """Cuts each group's items into the same number of calls. Yields every group's items of a call, and the smallest
        size that holds them."""
        for some, size in calls(max(map(len, parts)), sizes):
            yield [part[some] for part in parts], size

    @staticmethod
    def _filled(packed: np.ndarray, parts: list[np.ndarray], *, columns: bool = False) -> np.ndarray:
        """Writes each group's items over the padding [groups, size, width]. Returns the buffers of the groups one after
        the other, int32 [groups * size, width], or with `columns` [groups * width, size]."""
        for buffer, part in zip(packed, parts, strict=False):
            buffer[: len(part)] = part
        packed = packed.transpose(0, 2, 1) if columns else packed
        return packed.reshape(-1, packed.shape[2])

    # Numbers within a group

    def _slot(self, slot: Any) -> Any:
        return np.where(slot == self.padding_slot, self.num_slots, slot % self.num_slots)

    def _page(self, page: Any) -> Any:
        return page % self.layout.num_pages

    def _penalty_row(self, row: Any) -> Any:
        return np.where(row == NO_PENALTY_ROW, NO_PENALTY_ROW, (row - 1) % max(self.penalty_rows, 1) + 1)
