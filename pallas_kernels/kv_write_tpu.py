"""Writes new keys and values into the pages on TPU, in place.

Compiled for v5e and v6e ahead of time and run in interpret mode; not yet run on a device.

XLA sorts the tokens by tile, padding last. The tokens of one tile are a group; no two groups in flight share a tile. A
copy to or from HBM moves words of 4 bytes in the direction of the tokens, and a tile has 8 of them (`tpu_dma`). Moved
for each group, with all heads, keys and values:

  all tokens are new       the tile is written; bytes written / new bytes: 1 (prompts)
  one token is (decodes)   the token's word is read, changed and written; bytes moved / new bytes: 1 in float32, where
                           nothing needs to be read, 4 in bfloat16, 8 in 8 bits. Whole tiles would move 16, 32, 64.
  some are                 the tile is read, changed and written (the ends of a prompt)

In the engine's steps, the attention kernel writes the decodes (`paged_attention/tpu_write.py`), and this kernel only
prompts. Scales lie along lanes. A copy moves at least 128 of them, so a page's scales are read, changed and written.

Grid: one step per chunk of sorted tokens, for chunks with real tokens. A chunk ends its groups and waits for its
  writes, so that two chunks write a shared tile one after the other.
Memory traffic: the groups as above; the new rows once, in float32, the only type in which a single row is addressable.
Pipeline: a ring of RING tiles in VMEM. Reads run AHEAD groups ahead. A write is awaited when its place is reused.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxserve.pallas_kernels.kv_write import quantize
from jaxserve.pallas_kernels.tpu_dma import TILE_BYTES, aligned, copy, word_rows
from jaxserve.pallas_kernels.types import KVPages

RING = 8
AHEAD = 4
CHUNK = 128  # maximum of tokens in a chunk
CHUNK_BYTES = 1 << 20
MAX_TOKENS = 65536  # slots and groups of this many still fit SMEM


def write_vmem_bytes(kv_heads: int, head_dim: int) -> int:
    """Upper estimate of the VMEM that the kernel needs: the ring, two chunks, and a few tiles in float32."""
    lanes = -(-head_dim // 128) * 128
    tile = 2 * kv_heads * TILE_BYTES * lanes
    return RING * tile + 16 * tile + 2 * max(CHUNK_BYTES, 64 * kv_heads * lanes) + (1 << 20)


class Plan(NamedTuple):
    """The static parameters of a kernel. rows: tokens in a tile of the target. word: tokens in a word, or 0 where
    tokens lie along lanes. chunk: tokens in a chunk."""

    page_size: int
    rows: int
    word: int
    chunk: int


class Scalars(NamedTuple):
    """Sorted tokens in groups, int32.

    slots [tokens]: of the sorted tokens. start [tokens + 1]: first token of each group, then the number of real tokens.
    chunk [chunks + 1]: first group of each chunk. first_page [1]: the page from which slots count.
    """

    slots: Any
    start: Any
    chunk: Any
    first_page: Any


@jax.jit
def write_kv(pages: KVPages, k: jax.Array, v: jax.Array, slots: jax.Array, first_page: jax.Array | int = 0) -> KVPages:
    """`kv_write.write_kv` in place. Padding is not written. Pages may be wider than head_dim; the rest is filled with
    0."""
    if slots.shape[0] > MAX_TOKENS:
        raise ValueError(f"write_kv takes at most {MAX_TOKENS} tokens at once, not {slots.shape[0]}")
    new, *codes_scale = new_tokens(pages, k, v)
    new_scale = None
    if pages.scale is not None:
        new_scale = _write(pages.scale, codes_scale[0], slots, first_page, Plan(pages.page_size, pages.page_size, 0, 0))
    dtype = pages.data.dtype
    plan = Plan(pages.page_size, TILE_BYTES // dtype.itemsize, word_rows(dtype), 0)
    return KVPages(_write(pages.data, new, slots, first_page, plan), new_scale)


def new_tokens(pages: KVPages, k: jax.Array, v: jax.Array) -> list[jax.Array]:
    """Converts k, v [tokens, kv_heads, head_dim] to the pages' form, in float32, where a single row is addressable:
    numbers or codes [tokens, 2, the pages' kv_heads, 1, their head_dim], and for codes scales [tokens, 2, kv_heads, 1].
    Where pages have more heads than k, see `stored_dim`."""
    new = jnp.stack([k, v], axis=1)
    scales = []
    if pages.scale is not None:
        new, scale = quantize(new, pages.data.dtype)
        scales = [scale[..., None]]
    tokens, _, kv_heads, head_dim = new.shape
    new = jnp.pad(new.astype(jnp.float32), ((0, 0),) * 3 + ((0, stored_dim(pages, kv_heads) - head_dim),))
    return [new.reshape(tokens, 2, pages.kv_heads, 1, pages.head_dim), *scales]


def stored_dim(pages: KVPages, kv_heads: int) -> int:
    """Numbers of each of `kv_heads` heads in the pages. Where these have more heads, several neighbours are the parts
    of one."""
    return pages.kv_heads // kv_heads * pages.head_dim


def _write(target: jax.Array, new: jax.Array, slots: jax.Array, first_page: jax.Array | int, plan: Plan) -> jax.Array:
    """Writes new [tokens, 2, kv_heads, 1, ...] into target [pages, 2, kv_heads, page_size, ...]. Replaces the plan's
    chunk by one that fits the tokens."""
    tokens = slots.shape[0]
    row_bytes = 2 * target.shape[2] * 4 * max(128, new.shape[-1])
    chunk = min(CHUNK, max(8, 1 << (CHUNK_BYTES // row_bytes).bit_length() - 1))
    order, count, scalars = _group(slots, plan.rows, chunk)
    scalars = scalars._replace(first_page=jnp.asarray(first_page, jnp.int32).reshape(1))
    tile = (*target.shape[1:3], plan.rows, *target.shape[4:])
    vmem = max(write_vmem_bytes(target.shape[2], target.shape[-1]), 14 << 20)
    words = (*target.shape[1:3], max(plan.word, 1), *target.shape[4:])
    call = pl.pallas_call(
        partial(_kernel, plan._replace(chunk=chunk)),
        out_shape=jax.ShapeDtypeStruct(target.shape, target.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=((count + chunk - 1) // chunk,),
            in_specs=[
                pl.BlockSpec((chunk, *new.shape[1:]), lambda i, *_: (i, *(0,) * (new.ndim - 1))),
                pl.BlockSpec(memory_space=pltpu.HBM),
            ],
            out_specs=pl.BlockSpec(memory_space=pltpu.HBM),
            scratch_shapes=[
                pltpu.VMEM((RING, *tile), target.dtype),
                pltpu.VMEM((RING, *words), target.dtype),
                pltpu.VMEM(tile, jnp.float32),
                pltpu.SemaphoreType.DMA((RING,)),
                pltpu.SemaphoreType.DMA((RING,)),
            ],
        ),
        input_output_aliases={len(scalars) + 1: 0},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",), vmem_limit_bytes=vmem),
        name="write_kv",
    )
    new = jnp.pad(new[order], ((0, -tokens % chunk),) + ((0, 0),) * (new.ndim - 1))
    return call(*scalars, new, target)


def _group(slots: jax.Array, rows: int, chunk: int) -> tuple[jax.Array, jax.Array, Scalars]:
    """Returns the order of the tokens by tile, padding last; the number of real tokens; and their groups. The first
    page is not part of it, so that layers share the work."""
    tokens = slots.shape[0]
    tile = jnp.where(slots < 0, jnp.iinfo(jnp.int32).max, slots // rows)
    order = jnp.argsort(tile)
    tile = tile[order]
    index = jnp.arange(tokens, dtype=jnp.int32)
    count = (slots >= 0).sum(dtype=jnp.int32)
    begins = (index % chunk == 0) | (tile != jnp.roll(tile, 1))
    begins &= index < count
    start = jnp.sort(jnp.where(begins, index, count))
    chunks = (tokens + chunk - 1) // chunk
    before = index[None, :] < jnp.arange(chunks + 1)[:, None] * chunk
    first = (begins[None, :] & before).sum(1, dtype=jnp.int32)
    return order, count, Scalars(slots[order], jnp.append(start, count), first, None)


def _kernel(plan: Plan, *refs: Any) -> None:
    """Writes a chunk: new [chunk, 2, kv_heads, 1, ...], target in HBM, ring [RING, 2, kv_heads, rows, ...] and words
    [RING, 2, kv_heads, word, ...] of the target's dtype, wide [2, kv_heads, rows, ...] in float32."""
    scalars = Scalars(*refs[: len(Scalars._fields)])
    new, _, target, ring, words, wide, read, written = refs[len(Scalars._fields) :]
    slots = scalars.slots
    start = scalars.start
    step = pl.program_id(0)
    first = scalars.chunk[step]
    last = scalars.chunk[step + 1]

    def part(group, rows):
        """The tile of a group (rows of a tile), or the word of its first token (rows of a word)."""
        slot = slots[start[group]]
        row = aligned(slot % plan.page_size // rows * rows, rows)
        return target.at[scalars.first_page[0] + slot // plan.page_size].at[:, :, pl.ds(row, rows)]

    def in_kind(group, *, one, some, whole):
        """Calls the function for the group's number of tokens; None does nothing."""
        tokens = start[group + 1] - start[group]
        alone = (tokens == 1) & (plan.word > 0)
        full = tokens == plan.rows
        for kind, act in ((alone, one), (full & ~alone, whole), (~full & ~alone, some)):
            if act is not None:
                pl.when(kind)(act)

    def reading(group, rows):
        cell = words if rows == plan.word else ring
        return copy(part(group, rows), cell.at[group % RING], read.at[group % RING])

    def writing(group, rows):
        cell = words if rows == plan.word else ring
        return copy(cell.at[group % RING], part(group, rows), written.at[group % RING])

    def start_reading(group, _=None):
        word = (lambda: reading(group, plan.word).start()) if plan.word > 1 else None
        in_kind(group, one=word, some=lambda: reading(group, plan.rows).start(), whole=None)

    def await_reading(group):
        word = (lambda: reading(group, plan.word).wait()) if plan.word > 1 else None
        in_kind(group, one=word, some=lambda: reading(group, plan.rows).wait(), whole=None)

    def start_writing(group):
        word = (lambda: writing(group, plan.word).start()) if plan.word else None
        in_kind(group, one=word, some=(start := lambda: writing(group, plan.rows).start()), whole=start)

    def await_writing(group, _=None):
        word = (lambda: writing(group, plan.word).wait()) if plan.word else None
        in_kind(group, one=word, some=(wait := lambda: writing(group, plan.rows).wait()), whole=wait)

    def row_of(token):
        return new[token - step * plan.chunk]

    def one_group(group, _):
        ahead = group + AHEAD
        pl.when((ahead < last) & (ahead - RING >= first))(lambda: await_writing(ahead - RING))
        pl.when(ahead < last)(lambda: start_reading(ahead))
        await_reading(group)
        place = group % RING

        def change_word():
            word = words.at[place]
            token = start[group]
            here = lax.broadcasted_iota(jnp.int32, word.shape, 2) == slots[token] % plan.word
            # Selected in float32, which holds all dtypes exactly: some chips have no masks for narrow dtypes.
            word[...] = jnp.where(here, row_of(token), word[...].astype(jnp.float32)).astype(word.dtype)

        def change_tile():
            wide[...] = ring[place].astype(jnp.float32)
            fill_tile()

        def fill_tile():
            def one_token(token, _):
                row = slots[token] % plan.rows
                if plan.word:
                    wide[:, :, pl.ds(row, 1)] = row_of(token)
                else:  # tokens lie along lanes, of which a single one is not addressable
                    here = lax.broadcasted_iota(jnp.int32, wide.shape, 2) == row
                    wide[...] = jnp.where(here, row_of(token), wide[...])

            lax.fori_loop(start[group], start[group + 1], one_token, None)
            ring[place] = wide[...].astype(ring.dtype)

        in_kind(group, one=change_word if plan.word else None, some=change_tile, whole=fill_tile)
        start_writing(group)

    lax.fori_loop(first, jnp.minimum(first + AHEAD, last), start_reading, None)
    lax.fori_loop(first, last, one_group, None)
    lax.fori_loop(jnp.maximum(first, last - RING), last, await_writing, None)
