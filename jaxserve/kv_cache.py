"""The paged KV cache on the devices: its layout, its size, and copying of pages."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from jaxserve.mesh import sharding
from jaxserve.models.config import ModelConfig
from pallas_kernels.types import KVPages

NULL_PAGE = 0  # owned by nobody: padding tokens write here, and nothing reads it
COPIES = 16  # page copies per call of `copy_pages`

KVCache = list[KVPages]  # one per layer


@dataclass(frozen=True)
class CacheLayout:
    """Shape of the cache: per layer [num_pages, 2 (key, value), kv_heads, page_size, head_dim]; see `KVPages`."""

    num_layers: int
    num_pages: int
    page_size: int
    kv_heads: int
    head_dim: int
    dtype: Any

    @classmethod
    def of(
        cls, model: ModelConfig, kv_heads: int, num_pages: int, page_size: int, dtype: Any, platform: str = "cpu"
    ) -> CacheLayout:
        head_dim = stored_head_dim(model.head_dim, platform)
        return cls(model.num_layers, num_pages, page_size, kv_heads, head_dim, jnp.dtype(dtype))

    @property
    def layer_shape(self) -> tuple[int, ...]:
        return (self.num_pages, 2, self.kv_heads, self.page_size, self.head_dim)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token over all layers and devices."""
        return self.num_layers * 2 * self.kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def page_bytes(self) -> int:
        return self.page_size * self.token_bytes

    def sharding(self, mesh: Mesh) -> NamedSharding:
        return sharding(mesh, None, None, "kv_heads")

    def abstract(self, mesh: Mesh) -> list[KVPages]:
        """The cache's shapes, dtypes and shardings."""
        layer = jax.ShapeDtypeStruct(self.layer_shape, self.dtype, sharding=self.sharding(mesh))
        return [KVPages(cast(jax.Array, layer))] * self.num_layers

    def create(self, mesh: Mesh) -> KVCache:
        zeros = jax.jit(partial(jnp.zeros, self.layer_shape, self.dtype), out_shardings=self.sharding(mesh))
        return [KVPages(zeros()) for _ in range(self.num_layers)]


def stored_head_dim(head_dim: int, platform: str) -> int:
    """A head's width in the cache. TPUs hold rows of 128 numbers in any case; XLA lays narrower ones out in another
    order, which kernels cannot read without a copy of the whole cache."""
    return -(-head_dim // 128) * 128 if platform == "tpu" else head_dim


def copy_pages(cache: KVCache, sources: jax.Array, targets: jax.Array) -> KVCache:
    """Copies page sources[i] to targets[i], int32 [COPIES]; all are read before any is written. Pad with NULL_PAGE."""
    return jax.tree.map(lambda x: x.at[targets].set(x[sources], mode="promise_in_bounds"), cache)
