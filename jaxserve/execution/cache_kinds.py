"""The kinds of KV cache: keys and values, or latents. Each kind knows its arrays, how devices share them, and the
attention operation that writes and reads them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jaxserve.devices.mesh import RULES, is_split, num_shards, on_each_device, spec
from jaxserve.models.decoder import DecoderLayer
from jaxserve.models.drafter import EagleLayer
from jaxserve.models.spec import LatentAttentionSpec, ModelConfig
from jaxserve.pallas_kernels import token_shares
from jaxserve.pallas_kernels.operands import Heads, LatentHeads
from jaxserve.pallas_kernels.ops import Ops
from jaxserve.pallas_kernels.types import KVPages, LatentPages, has_scale, stored_head_dim, stored_latent_width

Pages = KVPages | LatentPages
EVERYWHERE = PartitionSpec()
CACHED_TOKENS = str(RULES["cached_tokens"])
Layer = DecoderLayer | EagleLayer


MOST_LAYERS = 8  # maximum of layers in one array of the cache


def layers_of_array(layers: int) -> int:
    """How many layers to put in an array: the largest divisor of `layers` up to MOST_LAYERS, so that all arrays are
    alike."""
    return max(n for n in range(1, MOST_LAYERS + 1) if layers % n == 0)


def _shaped(shape: tuple[int, ...], dtype: Any) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


@dataclass(frozen=True)
class KeysAndValues:
    """Keys and values of all heads: pages [pages, 2 (key, value), kv_heads, page_size, head_dim]; see `KVPages`."""

    kv_heads: int
    head_dim: int
    dtype: np.dtype

    def pages(self, count: int, page_size: int) -> KVPages:
        """The shapes of `count` pages of one layer. Codes of int8 or fp8 have a scale per token and head."""
        scales = (count, 2, self.kv_heads, page_size)
        scale = _shaped(scales, jnp.float32) if has_scale(self.dtype) else None
        return KVPages(_shaped((*scales, self.head_dim), self.dtype), scale)

    @property
    def axes(self) -> tuple[str | None, ...]:
        """Logical axes of the first dimensions of values."""
        return None, None, "cached_heads", "cached_tokens"

    @property
    def specs(self) -> KVPages:
        """How devices share pages."""
        split: Any = spec(*self.axes)
        return KVPages(split, split if has_scale(self.dtype) else None)

    def attend(
        self, layer: Layer, ops: Ops, heads: Heads, pages: KVPages, where: tuple, mesh: Mesh, dtype: Any,
        decode_only: bool,
    ) -> tuple[jax.Array, KVPages]:  # fmt: skip
        """`Ops.attend` for the heads of each device."""
        chosen: Any = layer.spec.attention
        options = {"scale": chosen.softmax_scale, "window": chosen.window, "softcap": chosen.softcap}
        attend = ops.attend
        if num_shards(mesh, "cached_tokens") > 1:
            attend = partial(token_shares.attend, ops, axis=CACHED_TOKENS)
        attend = partial(attend, **options, eps=layer.norm_eps, dtype=dtype, decode_only=decode_only)
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
        return jax.tree.map(lambda _: EVERYWHERE, heads)._replace(qkv=of_qkv, sinks=of_sinks)


@dataclass(frozen=True)
class Latents:
    """One row per token, which all heads share: pages [pages, page_size, width]; see `LatentPages`. Each device holds
    all rows, or its share of them (`token_shares`)."""

    rank: int
    rope_dim: int
    width: int
    dtype: np.dtype

    def pages(self, count: int, page_size: int) -> LatentPages:
        """The shapes of `count` pages of one layer."""
        scale = _shaped((count, 2, page_size), jnp.float32) if has_scale(self.dtype) else None
        return LatentPages(_shaped((count, page_size, self.width), self.dtype), scale)

    @property
    def axes(self) -> tuple[str | None, ...]:
        """Logical axes of the first dimensions of values."""
        return None, "cached_tokens"

    @property
    def specs(self) -> LatentPages:
        """How devices share pages."""
        data: Any = spec(*self.axes)
        scale: Any = spec(None, None, "cached_tokens")
        return LatentPages(data, scale if has_scale(self.dtype) else None)

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
        return _on_each_device(attend, heads, self._spec_of_heads, pages, self.specs, where, mesh)

    def write(
        self, layer: Layer, ops: Ops, heads: LatentHeads, pages: LatentPages, where: tuple, mesh: Mesh, dtype: Any
    ) -> tuple[jax.Array, LatentPages]:
        """`attend` without the attention: the result has its shape and no meaning."""

        def write(heads: LatentHeads, pages: LatentPages, slots: jax.Array, _: Any, first_page: jax.Array) -> Any:
            pages = ops.write_latent(pages, heads.row, slots, first_page, rank=self.rank)
            return jnp.zeros((*heads.q.shape[:2], heads.v_up.shape[1]), dtype), pages

        return _on_each_device(write, heads, self._spec_of_heads, pages, self.specs, where, mesh)

    @property
    def _spec_of_heads(self) -> LatentHeads:
        """How devices share the heads."""
        split: Any = (spec(None, "kv_heads"), EVERYWHERE, spec("kv_heads"), spec("kv_heads"))
        return LatentHeads(*split)


CacheKind = KeysAndValues | Latents


def cache_kind(model: ModelConfig, kv_heads: int, dtype: Any, platform: str, shares: int = 1) -> CacheKind:
    """The kind of cache of a model's attention layers. `kv_heads` are the heads over all devices, with repeats, of
    which each group of `shares` devices has the same."""
    attention = model.attention
    if isinstance(attention, LatentAttentionSpec):
        width = stored_latent_width(attention.rank + attention.rope_dim, platform)
        return Latents(attention.rank, attention.rope_dim, width, np.dtype(dtype))
    return KeysAndValues(kv_heads // shares, stored_head_dim(model.head_dim, platform), np.dtype(dtype))


def _on_each_device(
    attend: Callable, heads: Any, of_heads: Any, pages: Any, of_pages: Pages, where: tuple, mesh: Mesh
) -> tuple[jax.Array, Any]:
    """Runs `attend` on each device for its heads and pages. `where` says where tokens are written and read."""

    def local(heads, pages, kv_slot, tables, q_start, kv_len, num_decodes, first_page):
        if num_shards(mesh, "cached_tokens") > 1:
            kv_slot = token_shares.own_slots(kv_slot, CACHED_TOKENS)
        return attend(heads, pages, kv_slot, (tables, q_start, kv_len, num_decodes), first_page)

    if not is_split(mesh):
        return local(heads, pages, *where)
    in_specs = (of_heads, of_pages, *(EVERYWHERE,) * len(where))
    return on_each_device(local, mesh, in_specs, (spec(None, "kv_heads"), of_pages))(heads, pages, *where)
