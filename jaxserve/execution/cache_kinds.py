"""The kinds of KV cache: keys and values, latents, or rows of tokens and of compressed entries. Each kind knows its
arrays, how devices share them, and the attention operation that writes and reads them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import Mesh, PartitionSpec

from jaxserve.config import ConfigError
from jaxserve.devices.mesh import RULES, is_split, num_shards, on_each_device, spec
from jaxserve.models.decoder import DecoderLayer
from jaxserve.models.drafter import EagleLayer
from jaxserve.models.gated_streams import GatedStreamsLayer
from jaxserve.models.hyper import HyperLayer
from jaxserve.models.spec import (
    CompressedAttentionSpec,
    CompressionSpec,
    LatentAttentionSpec,
    ModelConfig,
    PooledChoiceSpec,
)
from jaxserve.pallas_kernels import compressed_attention, token_shares
from jaxserve.pallas_kernels.compressed_attention import Compression, RowLayout
from jaxserve.pallas_kernels.operands import ChoiceInputs, CompressedHeads, Heads, LatentHeads
from jaxserve.pallas_kernels.ops import Ops
from jaxserve.pallas_kernels.types import (
    KVPages,
    LatentPages,
    RowPages,
    has_scale,
    stored_head_dim,
    stored_latent_width,
)

Pages = KVPages | LatentPages | RowPages
EVERYWHERE = PartitionSpec()
CACHED_TOKENS = str(RULES["cached_tokens"])
Layer = DecoderLayer | HyperLayer | GatedStreamsLayer | EagleLayer


MOST_LAYERS = 8  # maximum of layers in one array of the cache


def layers_of_array(layers: int) -> int:
    """How many layers to put in an array: the largest divisor of `layers` up to MOST_LAYERS, so that all arrays are
    alike."""
    return max(n for n in range(1, MOST_LAYERS + 1) if layers % n == 0)


def _shaped(shape: tuple[int, ...], dtype: Any) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


def _index_keys(count: int, page_size: int, dim: int, dtype: np.dtype) -> Any:
    """The shape of the keys of `count` pages that tokens or blocks are chosen by; None where `dim` is 0."""
    kept = jnp.bfloat16 if has_scale(dtype) else dtype
    return _shaped((count, page_size, dim), kept) if dim else None


@dataclass(frozen=True)
class KeysAndValues:
    """Keys and values of all heads: pages [pages, 2 (key, value), kv_heads, page_size, head_dim]; see `KVPages`.

    If layers differ in their heads, a part of a page has the bytes of `mixed` layers of this shape, and as many layers
    of another shape as have the same bytes: [pages, 2 * mixed, kv_heads, page_size, head_dim]. Each layer sees the
    whole array in its own shape. With `mixed` 0 all layers have this shape.

    A TPU lays out the last two axes in tiles, and could only copy the whole array into a shape that has others. So
    there a head of such models is several heads of 128 numbers (`in_parts`), and shapes differ in the axes before.

    `index_dim` is the size of the keys that blocks are chosen by; 0: there are none.
    """

    kv_heads: int
    head_dim: int
    dtype: np.dtype
    mixed: int = 0
    in_parts: bool = False
    index_dim: int = 0

    def fit(self, attention: Any, kv_heads: int) -> int:
        """How many layers with this attention a part of a page holds; `kv_heads` as in `cache_kind`."""
        if not self.mixed:
            return 1
        numbers = _numbers(attention, kv_heads, self.head_dim if self.in_parts else 1)
        return self.mixed * self.kv_heads * self.head_dim // numbers

    def pages(self, count: int, page_size: int) -> KVPages:
        """The shapes of `count` pages of one layer. Codes of int8 or fp8 have a scale per token and head."""
        scales = (count, 2 * (self.mixed or 1), self.kv_heads, page_size)
        scale = _shaped(scales, jnp.float32) if has_scale(self.dtype) else None
        keys = _index_keys(count, page_size, self.index_dim, self.dtype)
        return KVPages(_shaped((*scales, self.head_dim), self.dtype), scale, keys)

    @property
    def axes(self) -> tuple[str | None, ...]:
        """Logical axes of the first dimensions of values."""
        return None, None, "cached_heads", "cached_tokens"

    @property
    def specs(self) -> KVPages:
        """How devices share pages."""
        split: Any = spec(*self.axes)
        keys: Any = EVERYWHERE
        return KVPages(split, split if has_scale(self.dtype) else None, keys if self.index_dim else None)

    def attend(
        self, layer: Layer, ops: Ops, heads: Heads, pages: KVPages, where: tuple, mesh: Mesh, dtype: Any,
        decode_only: bool,
    ) -> tuple[jax.Array, KVPages]:  # fmt: skip
        """`Ops.attend` for the heads of each device."""
        chosen: Any = layer.spec.attention
        options = {"scale": chosen.softmax_scale, "window": chosen.window, "softcap": chosen.softcap}
        attend: Callable[..., Any] = ops.attend_shared if chosen.shares_kv else ops.attend
        if isinstance(blocks := chosen.blocks, PooledChoiceSpec):
            attend = partial(ops.attend_pooled, size=blocks.size, most=blocks.count, key_eps=blocks.norm.eps)
        elif blocks is not None:
            attend = partial(ops.attend_blocks, size=blocks.size, most=blocks.count, local=blocks.local)
        elif self.index_dim:
            attend = partial(_beside_index_keys, attend)
        if num_shards(mesh, "cached_tokens") > 1:
            attend = partial(token_shares.attend, ops, axis=CACHED_TOKENS)
        attend = partial(attend, **options, eps=layer.norm_eps, dtype=dtype, decode_only=decode_only)
        if self.mixed:
            in_order = _in_order if mesh.devices.flat[0].platform == "cpu" else _as_it_is
            attend = partial(_in_own_shape, attend, self.in_parts, in_order)
        return _on_each_device(attend, heads, self._spec_of(heads), pages, self.specs, where, mesh)

    def write(
        self, layer: Layer, ops: Ops, heads: Heads, pages: KVPages, where: tuple, mesh: Mesh, dtype: Any
    ) -> tuple[jax.Array, KVPages]:
        """`attend` without the attention: the result has its shape and no meaning."""

        def write(heads: Heads, pages: KVPages, slots: jax.Array, _: Any, first_page: jax.Array) -> Any:
            return ops.rotate_and_write(heads, layer.norm_eps, dtype, pages, slots, first_page)

        return _on_each_device(write, heads, self._spec_of(heads), pages, self.specs, where, mesh)

    def _spec_of(self, heads: Heads) -> Heads:
        """How devices share the heads."""
        of_qkv: Any = jax.tree.map(lambda x: spec(*(None,) * (x.ndim - 3), "kv_heads"), heads.qkv)
        of_sinks = None if heads.sinks is None else spec("kv_heads")
        found = jax.tree.map(lambda _: EVERYWHERE, heads)._replace(qkv=of_qkv, sinks=of_sinks)
        if not isinstance(found.choice, ChoiceInputs):  # all devices make the same choice for all heads
            return found
        of_queries: Any = spec(None, "kv_heads")
        return found._replace(choice=found.choice._replace(q=of_queries))


@dataclass(frozen=True)
class Latents:
    """One row per token, which all heads share: pages [pages, page_size, width]; see `LatentPages`. Each device holds
    all rows, or its share of them (`token_shares`). `index_dim` is the size of an indexer's keys; 0: there is none."""

    rank: int
    rope_dim: int
    width: int
    dtype: np.dtype
    index_dim: int = 0

    def fit(self, attention: Any, kv_heads: int) -> int:
        """How many layers a part of a page holds."""
        return 1

    def pages(self, count: int, page_size: int) -> LatentPages:
        """The shapes of `count` pages of one layer."""
        scale = _shaped((count, 2, page_size), jnp.float32) if has_scale(self.dtype) else None
        keys = _index_keys(count, page_size, self.index_dim, self.dtype)
        return LatentPages(_shaped((count, page_size, self.width), self.dtype), scale, keys)

    @property
    def axes(self) -> tuple[str | None, ...]:
        """Logical axes of the first dimensions of values."""
        return None, "cached_tokens"

    @property
    def specs(self) -> LatentPages:
        """How devices share pages."""
        data: Any = spec(*self.axes)
        scale: Any = spec(None, None, "cached_tokens")
        return LatentPages(data, scale if has_scale(self.dtype) else None, data if self.index_dim else None)

    def attend(
        self, layer: Layer, ops: Ops, heads: LatentHeads, pages: LatentPages, where: tuple, mesh: Mesh, dtype: Any,
        decode_only: bool,
    ) -> tuple[jax.Array, LatentPages]:  # fmt: skip
        """`Ops.attend_latent` for the heads of each device."""
        chosen: Any = layer.spec.attention
        attend = ops.attend_latent
        if num_shards(mesh, "cached_tokens") > 1:
            attend = partial(token_shares.attend_latent, ops, axis=CACHED_TOKENS)
        attend = partial(attend, scale=chosen.softmax_scale, decode_only=decode_only)
        return _on_each_device(attend, heads, self._spec_of(heads), pages, self.specs, where, mesh)

    def attend_chosen(
        self, layer: Layer, ops: Ops, heads: LatentHeads, pages: LatentPages, seen: jax.Array, where: tuple, mesh: Mesh,
        decode_only: bool,
    ) -> tuple[jax.Array, LatentPages, jax.Array]:  # fmt: skip
        """`Ops.attend_chosen` for the heads of each device, each of which makes the same choice."""
        chosen: Any = layer.spec.attention
        attend = partial(ops.attend_chosen, scale=chosen.softmax_scale, decode_only=decode_only)
        of_heads = self._spec_of(heads)
        return _on_each_device(attend, heads, of_heads, pages, self.specs, where, mesh, seen)

    def write(
        self, layer: Layer, ops: Ops, heads: LatentHeads, pages: LatentPages, where: tuple, mesh: Mesh, dtype: Any
    ) -> tuple[jax.Array, LatentPages]:
        """`attend` without the attention: the result has its shape and no meaning."""

        def write(heads: LatentHeads, pages: LatentPages, slots: jax.Array, _: Any, first_page: jax.Array) -> Any:
            pages = ops.write_latent(pages, heads.row, slots, first_page, rank=self.rank)
            return jnp.zeros((*heads.q.shape[:2], heads.v_up.shape[1]), dtype), pages

        return _on_each_device(write, heads, self._spec_of(heads), pages, self.specs, where, mesh)

    def _spec_of(self, heads: LatentHeads) -> LatentHeads:
        """How devices share the heads."""
        return jax.tree.map(lambda _: EVERYWHERE, heads)._replace(
            q=spec(None, "kv_heads"),
            k_up=spec("kv_heads"),
            v_up=spec("kv_heads"),
            sinks=None if heads.sinks is None else spec("kv_heads"),
        )


