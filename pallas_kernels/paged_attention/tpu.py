"""Paged attention on TPU: one Mosaic kernel for decode rows and for tiles of prompts.

Compiled for v5e and v6e ahead of time and run in interpret mode; not yet run on a device. `tpu_kernel.py` has the
kernel, `tpu_plan.py` its sizes.

Grid: one step per item, in the order of the tiles. An item is a tile of query tokens and a row that has tokens in it.
  There are as many steps as the batch has items, so padding costs nothing. Decode: a tile is one token, and item r is
  row r. Prompts: all rows lie back to back in tiles of up to TILE tokens; `_prompt_items` lists the items in XLA.
Memory traffic: a row's pages once per tile, from the window's oldest page to the tile's newest. One DMA copies a page,
  with all heads, keys and values. Queries and results are copied once; each page costs 4 bytes of the block tables.
  Pages and tables stay in HBM, so a context of 128k tokens in pages of 16 takes 96 KiB of SMEM for any number of rows.
Pipeline: blocks of several pages in two VMEM slots. While one block is computed, the row's next block or the next
  item's first block is on its way. The tables of the next two items are fetched before that. The running softmax
  (float32) stays in VMEM until the tile ends. Rows in one tile can share it, because a token sees only its own row's
  keys.
Write: in `write_and_attend` the attention kernel also writes the decodes' new tokens (`tpu_write.py`), so that a decode
  step launches one kernel a layer. `kv_write_tpu` writes prompts beforehand. Bytes written to HBM for each new byte: 2
  in bfloat16, 4 in 8 bits, and 8 KiB for the scales of 8 heads. None are read.
Schedule: bundles that v5e's compiler packs, with jax 0.10.2, bf16, 8 heads of 128, groups of 4. A prompt's 512 queries
  x 512 keys of a head: 1,172 without a mask (at least 512 for its matrix instructions and 512 for its stores), 1,282
  with one. A decode's 8 heads x 512 keys: 769, while their DMA takes about 2,400 cycles. The write adds 79 bundles to a
  row's last block (76 on v6e), with codes and scales 245 (193).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxserve.pallas_kernels.kv_write_tpu import new_tokens, stored_dim, write_kv, write_vmem_bytes
from jaxserve.pallas_kernels.paged_attention.tpu_kernel import kernel
from jaxserve.pallas_kernels.paged_attention.tpu_plan import (
    BLOCK,
    LANES,
    TILE,
    Plan,
    Scalars,
    Scratch,
    make_plan,
)
from jaxserve.pallas_kernels.registry import AttentionProblem, Device
from jaxserve.pallas_kernels.tpu_dma import vmem_bytes
from jaxserve.pallas_kernels.types import AttentionOptions, KVPages

__all__ = ["paged_attention", "why_not", "write_and_attend", "write_kv"]


def why_not(device: Device, problem: AttentionProblem) -> str | None:
    """Returns why this device cannot run `paged_attention` and `write_kv` on the problem, or None."""
    if device.platform != "tpu":
        return f"Mosaic TPU kernels need a TPU, not platform {device.platform!r}"
    q_dtype = str(jnp.dtype(problem.q_dtype))
    kv_dtype = str(jnp.dtype(problem.kv_dtype))
    if q_dtype not in ("bfloat16", "float32"):
        return f"queries must be bfloat16 or float32, not {q_dtype}"
    if kv_dtype not in ("bfloat16", "float32", "int8", "float8_e4m3fn"):
        return f"the KV cache must be bfloat16, float32, int8 or float8_e4m3fn, not {kv_dtype}"
    if problem.page_size not in (16, 32, 64, 128, 256):
        return f"the page size must be 16, 32, 64, 128 or 256, not {problem.page_size}"
    if jnp.dtype(kv_dtype).itemsize == 1 and problem.page_size < 32:
        return f"8-bit pages need a page size of at least 32, not {problem.page_size}; take --page-size {LANES}"
    if problem.has_scale and problem.page_size < LANES:
        return (
            f"scales need a page size of at least {LANES}, not {problem.page_size}, because copies move whole tiles; "
            f"take --page-size {LANES}"
        )
    limit = vmem_bytes(device.kind)
    options: AttentionOptions = {"scale": 1.0, "window": None, "softcap": None}
    need = max(make_plan(problem, tokens, BLOCK, writes=tokens == 1, **options).vmem_bytes for tokens in (1, TILE))
    need = max(need, write_vmem_bytes(problem.kv_heads, problem.head_dim))
    if need > limit:
        return f"the kernels need {need >> 20} MiB of VMEM, {device.kind} gives them {limit >> 20}; take smaller pages"
    return None


@partial(jax.jit, static_argnames=("scale", "window", "softcap", "decode_only"))
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
) -> jax.Array:
    """See `reference.paged_attention`. Padding tokens are 0. Raises ValueError where a row's table does not fit SMEM.

    Pages may be wider than q's head_dim, filled with 0. Where head_dim is not a multiple of 128 they should be rounded
    up to one: tiles take that space anyway, and with narrower pages XLA's default layout makes it copy the cache at
    each call. Where pages have more heads than q, and no scales, several neighbouring heads are the parts of one.
    """
    options: AttentionOptions = {"scale": scale, "window": window, "softcap": softcap}
    batch = _Batch(q, block_tables, q_start, kv_len, num_decodes, sinks, jnp.asarray(first_page, jnp.int32), options)
    out, _ = _decode(batch, pages)
    return _whole(batch, out, None if decode_only else _prompts(batch, pages))


@partial(jax.jit, static_argnames=("scale", "window", "softcap", "decode_only"))
def write_and_attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    pages: KVPages,
    slots: jax.Array,
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
) -> tuple[jax.Array, KVPages]:
    """`write_kv`, then `paged_attention`, where the attention kernel writes the decodes' tokens.

    A decode's slot is the last of its row, or -1. No two decodes may write to one page, and no row may read a page that
    another one writes.
    """
    options: AttentionOptions = {"scale": scale, "window": window, "softcap": softcap}
    batch = _Batch(q, block_tables, q_start, kv_len, num_decodes, sinks, jnp.asarray(first_page, jnp.int32), options)
    if not decode_only:
        pages = write_kv(pages, k, v, jnp.where(jnp.arange(len(slots)) < num_decodes, -1, slots), first_page)
    out, pages = _decode(batch, pages, (k, v, slots))
    return _whole(batch, out, None if decode_only else _prompts(batch, pages)), pages


class _Batch(NamedTuple):
    """The arguments that both public functions share, under their names."""

    q: jax.Array
    block_tables: jax.Array
    q_start: jax.Array
    kv_len: jax.Array
    num_decodes: jax.Array
    sinks: jax.Array | None
    first_page: jax.Array
    options: AttentionOptions

    def plan(self, pages: KVPages, tokens: int, *, writes: bool = False) -> Plan:
        _, kv_heads, group, _ = self.q.shape
        parts = pages.kv_heads // kv_heads
        sizes = kv_heads, group, stored_dim(pages, kv_heads), pages.page_size
        problem = AttentionProblem(self.q.dtype, pages.data.dtype, *sizes, pages.scale is not None)
        return make_plan(problem, tokens, self.block_tables.shape[1], writes=writes, parts=parts, **self.options)

    def padded_q(self, pages: KVPages, tokens: int) -> jax.Array:
        """Cuts the queries to `tokens` tokens, and pads them to the size of the pages' heads."""
        _, kv_heads, _, head_dim = self.q.shape
        return jnp.pad(self.q[:tokens], ((0, 0),) * 3 + ((0, stored_dim(pages, kv_heads) - head_dim),))


