"""The TPU's attention kernel writes a decode's new token to the cache, since it holds the token's block in VMEM anyway.

An item's new token is put into the block that has just arrived, where attention finds it. Then the 4-byte words that
contain the token are copied to its page in HBM. Nothing is read for this. Bytes written for each new byte: 1 in
float32, 2 in 16 bits, 4 in 8 bits. Scales lie along lanes, so those of all tokens of the page go back, of all heads,
keys and values. Only one row may write to a page or read it meanwhile.

`new` is float32 [2, kv_heads, 1, head_dim]: keys and values, or their codes. In float32 a row can be placed without
shuffles. `new_scale` is float32 [2, kv_heads, 1].
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxserve.pallas_kernels.paged_attention.tpu_plan import TABLES, Plan, Refs, Scalars, Scratch
from jaxserve.pallas_kernels.tpu_dma import TILE_BYTES, aligned, copy, word_rows


def put(plan: Plan, refs: Refs, scratch: Scratch, position: Any, block: Any, slot: Any) -> None:
    """Puts the new token into the block in VMEM, at its position."""
    at = position - block * plan.block_tokens
    rows = TILE_BYTES // jnp.dtype(plan.kv_dtype).itemsize
    place = pl.ds(aligned(at // rows * rows, rows), rows)
    before = scratch.kv[slot, :, :, place]
    here = lax.broadcasted_iota(jnp.int32, before.shape, 2) == at % rows
    # Selected in float32, which holds all dtypes exactly: some chips have no masks for narrow dtypes.
    scratch.kv[slot, :, :, place] = jnp.where(here, refs.new[...], before.astype(jnp.float32)).astype(plan.kv_dtype)
    if plan.has_scale:
        page = at // plan.page_size
        scales = scratch.kv_scale[slot, page]
        here = lax.broadcasted_iota(jnp.int32, scales.shape, 2) == at % plan.page_size
        scratch.kv_scale[slot, page] = jnp.where(here, refs.new_scale[...], scales)


def start(
    plan: Plan, refs: Refs, scratch: Scratch, scalars: Scalars, position: Any, block: Any, slot: Any, item: Any
) -> None:
    """Starts the copies of the parts that `put` changed to the token's page."""
    at = position - block * plan.block_tokens
    entry = position // plan.page_size
    page = scalars.first_page[0] + scratch.table[item % TABLES * plan.table_entries + entry]
    word = word_rows(plan.kv_dtype)
    source = scratch.kv.at[slot, :, :, pl.ds(aligned(at // word * word, word), word)]
    target = refs.data.at[page].at[:, :, pl.ds(aligned(position % plan.page_size // word * word, word), word)]
    copy(source, target, scratch.written).start()
    if plan.has_scale:
        copy(scratch.kv_scale.at[slot, at // plan.page_size], refs.data_scale.at[page], scratch.written).start()


def await_written(plan: Plan, refs: Refs, scratch: Scratch) -> None:
    """Waits for the copies that the last `start` began."""
    word = pl.ds(0, word_rows(plan.kv_dtype))
    copy(scratch.kv.at[0, :, :, word], refs.data.at[0].at[:, :, word], scratch.written).wait()
    if plan.has_scale:
        copy(scratch.kv_scale.at[0, 0], refs.data_scale.at[0], scratch.written).wait()
