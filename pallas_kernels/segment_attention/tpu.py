"""Attention within segments on TPUs, by JAX's own flash attention (`jax.experimental.pallas.ops.tpu`). Not yet run on a
TPU."""

from __future__ import annotations

from math import gcd

import jax
import jax.numpy as jnp

from jaxserve.pallas_kernels.registry import Device, SegmentProblem
from jaxserve.pallas_kernels.segment_attention.reference import padded

LANES = 128
BLOCK = 512  # most queries, and keys, of a block


def why_not(device: Device, problem: SegmentProblem) -> str | None:
    """The reason why it cannot be used, or None."""
    if device.platform != "tpu":
        return "it is for TPUs"
    if problem.dtype.name not in ("bfloat16", "float32"):
        return f"queries must be bfloat16 or float32, not {problem.dtype}"
    return None


def segment_attention(q: jax.Array, k: jax.Array, v: jax.Array, segment: jax.Array, scale: float) -> jax.Array:
    """As `reference.segment_attention`."""
    from jax.experimental.pallas.ops.tpu.flash_attention import BlockSizes, SegmentIds, flash_attention

    rows, _, dim = q.shape
    q, k, v, segment = padded(q, k, v, segment, LANES)
    k, v = (jnp.where((segment >= 0)[:, None, None], x, 0) for x in (k, v))  # scores are masked by a sum
    padding = (0, 0), (0, 0), (0, -dim % LANES)
    by_head = [jnp.pad(x, padding).swapaxes(0, 1)[None] for x in (q, k, v)]
    size = gcd(len(q), BLOCK)
    blocks = BlockSizes(block_q=size, block_k_major=size, block_k=size, block_b=1)
    ids = SegmentIds(segment[None], segment[None])
    out = flash_attention(*by_head, segment_ids=ids, sm_scale=scale, block_sizes=blocks)
    return out[0].swapaxes(0, 1)[:rows, :, :dim]
