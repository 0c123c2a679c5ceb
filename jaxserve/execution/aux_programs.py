"""The host's calls that change slots, cache and adapters between steps."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import jax
import numpy as np
from jax.stages import Compiled

from jaxserve.adapters.adapter import Adapter
from jaxserve.execution import commands
from jaxserve.execution.adapter_stacks import AdapterStacks
from jaxserve.execution.kv_cache import COPIES, STATE_COPIES, CacheLayout, KVCache
from jaxserve.execution.signatures import CREATE_CACHE, TABLE_COPIES, TABLE_UPDATES, AuxProgram, ProgramName
from jaxserve.execution.slots import COUNTED_PER_CALL, SLOTS_PER_CALL, SlotState, padding_slot_params
from jaxserve.models.decoder import Decoder
from jaxserve.scheduling.block_manager import NULL_PAGE
from jaxserve.types import NO_PENALTY_ROW

SLOT_SIZES = (SLOTS_PER_CALL, 8 * SLOTS_PER_CALL, 64 * SLOTS_PER_CALL)  # rows per call of `set_slots`
COUNT_SIZES = (COUNTED_PER_CALL, 16 * COUNTED_PER_CALL)  # tokens per call of `count_tokens`, beside the largest call


class AuxCalls(commands.Commanded):
    """The part of a `ModelRunner` that runs programs which are not steps. They are dispatched and return at once."""

    model: Decoder
    num_slots: int
    max_len: int
    slots: SlotState
    layout: CacheLayout
    cache: KVCache
    stacks: AdapterStacks | None
    executables: dict[ProgramName, Compiled]
    beside: Sequence[AuxCalls] = ()  # runners of other models on the same devices
    _on_cpu: bool
    _arrays: list[jax.Array]
    _first_stack: int  # place of the pool's first array in `_arrays`

    @abstractmethod
    def _get(self, name: ProgramName) -> Compiled: ...

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
        if rows:
            self.tell(commands.SetSlots, rows)
        for some, size in calls(len(rows), self.slot_sizes):
            padding = [padding_slot_params(self.num_slots)] * (size - len(rows[some]))
            self.slots = self._get(AuxProgram("set_slots", size))(self.slots, np.stack(rows[some] + padding))

    def count_tokens(self, counted: np.ndarray) -> None:
        """Counts tokens of sequences in their penalty rows. counted: int32 [3, n], as from `encode_counts`."""
        self.tell(commands.CountTokens, counted)
        for some, size in calls(counted.shape[1], self.count_sizes):
            packed = np.full((3, size), self.model.config.vocab_size, np.int32)
            packed[0] = NO_PENALTY_ROW
            packed[:, : counted[:, some].shape[1]] = counted[:, some]
            self.slots = self._get(AuxProgram("count_tokens", size))(self.slots, packed)

    def update_tables(self, copies: list[tuple[int, int]], entries: np.ndarray) -> None:
        """Copies rows of the block table, as (source, target) slots, one after the other. Then writes entries of the
        table, int32 [3, n] of (slot, index, page)."""
        calls = [(copies[at : at + TABLE_COPIES], entries[:, :0]) for at in range(0, len(copies), TABLE_COPIES)]
        calls += [([], entries[:, at : at + TABLE_UPDATES]) for at in range(0, entries.shape[1], TABLE_UPDATES)]
        if calls:
            self.tell(commands.UpdateTables, copies, entries)
        for rows, some in calls:
            packed_rows = np.full((TABLE_COPIES, 2), self.num_slots, np.int32)
            packed = np.zeros((3, TABLE_UPDATES), np.int32)
            packed_rows[: len(rows)] = np.reshape(rows, (-1, 2))
            packed[0] = self.num_slots
            packed[:, : some.shape[1]] = some
            self.slots = self._get(AuxProgram("update_tables"))(self.slots, packed_rows, packed)

    def copy_pages(self, pairs: list[tuple[int, int]]) -> None:
        """Copies pages, given as (source, target), before the next step writes."""
        if pairs:
            self.tell(commands.CopyPages, pairs)
            self._copy("copy_pages", pairs, COPIES, NULL_PAGE)

    def read_pages(self, pages: list[int]) -> list[tuple[int, list[jax.Array]]]:
        """The contents of pages after the steps dispatched so far, in calls of `CacheLayout.copy_sizes`: the number of
        pages that a call read, and the arrays with their contents first, see `CacheLayout.contents`."""
        self.tell(commands.ReadPages, pages)
        results = []
        for some, size in calls(len(pages), self.layout.copy_sizes):
            packed = np.full(size, NULL_PAGE, np.int32)
            packed[: len(pages[some])] = pages[some]
            results.append((len(pages[some]), self._get(AuxProgram("read_pages", size))(self.cache, packed)))
        return results

    def write_pages(self, pages: list[int], contents: list[np.ndarray]) -> None:
        """Writes contents as `read_pages` has returned them to pages, in one call. There is room for one of
        `CacheLayout.copy_sizes` pages in `contents`, which must not change any more: the copy may be under way."""
        self.tell(commands.WritePages, pages, contents)
        packed = np.full(len(contents[0]), NULL_PAGE, np.int32)
        packed[: len(pages)] = pages
        self.cache = self._get(AuxProgram("write_pages", len(packed)))(self.cache, packed, contents)

    def copy_states(self, pairs: list[tuple[int, int]]) -> None:
        """Copies recurrent states between slots and snapshots, given as (source, target), after the steps dispatched so
        far."""
        if pairs:
            self.tell(commands.CopyStates, pairs)
            self._copy("copy_states", pairs, STATE_COPIES, self.num_slots)

    def _copy(self, kind: str, pairs: list[tuple[int, int]], each: int, padding_slot: int) -> None:
        """Copies within the cache in calls of `each` pairs. Unused pairs copy the place `padding_slot` to itself."""
        for at in range(0, len(pairs), each):
            packed = np.full((2, each), padding_slot, np.int32)
            some = np.asarray(pairs[at : at + each], np.int32).T
            packed[:, : some.shape[1]] = some
            self.cache = self._get(AuxProgram(kind))(self.cache, packed[0], packed[1])

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
        self.tell(commands.WriteAdapter, target, place, a, b)
        new = self.stacks.targets[target].padded(a, b, self.stacks.sizes)
        first = self._first_stack + 1 + 2 * target
        program = self._get(AuxProgram("write_adapter", self.stacks.kind_of(target)))
        self._arrays[first : first + 2] = program(self._arrays[first : first + 2], np.int32(place), new)

    def write_ranks(self, place: int, ranks: np.ndarray) -> None:
        """Writes the ranks, int32 [products, parts], of a place of the pool."""
        self.tell(commands.WriteRanks, place, ranks)
        at = self._first_stack
        self._arrays[at] = self._get(AuxProgram("write_ranks"))(self._arrays[at], np.int32(place), ranks)


def deferred_calls(draws: np.ndarray, sizes: list[int]) -> Iterator[tuple[int, int, int]]:
    """Cuts the draws of `sample_deferred`, int32 [n, DEFERRED_WORDS], into calls that hold whole rows. Yields where
    each call begins and ends, and the smallest of these ascending sizes that holds it."""
    # where rows begin
    at = 0
    starts = np.append(np.flatnonzero(draws[:, 1] == 0), len(draws))
    while at < len(draws):
        end = int(starts[starts <= at + sizes[-1]][-1])
        yield at, end, next(size for size in sizes if size >= end - at)
        at = end


def calls(count: int, sizes: list[int]) -> Iterator[tuple[slice, int]]:
    """Cuts `count` items into as few calls as possible. `sizes` are ascending. Yields the items of each call, and the
    smallest size that holds them."""
    for at in range(0, count, sizes[-1]):
        some = min(sizes[-1], count - at)
        yield slice(at, at + some), next(size for size in sizes if size >= some)
