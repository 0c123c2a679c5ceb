"""A model whose layers are divided among groups of devices: a runner for each stage behind the interface of one.

The host sends each step to all stages at once. The devices pass on what a stage has computed, and start when it has
arrived, so that a stage works on one step while the next stage works on the one before. What the last stage samples
goes back to the other stages in the same way. A stage runs its calls in order; so it must not be told to wait for
tokens before it has been given the work that it can do meanwhile. Tokens are therefore kept here until a step comes
that reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from jaxserve.devices.mesh import by_group
from jaxserve.execution import commands
from jaxserve.execution.group_stage_runner import tokens_of
from jaxserve.execution.kv_cache import CacheLayout
from jaxserve.execution.programs import StepProgram, compile_threads
from jaxserve.execution.sampling import Sampled
from jaxserve.execution.signatures import ProgramName
from jaxserve.execution.slots import RowParams, SlotState
from jaxserve.execution.stage_runner import StageRunner
from jaxserve.execution.step_shape import StepShape

StageProgram = tuple[int, ProgramName]  # the number of a stage, and the name of one of its programs
_SLOT = RowParams._fields.index("slot")  # its place in a row of `set_slots`; each field before it is one word


@dataclass
class Returning:
    """Tokens on their way from the last stage to the others."""

    kind: str  # the program that takes them, see `StageRunner.take`
    slot: np.ndarray  # int32: whose tokens they are; the padding slot for those that nobody needs
    tokens: list[jax.Array]  # on the devices of each stage but the last


class PipelineRunner(commands.Commanded):
    """The stages of a model, with the methods of a `ModelRunner` that an engine uses.

    Args:
      stages: in the order in which they compute.
      one_page: the layout of the whole model's cache with a single page.

    Attributes:
      here: the stages whose devices this process has; all of them, except in `HostPipelineRunner`.
      watcher: as of `ModelRunner`.
    """

    def __init__(self, stages: list[StageRunner], one_page: CacheLayout):
        self.stages = stages
        self._whole = one_page
        self.here = stages
        self._last = stages[-1]
        self._others = stages[:-1]
        self._places = [by_group(one.mesh, PartitionSpec()) for one in stages]
        self._returning: list[Any] = []
        self.watcher: Callable[[jax.Array], None] | None = None

    # What the stages have in common, or the last one has

    @property
    def num_stages(self) -> int:
        return len(self.stages)

    @property
    def model(self) -> Any:
        return self._last.model

    @property
    def mesh(self) -> Any:
        return self._last.mesh

    @property
    def programs(self) -> Any:
        return self._last.programs

    @property
    def layout(self) -> CacheLayout:
        """The cache of all layers. Each stage has its part of every page."""
        return replace(self._whole, num_pages=self._last.layout.num_pages)

    @property
    def slots(self) -> SlotState:
        return self._last.slots

    @property
    def num_slots(self) -> int:
        return self._last.num_slots

    @property
    def max_len(self) -> int:
        return self._last.max_len

    @property
    def penalty_rows(self) -> int:
        return self._last.penalty_rows

    @property
    def weights(self) -> list[jax.Array]:
        return [x for one in self.here for x in one.weights]

    @property
    def num_executables(self) -> int:
        return sum(one.num_executables for one in self.here)

    @property
    def compile_seconds(self) -> float:
        return sum(one.compile_seconds for one in self.here)

    @property
    def compiling(self) -> bool:
        return any(one.compiling for one in self.here)

    @property
    def frozen(self) -> bool:
        return self._last.frozen

    @frozen.setter
    def frozen(self, frozen: bool) -> None:
        for one in self.stages:
            one.frozen = frozen

    # Memory and programs

    def allocate(self) -> None:
        """Allocates the caches and the slots of all stages. Existing ones are freed first."""
        self.tell(commands.Allocate)
        self._returning.clear()
        for one in self.here:
            one.allocate()

    def release(self) -> None:
        """Frees weights, caches and slots, see `ModelRunner.release`."""
        self.tell(commands.Release)
        self._returning.clear()
        for one in self.here:
            one.release()

    def restore(self) -> None:
        """Allocates what a failed step has destroyed, see `ModelRunner.restore`."""
        self._returning.clear()
        for one in self.stages:
            one.restore()

    def is_whole(self) -> bool:
        """Whether all caches and slots exist. Waits for the devices."""
        return all(one.is_whole() for one in self.here)

    def names(self, shapes: Sequence[StepShape]) -> list[StageProgram]:
        """The names of all programs that serving can need."""
        return [(i, name) for i, one in enumerate(self.stages) for name in one.names(shapes)]

    def compile(self, names: Sequence[StageProgram], on_done: Callable[[], None] = lambda: None) -> None:
        """Compiles these programs, several at a time, unless they are compiled already. `on_done` is called after each,
        in any thread."""
        self.tell(commands.CompileStages, list(names))
        jobs = self._jobs(names)
        on_cpu = self._last.mesh.devices.flat[0].platform == "cpu"

        def compile_one(job: Callable[[], Any]) -> None:
            job()
            on_done()

        with ExitStack() as rooms, ThreadPoolExecutor(compile_threads(len(jobs), on_cpu=on_cpu)) as pool:
            for number, one in enumerate(self.stages):
                if one in self.here:
                    rooms.enter_context(one.room_to_compile([name for stage, name in names if stage == number]))
            list(pool.map(compile_one, jobs))

    def _jobs(self, names: Sequence[StageProgram]) -> list[Callable[[], Any]]:
        """The calls that compile these programs."""
        return [partial(self.stages[number]._get, name) for number, name in names]

    # Dispatch

    def step(self, program: StepProgram, packed: np.ndarray) -> tuple[Sampled, jax.Array | None]:
        """Runs one step through all stages; see `ModelRunner.step`. Returns the last stage's results."""
        slots, sampling = self._slots_of(program.shape, packed)
        self._return_tokens(slots)
        x: jax.Array | None = None
        for one, place in zip(self._others, self._places[1:], strict=True):
            x = jax.device_put(one.advance(program.shape, packed, x), place)
        assert x is not None
        drawn, hidden = self._last.finish(program, packed, x)
        self._keep(taken_by(program), sampling, tokens_of(drawn))
        return drawn, hidden

    def sample_deferred(self, draws: np.ndarray, masks: np.ndarray) -> list[tuple[int, Sampled]]:
        """As `ModelRunner.sample_deferred`, in the last stage."""
        results = self._last.sample_deferred(draws, masks)
        for slot, tokens in self._last.returned(draws, results):
            self._keep("take_deferred", slot, tokens)
        return results

    def score_prompt(self, rows: np.ndarray, targets: np.ndarray, places: np.ndarray | None = None) -> jax.Array:
        return self._last.score_prompt(rows, targets, places)

    def set_slots(self, rows: list[np.ndarray]) -> None:
        if rows:
            self.tell(commands.SetSlots, rows)
        taken = [int(row[_SLOT]) for row in rows]
        for some in self._returning:  # what a slot's last sequence sampled must not reach the new one
            some.slot[np.isin(some.slot, taken)] = self._last.padding_slot
        self._returning = [some for some in self._returning if self._matters(some)]
        for one in self.here:
            one.set_slots(rows)

    def count_tokens(self, counted: np.ndarray) -> None:
        self.tell(commands.CountTokens, counted)
        if self._last in self.here:
            self._last.count_tokens(counted)

    def update_tables(self, copies: list[tuple[int, int]], entries: np.ndarray) -> None:
        if copies or entries.size:
            self.tell(commands.UpdateTables, copies, entries)
        for one in self.here:
            one.update_tables(copies, entries)

    def copy_pages(self, pairs: list[tuple[int, int]]) -> None:
        if pairs:
            self.tell(commands.CopyPages, pairs)
        for one in self.here:
            one.copy_pages(pairs)

    def copy_states(self, pairs: list[tuple[int, int]]) -> None:
        assert not pairs, "pipelines serve no recurrent layers"

    def least(self, numbers: list[int]) -> list[int]:
        """The least of each number on all hosts of the pipeline."""
        return numbers

    def _slots_of(self, shape: StepShape, packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(slots of a step's rows; for each row of its bucket the slot if it samples a token, or the padding slot)."""
        fields = shape.fields
        padding_slot = self._last.padding_slot
        slot, num_new = (packed[..., at : at + size].ravel() for at, size in (fields["slot"], fields["num_new"]))
        return slot[slot < padding_slot], np.where(num_new > 0, slot, padding_slot)

    def _matters(self, sampled: Any) -> bool:
        """Whether tokens on their way belong to a sequence that still has its slot."""
        return bool((sampled.slot < self._last.padding_slot).any())

    def _keep(self, kind: str, slot: np.ndarray, tokens: jax.Array) -> None:
        """Sends tokens of the last stage on their way, for the slots [n] that need them."""
        some = Returning(kind, slot.astype(np.int32), [])
        if self._matters(some):
            some.tokens = [jax.device_put(tokens, place) for place in self._places[:-1]]
            self._returning.append(some)

    def _return_tokens(self, slot: np.ndarray) -> None:
        """Gives the stages the tokens that sampled these slots' last tokens, and all tokens before those."""
        needed = [i for i, some in enumerate(self._returning) if np.isin(some.slot, slot).any()]
        count = needed[-1] + 1 if needed else 0
        for some in self._returning[:count]:
            for one, tokens in zip(self._others, some.tokens, strict=True):
                one.take(some.kind, some.slot, tokens)
        del self._returning[:count]


def taken_by(program: StepProgram) -> str:
    """The kind of the program that takes what a step has sampled, see `StageRunner.take`."""
    return "take_checked" if program.proposals else "take_tokens"