def _decode(batch: _Batch, pages: KVPages, write: tuple[jax.Array, ...] | None = None) -> tuple[jax.Array, KVPages]:
    """Attention of each row's first token, as if all rows decoded; other rows' results are undefined. `write`: keys,
    values and slots of all tokens, of which the decodes' are written to the pages."""
    decodes = min(len(batch.block_tables), len(batch.q))
    item = jnp.arange(decodes, dtype=jnp.int32)
    plan = batch.plan(pages, 1, writes=write is not None)
    scalars = Scalars(item, item, batch.num_decodes, batch.q_start, batch.kv_len, batch.first_page)
    new: list[jax.Array] = []
    if write is not None:
        k, v, slots = (x[:decodes] for x in write)
        scalars = scalars._replace(slots=slots)
        new = new_tokens(pages, k, v)
    return _attend(plan, batch.padded_q(pages, decodes), pages, batch.block_tables, batch.sinks, scalars, new)


def _prompts(batch: _Batch, pages: KVPages) -> jax.Array:
    """Attention of all tokens of prompts; results of other tokens are undefined."""
    tokens = len(batch.q)
    plan = batch.plan(pages, max(tokens, 2))
    tile, row, count = _prompt_items(plan.tile, tokens, batch.q_start, batch.num_decodes)
    scalars = Scalars(tile, row, count, batch.q_start, batch.kv_len, batch.first_page)
    return _attend(plan, batch.padded_q(pages, tokens), pages, batch.block_tables, batch.sinks, scalars)[0]


def _whole(batch: _Batch, decodes: jax.Array, prompts: jax.Array | None) -> jax.Array:
    """Selects each token's result: decode, prompt, or 0 for padding. As wide as q."""
    tokens = len(batch.q)
    head_dim = batch.q.shape[-1]
    token = jnp.arange(tokens)[:, None, None, None]
    rest = jnp.zeros((tokens - len(decodes), *decodes.shape[1:]), decodes.dtype)
    others = 0 if prompts is None else jnp.where(token < batch.q_start[-1], prompts, 0)
    return jnp.where(token < batch.num_decodes, jnp.concatenate([decodes, rest]), others)[..., :head_dim]


