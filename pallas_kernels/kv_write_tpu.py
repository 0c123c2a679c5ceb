"""Write of new keys and values into the pages on TPU, in place.

Compiled for v5e and v6e ahead of time, run in interpret mode only; not yet run on a device.

A copy to or from HBM moves whole tiles, so a token (one row of a tile) is written by read, change, write. Tokens are
sorted by tile outside the kernel, padding last, and each run of tokens in one tile (a group) is one such round: no two
rounds in flight touch the same tile.

Grid: one step per chunk of sorted tokens, only as many as hold real tokens. A chunk ends its groups and awaits its
  writes, so that a tile shared by two chunks is written by one after the other.
Memory traffic: per group one tile of all heads, keys and values, in and out; the new rows once, in float32, because
  only there a row can be addressed by itself.
Pipeline: a ring of RING tiles in VMEM; reads run AHEAD groups ahead, writes are awaited when their place is needed.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.kv_write import quantize
from pallas_kernels.types import KVPages

RING = 8
AHEAD = 4
CHUNK = 128  # most tokens in a chunk
CHUNK_BYTES = 1 << 20
TILE_BYTES = 32  # of a tile in the direction of the tokens, whatever the dtype
MAX_TOKENS = 65536  # whose slots and groups still fit SMEM


def write_vmem_bytes(kv_heads: int, head_dim: int) -> int:
    """An upper estimate of what the kernel needs: the ring, two chunks, and a tile in float32 a few times."""
    lanes = -(-head_dim // 128) * 128
    tile = 2 * kv_heads * TILE_BYTES * lanes
    return RING * tile + 16 * tile + 2 * max(CHUNK_BYTES, 64 * kv_heads * lanes) + (1 << 20)


class Groups(NamedTuple):
    """Sorted tokens in groups, int32.

    slots [tokens]: of the sorted tokens. start [tokens + 1]: first token of each group, then the number of real tokens.
    chunk [chunks + 1]: first group of each chunk.
    """

    slots: Any
    start: Any
    chunk: Any


@jax.jit
def write_kv(pages: KVPages, k: jax.Array, v: jax.Array, slots: jax.Array, first_page: jax.Array | int = 0) -> KVPages:
    """As `kv_write.write_kv`, in place; padding is not written. Pages may be wider than head_dim; the rest is filled
    with 0."""
    slots = jnp.where(slots < 0, -1, slots + first_page * pages.page_size)
    if slots.shape[0] > MAX_TOKENS:
        raise ValueError(f"write_kv takes at most {MAX_TOKENS} tokens at once, not {slots.shape[0]}")
    new = jnp.stack([k, v], axis=1)
    new_scale = None
    if pages.scale is not None:
        new, codes_scale = quantize(new, pages.data.dtype)
        new_scale = _write(pages.scale, codes_scale[..., None], slots, pages.page_size)
    new = jnp.pad(new.astype(jnp.float32), ((0, 0),) * 3 + ((0, pages.head_dim - new.shape[-1]),))
    rows = TILE_BYTES // pages.data.dtype.itemsize
    return KVPages(_write(pages.data, new[:, :, :, None], slots, rows), new_scale)


def _write(target: jax.Array, new: jax.Array, slots: jax.Array, rows: int) -> jax.Array:
    """Writes new [tokens, 2, kv_heads, 1, ...] into target [pages, 2, kv_heads, page_size, ...].

    rows: tokens in a tile of the target, what is read and written at once.
    """
    tokens, page_size = slots.shape[0], target.shape[3]
    row_bytes = 2 * target.shape[2] * 4 * max(128, new.shape[-1])
    chunk = min(CHUNK, max(8, 1 << (CHUNK_BYTES // row_bytes).bit_length() - 1))
    order, count, groups = _group(slots, page_size, rows, chunk)
    tile = (*target.shape[1:3], rows, *target.shape[4:])
    vmem = max(write_vmem_bytes(target.shape[2], target.shape[-1]), 14 << 20)
    call = pl.pallas_call(
        partial(_kernel, page_size, rows, chunk),
        out_shape=jax.ShapeDtypeStruct(target.shape, target.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(groups),
            grid=((count + chunk - 1) // chunk,),
            in_specs=[
                pl.BlockSpec((chunk, *new.shape[1:]), lambda i, *_: (i, *(0,) * (new.ndim - 1))),
                pl.BlockSpec(memory_space=pltpu.HBM),
            ],
            out_specs=pl.BlockSpec(memory_space=pltpu.HBM),
            scratch_shapes=[
                pltpu.VMEM((RING, *tile), target.dtype),
                pltpu.SemaphoreType.DMA((RING,)),
                pltpu.SemaphoreType.DMA((RING,)),
            ],
        ),
        input_output_aliases={len(groups) + 1: 0},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",), vmem_limit_bytes=vmem),
        name="write_kv",
    )
    new = jnp.pad(new[order], ((0, -tokens % chunk),) + ((0, 0),) * (new.ndim - 1))
    return call(*groups, new, target)


def _group(slots: jax.Array, page_size: int, rows: int, chunk: int) -> tuple[jax.Array, jax.Array, Groups]:
    """Order of the tokens by tile, padding last; number of real tokens; their groups."""
    tokens = slots.shape[0]
    tile = jnp.where(slots < 0, jnp.iinfo(jnp.int32).max, slots // rows)
    order = jnp.argsort(tile)
    tile, index = tile[order], jnp.arange(tokens, dtype=jnp.int32)
    count = (slots >= 0).sum(dtype=jnp.int32)
    begins = (index % chunk == 0) | (tile != jnp.roll(tile, 1))
    begins &= index < count
    start = jnp.sort(jnp.where(begins, index, count))
    chunks = (tokens + chunk - 1) // chunk
    before = index[None, :] < jnp.arange(chunks + 1)[:, None] * chunk
    first = (begins[None, :] & before).sum(1, dtype=jnp.int32)
    return order, count, Groups(slots[order], jnp.append(start, count), first)


def _kernel(page_size, rows, chunk, slots, start, chunk_group, new, _, target, ring, read, written) -> None:
    """A chunk: new [chunk, 2, kv_heads, 1, ...], target in HBM, ring [RING, 2, kv_heads, rows, ...]."""
    step = pl.program_id(0)
    first, last = chunk_group[step], chunk_group[step + 1]

    def tile_of(group):
        slot = slots[start[group]]
        row = pl.multiple_of(slot % page_size // rows * rows, rows)
        return target.at[slot // page_size, :, :, pl.ds(row, rows)]

    def reading(group):
        place = group % RING
        return pltpu.make_async_copy(tile_of(group), ring.at[place], read.at[place])

    def writing(group):
        place = group % RING
        return pltpu.make_async_copy(ring.at[place], tile_of(group), written.at[place])

    def one_group(group, _):
        ahead = group + AHEAD

        @pl.when((ahead < last) & (ahead - RING >= first))
        def await_place():
            writing(ahead - RING).wait()

        @pl.when(ahead < last)
        def read_ahead():
            reading(ahead).start()

        reading(group).wait()
        tile = ring.at[group % RING]
        place = lax.broadcasted_iota(jnp.int32, tile.shape, 2)

        def one_token(token, _):
            row = new[token - step * chunk]
            # Selected in float32, where it is exact for all dtypes: narrow ones lack masks on some chips.
            tile[...] = jnp.where(place == slots[token] % rows, row, tile[...].astype(jnp.float32)).astype(tile.dtype)

        lax.fori_loop(start[group], start[group + 1], one_token, None)
        writing(group).start()

    lax.fori_loop(first, jnp.minimum(first + AHEAD, last), lambda group, _: reading(group).start(), None)
    lax.fori_loop(first, last, one_group, None)
    lax.fori_loop(jnp.maximum(first, last - RING), last, lambda group, _: writing(group).wait(), None)
