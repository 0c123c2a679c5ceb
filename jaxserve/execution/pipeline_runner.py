"""A model whose layers are divided among groups of devices: a runner for each stage behind the interface of one.

The host sends each step to all stages at once. The devices pass on what a stage has computed, and start when it has
arrived, so that a stage works on one step while the next stage works on the one before. What the last stage samples
goes back to the other stages in the same way. How arrays go between stages is the business of a transport: within one
process (`LocalTransport`), or between hosts (`host_transport`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import PartitionSpec

from jaxserve.devices.mesh import by_group
from jaxserve.execution import runner_commands
from jaxserve.execution.device_groups import SLOT
from jaxserve.execution.kv_cache import CacheLayout
from jaxserve.execution.programs import StepProgram, compile_threads
from jaxserve.execution.runner import ModelRunner, arrays_of
from jaxserve.execution.sampling import Sampled
from jaxserve.execution.signatures import ProgramName
from jaxserve.execution.slots import SlotState
from jaxserve.execution.step_shape import StepShape

StageProgram = tuple[int, ProgramName]  # the number of a stage, and the name of one of its programs


class Transport(Protocol):
    """Runs calls that concern several stages, and moves their arrays.

    Attributes:
      here: the stages whose devices this process has.
      watcher: as of `ModelRunner`.
    """

    here: list[ModelRunner]
    watcher: Callable[[jax.Array], None] | None

    def step(self, program: StepProgram, packed: np.ndarray) -> tuple[Sampled, jax.Array | None]: ...
    def sample_deferred(self, draws: np.ndarray, masks: np.ndarray) -> list[tuple[int, Sampled]]: ...
    def score_prompt(self, rows: np.ndarray, targets: np.ndarray, places: np.ndarray | None) -> jax.Array: ...

    def take_all(self) -> None:
        """Takes everything that the last stage has sampled, where that is not there yet."""

    def forget(self, slots: Sequence[int]) -> None:
        """What the last sequences of these slots have sampled must not reach the new ones."""

    def clear(self) -> None:
        """Forgets what is on its way, before cache and slots are freed."""

    def freeze(self, frozen: bool) -> None:
        """As `ModelRunner.frozen`, for programs that move arrays."""

    def jobs(self, names: Sequence[StageProgram]) -> list[Callable[[], Any]]:
        """The calls that compile these programs of stages, and those that move their arrays."""

    def least(self, numbers: list[int]) -> list[int]:
        """The least of each number on all hosts of the pipeline."""


class PipelineRunner(runner_commands.Commanded, calls=runner_commands.OF_PIPELINES):
    """The stages of a model, with the methods of a `ModelRunner` that an engine uses.

    Args:
      stages: in the order in which they compute.
      one_page: the layout of the whole model's cache with a single page.

    Attributes:
      sizing_of: makes what chooses the number of pages for buckets of these shapes; only on hosts that are told when.
    """

    sizing_of: Callable[[list[StepShape]], Any]

    def __init__(self, stages: list[ModelRunner], one_page: CacheLayout, transport: Transport):
        self.stages = stages
        self.num_stages = len(stages)
        self.transport = transport
        self.here = transport.here
        self._whole = one_page
        # What the stages have in common, or the last one has.
        self._last = stages[-1]
        self.model = self._last.model
        self.mesh = self._last.mesh
        self.programs = self._last.programs
        self.num_slots = self._last.num_slots
        self.penalty_rows = self._last.penalty_rows
        self.encoder = None  # pictures are not read in pipelines

    @property
    def layout(self) -> CacheLayout:
        """The cache of all layers. Each stage has its part of every page."""
        return replace(self._whole, num_pages=self._last.layout.num_pages)

    @property
    def slots(self) -> SlotState:
        return self._last.slots

    @property
    def max_len(self) -> int:
        return self._last.max_len

    @property
    def streamed_bytes(self) -> int:
        return 0

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
        return self.here[0].frozen

    @frozen.setter
    def frozen(self, frozen: bool) -> None:
        for one in self.here:
            one.frozen = frozen
        self.transport.freeze(frozen)

    @property
    def watcher(self) -> Callable[[jax.Array], None] | None:
        return self.transport.watcher

    @watcher.setter
    def watcher(self, watcher: Callable[[jax.Array], None] | None) -> None:
        self.transport.watcher = watcher

    # Memory and programs

    def allocate(self) -> None:
        """Allocates the caches and the slots of all stages. Existing ones are freed first."""
        self.transport.clear()
        for one in self.here:
            one.allocate()

    def release(self) -> None:
        """Frees weights, caches and slots, see `ModelRunner.release`."""
        self.transport.clear()
        for one in self.here:
            one.release()

    def restore(self) -> None:
        """Allocates what a failed step has destroyed, see `ModelRunner.restore`."""
        self.transport.clear()
        if not self.is_whole():
            self.allocate()

    def is_whole(self) -> bool:
        """Whether all caches and slots exist. Waits for the devices."""
        return all(one.is_whole() for one in self.here)

    def begin_pages(self, shapes: list[StepShape]) -> None:
        """Begins to choose the number of pages, as the first host has told this one."""
        self._sizing = self.sizing_of(shapes)
        self._sizing.begin()

    def finish_pages(self, shapes: list[StepShape]) -> None:
        self._sizing.finish(shapes)

    def names(self, shapes: Sequence[StepShape]) -> list[StageProgram]:
        """The names of all programs that serving can need."""
        return [(i, name) for i, one in enumerate(self.stages) for name in one.names(shapes)]

    def compile(self, names: Sequence[StageProgram], on_done: Callable[[], None] = lambda: None) -> None:
        """Compiles these programs, several at a time, unless they are compiled already. `on_done` is called after each,
        in any thread."""
        jobs = self.transport.jobs(names)
        on_cpu = self._last.mesh.devices.flat[0].platform == "cpu"

        def compile_one(job: Callable[[], Any]) -> None:
            job()
            on_done()

        with ExitStack() as rooms, ThreadPoolExecutor(compile_threads(len(jobs), on_cpu=on_cpu)) as pool:
            for number, one in enumerate(self.stages):
                if one in self.here:
                    rooms.enter_context(one.room_to_compile([name for stage, name in names if stage == number]))
            list(pool.map(compile_one, jobs))

    # Dispatch

    def step(self, program: StepProgram, packed: np.ndarray) -> tuple[Sampled, jax.Array | None]:
        """Runs one step through all stages; see `ModelRunner.step`. Returns the last stage's results. Hidden states may
        be only a shape, if the last stage is on another host."""
        return self.transport.step(program, packed)

    def sample_deferred(self, draws: np.ndarray, masks: np.ndarray) -> list[tuple[int, Sampled]]:
        """As `ModelRunner.sample_deferred`, in the last stage."""
        return self.transport.sample_deferred(draws, masks)

    def score_prompt(self, rows: np.ndarray, targets: np.ndarray, places: np.ndarray | None = None) -> jax.Array:
        return self.transport.score_prompt(rows, targets, places)

    def take_all(self) -> None:
        """Takes everything that the last stage has sampled, on all hosts."""
        self.transport.take_all()

    def set_slots(self, rows: list[np.ndarray]) -> None:
        self.transport.forget([int(row[SLOT]) for row in rows])
        for one in self.here:
            one.set_slots(rows)

    def count_tokens(self, counted: np.ndarray) -> None:
        if self._last in self.here:
            self._last.count_tokens(counted)

    def update_tables(self, copies: list[tuple[int, int]], entries: np.ndarray) -> None:
        for one in self.here:
            one.update_tables(copies, entries)

    def copy_pages(self, pairs: list[tuple[int, int]]) -> None:
        for one in self.here:
            one.copy_pages(pairs)

    def copy_states(self, pairs: list[tuple[int, int]]) -> None:
        assert not pairs, "pipelines serve no recurrent layers"


@dataclass
class InTransit:
    """Tokens on their way from the last stage to the others."""

    kind: str  # the program that takes them, see `ModelRunner.take`
    slot: np.ndarray  # int32: whose tokens they are; the padding slot for those that no sequence needs
    tokens: list[jax.Array]  # on the devices of each stage but the last


class LocalTransport:
    """Between stages whose devices this process has. See `Transport`.

    A stage runs its calls in order; so it must not be told to wait for tokens before it has been given the work that it
    can do meanwhile. Tokens are therefore kept here until a step comes that reads them.
    """

    def __init__(self, stages: list[ModelRunner]):
        self.here = stages
        self.watcher: Callable[[jax.Array], None] | None = None
        self._last = stages[-1]
        self._others = stages[:-1]
        self._places = [by_group(one.mesh, PartitionSpec()) for one in stages]
        self._in_transit: list[InTransit] = []

    def step(self, program: StepProgram, packed: np.ndarray) -> tuple[Sampled, jax.Array | None]:
        slots, sampling = slots_of(program.shape, packed, self._last.padding_slot)
        self._return_tokens(slots)
        x: jax.Array | None = None
        for one, place in zip(self._others, self._places[1:], strict=True):
            x = jax.device_put(one.advance(program.shape, packed, x), place)
        drawn, hidden = self._last.step(program, packed, x)
        self._keep(taken_by(program), sampling, arrays_of(drawn.tokens)[0])
        return drawn, hidden

    def sample_deferred(self, draws: np.ndarray, masks: np.ndarray) -> list[tuple[int, Sampled]]:
        results = self._last.sample_deferred(draws, masks)
        for slot, tokens in self._last.returned(draws, results):
            self._keep("take_deferred", slot, tokens)
        return results

    def score_prompt(self, rows: np.ndarray, targets: np.ndarray, places: np.ndarray | None) -> jax.Array:
        return self._last.score_prompt(rows, targets, places)

    def take_all(self) -> None:
        """Nothing is elsewhere."""

    def forget(self, slots: Sequence[int]) -> None:
        for some in self._in_transit:
            some.slot[np.isin(some.slot, slots)] = self._last.padding_slot
        self._in_transit = [some for some in self._in_transit if self._matters(some)]

    def clear(self) -> None:
        self._in_transit.clear()

    def freeze(self, frozen: bool) -> None:
        """Arrays are moved without programs."""

    def jobs(self, names: Sequence[StageProgram]) -> list[Callable[[], Any]]:
        return [partial(self.here[number]._get, name) for number, name in names]

    def least(self, numbers: list[int]) -> list[int]:
        return numbers

    def _matters(self, some: InTransit) -> bool:
        """Whether tokens belong to a sequence that still has its slot."""
        return bool((some.slot < self._last.padding_slot).any())

    def _keep(self, kind: str, slot: np.ndarray, tokens: jax.Array) -> None:
        """Sends tokens of the last stage on their way, for the slots [n] that need them."""
        some = InTransit(kind, slot.astype(np.int32), [])
        if self._matters(some):
            some.tokens = [jax.device_put(tokens, place) for place in self._places[:-1]]
            self._in_transit.append(some)

    def _return_tokens(self, slot: np.ndarray) -> None:
        """Gives the stages the tokens that sampled these slots' last tokens, and all tokens before those."""
        needed = [i for i, some in enumerate(self._in_transit) if np.isin(some.slot, slot).any()]
        count = needed[-1] + 1 if needed else 0
        for some in self._in_transit[:count]:
            for one, tokens in zip(self._others, some.tokens, strict=True):
                one.take(some.kind, some.slot, tokens)
        del self._in_transit[:count]


def slots_of(shape: StepShape, packed: np.ndarray, padding_slot: int) -> tuple[np.ndarray, np.ndarray]:
    """(slots of a step's rows; for each row of its bucket the slot if it samples a token, or the padding slot)."""
    fields = shape.fields
    slot, num_new = (packed[..., at : at + size].ravel() for at, size in (fields["slot"], fields["num_new"]))
    return slot[slot < padding_slot], np.where(num_new > 0, slot, padding_slot)


def taken_by(program: StepProgram) -> str:
    """The kind of the program that takes what a step has sampled, see `ModelRunner.take`."""
    return "take_checked" if program.proposals else "take_tokens"
