"""The cache on the devices: its layout, its size, and copies of pages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxserve.config import PAGE_SIZES, ConfigError
from jaxserve.devices.mesh import on_one_cpu
from jaxserve.execution.cache_kinds import CacheKind, Compressed, Pages, cache_kind, layers_of_array
from jaxserve.execution.layer_groups import LayerGroups, LayerPlace
from jaxserve.execution.slot_states import StateLayout
from jaxserve.models.spec import CompressedAttentionSpec, LayerSpec, ModelConfig, RecurrentSpec
from jaxserve.pallas_kernels import cpu
from jaxserve.pallas_kernels.types import State
from jaxserve.scheduling.block_manager import Chunk

COPIES = 16  # page copies per call of `copy_pages`
COPIED_BYTES = 2**23  # most bytes of a call of `read_pages` or `write_pages`, unless it is for a single page
INTERVALS = 512, 1024  # fewest and most tokens between snapshots of recurrent states, unless the user says otherwise
LARGE_STATE = 1 << 16  # numbers of a layer's state of a sequence from which on states are in large pages on CPU
STATE_COPIES = 2  # state copies per call of `copy_states`; a state is about a thousand times larger than a page

KVCache = list[Pages | State]  # first arrays of pages, then arrays of states; each has a few layers


@dataclass(frozen=True)
class CacheLayout:
    """The arrays of the cache.

    A page has `groups.depth` parts, each for a layer. The group of layers that owns the page uses these parts. An
    array holds the parts of a few layers: first the parts of its first layer for all pages, then those of its second.
    If layers differ in their heads, a part may hold several layers (`KeysAndValues.fit`), one after the other.
    Arrays hold several layers because each array that a step takes and returns costs the host about 3 us. The arrays of
    recurrent layers, if there are any, follow the arrays of pages.

    Attributes:
      groups: how the layers with pages share them.
      kind: what these layers keep of a token.
      states: the arrays of recurrent layers; None: there are none.
      draft: what the layer of a draft head keeps of a token, in the last array; None: there is no draft head.
    """

    groups: LayerGroups
    num_pages: int
    page_size: int
    kind: CacheKind
    states: StateLayout | None = None
    draft: CacheKind | None = None

    @classmethod
    def of(
        cls,
        model: ModelConfig,
        kv_heads: int,
        num_pages: int,
        page_size: int,
        dtype: Any,
        platform: str = "cpu",
        longest: int | None = None,
        num_slots: int = 0,
        snapshots: int = 0,
        shares: int = 1,
    ) -> CacheLayout:
        """The layout for a model with `num_pages` pages of `page_size` tokens, for devices of which groups of `shares`
        have the same key-value heads and different tokens.

        `longest` is the length of the longest sequence in tokens; None: the model's own limit. Only recurrent layers
        need `num_slots`, the number of sequences that can run at a time, and `snapshots`, the number of states that can
        be kept beside those of running sequences.
        """
        net = model.recurrent
        states = None
        if net is not None:
            states = StateLayout(net, model.num_recurrent, num_slots + 1, snapshots)
        longest = model.max_position if longest is None else longest
        page_size = fitting_page_size(model, longest, page_size, page_size)
        kind = cache_kind(model, kv_heads, dtype, platform, shares, page_size)
        sights, fits, sources = _parts(model, kind, kv_heads)
        groups = LayerGroups.of(sights, longest, fits, sources)
        return cls(groups, num_pages, page_size, kind, states)

    def places(self, layers: Sequence[LayerSpec]) -> list[LayerPlace]:
        """The places of layers, which are the first ones of those that share the cache."""
        found: list[LayerPlace] = []
        paged = (self._place_of_pages(*place) for place in self.groups.places)
        recurrent = count()
        for layer in layers:
            if layer.attention is None:  # the layer changes nothing in the array that it is given
                found.append(LayerPlace(0, 0, 0))
            elif isinstance(layer.attention, RecurrentSpec):
                found.append(self._place_of_states(next(recurrent)))
            else:
                place = next(paged)
                if layer.beside is not None:
                    place = place._replace(beside=self._place_of_states(next(recurrent)))
                if getattr(layer.attention, "compression", None) is not None:
                    place = place._replace(beside=next(paged))
                found.append(place)
        return found

    def _place_of_pages(self, group: int, index: int) -> LayerPlace:
        """The place of the group's layer with this index."""
        part, within = divmod(index, self.groups.fits[group])
        array, part = divmod(part, self.groups.depth // self.num_arrays)
        return LayerPlace(array, group, part * self.num_pages * self.groups.fits[group] + within)

    def _place_of_states(self, index: int) -> LayerPlace:
        """The place of a recurrent layer; `index` counts recurrent layers only."""
        assert self.states is not None
        array, part = self.states.place(index)
        return LayerPlace(self.num_arrays + array, None, part * self.states.places)

    @property
    def num_arrays(self) -> int:
        """The number of arrays of pages: as few as possible, all alike."""
        return self.groups.depth // layers_of_array(self.groups.depth)

    @property
    def array(self) -> Pages:
        """The shapes of one of the arrays of pages."""
        return self.kind.pages(self.groups.depth // self.num_arrays * self.num_pages, self.page_size)

    @property
    def dtype(self) -> np.dtype:
        """The dtype of cached values, or of their codes."""
        return self.kind.dtype

    @property
    def token_bytes(self) -> int:
        """Bytes of one token over all groups of layers and all devices, for a token within all windows."""
        return self.groups.num_groups * self.page_bytes // self.page_size

    def device_token_bytes(self, mesh: Mesh) -> int:
        """`token_bytes` on each device."""
        return self.groups.num_groups * self.device_page_bytes(mesh) // self.page_size

    @property
    def page_bytes(self) -> int:
        """Bytes of a page over all devices. Copies on several devices count once."""
        draft = 0 if self.draft is None else _bytes(self.draft, self.page_size)
        return self.groups.depth * _bytes(self.kind, self.page_size) + draft

    def device_page_bytes(self, mesh: Mesh) -> int:
        """Bytes of a page on each device."""
        draft = 0 if self.draft is None else _device_bytes(self.draft, self.page_size, mesh)
        return self.groups.depth * _device_bytes(self.kind, self.page_size, mesh) + draft

    @property
    def draft_group(self) -> int:
        """The group of layers whose block tables a draft head uses: the one that sees all tokens."""
        return self.groups.windows.index(None)

    def tables(self, tables: jax.Array) -> list[jax.Array]:
        """Rows' block tables, int32 [rows, blocks * groups] -> a table [rows, blocks] for each group of layers."""
        if self.groups.num_groups == 1:
            return [tables]
        by_group = tables.reshape(len(tables), -1, self.groups.num_groups)
        return [by_group[:, :, group] for group in range(self.groups.num_groups)]

    def state_bytes(self, mesh: Mesh) -> int:
        """Bytes of all recurrent states and snapshots on each device; 0 without recurrent layers."""
        return 0 if self.states is None else self.states.device_bytes(mesh)

    def snapshot_interval(self, asked: int | None) -> int:
        """Tokens between snapshots within a prompt, in whole pages: as many as asked. By default their pages take as
        much memory as a snapshot, within INTERVALS; a power of two."""
        assert self.states is not None
        if asked is None:
            worth = self.states.slot_bytes // self.token_bytes
            least, most = INTERVALS
            asked = min(max(1 << worth.bit_length(), least), most)
        return -(-asked // self.page_size) * self.page_size

    @property
    def copy_sizes(self) -> list[int]:
        """The numbers of pages for which `read_pages` and `write_pages` are compiled."""
        return [size for size in (1, 4, 16) if size == 1 or size * self.page_bytes <= COPIED_BYTES]

    def contents(self, mesh: Mesh, count: int) -> list[jax.ShapeDtypeStruct]:
        """The contents of `count` pages, as `read_pages` returns them: [count, layers, ...] for the values, for the
        scales if there are any, and the same for a draft head. Devices split them as they split pages."""
        parts = [(self.kind, self.groups.depth)] + ([] if self.draft is None else [(self.draft, 1)])
        return [
            jax.ShapeDtypeStruct((count, layers, *x.shape[1:]), x.dtype, sharding=NamedSharding(mesh, P(None, *spec)))
            for kind, layers in parts
            for x, spec in zip(*map(jax.tree.leaves, (kind.pages(1, self.page_size), kind.specs)), strict=True)
        ]

    def _arrays(self, mesh: Mesh) -> list[tuple[Any, Any]]:
        """Each array of the cache as shapes, and its shardings."""

        def shardings(kind: CacheKind) -> Any:
            return jax.tree.map(partial(NamedSharding, mesh), kind.specs)

        pages: Any = (self.array, shardings(self.kind))
        states: Any = []
        if self.states is not None:
            states = [(self.states.array, self.states.shardings(mesh))] * self.states.num_arrays
        draft: Any = []
        if self.draft is not None:
            draft = [(self.draft.pages(self.num_pages, self.page_size), shardings(self.draft))]
        return [pages] * self.num_arrays + states + draft

    def shardings(self, mesh: Mesh) -> list[Any]:
        """The shardings of each array of the cache."""
        return [place for _, place in self._arrays(mesh)]

    def abstract(self, mesh: Mesh) -> list[Any]:
        """The cache's shapes, dtypes and shardings."""

        def placed(array: Any, place: NamedSharding) -> Any:
            return jax.tree.map(lambda x, on: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=on), array, place)

        return [placed(*one) for one in self._arrays(mesh)]

    def create(self, mesh: Mesh) -> KVCache:
        """Allocates the cache, see `empty`."""
        return jax.jit(partial(self.empty, mesh), out_shardings=self.shardings(mesh))()

    def empty(self, mesh: Mesh) -> KVCache:
        """A new cache, to be computed on the devices. On one CPU its contents are undefined, and the system provides
        memory when a page is first written, so that a large cache costs no time at start. Large states are in large
        pages, since each step reads and writes all of a row's."""
        if not on_one_cpu(mesh):
            return [jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), array) for array, _ in self._arrays(mesh)]

        def fill(x: jax.ShapeDtypeStruct, of_states: bool) -> jax.Array:
            return cpu.untouched(x.shape, x.dtype, of_states and math.prod(x.shape[1:]) >= LARGE_STATE)

        arrays = [array for array, _ in self._arrays(mesh)]
        states = range(self.num_arrays, self.num_arrays + (0 if self.states is None else self.states.num_arrays))
        return [jax.tree.map(partial(fill, of_states=i in states), array) for i, array in enumerate(arrays)]


