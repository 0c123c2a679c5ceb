"""Latent attention on TPU: one Mosaic kernel for decode rows and for tiles of prompts.

It is compiled ahead of time for v5e and v6e, and has run in interpret mode only, not on a device.

Grid: one step per item, in the order of the tiles. An item is a pair of a tile of queries and a row that has tokens in
  it. The grid has as many steps as the batch has items. In decode a tile is all heads of one token. In prompts it is
  all heads of up to TILE / heads tokens, with the tokens of all rows back to back.
Memory traffic: a row's pages once per tile, each page by one DMA, which serves keys and values; queries and results
  once. Rows of the cache are whole tiles of 128 lanes (640 numbers for DeepSeek's 576, a ninth more bytes). XLA lays
  narrower rows out in a way that a kernel could read only after copying the cache.
Pipeline: blocks of several pages in two VMEM slots, tables two items ahead, and a running softmax in float32 in VMEM,
  as in paged attention (`paged_attention/tpu.py`). Scores are of up to 512 queries at once, or all heads of a token.
  8-bit blocks become bfloat16 once per tile; their scales multiply scores and probabilities.
Arithmetic: a block of 512 tokens x 128 heads takes 2 x 512 x 128 x (640 + 512) = 151 million operations: 1,152 cycles
  of v5e's matrix units (197 TFLOP/s, 1.5 GHz), 288 of v6e's (918, 1.75 GHz). Its 655 KB take 1,200 and 700 cycles.
Schedule: the number of bundles that the compilers pack for a block without masks (jax 0.10.2, bfloat16). Decode takes
  1,270 on v5e and 540 on v6e with 128 heads, and 470 and 400 with 16 heads, which is bound by memory. Prompts take
  1,070 and 345 for each 128 queries.
Write: the kernel of `kv_write_tpu`, which treats a page of latents as a page of one head with keys and no values.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxserve.pallas_kernels import kv_write_tpu
from jaxserve.pallas_kernels.latent_attention.reference import as_stored
from jaxserve.pallas_kernels.latent_attention.tpu_kernel import kernel
from jaxserve.pallas_kernels.latent_attention.tpu_plan import TILE, LatentPlan, LatentScratch, make_plan
from jaxserve.pallas_kernels.paged_attention.tpu import _prompt_items
from jaxserve.pallas_kernels.paged_attention.tpu_plan import BLOCK, LANES, Scalars
from jaxserve.pallas_kernels.registry import Device, LatentProblem
from jaxserve.pallas_kernels.tpu_dma import TILE_BYTES, vmem_bytes, word_rows
from jaxserve.pallas_kernels.types import LatentPages


def why_not(device: Device, problem: LatentProblem) -> str | None:
    """Why this device cannot run `latent_attention` and `write_latent` on the problem, or None."""
    if device.platform != "tpu":
        return f"Mosaic TPU kernels need a TPU, not platform {device.platform!r}"
    q_dtype = str(jnp.dtype(problem.q_dtype))
    kv_dtype = str(jnp.dtype(problem.kv_dtype))
    if q_dtype not in ("bfloat16", "float32"):
        return f"queries must be bfloat16 or float32, not {q_dtype}"
    if kv_dtype not in (("int8", "float8_e4m3fn") if problem.has_scale else ("bfloat16", "float32")):
        return f"a cache {'with' if problem.has_scale else 'without'} scales cannot be {kv_dtype}"
    if problem.rank % LANES or problem.row_width % LANES:
        return (
            f"latents and rows of the cache must be multiples of {LANES} numbers wide, not {problem.rank} and "
            f"{problem.row_width}; `stored_latent_width` tells the row's"
        )
    least = LANES if problem.has_scale else 16
    if problem.page_size not in (16, 32, 64, 128, 256) or problem.page_size < least:
        return f"the page size must be a power of two from {least} to 256, not {problem.page_size}"
    limit = vmem_bytes(device.kind)
    need = max(make_plan(problem, tokens, BLOCK, 1.0).vmem_bytes for tokens in (1, TILE))
    if need > limit:
        return f"the kernels need {need >> 20} MiB of VMEM, {device.kind} gives them {limit >> 20}"
    return None


@partial(jax.jit, static_argnames="rank")
def write_latent(
    pages: LatentPages, rows: jax.Array, slots: jax.Array, first_page: jax.Array | int = 0, *, rank: int
) -> LatentPages:
    """As `reference.write_latent`, in place; padding is not written."""
    if slots.shape[0] > kv_write_tpu.MAX_TOKENS:
        raise ValueError(f"write_latent takes at most {kv_write_tpu.MAX_TOKENS} tokens at once, not {slots.shape[0]}")
    (count, size, width), dtype = pages.data.shape, pages.data.dtype
    new, own = as_stored(pages, rows, rank)
    plan = kv_write_tpu.Plan(size, TILE_BYTES // dtype.itemsize, word_rows(dtype), 0)
    wide = new.astype(jnp.float32)[:, None, None, None]  # [tokens, 1, 1, 1, width], the form that this kernel takes
    data = kv_write_tpu._write(pages.data.reshape(count, 1, 1, size, width), wide, slots, first_page, plan)
    scale = pages.scale
    if scale is not None and own is not None:
        lanes = kv_write_tpu.Plan(size, size, 0, 0)
        target = scale.reshape(count, 1, 2, size)
        new_scale = own[:, None, :, None]
        scale = kv_write_tpu._write(target, new_scale, slots, first_page, lanes).reshape(scale.shape)
    return LatentPages(data.reshape(pages.data.shape), scale)


@partial(jax.jit, static_argnames=("scale", "rank", "decode_only"))
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
    """As `reference.latent_attention`. Padding tokens are 0. Raises ValueError when a row's table does not fit SMEM."""
    first_page = jnp.asarray(first_page, jnp.int32)
    (tokens, heads, dim), rows = q.shape, len(tables)
    problem = LatentProblem(
        q.dtype, pages.data.dtype, heads, rank, dim - rank, pages.page_size, pages.scale is not None, pages.width
    )
    decodes = min(rows, tokens)
    item = jnp.arange(decodes, dtype=jnp.int32)
    scalars = Scalars(item, item, num_decodes, q_start, kv_len, first_page)
    out = _attend(make_plan(problem, 1, tables.shape[1], scale), q[:decodes], pages, tables, scalars)
    others: jax.Array | int = 0
    token = jnp.arange(tokens)[:, None, None]
    if not decode_only:
        plan = make_plan(problem, max(tokens, 2), tables.shape[1], scale)
        tile, row, count = _prompt_items(plan.tile, tokens, q_start, num_decodes)
        scalars = Scalars(tile, row, count, q_start, kv_len, first_page)
        others = jnp.where(token < q_start[-1], _attend(plan, q, pages, tables, scalars), 0)
    rest = jnp.zeros((tokens - decodes, *out.shape[1:]), out.dtype)
    return jnp.where(token < num_decodes, jnp.concatenate([out, rest]), others)


