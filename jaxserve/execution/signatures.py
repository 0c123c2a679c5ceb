"""The programs that a runner compiles: functions, their abstract arguments, and where the results lie."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from jaxserve.devices.command_buffers import exchanges
from jaxserve.devices.mesh import by_group, for_each_group, num_groups, replicated, spans_hosts
from jaxserve.execution import drafting, stage_steps, steps
from jaxserve.execution.adapter_stacks import AdapterStacks
from jaxserve.execution.forward import ForwardContext
from jaxserve.execution.kv_cache import (
    COPIES,
    STATE_COPIES,
    CacheLayout,
    copy_pages,
    copy_states,
    read_pages,
    write_pages,
)
from jaxserve.execution.programs import LENGTHS, StepProgram, StepPrograms
from jaxserve.execution.slots import SLOT_WORDS, SlotState, count_tokens, set_slots
from jaxserve.execution.step_shape import StepShape
from jaxserve.execution.verify import DEFERRED_WORDS
from jaxserve.models.decoder import Decoder
from jaxserve.models.drafter import Drafter
from jaxserve.models.stages import Stage
from jaxserve.scheduling.step_plan import Sampler

TABLE_UPDATES = 512  # block-table entries per call of `update_tables`
TABLE_COPIES = 32  # copied rows of the block table per call of `update_tables`


class AuxProgram(NamedTuple):
    """The name of a program that is not a step: the method of `Signatures` that describes it, and its number of rows or
    tokens. The number is 0 if there is only one such program."""

    kind: str
    size: int = 0
    sampler: Sampler | None = None  # of "propose", like the next one
    passes: int = 0

    def __str__(self) -> str:
        """As profiles, dumps and logs name it: set_slots_32, propose_8_greedy_x4."""
        if self.sampler is not None:
            return f"{self.kind}_{self.size}_{self.sampler.name.lower()}_x{self.passes}"
        return f"{self.kind}_{self.size}" if self.size else self.kind

    @property
    def takes_cache(self) -> bool:
        """Whether its arguments depend on the number of pages."""
        return self.kind in ("create_cache", "copy_pages", "copy_states", "read_pages", "write_pages", "propose")


ProgramName = StepProgram | AuxProgram
CREATE_SLOTS = AuxProgram("create_slots")
CREATE_CACHE = AuxProgram("create_cache")


def draft_programs(shapes: Sequence[StepShape], programs: StepPrograms, mesh: Mesh) -> list[AuxProgram]:
    """The programs that propose tokens with a draft head, the smallest first, for steps by these programs. Unless they
    are static, or GPUs exchange something, the number of passes is known at run time."""
    most = programs.proposals
    static = programs.static or exchanges(mesh)
    rows = sorted({shape.rows for shape in shapes if shape.decode_only} or {shape.rows for shape in shapes})
    passes = [count for count in LENGTHS if count < most and static] + [most]
    samplers = Sampler.GREEDY, Sampler.FILTERED
    return [AuxProgram("propose", size, sampler, count) for size in rows for count in passes for sampler in samplers]


class Signature(NamedTuple):
    """A program: its function, which arguments are donated, its abstract arguments, and its results' shardings."""

    function: Callable
    donated: tuple[int, ...]
    arguments: tuple
    results: Any


class SplitsSteps(Protocol):
    """Makes several programs of a step; see `streamed_layers`."""

    def signature(self, of: Signatures, program: StepProgram) -> Signature: ...


