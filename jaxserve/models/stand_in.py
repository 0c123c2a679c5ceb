"""What stands for attention where only shapes matter: when the parameters are declared."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxserve.pallas_kernels.operands import Heads, LatentHeads, StateInputs


def stand_in(spec: Any, dtype: Any, heads: Heads | LatentHeads | StateInputs) -> jax.Array:
    """Called like an `AttentionFn` for a layer whose attention is `spec`: a result of the right shape."""
    if isinstance(heads, Heads):
        whole = heads.qkv.reduce(dtype)
        return whole[:, :, : spec.num_heads // whole.shape[1]]
    if isinstance(heads, LatentHeads):
        return jnp.zeros((*heads.q.shape[:2], heads.v_up.shape[1]), dtype)
    return jnp.zeros((len(heads[0]), *spec.results), jnp.float32)