def _bytes(kind: CacheKind, page_size: int) -> int:
    """Bytes of a page of one layer over all devices."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(kind.pages(1, page_size)))


def _device_bytes(kind: CacheKind, page_size: int, mesh: Mesh) -> int:
    """Bytes of a page of one layer on each device. Some arrays of a page may be split, and others be copies."""
    leaves = zip(*map(jax.tree.leaves, (kind.pages(1, page_size), kind.specs)), strict=True)
    return sum(math.prod(NamedSharding(mesh, spec).shard_shape(x.shape)) * x.dtype.itemsize for x, spec in leaves)


def _sights(model: ModelConfig) -> list[int | Chunk | None]:
    """How far back each layer of attention sees (`Windows`). For a model without attention one stands in that sees all
    tokens (`ModelConfig.attention`)."""
    if not model.attentions:
        return [None]
    chunks = [getattr(attention, "chunk", None) for attention in model.attentions]
    return [Chunk(chunk) if chunk else a.window for a, chunk in zip(model.attentions, chunks, strict=True)]


def _parts(
    model: ModelConfig, kind: CacheKind, kv_heads: int
) -> tuple[list[int | Chunk | None], list[int], Sequence[int]]:
    """For each thing that a layer of attention keeps of tokens: how far back it is read, how many like it a part of a
    page holds, and the number of the thing that is read, its own or an earlier layer's."""
    if not isinstance(kind, Compressed):
        return _sights(model), [kind.fit(one, kv_heads) for one in model.attentions], model.kv_sources
    sights: list[int | Chunk | None] = []
    fits = []
    for attention in model.attentions:
        assert isinstance(attention, CompressedAttentionSpec)
        of_entries = [] if attention.compression is None else [kind.layout.shares]
        sights += [attention.kept] + [None] * len(of_entries)
        fits += [1, *of_entries]
    return sights, fits, range(len(fits))


