"""The device side of the engine: parameters, cache and slots, and the compiled functions that advance them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
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

from jaxserve.adapters.adapter import Adapter
from jaxserve.config import MAX_TOKENS_PER_CALL
from jaxserve.devices import layouts
from jaxserve.devices.command_buffers import compiler_options, exchanges, why_static
from jaxserve.devices.jax_versions import with_int4_arguments
from jaxserve.devices.mesh import num_groups, on_one_cpu, replicated
from jaxserve.execution import runner_commands, steps
from jaxserve.execution.adapter_stacks import AdapterStacks
from jaxserve.execution.device_groups import DeviceGroups, GatheredRows, calls
from jaxserve.execution.encoder_runner import EncoderRunner
from jaxserve.execution.kv_cache import STATE_COPIES, CacheLayout, KVCache
from jaxserve.execution.memory import Needs, stored_bytes
from jaxserve.execution.packed_params import bundle
from jaxserve.execution.programs import StepProgram, StepPrograms, bounds_code, compile_threads
from jaxserve.execution.sampling import Sampled
from jaxserve.execution.signatures import (
    CREATE_CACHE,
    CREATE_SLOTS,
    AuxProgram,
    ProgramName,
    Signatures,
    draft_programs,
)
from jaxserve.execution.slots import COUNTED_PER_CALL, NO_ADAPTER, SLOTS_PER_CALL, SlotState, create_slots
from jaxserve.execution.step_shape import StepShape
from jaxserve.execution.streamed_layers import StreamedLayers
from jaxserve.models.adapter_targets import AdapterTargets, PoolSizes
from jaxserve.models.decoder import Decoder
from jaxserve.models.drafter import Drafter
from jaxserve.models.stages import Stage
from jaxserve.pallas_kernels import cpu, lowered_kernels
from jaxserve.pallas_kernels.operands import Row, value_of
from jaxserve.scheduling.block_manager import NULL_PAGE
from jaxserve.scheduling.image_prompts import EncoderJob
from jaxserve.scheduling.step_plan import Sampler

log = logging.getLogger(__name__)

SLOT_SIZES = (SLOTS_PER_CALL, 8 * SLOTS_PER_CALL, 64 * SLOTS_PER_CALL)  # rows per call of `set_slots`
COUNT_SIZES = (COUNTED_PER_CALL, 16 * COUNTED_PER_CALL)  # tokens per call of `count_tokens`, beside the largest call


class KeptPrograms(Protocol):
    """Programs that earlier starts have compiled; see `bundles.program_cache`."""

    def load(self, name: ProgramName) -> Compiled | None:
        """The program, or None if it is not there."""

    def compiling(self) -> AbstractContextManager[None]:
        """In this context programs are compiled that can be kept."""

    def keep(self, name: ProgramName, compiled: Compiled) -> None: ...


class ModelRunner(runner_commands.Commanded, calls=runner_commands.OF_MODELS):
    """Owns the parameters, the cache and the slots on the devices of one mesh, and the programs that change them. The
    model is a whole one, or a stage of a pipeline; the mesh is one group of devices or several (`device_groups`).

    Methods that run programs dispatch them and return at once; reading a result waits for the devices. Each of these
    calls is also passed to `listener`, unless it is None, as a command with which another runner can repeat the call.
    `watcher` gets the sampled tokens of each call that samples, which the devices may still be computing.

    Args:
      num_slots: sequences that can run at a time, on each group of devices.
      penalty_rows: sequences with penalties that can run at a time, on each group of devices.
      max_tokens_per_call: tokens that a row may sample in one call.
      static: programs are specialised to what the host knows, see `programs`; None: they are where they must be
        (`command_buffers.why_static`).
      proposals: most tokens that are proposed for a row, see `verify`.
      drafter: a draft head, see `drafting`; its parameters are in `params` under "draft".
      pooling: for models that embed or score, see `steps.pool_rows`. Such a runner has no programs that sample.
      adapters: the pool of LoRA adapters; None: there is none. The model must have been made for adapters.
      encoder: of pictures, for a model that sees.
      streamed: the last layers of the model, whose weights are in host memory. `model` and `params` are then those of
        the layers before them, and a step waits until these layers are being computed. None: there are none.
    """

    num_stages = 1  # of a pipeline

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
        streamed: StreamedLayers | None = None,
        encoder: EncoderRunner | None = None,
    ):
        self.model = model
        self.encoder = encoder
        self.mesh = mesh
        self.num_slots = num_slots
        self.penalty_rows = penalty_rows
        platform = mesh.devices.flat[0].platform
        self._on_cpu = platform == "cpu"
        self._compiler_options = compiler_options(mesh)
        if platform not in ("cpu", "tpu"):
            lowered_kernels.keep()
        static = why_static(mesh) is not None if static is None else static
        self.programs = StepPrograms(
            static=static,
            most=1 if exchanges(mesh) and not static else max_tokens_per_call,
            costly_filters=model.ops.draw is None,
            pools=pooling is not None,
            proposals=proposals,
            has_head=drafter is not None,
        )
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
        self.streamed = streamed
        self.layout: CacheLayout
        self.groups: DeviceGroups
        self.slots: SlotState
        self.cache: KVCache
        self.compile_seconds = 0.0
        self.watcher: Callable[[jax.Array], None] | None = None
        self._hidden: jax.Array | None = None  # hidden states of the latest step that kept them
        self.copies_pages = False  # True: `compile` prepares `read_pages` and `write_pages`
        self.beside: Sequence[ModelRunner] = ()  # runners of other models on the same devices
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
        return self.groups.padding_slot

    @property
    def stage(self) -> Stage | None:
        """The stage of a pipeline that this is; None: the model is whole."""
        return self.model.stage if isinstance(self.model.stage, Stage) else None

    @property
    def streamed_bytes(self) -> int:
        """Bytes of weights that each step copies to each device."""
        return 0 if self.streamed is None else self.streamed.device_bytes

    @property
    def params(self) -> Any:
        """The model's parameter tree. Vectors in it are copies, because they are stored in stacks."""
        return jax.tree.map(value_of, self._unbundle(self._arrays), is_leaf=lambda x: isinstance(x, Row))

    @property
    def weights(self) -> list[jax.Array]:
        """The parameters as programs take them, behind them the pool of adapters, and behind it weights in host memory.
        New ones must have the same forms."""
        return [*self._arrays, *([] if self.streamed is None else self.streamed.weights)]

    @weights.setter
    def weights(self, arrays: list[jax.Array]) -> None:
        count = len(self._arrays)
        self._arrays = arrays[:count]
        if self.streamed is not None:
            self.streamed.set_weights(arrays[count:])

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
        if self.streamed is not None:
            self.streamed.places = list(layout.places(self.model.config.layers))
        self.groups = DeviceGroups(num_groups(self.mesh), self.num_slots, self.penalty_rows, layout.num_pages)
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
            images=None if self.encoder is None else self.encoder.rows_shape,
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
        self.set_cache_size(replace(self.layout, num_pages=pages), max_blocks)

    def allocate(self) -> None:
        """Allocates the cache and the slots. Existing ones are freed first."""
        self.free_cache()  # the old and the new one may not fit together
        vars(self).pop("slots", None)
        self.slots = self._get(CREATE_SLOTS)()
        self.create_cache()

    def release(self) -> None:
        """Frees weights, cache and slots, until there are new weights and `allocate` is called. Weights in host memory
        stay there."""
        if self.streamed is not None:
            self.streamed.uploads.clear()
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
        """Bytes of the parameters on each device, with room for those that are copied to it."""
        room = 0 if self.streamed is None else self.streamed.room_bytes
        encoder = 0 if self.encoder is None else self.encoder.weight_bytes
        return sum(layouts.device_bytes(x) for x in self._arrays) + room + encoder

    @property
    def slot_bytes(self) -> int:
        """Bytes of the slots on each device."""
        return sum(stored_bytes(x) for x in jax.tree.leaves(jax.eval_shape(self._make_slots)))

    @property
    def cache_bytes(self) -> int:
        """Bytes of the cache on each device."""
        return sum(_device_bytes(x) for x in jax.tree.leaves(self.cache))

    # Dispatch

    def step(
        self, program: StepProgram, packed: np.ndarray, x: jax.Array | None = None
    ) -> tuple[Sampled, jax.Array | None]:
        """Runs one step over int32 [program.shape.words]; see `steps.run_step`. With several groups of devices `packed`
        is [groups, words], see `DeviceGroups`, and hidden states of all groups follow each other. x: from the stage
        before, in the last stage of a pipeline."""
        buffers = self.groups.step_buffers(program.shape, packed)
        if self.streamed is None:
            given = () if x is None else (x,)
            result = self._get(program)(self._arrays, self.cache, self.slots, buffers, *given)
            self.cache = result.cache
        else:
            result = self.streamed.step(self, program, buffers)
        self.slots = result.slots
        self._hidden = result.hidden
        self._show(result.drawn)
        return self.groups.side_by_side(result.drawn), result.hidden

    def advance(self, shape: StepShape, packed: np.ndarray, x: jax.Array | None) -> jax.Array:
        """Runs the part of a step of a stage that is not the last; returns what the next stage reads. x: from the stage
        before; None: there is none."""
        given = () if x is None else (x,)
        buffers = self.groups.step_buffers(shape, packed)
        result = self._get(stage_program(shape))(self._arrays, self.cache, self.slots, buffers, *given)
        self.cache = result.cache
        self.slots = result.slots
        return result.x

    def take(self, kind: str, slot: np.ndarray, tokens: jax.Array) -> None:
        """Notes tokens of the last stage, see `stage_steps.take_tokens`. `kind`: which of its programs. Slots and
        tokens of several groups follow each other."""
        local = slot if self.groups.count == 1 else self.groups.slot(slot).astype(np.int32)
        self.slots = self._get(AuxProgram(kind, len(slot) // self.groups.count))(self.slots, local, tokens)

    def sample_deferred(self, draws: np.ndarray, masks: np.ndarray) -> list[tuple[int, Sampled]]:
        """Samples the tokens of deferred rows, in calls of `deferred_sizes`. Returns each call's number of draws and
        its results; with several groups of devices one result for all. draws: int32 [n, DEFERRED_WORDS], and masks [n,
        words], as in `steps.sample_deferred`."""
        given = np.concatenate([draws, masks], axis=1)
        results = []
        for some, size in self.groups.deferred_calls(draws, self.deferred_sizes):
            packed = self.groups.deferred_draws(given, some, size)
            one, self.slots = self._get(AuxProgram("sample_deferred", size))(self._arrays, self.slots, packed)
            results.append((some, size, one))
            self._show(one)
        return self.groups.in_order(len(draws), results)

    def returned(self, draws: np.ndarray, results: list[tuple[int, Sampled]]) -> Iterator[tuple[np.ndarray, jax.Array]]:
        """Of each call of `sample_deferred` the slots of its draws, the padding slot for padding, and the tokens."""
        tokens = [x for _, one in results for x in arrays_of(one.tokens)]
        for (some, size), one in zip(self.groups.deferred_calls(draws, self.deferred_sizes), tokens, strict=True):
            yield self.groups.deferred_slots(draws, some, size), one

    def score_prompt(self, rows: np.ndarray, targets: np.ndarray, places: np.ndarray | None = None) -> Any:
        """Packed log-probabilities of the tokens `targets` [n] at `rows` [n] of the hidden states that the latest step
        kept; int32 [at least n, SCORE_WORDS]. n is at most the number of these hidden states. places [n]: the
        places of the rows' adapters, or -1; None: no row has one."""
        hidden = self._hidden
        assert hidden is not None, "the latest step kept no hidden states"
        tokens = hidden.shape[0] // self.groups.count
        most, _ = steps.scored_words(tokens, self._on_cpu)
        columns = [rows, targets]
        if self.stacks is not None:
            columns.append(np.full(len(rows), NO_ADAPTER) if places is None else places)
        packed, in_order = self.groups.scored_rows(tokens, most, columns)
        return in_order(self._get(AuxProgram("score_prompt", tokens))(self._arrays, hidden, packed))

    def propose(self, name: AuxProgram, slots: np.ndarray, count: int) -> jax.Array:
        """Proposes `count` tokens for each of these slots [n] with a program of `draft_programs`; see
        `drafting.propose`. Returns int32 [name.passes, name.size]."""
        packed = np.full(2 + name.size, self.num_slots, np.int32)
        packed[:2] = (len(slots), count)
        packed[2 : 2 + len(slots)] = slots
        tokens, self.cache[-1] = self._get(name)(self._arrays, self.cache[-1], self.slots, packed)
        return tokens

    def _show(self, drawn: Sampled) -> None:
        if self.watcher is not None:
            self.watcher(drawn.tokens)

    # Between steps

    @property
    def slot_sizes(self) -> list[int]:
        """The numbers of rows for which `set_slots` is compiled. Accelerators fill any number of slots in one call. A
        row takes 4 KiB, so there are sizes between a few slots and all."""
        sizes = [size for size in SLOT_SIZES if size < self.num_slots]
        return [SLOTS_PER_CALL] if self._on_cpu else [*sizes, max(self.num_slots, SLOTS_PER_CALL)]

    @property
    def count_sizes(self) -> list[int]:
        """The numbers of tokens for which `count_tokens` is compiled. The largest takes the longest sequence."""
        if self._on_cpu:
            return [COUNTED_PER_CALL]
        return [size for size in COUNT_SIZES if size < self.max_len] + [max(self.max_len, COUNTED_PER_CALL)]

    def set_slots(self, rows: list[np.ndarray]) -> None:
        """Writes the sampling parameters of slots. Each row is the result of `encode_slot`."""
        for size, packed in self.groups.slot_rows(rows, self.slot_sizes):
            self.slots = self._get(AuxProgram("set_slots", size))(self.slots, packed)

    def count_tokens(self, counted: np.ndarray) -> None:
        """Counts tokens of sequences in their penalty rows. counted: int32 [3, n], as from `encode_counts`."""
        for size, packed in self.groups.counted_tokens(counted, self.count_sizes, self.model.config.vocab_size):
            self.slots = self._get(AuxProgram("count_tokens", size))(self.slots, packed)

    def update_tables(self, copies: list[tuple[int, int]], entries: np.ndarray) -> None:
        """Copies rows of the block table, as (source, target) slots, one after the other. Then writes entries of the
        table, int32 [3, n] of (slot, index, page)."""
        if not copies and not entries.size:
            return
        for given in self.groups.table_changes(copies, entries):
            self.slots = self._get(AuxProgram("update_tables"))(self.slots, *given)

    def copy_pages(self, pairs: list[tuple[int, int]]) -> None:
        """Copies pages, given as (source, target), before the next step writes."""
        if not pairs:
            return
        for sources, targets in self.groups.page_pairs(pairs):
            self.cache = self._get(AuxProgram("copy_pages"))(self.cache, sources, targets)

    def read_pages(self, pages: list[int]) -> list[tuple[int, list[jax.Array]]]:
        """The contents of pages after the steps dispatched so far, in calls of `CacheLayout.copy_sizes`: the number of
        pages that a call read, and the arrays with their contents first, see `CacheLayout.contents`."""
        results = []
        for some, size in calls(len(pages), self.layout.copy_sizes):
            packed = np.full(size, NULL_PAGE, np.int32)
            packed[: len(pages[some])] = pages[some]
            results.append((len(pages[some]), self._get(AuxProgram("read_pages", size))(self.cache, packed)))
        return results

    def encode_images(self, jobs: Sequence[EncoderJob]) -> None:
        """Computes features of pictures before the next step reads them."""
        assert self.encoder is not None
        assert self.slots.images is not None
        self.slots = self.slots._replace(images=self.encoder.encode(self.slots.images, jobs))

    def write_pages(self, pages: list[int], contents: list[np.ndarray]) -> None:
        """Writes contents as `read_pages` has returned them to pages, in one call. There is room for one of
        `CacheLayout.copy_sizes` pages in `contents`, which must not change any more: the copy may be under way."""
        packed = np.full(len(contents[0]), NULL_PAGE, np.int32)
        packed[: len(pages)] = pages
        self.cache = self._get(AuxProgram("write_pages", len(packed)))(self.cache, packed, contents)

    def copy_states(self, pairs: list[tuple[int, int]]) -> None:
        """Copies recurrent states between slots and snapshots, given as (source, target), after the steps dispatched so
        far. Unused pairs copy the padding slot to itself."""
        if not pairs:
            return
        for at in range(0, len(pairs), STATE_COPIES):
            packed = np.full((2, STATE_COPIES), self.num_slots, np.int32)
            some = np.asarray(pairs[at : at + STATE_COPIES], np.int32).T
            packed[:, : some.shape[1]] = some
            self.cache = self._get(AuxProgram("copy_states"))(self.cache, packed[0], packed[1])

    def adapter_uploads(self, place: int, adapter: Adapter | None) -> Iterator[Callable[[], None]]:
        """The calls that bring an adapter to a place of the pool, in their order; None empties the place. Each takes
        far less than a step, and steps may be dispatched between them. Until the last one, the place adds nothing."""
        assert self.stacks is not None, "there is no pool of adapters"
        yield partial(self.write_ranks, place, self.stacks.ranks_of({}))
        if adapter is None:
            return
        for number, target in enumerate(self.stacks.targets):
            if (found := adapter.matrices.get(target.path)) is not None:
                yield partial(self.write_adapter, number, place, found.a, found.b)
        yield partial(self.write_ranks, place, self.stacks.ranks_of(adapter.matrices))

    def write_adapter(self, target: int, place: int, a: np.ndarray, b: np.ndarray) -> None:
        """Writes an adapter's matrices for one product, see `Matrices`, to a place of the pool."""
        assert self.stacks is not None
        new = self.stacks.targets[target].padded(a, b, self.stacks.sizes)
        first = self._first_stack + 1 + 2 * target
        program = self._get(AuxProgram("write_adapter", self.stacks.kind_of(target)))
        self._arrays[first : first + 2] = program(self._arrays[first : first + 2], np.int32(place), new)

    def write_ranks(self, place: int, ranks: np.ndarray) -> None:
        """Writes the ranks, int32 [products, parts], of a place of the pool."""
        at = self._first_stack
        self._arrays[at] = self._get(AuxProgram("write_ranks"))(self._arrays[at], np.int32(place), ranks)

    # Compilation

    @contextmanager
    def room_to_compile(self, names: Sequence[ProgramName]) -> Iterator[None]:
        """On accelerators frees the caches on these devices while any of these programs is compiled, and creates them
        again, empty. XLA:GPU tries a product in several ways on the device, and fails without memory for its operands
        and results."""
        frees = not self._on_cpu and any(name not in self.executables for name in names)
        freed = [one for one in (self, *self.beside) if frees and "cache" in vars(one)]
        for one in freed:
            one.free_cache()
        try:
            yield
        finally:
            for one in freed:
                one.create_cache()

    def free_cache(self) -> None:
        vars(self).pop("cache", None)

    def create_cache(self) -> None:
        """Creates the cache again, empty, if `free_cache` has freed it."""
        if "cache" not in vars(self):
            self.cache = self._get(CREATE_CACHE)()

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
        needs = needs_of(names, {name: self._analyses[name][1] for name in known})
        return needs if self.encoder is None else needs + self.encoder.needs

    def names(self, shapes: Sequence[StepShape]) -> list[ProgramName]:
        """The names of all programs that serving can need: auxiliary ones, then steps from the largest bucket on, then
        others with the output head."""
        # Programs that need no kernel come first: on CPU the kernels may still be compiling.
        auxiliary = [AuxProgram("set_slots", size) for size in self.slot_sizes]
        auxiliary += [AuxProgram("update_tables"), AuxProgram("copy_pages")]
        if self.layout.states is not None and self.layout.states.snapshots:
            auxiliary.append(AuxProgram("copy_states"))
        auxiliary += [AuxProgram("count_tokens", size) for size in self.count_sizes]
        if self.copies_pages:
            auxiliary += [AuxProgram(kind, n) for kind in ("read_pages", "write_pages") for n in self.layout.copy_sizes]
        auxiliary += self.draft_programs(shapes)
        if self.stacks is not None:
            auxiliary += [AuxProgram("write_ranks"), *(AuxProgram("write_adapter", kind) for kind in self.stacks.kinds)]
        if self.stage is not None and not self.stage.is_last:
            return self._names_of_stage(auxiliary, shapes)
        by_size = sorted(self.programs.all(shapes), key=lambda program: -program.shape.tokens)
        streamed = [] if self.streamed is None else self.streamed.programs(shapes)
        return [*auxiliary, *by_size, *self._others(shapes), *streamed]

    def _names_of_stage(self, auxiliary: list[AuxProgram], shapes: Sequence[StepShape]) -> list[ProgramName]:
        """The names of the programs of a stage that is not the last: it samples nothing, and takes what the last one
        has sampled."""
        names: list[ProgramName] = [name for name in auxiliary if name.kind != "count_tokens"]
        checking = {program.shape for program in self.programs.all(shapes) if program.proposals}
        for kind, some in (("take_tokens", shapes), ("take_checked", checking)):
            names += [AuxProgram(kind, rows) for rows in sorted({shape.rows for shape in some})]
        names += [AuxProgram("take_deferred", size) for size in self.deferred_sizes]
        return [*names, *sorted(map(stage_program, shapes), key=lambda part: -part.shape.tokens)]

    def draft_programs(self, shapes: Sequence[StepShape]) -> list[AuxProgram]:
        """The names of the programs that propose with a draft head; see `signatures.draft_programs`."""
        return [] if self.drafter is None else draft_programs(shapes, self.programs, self.mesh)

    def largest(self, shapes: Sequence[StepShape]) -> list[ProgramName]:
        """The names of the programs that need the most memory, one of each kind, and of some that bound others."""
        last_of_kinds = [[shape for shape in shapes if shape.decode_only is decodes][-1:] for decodes in (True, False)]
        large = [shape for some in last_of_kinds for shape in some]
        if self.stage is not None and not self.stage.is_last:
            return list(map(stage_program, large))
        streamed = [] if self.streamed is None else self.streamed.programs(large)
        return [*self.programs.bounding(shapes), *self._others(shapes), *streamed]

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
        lazily = {"zeros": cpu.zeros} if on_one_cpu(self.mesh) else {}
        return Signatures(
            self.model,
            self.mesh,
            self.layout,
            params,
            self._unbundle,
            slots,
            static=self.programs.static,
            on_cpu=self._on_cpu,
            proposals=self._proposals,
            drafter=self.drafter,
            stacks=self.stacks,
            pooling=self.pooling,
            streamed=self.streamed,
            make_slots=partial(self._make_slots, **lazily),
        )


def stage_program(shape: StepShape) -> StepProgram:
    """The one program of a bucket in a stage that samples nothing."""
    return StepProgram(shape, Sampler.NONE, 1, keeps_hidden=False)


def arrays_of(rows: Any) -> list[jax.Array]:
    """The arrays on the devices of a result that the host reads: with several groups [groups * calls, rows]."""
    return rows.arrays if isinstance(rows, GatheredRows) else [rows]


def _device_bytes(x: jax.Array) -> int:
    return stored_bytes(x.addressable_shards[0].data)


def needs_of(names: Sequence[ProgramName], compiled: Mapping[ProgramName, Any]) -> Needs:
    """The memory that programs need, by the compiler's figures of those that are compiled. The code of each other
    program is bounded by the smallest compiled one that is larger in every respect, else by the largest of all."""
    code = {name: figures.generated_code_size_in_bytes for name, figures in compiled.items()}
    auxiliary = [code[name] for name in code if isinstance(name, AuxProgram)]

    def bound(name: ProgramName) -> int:
        if isinstance(name, AuxProgram):
            return max(auxiliary or code.values(), default=0)  # the compiled ones sample or have the output head
        larger = [n for n in code if isinstance(n, StepProgram) and bounds_code(n, name)]
        return min((code[n] for n in larger), default=max(code.values(), default=0))

    return Needs.of(list(compiled.values()), [bound(name) for name in names if name not in compiled])
