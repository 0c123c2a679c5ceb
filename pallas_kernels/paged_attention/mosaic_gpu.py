"""Paged attention for Hopper GPUs (compute capability 9.0) in Pallas Mosaic GPU. Compiled for H200, not yet run on one.

Prompts have their own kernel (`mosaic_gpu_prompt`), and so has decode (`mosaic_gpu_decode`). The numbers of a head are
rows of the matrix unit's tile in decode, so head_dim must be a multiple of 64 there. Decode with other sizes runs in
Triton (`triton_gpu`), whose tiles pad a head to a power of two without reading more.
"""

from __future__ import annotations

import importlib.util
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxserve.pallas_kernels import tuning
from jaxserve.pallas_kernels.paged_attention import mosaic_gpu_decode
from jaxserve.pallas_kernels.paged_attention.mosaic_gpu_prompt import prompts
from jaxserve.pallas_kernels.registry import AttentionProblem, Device
from jaxserve.pallas_kernels.types import KVPages


def why_not(device: Device, problem: AttentionProblem) -> str | None:
    """Returns the reason why this backend cannot run the problem, or None where it can."""
    if device.platform != "gpu" or device.capability != (9, 0):
        return "it is for NVIDIA GPUs of compute capability 9.0 (H100, H200)"
    if problem.q_dtype not in (jnp.bfloat16, jnp.float16):
        return f"queries must be bfloat16 or float16, not {problem.q_dtype}"
    allowed = ("int8", "float8_e4m3fn") if problem.has_scale else (problem.q_dtype.name,)
    if problem.kv_dtype.name not in allowed:
        scales = "with" if problem.has_scale else "without"
        return f"a cache {scales} scales must be {' or '.join(allowed)}, not {problem.kv_dtype}"
    if problem.head_dim % 16 or not 32 <= problem.head_dim <= 256:
        return f"head_dim must be a multiple of 16 from 32 to 256, not {problem.head_dim}"
    if problem.head_dim % 64 and importlib.util.find_spec("jax_triton") is None:
        return f"decode with head_dim {problem.head_dim} needs jax-triton, which is not installed"
    if problem.group > 16:
        return f"at most 16 query heads may share a KV head, not {problem.group}"
    if problem.page_size < 8 or problem.page_size & (problem.page_size - 1):
        return f"page_size must be a power of two, 8 or more, not {problem.page_size}"
    return None


@partial(jax.jit, static_argnames=("scale", "window", "softcap", "decode_only", "interpret"))
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
    interpret: Any = None,
) -> jax.Array:
    """See `reference.paged_attention`. `interpret`: a plgpu.InterpretGPUParams, to run on CPU."""
    options: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap, "sinks": sinks}
    options["first_page"] = jnp.asarray(first_page, jnp.int32)
    decode = _decode_by_triton if q.shape[-1] % 64 else partial(_decode, interpret=interpret)
    decoded = decode(q, pages, block_tables, kv_len, num_decodes, decode_only=decode_only, **options)
    if decode_only:
        return decoded
    return prompts(decoded, q, pages, block_tables, q_start, kv_len, num_decodes, interpret=interpret, **options)


def _decode(q, pages, block_tables, kv_len, num_decodes, *, decode_only, **options):
    """Returns q's shape, with decode rows computed; row r's query is token r. Other rows hold finite numbers."""
    del decode_only
    rows = min(block_tables.shape[0], q.shape[0])
    tuned = tuning.lookup("decode", "mosaic_gpu", **tuning.of_attention(q, pages.data, block_tables), rows=rows)
    decoded = mosaic_gpu_decode.decode(
        q, pages, block_tables, kv_len, num_decodes, rows=rows, parallel=tuned.get("parallel"), **options
    )
    return jnp.pad(decoded, [(0, q.shape[0] - rows), (0, 0), (0, 0), (0, 0)])


def _decode_by_triton(q, *args, **options):
    from jaxserve.pallas_kernels.paged_attention import triton_gpu  # imports jax-triton

    return triton_gpu.decode(q, *args, **options)
