"""Paged attention on CPU in C++ (`cpu_attention.cc`). It reads the pages in place, and it also writes new tokens.

Grid: tiles of about 64 queries of one row and one KV head (16 tokens where the group has 4 query heads). XLA's threads
  take the next tile when they are free.
Traffic: each tile reads its row's keys and values once, starting with the oldest block in the window. They are read in
  the cache's dtype and become float32 in registers. The softmax is a running one over blocks of 64 cached tokens; the
  scores of a block stay in the CPU's cache.
Pipeline: with fewer than 10 queries for a head, keys and values are prefetched 16 tokens ahead, across page borders.
  With 10 or more, a block of keys is transposed first, and both products run in strips of 6 queries.
Order of sums: by position, in blocks of 64. The two ways to compute scores add a head's channels in different orders.
  So a token may get other bits in a prompt's chunk than as a decode. With `one_order` the second way computes all.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.pallas_kernels import cpu, cpu_build, kv_write
from jaxserve.pallas_kernels.cpu_build import ATTENTION
from jaxserve.pallas_kernels.paged_attention import reference
from jaxserve.pallas_kernels.registry import AttentionProblem, Device
from jaxserve.pallas_kernels.types import KVPages

FLOATS = tuple(map(np.dtype, (jnp.float32, jnp.bfloat16, jnp.float16)))
CODES = tuple(map(np.dtype, (jnp.int8, jnp.float8_e4m3fn)))  # dtypes of quantized caches, which have scales


def why_not(device: Device, problem: AttentionProblem) -> str | None:
    """Returns the reason why this backend cannot run the problem, or None where it can."""
    if device.platform != "cpu":
        return "it is for CPUs"
    if problem.q_dtype not in FLOATS:
        return f"queries must be float32, bfloat16 or float16, not {problem.q_dtype}"
    if problem.kv_dtype not in (CODES if problem.has_scale else FLOATS):
        return f"it knows no {problem.kv_dtype} cache {'with' if problem.has_scale else 'without'} scales"
    return None if cpu_build.possible(ATTENTION) else cpu_build.lacking()


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
    softcap: float | None = None,
    sinks: jax.Array | None = None,
    first_page: jax.Array | int = 0,
    decode_only: bool = False,
    one_order: bool = False,
) -> jax.Array:
    """See `reference.paged_attention`. With `one_order` a query's result depends only on the tokens that it sees, bit
    for bit."""
    if not cpu.available(ATTENTION):  # the build failed
        assert not one_order, "plain XLA promises no order"
        options = {"scale": scale, "window": window, "softcap": softcap, "sinks": sinks}
        rest = {"first_page": first_page, "decode_only": decode_only}
        return reference.paged_attention(q, pages, block_tables, q_start, kv_len, num_decodes, **options, **rest)
    call = jax.ffi.ffi_call("jaxserve_paged_attention", jax.ShapeDtypeStruct(q.shape, q.dtype))
    return call(
        q,
        pages.data,
        _or_nothing(pages.scale),
        block_tables,
        q_start,
        kv_len,
        jnp.int32(first_page),
        _or_nothing(sinks),
        scale=np.float32(scale),
        window=np.int64(window or np.iinfo(np.int64).max // 2),
        softcap=np.float32(softcap or 0),
        one_order=np.bool_(one_order),
    )


def write_kv(pages: KVPages, k: jax.Array, v: jax.Array, slots: jax.Array, first_page: jax.Array | int = 0) -> KVPages:
    """`kv_write.write_kv` in place. Padding tokens are skipped rather than written to the null page."""
    if k.dtype not in FLOATS or not cpu.available(ATTENTION):
        return kv_write.write_kv(pages, k, v, slots, first_page)
    arrays = pages.data, _or_nothing(pages.scale)
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]
    call = jax.ffi.ffi_call("jaxserve_write_kv", shapes, input_output_aliases={0: 0, 1: 1})
    data, scale = call(*arrays, k, v, slots, jnp.int32(first_page))
    return KVPages(data, None if pages.scale is None else scale)


def _or_nothing(x: Any) -> jax.Array:
    return jnp.zeros(0, jnp.float32) if x is None else x