def fitting_page_size(model: ModelConfig, longest: int, asked: int | None, usual: int, shares: int = 1) -> int:
    """The page size that was asked for, or else `usual`. If the model attends in chunks that end before `longest`
    tokens, these must be whole pages: in the place of `usual`, the largest size below it that fits is taken.

    `shares` is a number of which the page size must be a multiple. Raises ConfigError where no size fits."""
    chunks = sorted({sight for sight in _sights(model) if isinstance(sight, Chunk) and sight < longest})
    size = asked or usual
    if not any(chunk % size for chunk in chunks):
        return size
    fitting = [s for s in PAGE_SIZES if s % shares == 0 and not any(chunk % s for chunk in chunks)]
    if asked is None and (smaller := [s for s in fitting if s < usual]):
        return smaller[-1]
    allowed = " or ".join(map(str, fitting))
    raise ConfigError(
        f"page_size {size} does not divide the model's attention chunks of {chunks[0]} tokens; "
        + (f"choose {allowed}" if fitting else "no page size does")
        + f", or set max_model_len to {chunks[0]} or less"
    )


def cache_dtype(name: str, compute: Any) -> np.dtype:
    """The dtype of the cache for `EngineConfig.kv_cache_dtype`; "auto" means the dtype of the computation."""
    named = {"auto": compute, "bf16": jnp.bfloat16, "fp8": jnp.float8_e4m3fn, "int8": jnp.int8}
    return np.dtype(named[name])