def _prompt_items(tile: int, tokens: int, q_start: jax.Array, num_decodes: jax.Array):
    """Lists the pairs of a tile and a prompt row with tokens in it. Returns tiles, rows, and the number of pairs."""
    start = q_start[:-1]
    end = q_start[1:]
    rows = start.shape[0]
    prompt = (jnp.arange(rows) >= num_decodes) & (end > start)
    first = start // tile
    tiles = jnp.where(prompt, (end - 1) // tile - first + 1, 0)
    after = jnp.cumsum(tiles)
    item = jnp.arange((tokens + tile - 1) // tile + rows)
    row = jnp.minimum((after[None, :] <= item[:, None]).sum(1), rows - 1)
    item_tile = first[row] + item - (after - tiles)[row]
    last = (tokens - 1) // tile
    return jnp.clip(item_tile, 0, last).astype(jnp.int32), row.astype(jnp.int32), after[-1]


def _attend(
    plan: Plan,
    q: jax.Array,
    pages: KVPages,
    tables: jax.Array,
    sinks: jax.Array | None,
    scalars: Scalars,
    new: Sequence[jax.Array] = (),
) -> tuple[jax.Array, KVPages]:
    """Runs the kernel over the items. q: [tokens, kv_heads, group, head_dim]. Returns results of q's shape, undefined
    in tiles without an item, and the pages, to which the kernel has written `new` where the plan says so."""
    tokens, kv_heads, group, head_dim = q.shape
    plan.check_smem(scalars.tile.shape[0], tables.shape[0])
    tables = jnp.pad(tables, ((0, 0), (0, plan.table_entries - plan.table_width)))
    tiles = (tokens + plan.tile - 1) // plan.tile
    padding = plan.queries - plan.tile * group

    def to_tiles(x):
        """[tokens, kv_heads, group, n] -> [tiles, kv_heads, queries, n]; queries in order of group, then token."""
        x = jnp.pad(x, ((0, tiles * plan.tile - x.shape[0]), (0, 0), (0, 0), (0, 0)))
        x = x.reshape(tiles, plan.tile, kv_heads, group, -1).transpose(0, 2, 3, 1, 4)
        return jnp.pad(x.reshape(tiles, kv_heads, plan.tile * group, -1), ((0, 0), (0, 0), (0, padding), (0, 0)))

    def tile_block(item, tile, *_):
        return tile[item], 0, 0, 0

    block = pl.BlockSpec((None, kv_heads, plan.queries, head_dim), tile_block)
    hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    inputs = [to_tiles(q), tables, pages.data]
    specs = [block, hbm, hbm]
    if plan.has_scale:
        inputs = [*inputs, pages.scale]
        specs = [*specs, hbm]
    if sinks is not None:
        spread = jnp.broadcast_to(sinks.astype(jnp.float32)[:, :, None, None], (kv_heads, group, plan.tile, LANES))
        spread = spread.reshape(kv_heads, group * plan.tile, LANES)
        inputs.append(jnp.pad(spread, ((0, 0), (0, padding), (0, 0))))
        specs.append(pl.BlockSpec((kv_heads, plan.queries, LANES), lambda *_: (0, 0, 0)))

    for x in new:
        inputs.append(x)
        specs.append(pl.BlockSpec((None, *x.shape[1:]), lambda item, tile, *_, rank=x.ndim: (item, *(0,) * (rank - 1))))

    count = jnp.asarray(scalars.count, jnp.int32)
    scalars = scalars._replace(count=count[None], first_page=scalars.first_page[None])
    in_smem = [x for x in scalars if x is not None]
    shapes = [jax.ShapeDtypeStruct((tiles, kv_heads, plan.queries, head_dim), q.dtype)]
    out_specs = [block]
    aliases = {}
    if plan.writes:
        for i, x in enumerate(jax.tree.leaves(pages)):
            shapes.append(jax.ShapeDtypeStruct(x.shape, x.dtype))
            out_specs.append(hbm)
            aliases[len(in_smem) + 2 + i] = 1 + i  # the pages follow q and the tables
    call = pl.pallas_call(
        partial(kernel, plan, sinks is not None),
        out_shape=shapes,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(in_smem),
            grid=(count,),
            in_specs=specs,
            out_specs=out_specs,
            scratch_shapes=[part for part in Scratch.shapes(plan) if part is not None],
        ),
        input_output_aliases=aliases,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",), vmem_limit_bytes=plan.vmem_bytes),
        name=f"paged_attention_{'decode' if plan.tile == 1 else 'prompts'}",
    )
    out, *written = call(*in_smem, *inputs)
    if written:
        pages = jax.tree.unflatten(jax.tree.structure(pages), written)
    out = out[:, :, : plan.tile * group].reshape(tiles, kv_heads, group, plan.tile, head_dim)
    return out.transpose(0, 3, 1, 2, 4).reshape(tiles * plan.tile, kv_heads, group, head_dim)[:tokens], pages
