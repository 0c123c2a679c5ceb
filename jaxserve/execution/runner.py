"""The device side of the engine: parameters, cache and slots, and the compiled functions that advance them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.stages import Compiled, Lowered, Traced

from jaxserve.config import MAX_TOKENS_PER_CALL
from jaxserve.devices import layouts
from jaxserve.devices.command_buffers import compiler_options, why_static
from jaxserve.devices.jax_versions import with_int4_arguments
from jaxserve.devices.mesh import on_one_cpu, replicated
from jaxserve.execution import commands, steps
from jaxserve.execution.adapter_stacks import AdapterStacks
from jaxserve.execution.aux_programs import AuxCalls, deferred_calls
from jaxserve.execution.kv_cache import CacheLayout, KVCache
from jaxserve.execution.memory import Needs, stored_bytes
from jaxserve.execution.packed_params import bundle
from jaxserve.execution.program_needs import needs_of
from jaxserve.execution.programs import StepProgram, StepPrograms, compile_threads
from jaxserve.execution.sampling import Sampled
from jaxserve.execution.signatures import CREATE_SLOTS, AuxProgram, ProgramName, Signatures, draft_programs
from jaxserve.execution.slots import NO_ADAPTER, SlotState, create_slots
from jaxserve.execution.step_shape import StepShape
from jaxserve.models.adapter_targets import AdapterTargets, PoolSizes
from jaxserve.models.decoder import Decoder
from jaxserve.models.drafter import Drafter
from jaxserve.pallas_kernels import cpu, lowered_kernels
from jaxserve.pallas_kernels.parts import Row, value_of

log = logging.getLogger(__name__)


class KeptPrograms(Protocol):
    """Programs that earlier starts have compiled; see `bundles.program_cache`."""

    def load(self, name: ProgramName) -> Compiled | None:
        """The program, or None if it is not there."""

    def compiling(self) -> AbstractContextManager[None]:
        """In this context programs are compiled that can be kept."""

    def keep(self, name: ProgramName, compiled: Compiled) -> None: ...


class ModelRunner(AuxCalls):
    """Owns the parameters, the cache and the slots on the devices, and the programs that change them.

    Methods that run programs dispatch them and return at once; reading a result waits for the devices. Each of these
    calls is also passed to `listener`, unless it is None, as a command with which another runner can repeat the call.
    `watcher` gets the sampled tokens of each call that samples, which the devices may still be computing.

    Args:
      num_slots: sequences that can run at a time.
      penalty_rows: sequences with penalties that can run at a time.
      max_tokens_per_call: tokens that a row may sample in one call.
      static: programs are specialised to what the host knows, see `programs`; None: they are where they must be
        (`command_buffers.why_static`).
      proposals: most tokens that are proposed for a row, see `verify`.
      drafter: a draft head, see `drafting`; its parameters are in `params` under "draft".
      pooling: for models that embed or score, see `steps.pool_rows`. Such a runner has no programs that sample.
      adapters: the pool of LoRA adapters; None: there is none. The model must have been made for adapters.
    """

    signatures_kind: type[Signatures] = Signatures
    num_stages = 1  # of a pipeline
    streamed_bytes = 0  # of weights that each step copies to each device

    def __init__(
        self,
        model: Decoder,
        params: Any,
        mesh: Mesh,
        num_slots: int,
        penalty_rows: int,
        *,
        max_tokens_per_call: int = MAX_TOKENS_PER_CALL,
        static: bool | None = None,
        pooling: str | None = None,
        proposals: int = 0,
        drafter: Drafter | None = None,
        adapters: PoolSizes | None = None,
    ):
        self.model = model
        self.mesh = mesh
        self.num_slots = num_slots
        self.penalty_rows = penalty_rows
        platform = mesh.devices.flat[0].platform
        self._on_cpu = platform == "cpu"
        self._compiler_options = compiler_options(mesh)
        if platform not in ("cpu", "tpu"):
            lowered_kernels.keep()
        static = why_static(mesh) is not None if static is None else static
        costly = model.ops.draw is None
        pools = pooling is not None
        kinds: Any = {"costly_filters": costly, "pools": pools, "proposals": proposals, "has_head": drafter is not None}
        self.programs = StepPrograms(static=static, most=max_tokens_per_call, **kinds)
        self.pooling = pooling
        self._proposals = proposals
        self.drafter = drafter
        self.forms = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), params)
        self._arrays, self._unbundle = bundle(params, as_rows=model.ops.fused is not None)
        self._first_stack = len(self._arrays)
        self.stacks: AdapterStacks | None = None
        if adapters is not None:
            self.stacks = AdapterStacks(AdapterTargets.of(model, mesh), adapters, mesh)
            self._unbundle = self.stacks.unbundling(self._unbundle)
            self._arrays = self._arrays + self.stacks.create()
        self.layout: CacheLayout
        self.slots: SlotState
        self.cache: KVCache
        self.compile_seconds = 0.0
        self.watcher: Callable[[jax.Array], None] | None = None
        self._hidden: jax.Array | None = None  # hidden states of the latest step that kept them
        self.copies_pages = False  # True: `compile` prepares `read_pages` and `write_pages`
        self.frozen = False  # True: compiling a program raises RuntimeError
        self.compiling = False
        self.kept: KeptPrograms | None = None  # None: programs are compiled in each start
        self._analyses: dict[ProgramName, tuple[Any, Any]] = {}  # programs, and what they need of memory
        self.executables: dict[
            ProgramName, Compiled
        ] = {}  # may come from elsewhere, for these sizes of cache and slots
        self._slot_shapes = ""
        self._lock = threading.Lock()

    @property
    def padding_slot(self) -> int:
        """The number of the slot that no sequence owns."""
        return self.num_slots

    @property
    def params(self) -> Any:
        """The model's parameter tree. Vectors in it are copies, because they are stored in stacks."""
        return jax.tree.map(value_of, self._unbundle(self._arrays), is_leaf=lambda x: isinstance(x, Row))

    @property
    def weights(self) -> list[jax.Array]:
        """The parameters as programs take them, and behind them the pool of adapters. New ones must have the same
        forms."""
        return list(self._arrays)

    @weights.setter
    def weights(self, arrays: list[jax.Array]) -> None:
        self._arrays = arrays

    @property
    def pool_arrays(self) -> list[jax.Array]:
        return self._arrays[self._first_stack :]

    def bundled(self, params: Any) -> list[jax.Array]:
        """A parameter tree as programs take it."""
        return bundle(params, as_rows=self.model.ops.fused is not None)[0]

    def set_cache_size(self, layout: CacheLayout, max_blocks: int) -> None:
        """Sets the size of the cache, and the most blocks of a sequence, for programs that are compiled from now on.
        Compiled programs that depend on other sizes are dropped."""
        self.layout = layout
        self.max_len = max_blocks * layout.page_size
        config = self.model.config
        self._make_slots = partial(
            create_slots,
            self.num_slots,
            max_blocks * layout.groups.num_groups,
            config.vocab_size,
            config.hidden_size,
            self.model.dtype,
            self.penalty_rows,
            proposals=self._proposals,
            feature_size=None if self.drafter is None else self.drafter.config.hidden_size,
        )
        slots = str(jax.eval_shape(self._make_slots))
        stale = [
            name
            for name in self.executables
            if slots != self._slot_shapes or isinstance(name, StepProgram) or name.takes_cache
        ]
        for name in stale:
            del self.executables[name]
            self._analyses.pop(name, None)
        self._slot_shapes = slots

    def set_pages(self, pages: int, max_blocks: int) -> None:
        """`set_cache_size` with the present layout and this number of pages."""
        self.tell(commands.SetPages, pages, max_blocks)
        self.set_cache_size(replace(self.layout, num_pages=pages), max_blocks)

    def allocate(self) -> None:
        """Allocates the cache and the slots. Existing ones are freed first."""
        self.tell(commands.Allocate)
        self.free_cache()  # the old and the new one may not fit together
        vars(self).pop("slots", None)
        self.slots = self._get(CREATE_SLOTS)()
        self.create_cache()

    def release(self) -> None:
        """Frees weights, cache and slots, until there are new weights and `allocate` is called."""
        self.tell(commands.Release)
        for x in jax.tree.leaves((self._arrays, self.cache, self.slots)):
            x.delete()
        self._hidden = None

    def restore(self) -> None:
        """Allocates the cache and the slots again if a failed step has destroyed them. Their contents are then lost.

        Raises the devices' error if allocating fails, too.
        """
        if not self.is_whole():
            del self.cache, self.slots  # the old and the new ones may not fit together
            self.allocate()

    def is_whole(self) -> bool:
        """Whether cache and slots exist. Waits for the devices; a step that failed on them has destroyed both."""
        try:
            whole = not any(x.is_deleted() for x in jax.tree.leaves((self.cache, self.slots)))
            jax.block_until_ready((self.cache, self.slots) if whole else ())
        except Exception:  # the error of a computation that failed on the devices
            return False
        return whole

    @property
    def deferred_sizes(self) -> list[int]:
        """The numbers of draws for which `sample_deferred` is compiled. On CPU several small calls cost no more than a
        large one, so there is one size. All draws of a row have room in one call."""
        few = max(min(32, self.num_slots), self._proposals + 1)
        return [few] if self._on_cpu else sorted({few, max(few, self.num_slots)})

    @property
    def weight_bytes(self) -> int:
        """Bytes of the parameters on each device."""
        return sum(layouts.device_bytes(x) for x in self._arrays)

    @property
    def slot_bytes(self) -> int:
        """Bytes of the slots on each device."""
        return sum(stored_bytes(x) for x in jax.tree.leaves(jax.eval_shape(self._make_slots)))

    @property
    def cache_bytes(self) -> int:
        """Bytes of the cache on each device."""
        return sum(_device_bytes(x) for x in jax.tree.leaves(self.cache))

    # Dispatch

    def step(self, program: StepProgram, packed: np.ndarray) -> tuple[Sampled, jax.Array | None]:
        """Runs one step over int32 [program.shape.words]; see `steps.run_step`."""
        self.tell(commands.Step, program, packed)
        result = self._get(program)(self._arrays, self.cache, self.slots, packed)
        self.cache = result.cache
        self.slots = result.slots
        self._hidden = result.hidden
        self._show(result.drawn)
        return result.drawn, result.hidden

    def sample_deferred(self, draws: np.ndarray, masks: np.ndarray) -> list[tuple[int, Sampled]]:
        """Samples the tokens of deferred rows, in calls of `deferred_sizes`. Returns each call's number of draws and
        its results. draws: int32 [n, DEFERRED_WORDS], and masks [n, words], as in `steps.sample_deferred`."""
        self.tell(commands.SampleDeferred, draws, masks)
        given = np.concatenate([draws, masks], axis=1)
        drawn = []
        for at, end, size in deferred_calls(draws, self.deferred_sizes):
            packed = np.zeros((size, given.shape[1]), np.int32)
            packed[:, 0] = self.num_slots
            packed[: end - at] = given[at:end]
            one, self.slots = self._get(AuxProgram("sample_deferred", size))(self._arrays, self.slots, packed)
            drawn.append((end - at, one))
            self._show(one)
        return drawn

    def score_prompt(self, rows: np.ndarray, targets: np.ndarray, places: np.ndarray | None = None) -> jax.Array:
        """Packed log-probabilities of the tokens `targets` [n] at `rows` [n] of the hidden states that the latest step
        kept; int32 [at least n, SCORE_WORDS]. n is at most the number of these hidden states. places [n]: the
        places of the rows' adapters, or -1; None: no row has one."""
        self.tell(commands.ScorePrompt, rows, targets, places)
        hidden = self._hidden
        assert hidden is not None, "the latest step kept no hidden states"
        tokens = hidden.shape[0]
        most, _ = steps.scored_words(tokens, self._on_cpu)
        given = [rows, targets]
        if self.stacks is not None:
            given.append(np.full(len(rows), NO_ADAPTER) if places is None else places)
        packed = np.zeros(1 + len(given) * most, np.int32)
        packed[0] = len(rows)
        for column, values in zip(packed[1:].reshape(-1, most), given, strict=True):
            column[: len(rows)] = values
        return self._get(AuxProgram("score_prompt", tokens))(self._arrays, hidden, packed)

    def propose(self, name: AuxProgram, slots: np.ndarray, count: int) -> jax.Array:
        """Proposes `count` tokens for each of these slots [n] with a program of `draft_programs`; see
        `drafting.propose`. Returns int32 [name.passes, name.size]."""
        self.tell(commands.Propose, name, slots, count)
        packed = np.full(2 + name.size, self.num_slots, np.int32)
        packed[:2] = (len(slots), count)
        packed[2 : 2 + len(slots)] = slots
        tokens, self.cache[-1] = self._get(name)(self._arrays, self.cache[-1], self.slots, packed)
        return tokens

    def _show(self, drawn: Sampled) -> None:
        if self.watcher is not None:
            self.watcher(drawn.tokens)

    # Compilation

    @property
    def num_executables(self) -> int:
        return len(self.executables)

    def needs(self, shapes: Sequence[StepShape]) -> Needs:
        """The memory that all programs of serving with these buckets need, estimated from those that are compiled."""
        names = self.names(shapes)
        known = {name: self.executables[name] for name in names if name in self.executables}
        for name, program in known.items():
            if self._analyses.get(name, (None, None))[0] is not program:
                self._analyses[name] = program, program.memory_analysis()  # takes milliseconds
        return needs_of(names, {name: self._analyses[name][1] for name in known})

    def names(self, shapes: Sequence[StepShape]) -> list[ProgramName]:
        """The names of all programs that serving can need: upkeep, then the steps of these buckets, the largest first,
        then other programs with the output head."""
        # Programs that need no kernel come first: on CPU the kernels may still be compiling.
        upkeep = [AuxProgram("set_slots", size) for size in self.slot_sizes]
        upkeep += [AuxProgram("update_tables"), AuxProgram("copy_pages")]
        if self.layout.states is not None and self.layout.states.snapshots:
            upkeep.append(AuxProgram("copy_states"))
        upkeep += [AuxProgram("count_tokens", size) for size in self.count_sizes]
        if self.copies_pages:
            upkeep += [AuxProgram(kind, n) for kind in ("read_pages", "write_pages") for n in self.layout.copy_sizes]
        upkeep += self.draft_programs(shapes)
        if self.stacks is not None:
            upkeep += [AuxProgram("write_ranks"), *(AuxProgram("write_adapter", kind) for kind in self.stacks.kinds)]
        by_size = sorted(self.programs.all(shapes), key=lambda program: -program.shape.tokens)
        return [*upkeep, *by_size, *self._others(shapes)]

    def draft_programs(self, shapes: Sequence[StepShape]) -> list[AuxProgram]:
        """The names of the programs that propose with a draft head; see `signatures.draft_programs`."""
        return [] if self.drafter is None else draft_programs(shapes, self.programs.proposals, self.programs.static)

    def largest(self, shapes: Sequence[StepShape]) -> list[ProgramName]:
        """The names of the programs that need the most memory, one of each kind, and of some that bound others."""
        return [*self.programs.bounding(shapes), *self._others(shapes)]

    def _others(self, shapes: Sequence[StepShape]) -> list[ProgramName]:
        """The names of the programs beside the steps that multiply with the output head."""
        if self.pooling is not None:
            return []
        most = max(shape.tokens for shape in shapes if not shape.decode_only)
        return [
            AuxProgram("score_prompt", most),
            *(AuxProgram("sample_deferred", size) for size in self.deferred_sizes),
        ]

    def compile(self, names: Sequence[ProgramName], on_done: Callable[[], None] = lambda: None) -> None:
        """Compiles these programs, several at a time, unless they are compiled already, or an earlier start has kept
        them. `on_done` is called for each, in any thread.

        Tracing and lowering hold Python's lock. So this thread lowers one program after the other, in this order, while
        others compile what is lowered.
        """
        self.tell(commands.Compile, list(names))
        missing = [name for name in names if self._is_missing(name)]

        def compile_one(name: ProgramName, lowered: Lowered) -> None:
            self._compile(name, lowered)
            on_done()

        threads = compile_threads(len(names), on_cpu=self._on_cpu)
        with self.room_to_compile(names), ThreadPoolExecutor(threads) as pool:
            if self.kept is not None:
                self._take_kept(missing, pool)
            left = [name for name in missing if name not in self.executables]
            for _ in range(len(names) - len(left)):
                on_done()
            with self.kept.compiling() if self.kept is not None and left else nullcontext():
                jobs = [pool.submit(compile_one, name, self.lower(name)) for name in left]
                for job in jobs:
                    job.result()
            if self.kept is not None:
                list(pool.map(self.kept.keep, left, [self.executables[name] for name in left]))

    def _take_kept(self, names: Sequence[ProgramName], pool: ThreadPoolExecutor) -> None:
        """Takes those of the programs that earlier starts have compiled."""
        assert self.kept is not None
        found = zip(names, pool.map(self.kept.load, names), strict=True)
        self.executables |= {name: program for name, program in found if program is not None}

    def _get(self, name: ProgramName | StepShape) -> Compiled:
        if isinstance(name, StepShape):
            name = self.programs.largest(name)
        if self._is_missing(name):
            self._compile(name, self.lower(name))
        return self.executables[name]

    def _is_missing(self, name: ProgramName) -> bool:
        """Whether a program must be compiled. Raises RuntimeError if it must not any more."""
        missing = name not in self.executables
        if missing and self.frozen:
            raise RuntimeError(f"{name} was not compiled before the engine was ready")
        return missing

    def _compile(self, name: ProgramName, lowered: Lowered) -> None:
        start = time.perf_counter()
        self.compiling = True
        try:
            compiled = self.compiled(lowered)
        finally:
            self.compiling = False
        seconds = time.perf_counter() - start
        with self._lock:
            self.executables[name] = compiled
            self.compile_seconds += seconds
        log.debug("compiled %s in %.2f s", name, seconds)

    def compiled(self, lowered: Lowered) -> Compiled:
        """Compiles what `lower` gave."""
        return with_int4_arguments(lowered.compile(compiler_options=self._compiler_options))

    def lower(self, name: ProgramName | StepShape) -> Lowered:
        """Traces and lowers a program, for which shapes suffice. A bucket stands for its largest program."""
        with self.tracing():
            return self.trace(name).lower()

    def trace(self, name: ProgramName | StepShape) -> Traced:
        if isinstance(name, StepShape):
            name = self.programs.largest(name)
        function, donated, arguments, results = self.signatures.of(name)

        def program(*arguments: Any) -> Any:
            return function(*arguments)

        program.__name__ = str(name)
        with self.tracing():
            return jax.jit(program, donate_argnums=donated, out_shardings=results, keep_unused=True).trace(*arguments)

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """The context in which programs are traced and lowered."""
        with jax.default_matmul_precision(self._precision), jax.set_mesh(self.mesh):  # the mesh tells Pallas the chip
            yield

    @property
    def _precision(self) -> str:
        """The precision of matmuls. With float32 they are computed in float32 on every platform; for smaller types the
        compiler chooses."""
        return "highest" if self.model.dtype == jnp.float32 else "default"

    @property
    def signatures(self) -> Signatures:
        """The signatures of programs for the present sizes of cache and slots."""
        everywhere = replicated(self.mesh)

        def on_all_devices(x: Any) -> Any:
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere)

        slots = jax.tree.map(on_all_devices, jax.eval_shape(self._make_slots))
        params = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=layouts.place_of(x)) for x in self._arrays]
        model = self.model, self.mesh, self.layout, params, self._unbundle
        kinds: Any = {"proposals": self._proposals, "drafter": self.drafter, "stacks": self.stacks}
        kinds["pooling"] = self.pooling
        lazily = {"zeros": cpu.zeros} if on_one_cpu(self.mesh) else {}
        kinds["make_slots"] = partial(self._make_slots, **lazily)
        return self.signatures_kind(*model, slots, static=self.programs.static, on_cpu=self._on_cpu, **kinds)


def _device_bytes(x: jax.Array) -> int:
    return stored_bytes(x.addressable_shards[0].data)
