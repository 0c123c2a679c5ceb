"""Paged attention on CPU in C++ (`cpu_kernels.cc`), which reads the pages where they lie.

Grid: (tiles of up to 16 query tokens of a row, kv_heads), handed to XLA's threads as they come free.
Traffic: a row's keys and values once per tile, from the window's oldest page on; the scores of a tile stay in a buffer
  of its thread, small enough for its cache.
Pipeline: while a page's keys or values are used, those of the next come into the cache. From 40 queries of a head on,
  keys are transposed, a page at a time, as the matmul does with its weights.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import cpu, cpu_build
from pallas_kernels.paged_attention import reference
from pallas_kernels.registry import AttentionProblem, Device
from pallas_kernels.types import KVPages


def why_not(device: Device, problem: AttentionProblem) -> str | None:
    """The reason why it cannot be used, or None."""
    if device.platform != "cpu":
        return "it is for CPUs"
    if {problem.q_dtype, problem.kv_dtype} != {np.dtype(np.float32)}:
        return f"it computes in float32, not with {problem.q_dtype} queries and a {problem.kv_dtype} cache"
    if problem.head_dim % 8:
        return f"head_dim must be a multiple of 8, not {problem.head_dim}"
    if problem.softcap or problem.sinks:
        return "it knows no softcap and no sinks"
    return None if cpu_build.possible() else "there is no C++ compiler (CXX)"


def paged_attention(
    q: jax.Array,
    pages: KVPages,
    block_tables: jax.Array,
    q_start: jax.Array,
    kv_len: jax.Array,
    num_decodes: jax.Array,
    *,
    scale: float,
    window: int | None = None,
    first_page: jax.Array | int = 0,
    decode_only: bool = False,
    **rest: Any,
) -> jax.Array:
    """As `reference.paged_attention`."""
    if not cpu.available():  # the build failed
        options = {"scale": scale, "window": window, "first_page": first_page, "decode_only": decode_only, **rest}
        return reference.paged_attention(q, pages, block_tables, q_start, kv_len, num_decodes, **options)
    call = jax.ffi.ffi_call("jaxserve_paged_attention", jax.ShapeDtypeStruct(q.shape, jnp.float32))
    return call(
        q,
        pages.data,
        block_tables + first_page,
        q_start,
        kv_len,
        scale=np.float32(scale),
        window=np.int64(window or np.iinfo(np.int64).max // 2),
    )
