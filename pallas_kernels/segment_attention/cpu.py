"""Attention within segments on CPU in C++ (`cpu_segments.h`).

Grid: tiles of 128 queries of one head. XLA's threads take the next tile when they are free.
Traffic: each tile reads the keys and values of the blocks of 64 rows that may have a row of the same segment, once.
  The softmax is a running one over these blocks; the scores of a block stay in the CPU's cache.
"""

from __future__ import annotations

import jax
import numpy as np

from jaxserve.pallas_kernels import cpu, cpu_build
from jaxserve.pallas_kernels.cpu_build import ATTENTION
from jaxserve.pallas_kernels.registry import Device, SegmentProblem
from jaxserve.pallas_kernels.segment_attention import reference


def why_not(device: Device, problem: SegmentProblem) -> str | None:
    """The reason why it cannot be used, or None."""
    if device.platform != "cpu":
        return "it is for CPUs"
    if problem.dtype != np.float32:
        return f"queries must be float32, not {problem.dtype}"
    return None if cpu_build.possible(ATTENTION) else cpu_build.lacking()


def segment_attention(q: jax.Array, k: jax.Array, v: jax.Array, segment: jax.Array, scale: float) -> jax.Array:
    """As `reference.segment_attention`."""
    if not cpu.available(ATTENTION):  # the build failed
        return reference.segment_attention(q, k, v, segment, scale)
    call = jax.ffi.ffi_call("jaxserve_segment_attention", jax.ShapeDtypeStruct(q.shape, q.dtype))
    return call(q, k, v, segment, scale=np.float32(scale))
