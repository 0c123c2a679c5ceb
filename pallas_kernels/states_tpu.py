"""What the TPU kernels of recurrent layers share."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.pallas_kernels.registry import Device, RecurrentProblem
from jaxserve.pallas_kernels.state_rows import StateRows
from jaxserve.pallas_kernels.tpu_dma import vmem_bytes

FLOATS = ("bfloat16", "float32")


def why_not(device: Device, problem: RecurrentProblem, row_bytes: int) -> str | None:
    """The reason why these kernels cannot be used, or None. row_bytes: of a row's states in a layer."""
    if device.platform != "tpu" or any(old in device.kind for old in ("v2", "v3", "v4")):
        return "it is for TPUs v5e, v5p and newer"
    if problem.dtype.name not in FLOATS:
        return f"inputs must be bfloat16 or float32, not {problem.dtype}"
    if not problem.silu:
        return "the convolution must be followed by silu"
    if 5 * row_bytes > vmem_bytes(device.kind):  # two blocks before, two after, and the rest
        return f"a row's states are {row_bytes} bytes; at most {vmem_bytes(device.kind) // 5} fit"
    return None


def sources(rows: StateRows) -> jax.Array:
    """The slots whose states are fetched, int32 [rows]. A row that begins its sequence needs none: it gets that of the
    row before it, which is there already, or of the first row that continues. So no slot is fetched that another row
    writes."""
    each = jnp.arange(len(rows.source))
    last = lax.cummax(jnp.where(rows.fresh, -1, each))
    taken = rows.source[jnp.where(last < 0, jnp.argmin(rows.fresh), last)]
    return jnp.where(jnp.all(rows.fresh), rows.target[0], taken)


def silu(x: jax.Array) -> jax.Array:
    return x * jax.nn.sigmoid(x)


def column(x: jax.Array) -> jax.Array:
    """x [1, n] as [n, 1]."""
    return jnp.sum(jnp.where(_diagonal(x.shape[1]), x, 0.0), axis=1, keepdims=True)


def row(x: jax.Array) -> jax.Array:
    """x [n, 1] as [1, n]."""
    return jnp.sum(jnp.where(_diagonal(x.shape[0]), x, 0.0), axis=0, keepdims=True)


def _diagonal(size: int) -> jax.Array:
    shape = (size, size)
    return lax.broadcasted_iota(jnp.int32, shape, 0) == lax.broadcasted_iota(jnp.int32, shape, 1)