def _attend(plan: LatentPlan, q: jax.Array, pages: LatentPages, tables: jax.Array, scalars: Scalars) -> jax.Array:
    """Runs the kernel over the items: q [tokens, heads, rank + rope] -> [tokens, heads, rank]. Tiles without an item
    have unspecified results."""
    tokens, heads, dim = q.shape
    plan.check_smem(scalars.tile.shape[0], tables.shape[0])
    tables = jnp.pad(tables, ((0, 0), (0, plan.table_entries - plan.table_width)))
    tiles = (tokens + plan.tile - 1) // plan.tile
    q = jnp.pad(q, ((0, tiles * plan.tile - tokens), (0, plan.heads - heads), (0, plan.head_dim - dim)))
    q = q.reshape(tiles, plan.queries, plan.head_dim)

    def tile_block(item, tile, *_):
        return tile[item], 0, 0

    hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    inputs = [q, tables, pages.data]
    specs = [pl.BlockSpec((None, plan.queries, plan.head_dim), tile_block), hbm, hbm]
    if pages.scale is not None:
        inputs = [*inputs, pages.scale]
        specs = [*specs, hbm]
    count = jnp.asarray(scalars.count, jnp.int32)
    in_smem = [x for x in scalars._replace(count=count[None], first_page=scalars.first_page[None]) if x is not None]
    out = pl.pallas_call(
        partial(kernel, plan),
        out_shape=jax.ShapeDtypeStruct((tiles, plan.queries, plan.rank), q.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(in_smem),
            grid=(count,),
            in_specs=specs,
            out_specs=pl.BlockSpec((None, plan.queries, plan.rank), tile_block),
            scratch_shapes=[part for part in LatentScratch.shapes(plan) if part is not None],
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",), vmem_limit_bytes=plan.vmem_bytes),
        name=f"latent_attention_{'decode' if plan.tile == 1 else 'prompts'}",
    )(*in_smem, *inputs)
    return out.reshape(tiles * plan.tile, plan.heads, plan.rank)[:tokens, :heads]
