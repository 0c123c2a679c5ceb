"""Latent attention on CPU in C++ (`cpu_latent.cc`), which reads the pages in place, and the write into the pages.

Grid: tiles of up to 64 queries of one row, where a query is one head of one token. Threads take the next tile when they
  are free. If the batch has few tiles, threads share a tile by parts of 512 cached tokens, or tiles are smaller.
Traffic: each tile reads its row's cached rows once, in the stored width. A block of 64 tokens is converted to float32
  twice, by token and transposed, with its scales applied. For DeepSeek's sizes this takes 300 KB, which stay in the
  second-level cache.
Arithmetic: both products go in strips of 6 queries x 64 numbers (AVX-512), or x 16. Converting and transposing costs
  about a twentieth of the products for a tile of 64 queries, and a third for a tile of 8 queries.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.pallas_kernels import cpu, cpu_build
from jaxserve.pallas_kernels.cpu_build import LATENT
from jaxserve.pallas_kernels.latent_attention import reference
from jaxserve.pallas_kernels.paged_attention.cpu import CODES, FLOATS
from jaxserve.pallas_kernels.registry import Device, LatentProblem
from jaxserve.pallas_kernels.types import LatentPages


def why_not(device: Device, problem: LatentProblem) -> str | None:
    """The reason why it cannot be used, or None."""
    if device.platform != "cpu":
        return "it is for CPUs"
    if problem.q_dtype not in FLOATS:
        return f"queries must be float32, bfloat16 or float16, not {problem.q_dtype}"
    if problem.kv_dtype not in (CODES if problem.has_scale else FLOATS):
        return f"it knows no {problem.kv_dtype} cache {'with' if problem.has_scale else 'without'} scales"
    return None if cpu_build.possible(LATENT) else cpu_build.lacking()


def latent_attention(
    q: jax.Array,
    pages: LatentPages,
    tables: jax.Array,
    q_start: jax.Array,
    kv_len: jax.Array,
    num_decodes: jax.Array,
    *,
    scale: float,
    rank: int,
    first_page: jax.Array | int = 0,
    decode_only: bool = False,
) -> jax.Array:
    """As `reference.latent_attention`."""
    if not cpu.available(LATENT):  # the build failed
        rest: dict[str, Any] = {"scale": scale, "rank": rank, "first_page": first_page, "decode_only": decode_only}
        return reference.latent_attention(q, pages, tables, q_start, kv_len, num_decodes, **rest)
    shape = jax.ShapeDtypeStruct((*q.shape[:-1], rank), q.dtype)
    call = jax.ffi.ffi_call("jaxserve_latent_attention", shape)
    arrays = q, pages.data, _or_nothing(pages.scale), tables, q_start, kv_len, jnp.int32(first_page)
    return call(*arrays, scale=np.float32(scale))


def write_latent(
    pages: LatentPages, rows: jax.Array, slots: jax.Array, first_page: jax.Array | int = 0, *, rank: int
) -> LatentPages:
    """As `reference.write_latent`, in place; padding is left out instead of written to the null page."""
    if rows.dtype not in FLOATS or not cpu.available(LATENT):
        return reference.write_latent(pages, rows, slots, first_page, rank=rank)
    arrays = pages.data, _or_nothing(pages.scale)
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]
    call = jax.ffi.ffi_call("jaxserve_write_latent", shapes, input_output_aliases={0: 0, 1: 1})
    data, scale = call(*arrays, rows, slots, jnp.int32(first_page), rank=np.int64(rank))
    return LatentPages(data, None if pages.scale is None else scale)


def _or_nothing(x: Any) -> jax.Array:
    return jnp.zeros(0, jnp.float32) if x is None else x
