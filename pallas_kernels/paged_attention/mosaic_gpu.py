"""Paged attention for Hopper GPUs (compute capability 9.0) in Pallas Mosaic GPU. Compiled for H200, not yet run on one.

Prompts have their own kernel (`mosaic_gpu_prompt`). So has decode where head_dim is a multiple of 64
(`mosaic_gpu_decode`). All other decode rows use the kernel described here (`mosaic_gpu_kernel`). XLA makes a list of
work items from the batch (columns ROW …). An item is the query heads of one token against some blocks of its row's
cached tokens:

  grid      (kv_heads, items); programs whose item the batch does not need return at once
  threads   two warpgroups: one fetches, one computes 64 query rows
  pipeline  The fetching warpgroup reads page numbers from the block table. It copies a block of keys and values (pages,
            or part of one) into a ring of slots in shared memory by TMA. Each slot has barriers `full` and
            `free` for its keys, and two more for its values. The computing warpgroup computes Q K^T and adds P V with
            wgmma. The softmax between them is a running one in float32, and P stays in registers. Codes have a ring of
            their own, from which the fetching warpgroup converts them
  parts     The heads of a group are padded to 64 rows. This costs nothing: each cached token is read once, and the
            matrix unit waits for the cache. A long row is split into several items, so that few rows fill the GPU. XLA
            merges their float32 results by their log-sum-exp. The shapes of the batch limit the number of parts, and
            the row's own length decides it, so that a row's result is bitwise independent of the other rows. The price
            is programs without work, and few parts for one very long row among many short ones (with eight KV heads:
            eight parts up to 32 rows, four up to 64, then two)

A row's last page may hold NaN beyond the row's end. The fetching warpgroup clears such values before they are used.
With JAX 0.11.2 and head_dim up to 128, the shared memory and registers of two decode programs fit a multiprocessor,
except with softcap (148 registers, where two programs may have 128 each). With JAX 0.10.2 they do not fit with codes
either (138). There are hardly any register spills.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxserve.pallas_kernels import tuning
from jaxserve.pallas_kernels.paged_attention import mosaic_gpu_decode
from jaxserve.pallas_kernels.paged_attention.mosaic_gpu_items import LANES, Tile
from jaxserve.pallas_kernels.paged_attention.mosaic_gpu_kernel import LOG2E, launch
from jaxserve.pallas_kernels.paged_attention.mosaic_gpu_prompt import prompts
from jaxserve.pallas_kernels.paged_attention.reference import MASKED
from jaxserve.pallas_kernels.registry import AttentionProblem, Device
from jaxserve.pallas_kernels.types import KVPages
from jaxserve.pallas_kernels.work_lists import FIRST, LAST, MIN_BLOCKS, DecodeItems, decode_items

PARALLEL = 4 * 132  # programs to aim at where a batch has few rows: four for each multiprocessor of an H200
MOST_PROGRAMS = 2048  # of decode; bounds the parts that a long row may have beside many short ones


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
    args = (q, pages, block_tables, q_start, kv_len, num_decodes)
    options = {"scale": scale, "window": window, "softcap": softcap, "sinks": sinks, "interpret": interpret}
    options["first_page"] = jnp.asarray(first_page, jnp.int32)
    decoded = _decode(*args, **options)
    rows = decoded.shape[0]
    decoded = jnp.pad(decoded, [(0, q.shape[0] - rows), (0, 0), (0, 0), (0, 0)])
    return decoded if decode_only else prompts(decoded, *args, **options)


def _decode(
    q, pages, block_tables, q_start, kv_len, num_decodes, *, first_page, sinks, interpret, scale, window, softcap
):
    """Returns [rows, kv_heads, group, head_dim] in q's dtype. Row r's query is token r."""
    del q_start
    rows, (_, kv_heads, group, head_dim) = min(block_tables.shape[0], q.shape[0]), q.shape
    tuned = tuning.lookup("decode", "mosaic_gpu", **tuning.of_attention(q, pages.data, block_tables), rows=rows)
    if head_dim % 64 == 0:
        return mosaic_gpu_decode.decode(
            q, pages, block_tables, kv_len, num_decodes, rows=rows, first_page=first_page,
            parallel=tuned.get("parallel"), scale=scale, window=window, softcap=softcap, sinks=sinks,
            interpret=interpret,
        )  # fmt: skip
    heads = -(-group // 8) * 8
    tile = Tile(LANES, heads, 1, head_dim, pages.page_size, 64, q.dtype, jnp.dtype(jnp.float32),
                scale, window, softcap, interpret, _codes(pages))  # fmt: skip
    length = jnp.where(jnp.arange(rows) < num_decodes, kv_len[:rows], 0)
    most = -(-block_tables.shape[1] * tile.page_size // tile.block)
    most = min(_most_parts(kv_heads * rows, tuned.get("parallel")), -(-most // MIN_BLOCKS))
    work = decode_items(length, tile.block, window, most)
    padded = jnp.pad(q[:rows], [(0, 0), (0, 0), (0, heads - group), (0, 0)])
    values, logs = launch(tile, work.items, block_tables, first_page, padded, pages)
    return _merge(values[:, :, :group], logs[:, :, :group], work, sinks).astype(q.dtype)


def _most_parts(programs: int, parallel: int | None) -> int:
    """How many parts a row may have.

    `programs` (rows x KV heads) is how many the batch takes where no row is split. `parallel` is the number of programs
    to aim at, where that was measured. A part that no row needs is a program that returns at once, for an estimated
    5 ns. So there are at most about MOST_PROGRAMS, or twice the unavoidable number where that is larger.
    """
    if parallel is not None:
        return max(parallel // programs, 1)
    return max(PARALLEL // programs, min(MOST_PROGRAMS // programs, 8), 2)


def _codes(pages: KVPages) -> Any:
    return None if pages.scale is None else pages.data.dtype


def _merge(values: jax.Array, logs: jax.Array, work: DecodeItems, sinks: jax.Array | None) -> jax.Array:
    """Sums the parts' values [items, kv_heads, group, head_dim], weighted by their log-sum-exps `logs`.

    Items that no program wrote may hold anything, as may items of rows without tokens. Such rows get zeros.
    """
    which = jnp.arange(len(logs) // len(work.parts), dtype=jnp.int32)
    written = work.items[:, LAST] > work.items[:, FIRST]
    item = work.begin[:, None] + jnp.minimum(which, work.parts[:, None] - 1)  # [rows, most]
    real = ((which < work.parts[:, None]) & written[item])[..., None, None]
    logs = jnp.where(real, logs[item], MASKED)  # [rows, most, kv_heads, group]
    peak = jnp.max(logs, axis=1)
    if sinks is not None:
        peak = jnp.maximum(peak, sinks * LOG2E)
    weights = jnp.where(real, jnp.exp2(logs - peak[:, None]), 0.0)
    total = weights.sum(1) + (0.0 if sinks is None else jnp.exp2(sinks * LOG2E - peak))
    weighted = (weights[..., None] * jnp.where(real[..., None], values[item], 0.0)).sum(1)
    return weighted / jnp.where(total > 0, total, 1.0)[..., None]