def copy_pages(
    cache: KVCache,
    sources: jax.Array,
    targets: jax.Array,
    *,
    depth: int,
    arrays: int | None = None,
    draft: bool = False,
) -> KVCache:
    """Copies page sources[i] to targets[i], int32 [COPIES], with all its `depth` layers. All sources are read before
    any target is written. Unused entries are NULL_PAGE. The first `arrays` arrays of `cache` hold pages; None: all. So
    does the last one if there is a `draft` head."""
    arrays = len(cache) if arrays is None else arrays
    copied = _copy(cache[:arrays], sources, targets, depth // arrays)
    others = cache[arrays:]
    return copied + (_copy(others, sources, targets, 1) if draft else others)


def read_pages(cache: KVCache, pages: jax.Array, *, depth: int, arrays: int, draft: bool = False) -> list[jax.Array]:
    """The contents of `pages`, int32 [n], see `CacheLayout.contents`. The other arguments are as in `copy_pages`."""
    parts = [cache[:arrays]] + ([cache[-1:]] if draft else [])
    return [
        jnp.concatenate([x[_places(x, pages, layers // len(part))] for x in like], axis=1)
        for part, layers in zip(parts, (depth, 1), strict=False)
        for like in zip(*map(jax.tree.leaves, part), strict=True)
    ]


def write_pages(
    cache: KVCache, pages: jax.Array, contents: list[jax.Array], *, depth: int, arrays: int, draft: bool = False
) -> KVCache:
    """Writes what `read_pages` has returned to `pages`, int32 [n]. Entries that are not used are NULL_PAGE."""
    each = depth // arrays
    kinds = len(jax.tree.leaves(cache[0]))

    def write(array: Any, first: int, layers: int, new: list[jax.Array]) -> Any:
        """An array with these layers of contents."""
        leaves, structure = jax.tree.flatten(array)
        for i, (x, y) in enumerate(zip(leaves, new, strict=True)):
            part = y[:, first : first + layers]
            leaves[i] = x.at[_places(x, pages, layers)].set(part, mode="promise_in_bounds")
        return jax.tree.unflatten(structure, leaves)

    written = [write(one, i * each, each, contents[:kinds]) for i, one in enumerate(cache[:arrays])]
    return written + ([write(cache[-1], 0, 1, contents[kinds:])] if draft else cache[arrays:])


def _places(x: jax.Array, pages: jax.Array, each: int) -> jax.Array:
    """Where the parts of `pages` [n] for `each` layers lie in an array of pages; int32 [n, each]."""
    return pages[:, None] + jnp.arange(0, x.shape[0], x.shape[0] // each, dtype=jnp.int32)


def copy_states(cache: KVCache, sources: jax.Array, targets: jax.Array, *, layers: int, arrays: int) -> KVCache:
    """Copies recurrent states between slots and snapshots, from sources[i] to targets[i], int32 [STATE_COPIES], for all
    `layers` recurrent layers. All sources are read before any target is written. Unused entries are the padding slot.
    The last `arrays` arrays of `cache` hold states."""
    return cache[:-arrays] + _copy(cache[-arrays:], sources, targets, layers // arrays)


def _copy(arrays: list, sources: jax.Array, targets: jax.Array, each: int) -> list:
    """Copies the places `sources` to the places `targets` in each of `arrays` [each * places, ...] of `each` layers."""

    def copy(x: jax.Array) -> jax.Array:
        first = jnp.arange(0, x.shape[0], x.shape[0] // each, dtype=jnp.int32)[:, None]
        return x.at[first + targets].set(x[first + sources], mode="promise_in_bounds")

    return jax.tree.map(copy, arrays)