@dataclass(frozen=True)
class Signatures:
    """Describes programs for one model, or a stage of one, on one mesh, with one cache and number of slots.

    In a stage that is not the first, a step takes one more argument: x [tokens, hidden], from the stage before.
    Programs for several groups of devices are made from those of one (`_of_all_groups`).

    Attributes:
      params: abstract arrays that hold the parameters. `unbundle` makes the model's parameter tree from them.
      slots: abstract slots, replicated on all devices.
      make_slots: creates the slots on a device.
      static: programs are specialised to what the host knows, see `programs`.
      pooling: for models that embed or score, what steps return of their hidden states, see `steps.pool_rows`.
      proposals: most tokens that are proposed for a row; 0: there is no speculation.
      drafter: a draft head; None: there is none.
      stacks: the pool of LoRA adapters; None: there is none.
      streamed: layers whose weights are in host memory; None: there are none.
    """

    model: Decoder
    mesh: Mesh
    layout: CacheLayout
    params: list[jax.ShapeDtypeStruct]
    unbundle: Callable
    slots: SlotState
    static: bool
    on_cpu: bool
    pooling: str | None = None
    proposals: int = 0
    drafter: Drafter | None = None
    stacks: AdapterStacks | None = None
    make_slots: Callable[[], SlotState] | None = None
    streamed: SplitsSteps | None = None

    def of(self, name: ProgramName) -> Signature:
        made = self._of_one_group(name)
        return made if num_groups(self.mesh) == 1 else self._of_all_groups(name, made)

    def _of_one_group(self, name: ProgramName) -> Signature:
        if isinstance(name, StepProgram):
            return self.step(name) if self.streamed is None else self.streamed.signature(self, name)
        if name.sampler is not None:
            return self.propose(name.size, name.sampler, name.passes)
        if name.kind.startswith("take_"):
            return self.take(name)
        auxiliary: dict[str, Callable[[int], Signature]] = {
            "set_slots": self.set_slots,
            "count_tokens": self.count_tokens,
            "sample_deferred": self.sample_deferred,
            "score_prompt": self.score_prompt,
            "update_tables": self.update_tables,
            "copy_pages": self.copy_pages,
            "copy_states": self.copy_states,
            "read_pages": self.read_pages,
            "write_pages": self.write_pages,
            "write_adapter": self.write_adapter,
            "write_ranks": self.write_ranks,
            "create_slots": self.create_slots,
            "create_cache": self.create_cache,
        }
        return auxiliary[name.kind](name.size)

    def step(self, program: StepProgram) -> Signature:
        """The signature of a step, see `steps.run_step`."""
        context = self.context(program.shape, self.drafter if program.drafts else None)
        step: Callable[..., Any] = partial(
            steps.run_step,
            context=context,
            sampler=program.sampler,
            tokens_per_call=program.tokens_per_call,
            keeps_hidden=program.keeps_hidden,
            pooling=self.pooling,
            proposals=program.proposals,
        )
        everywhere: Any = self.everywhere
        hidden = everywhere if program.keeps_hidden else None
        caches: Any = self.cache_sharding
        results: Any = steps.StepResult(everywhere, hidden, caches, everywhere)
        arguments: tuple[Any, ...] = (self.params, self.cache, self.slots, self.host(program.shape.words))
        stage = self.model.stage
        if isinstance(stage, Stage) and not stage.is_first:
            size = self.model.config.hidden_size
            x = jax.ShapeDtypeStruct((program.shape.tokens, size), self.model.dtype, sharding=self.everywhere)
            arguments = (*arguments, x)
        if isinstance(stage, Stage) and not stage.is_last:
            step = partial(stage_steps.run_stage, context=self.context(program.shape))
            results = stage_steps.StageResult(everywhere, caches, everywhere)
        return Signature(self.with_params(step), (1, 2), arguments, results)

    def context(self, shape: StepShape, drafter: Drafter | None = None) -> ForwardContext:
        return ForwardContext(self.model, shape, self.layout, self.mesh, drafter)

    def take(self, name: AuxProgram) -> Signature:
        """The signature of `stage_steps.take_tokens`, after a step, one that checks proposals, or deferred draws."""
        most = {"take_tokens": (1,), "take_checked": (1 + self.proposals,), "take_deferred": ()}[name.kind]
        tokens = jax.ShapeDtypeStruct((*most, name.size), jnp.int32, sharding=self.everywhere)
        arguments = self.slots, self.host(name.size), tokens
        return Signature(stage_steps.take_tokens, (0,), arguments, self.everywhere)

    def propose(self, rows: int, sampler: Sampler, passes: int) -> Signature:
        """The signature of `drafting.propose`."""
        assert self.drafter is not None
        propose = partial(
            drafting.propose,
            model=self.model,
            drafter=self.drafter,
            layout=self.layout,
            mesh=self.mesh,
            sampler=sampler,
            passes=passes,
            static=self.static or exchanges(self.mesh),
        )
        arguments = self.params, self.cache[-1], self.slots, self.host(2 + rows)
        results = self.everywhere, self.cache_sharding[-1]
        return Signature(self.with_params(propose), (1,), arguments, results)

    def set_slots(self, rows: int) -> Signature:
        return Signature(set_slots, (0,), (self.slots, self.host(rows, SLOT_WORDS)), self.everywhere)

    def count_tokens(self, tokens: int) -> Signature:
        count = partial(count_tokens, in_pieces=self.mesh.devices.flat[0].platform == "tpu")
        return Signature(count, (0,), (self.slots, self.host(3, tokens)), self.everywhere)

    def sample_deferred(self, rows: int) -> Signature:
        sampler = Sampler.FULL if self.static else Sampler.ANY
        sample = partial(
            steps.sample_deferred, model=self.model, mesh=self.mesh, sampler=sampler, proposals=self.proposals
        )
        packed = self.host(rows, DEFERRED_WORDS + -(-self.model.config.vocab_size // 32))
        return Signature(self.with_params(sample), (1,), (self.params, self.slots, packed), self.everywhere)

    def score_prompt(self, tokens: int) -> Signature:
        shape = (tokens, self.model.config.hidden_size)
        hidden = jax.ShapeDtypeStruct(shape, self.model.dtype, sharding=self.everywhere)
        most, each = steps.scored_words(tokens, self.on_cpu)
        score = partial(steps.score_prompt, model=self.model, mesh=self.mesh, each=each, on_cpu=self.on_cpu)
        arguments = self.params, hidden, self.host(1 + (2 if self.stacks is None else 3) * most)
        return Signature(self.with_params(score), (), arguments, self.everywhere)

    def update_tables(self, _: int) -> Signature:
        arguments = self.slots, self.host(TABLE_COPIES, 2), self.host(3, TABLE_UPDATES)
        return Signature(steps.update_tables, (0,), arguments, self.everywhere)

    def copy_pages(self, _: int) -> Signature:
        copy = partial(copy_pages, **self._pages)
        return Signature(copy, (0,), (self.cache, self.host(COPIES), self.host(COPIES)), self.cache_sharding)

    def read_pages(self, count: int) -> Signature:
        results = [x.sharding for x in self.layout.contents(self.mesh, count)]
        return Signature(partial(read_pages, **self._pages), (), (self.cache, self.host(count)), results)

    def write_pages(self, count: int) -> Signature:
        arguments = self.cache, self.host(count), self.layout.contents(self.mesh, count)
        return Signature(partial(write_pages, **self._pages), (0,), arguments, self.cache_sharding)

    def copy_states(self, _: int) -> Signature:
        states = self.layout.states
        assert states is not None
        copy = partial(copy_states, layers=states.layers, arrays=states.num_arrays)
        arguments = self.cache, self.host(STATE_COPIES), self.host(STATE_COPIES)
        return Signature(copy, (0,), arguments, self.cache_sharding)

    def write_adapter(self, kind: int) -> Signature:
        assert self.stacks is not None
        return Signature(*self.stacks.writing(kind))

    def write_ranks(self, _: int) -> Signature:
        assert self.stacks is not None
        return Signature(*self.stacks.writing_ranks())

    def create_slots(self, _: int) -> Signature:
        assert self.make_slots is not None
        return Signature(self.make_slots, (), (), self.everywhere)

    def create_cache(self, _: int) -> Signature:
        return Signature(partial(self.layout.empty, self.mesh), (), (), self.cache_sharding)

    @property
    def _pages(self) -> dict[str, Any]:
        """Which arrays of the cache hold pages; see `copy_pages`."""
        layout = self.layout
        return {"depth": layout.groups.depth, "arrays": layout.num_arrays, "draft": self.drafter is not None}

    @property
    def everywhere(self) -> NamedSharding:
        return replicated(self.mesh)

    @property
    def cache(self) -> list:
        return self.layout.abstract(self.mesh)

    @property
    def cache_sharding(self) -> list[NamedSharding]:
        return self.layout.shardings(self.mesh)

    def host(self, *shape: int) -> jax.ShapeDtypeStruct:
        """The abstract form of an int32 array that comes from the host."""
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=self.everywhere)

    def with_params(self, function: Callable) -> Callable:
        return lambda arrays, *rest: function(self.unbundle(arrays), *rest)

    # Several groups of devices

    def _of_all_groups(self, name: ProgramName, made: Signature) -> Signature:
        """A program of all groups, made from that of one.

        If the groups span several hosts, every host gives a program the whole of each array that comes from the host,
        and a group takes its part on its devices: JAX accepts NumPy arrays of several processes only whole. And what
        the host reads is gathered, so that it is whole on every host."""
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
        return jax.ShapeDtypeStruct(argument.shape, argument.dtype, sharding=self.everywhere)

    def _whole_for_host(self, name: ProgramName, results: Any) -> Any:
        """The places of a program's results, everywhere for those that the host reads."""
        if isinstance(name, StepProgram):
            return results._replace(drawn=self.everywhere)
        if name.kind == "sample_deferred":
            return self.everywhere, results
        return self.everywhere if name.kind == "score_prompt" else results