@dataclass(frozen=True)
class Compressed:
    """Rows of tokens, in pages that are freed behind windows, and of compressed entries, in pages of all tokens: pages
    [pages, rows, width]; see `RowPages`. A part of a page has the tokens of a layer, or the entries of several layers.
    Each device holds all rows."""

    layout: RowLayout
    width: int
    dtype: np.dtype

    @classmethod
    def of(cls, model: ModelConfig, page_size: int, dtype: np.dtype, platform: str) -> Compressed:
        """The kind for a model whose attention is compressed."""
        width = stored_head_dim(model.head_dim, platform)
        token_rows = entry_rows = 1  # of a token, and of all entries in a page
        for attention in model.attentions:
            assert isinstance(attention, CompressedAttentionSpec)
            if (made := attention.compression) is not None:
                dims = [attention.head_dim] + ([] if made.indexer is None else [made.indexer.dim])
                token_rows = max(token_rows, 1 + -(-2 * made.series * sum(dims) // width))
                entry_rows = max(entry_rows, -(-page_size // made.rate) * sum(-(-dim // width) for dim in dims))
        rows = page_size * token_rows
        shares = max(n for n in range(1, rows // entry_rows + 1) if rows % n == 0)
        return cls(RowLayout(page_size, token_rows, shares), width, dtype)

    def fit(self, attention: Any, kv_heads: int) -> int:
        """How many layers' tokens a part of a page holds."""
        return 1

    def pages(self, count: int, page_size: int) -> RowPages:
        """The shapes of `count` pages of one layer."""
        assert page_size == self.layout.page_size
        return RowPages(_shaped((count, page_size * self.layout.token_rows, self.width), self.dtype))

    @property
    def axes(self) -> tuple[str | None, ...]:
        """Logical axes of the first dimensions of values."""
        return (None,)

    @property
    def specs(self) -> RowPages:
        """How devices share pages."""
        everywhere: Any = EVERYWHERE
        return RowPages(everywhere)

    def attend(
        self, layer: Layer, ops: Ops, heads: CompressedHeads, pages: RowPages | tuple[RowPages, ...], where: tuple,
        mesh: Mesh, dtype: Any, decode_only: bool,
    ) -> tuple[jax.Array, Any]:  # fmt: skip
        """`compressed_attention.attend` for the heads of each device, each of which makes the same entries. A layer
        that has entries gets two places in `where`, and two arrays unless they are the same."""
        chosen: Any = layer.spec.attention
        made: CompressionSpec | None = chosen.compression
        compression = None
        if made is not None:
            top_k = None if made.indexer is None else made.indexer.top_k
            compression = Compression(made.rate, made.series, chosen.norm.eps, top_k)
        arrays = (pages,) if isinstance(pages, RowPages) else pages
        attend: Callable[..., Any] = partial(
            compressed_attention.attend,
            layout=self.layout,
            window=chosen.window,
            scale=chosen.softmax_scale,
            compression=compression,
            decode_only=decode_only,
        )
        if is_split(mesh):
            of_heads = jax.tree.map(lambda _: EVERYWHERE, heads)
            of_heads = of_heads._replace(q=spec(None, "kv_heads"), sinks=spec("kv_heads"))
            in_specs = (of_heads, EVERYWHERE, EVERYWHERE, EVERYWHERE)
            attend = on_each_device(attend, mesh, in_specs, (spec(None, "kv_heads"), EVERYWHERE))
        out, arrays = attend(heads, arrays, *((where, None) if made is None else where))
        return out, arrays[0] if isinstance(pages, RowPages) else arrays

    def write(
        self, layer: Layer, ops: Ops, heads: Any, pages: RowPages, where: tuple, mesh: Mesh, dtype: Any
    ) -> tuple[jax.Array, RowPages]:
        """Draft heads have no layers of this kind."""
        raise NotImplementedError


CacheKind = KeysAndValues | Latents | Compressed


def cache_kind(
    model: ModelConfig, kv_heads: int, dtype: Any, platform: str, shares: int = 1, page_size: int = 16
) -> CacheKind:
    """The kind of cache of a model's attention layers. `kv_heads` are those over all devices, with repeats, in layers
    that have the fewest; each group of `shares` devices has the same."""
    attention = model.attention
    if isinstance(attention, CompressedAttentionSpec):
        if has_scale(np.dtype(dtype)):
            name = np.dtype(dtype).name
            raise ConfigError(f"kv_cache_dtype must be auto or bf16 for compressed attention, got {name}")
        return Compressed.of(model, page_size, np.dtype(dtype), platform)
    if isinstance(attention, LatentAttentionSpec):
        width = stored_latent_width(attention.rank + attention.rope_dim, platform)
        index_dim = 0 if attention.indexer is None else attention.indexer.dim
        return Latents(attention.rank, attention.rope_dim, width, np.dtype(dtype), index_dim)
    if model.shares_kv and shares > 1:
        raise ConfigError(
            f"decode_context_parallel_size must be 1 for a model whose layers share keys and values, got {shares}"
        )
    if not model.several_shapes:
        head_dim = stored_head_dim(attention.cached_dim, platform)
        index_dim = max((layer.blocks.dim for layer in model.layers if layer.blocks is not None), default=0)
        return KeysAndValues(kv_heads // shares, head_dim, np.dtype(dtype), index_dim=index_dim)
    several = "for a model whose layers differ in their heads of keys and values"
    if shares > 1:
        raise ConfigError(f"decode_context_parallel_size must be 1 {several}, got {shares}")
    if has_scale(np.dtype(dtype)):
        raise ConfigError(f"kv_cache_dtype must be auto or bf16 {several}, got {np.dtype(dtype).name}")
    in_parts = platform == "tpu"
    unit = stored_head_dim(1, platform)
    numbers = [_numbers(one, kv_heads, unit) for one in model.attentions]
    head_dim = unit if in_parts else attention.cached_dim
    return KeysAndValues(numbers[0] // head_dim, head_dim, np.dtype(dtype), math.lcm(*numbers) // numbers[0], in_parts)


def _numbers(attention: Any, kv_heads: int, unit: int) -> int:
    """Numbers of a token's keys in a layer, with repeated heads, each of a multiple of `unit` numbers."""
    return max(attention.num_kv_heads, kv_heads) * -(-attention.cached_dim // unit) * unit


def _beside_index_keys(
    attend: Callable, heads: Heads, pages: KVPages, *where: Any, **options: Any
) -> tuple[jax.Array, KVPages]:
    """Calls `attend` for a layer that chooses no blocks, among layers that do."""
    out, updated = attend(heads, pages._replace(index_keys=None), *where, **options)
    return out, updated._replace(index_keys=pages.index_keys)


def _in_own_shape(
    attend: Callable,
    in_parts: bool,
    in_order: Callable[[jax.Array], jax.Array],
    heads: Heads,
    pages: KVPages,
    slots: jax.Array,
    rows: tuple,
    first_page: jax.Array,
) -> tuple[jax.Array, KVPages]:
    """Calls `attend` with the pages in the shape of the layer's own heads. in_order: what is done to each shape."""
    whole = pages.data
    kv_heads, dim = heads.qkv.sums.shape[2], heads.qkv.sums.shape[4]
    if in_parts:
        kv_heads, dim = kv_heads * -(-dim // whole.shape[4]), whole.shape[4]
    own = in_order(whole.reshape(-1, 2, kv_heads, whole.shape[3], dim))
    out, pages = attend(heads, KVPages(own), slots, rows, first_page)
    return out, KVPages(in_order(pages.data.reshape(whole.shape)))


def _as_it_is(x: jax.Array) -> jax.Array:
    return x


def _in_order(x: jax.Array) -> jax.Array:
    """x with its axes in memory in their order. XLA on CPU else chooses another order for axes of size 1, and copies
    all pages between the shapes of layers whose heads differ."""
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))


def _on_each_device(
    attend: Callable, heads: Any, of_heads: Any, pages: Any, of_pages: Pages, where: tuple, mesh: Mesh, *also: jax.Array
) -> Any:
    """Runs `attend` on each device for its heads and pages. `where` says where tokens are written and read. What `also`
    is given is the same on all devices, and so is what `attend` then returns behind the result and the pages."""

    def local(heads, pages, kv_slot, tables, q_start, kv_len, num_decodes, first_page, *also):
        if num_shards(mesh, "cached_tokens") > 1:
            kv_slot = token_shares.own_slots(kv_slot, CACHED_TOKENS)
        return attend(heads, pages, kv_slot, (tables, q_start, kv_len, num_decodes), first_page, *also)

    if not is_split(mesh):
        return local(heads, pages, *where, *also)
    everywhere = (EVERYWHERE,) * len(also)
    in_specs = (of_heads, of_pages, *(EVERYWHERE,) * len(where), *everywhere)
    out_specs = (spec(None, "kv_heads"), of_pages, *everywhere)
    return on_each_device(local, mesh, in_specs, out_specs)(heads, pages, *where, *also)
