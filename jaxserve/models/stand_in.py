"""What stands for attention where only shapes matter: when the parameters are declared."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxserve.models.spec import LayerSpec
from jaxserve.pallas_kernels.operands import (
    CompressedHeads,
    Heads,
    LatentHeads,
    RecentTokens,
    SpacedInputs,
    StateInputs,
)


def stand_in(layer: LayerSpec, dtype: Any, heads: Heads | LatentHeads | CompressedHeads | StateInputs) -> jax.Array:
    """Called like the `AttentionFn` of this layer: a result of the right shape."""
    attention: Any = layer.attention
    if isinstance(heads, Heads):
        whole = heads.qkv.reduce(dtype)
        return whole[:, :, : attention.num_heads // whole.shape[1]]
    if isinstance(heads, CompressedHeads):
        return jnp.zeros_like(heads.q)
    if isinstance(heads, LatentHeads):
        return jnp.zeros((*heads.q.shape[:2], heads.v_up.shape[1]), dtype)
    if isinstance(heads, RecentTokens):
        assert layer.ngrams is not None
        return jnp.zeros((len(heads.tokens), layer.ngrams.longest - 1), jnp.int32)
    if isinstance(heads, SpacedInputs):
        return jnp.zeros(heads.x.shape, jnp.float32)
    assert layer.recurrent is not None
    return jnp.zeros((len(heads[0]), *layer.recurrent.results), jnp.float32)
