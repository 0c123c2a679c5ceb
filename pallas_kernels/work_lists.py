"""Lists of work that XLA makes of a batch, for kernels whose programs take an item each.

An item of attention is some query tokens of one row against some blocks of its cached tokens, int32 in eight columns:

  ROW                     of the block tables
  TOKEN, POSITION         the first query token: its place in the batch, and in the row
  LENGTH                  the row's cached tokens
  FIRST, LAST             blocks FIRST … LAST of the row are the item's; where they are equal there is nothing to do
  FULL_FIRST, FULL_LAST   of these blocks, those of which all query tokens see all keys
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

MIN_BLOCKS = 4  # of a part of a decode row

ROW, TOKEN, POSITION, LENGTH, FIRST, FULL_FIRST, FULL_LAST, LAST = range(8)
BEGIN, PARTS = FULL_FIRST, FULL_LAST  # in the items of decode, all of whose blocks are masked


class DecodeItems(NamedTuple):
    """The items of decode rows: of each row one after the other, from begin[row] on. What follows the last is empty."""

    items: jax.Array  # int32 [rows * most, 8]
    begin: jax.Array  # int32 [rows]
    parts: jax.Array  # int32 [rows], from 1 to most


def decode_items(length: jax.Array, block: int, window: int | None, most: int) -> DecodeItems:
    """The items of rows with `length` cached tokens and one query token each, a row in up to `most` parts.

    A row's parts depend on its own length alone, whatever else is in the batch and however many rows it has room for,
    and so do the bits of its result. What this costs: short rows are split even where there are enough of them to fill
    the device, and no row is in more parts than `most`, even where the others are so short that they leave it idle.
    A row without tokens has one item without blocks. FULL_FIRST's column holds the row's first item, FULL_LAST's its
    number of parts: BEGIN and PARTS.
    """
    rows = length.shape[0]
    first = jnp.maximum(length - window, 0) // block if window else jnp.zeros_like(length)
    last = (length + block - 1) // block
    count = last - first
    wanted = jnp.clip((count + MIN_BLOCKS - 1) // MIN_BLOCKS, 1, most)
    part = jnp.maximum((count + wanted - 1) // wanted, 1)
    parts = jnp.maximum((count + part - 1) // part, 1)
    ends = jnp.cumsum(parts)
    begin = ends - parts
    index = jnp.arange(rows * most, dtype=jnp.int32)
    # The row of an item: how many rows end before it.
    row = jnp.minimum((index[:, None] >= ends).sum(1, dtype=jnp.int32), rows - 1)
    start = jnp.minimum(first[row] + (index - begin[row]) * part[row], last[row])
    end = jnp.minimum(start + part[row], last[row])
    columns = {ROW: row, TOKEN: row, POSITION: length[row] - 1, LENGTH: length[row], FIRST: start, LAST: end}
    columns |= {BEGIN: begin[row], PARTS: parts[row]}
    items = jnp.stack([columns[i] for i in range(8)], axis=1).astype(jnp.int32)
    return DecodeItems(items, begin.astype(jnp.int32), parts.astype(jnp.int32))


def equal_spans(work: DecodeItems, heads: int, programs: int) -> jax.Array:
    """Int32 [programs + 1]: program p takes pairs spans[p] … spans[p + 1] of the list of (item, head), heads innermost.

    Pairs are dealt by what they cost, in blocks: their own and one for the beginning and the end of an item. An item
    is not divided, so that a program's share exceeds the average by less than the largest item. XLA makes the list.
    """
    cost = work.items[:, LAST] - work.items[:, FIRST] + 1
    index = jnp.arange(len(cost), dtype=jnp.int32)
    used = work.begin[-1] + work.parts[-1]
    cost = jnp.where(index < used, cost, 0)
    before = jnp.cumsum(cost) - cost  # of one head
    total = before[-1] + cost[-1]
    # total * heads * program may exceed 32 bits: shares are rounded down, and the last program takes the rest.
    share, rest = total * heads // programs, total * heads % programs
    program = jnp.arange(programs, dtype=jnp.int32)
    target = program * share + jnp.minimum(program, rest)
    item = jnp.maximum((target[:, None] >= before * heads).sum(1, dtype=jnp.int32) - 1, 0)
    item = jnp.minimum(item, used - 1)
    head = -(-(target - before[item] * heads) // cost[item])
    spans = item * heads + jnp.minimum(head, heads)
    return jnp.append(spans, used * heads).astype(jnp.int32)


def prompt_items(
    tile: int,
    block: int,
    window: int | None,
    tokens: int,
    q_start: jax.Array,
    kv_len: jax.Array,
    num_decodes: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """The items [count, 8] of up to `tile` query tokens of rows from num_decodes on, and the tiles before each row.

    `tokens` is the number of query tokens that the batch has room for. The last tiles of rows come first: they have
    most to do.
    """
    rows = kv_len.shape[0]
    q_len = q_start[1:] - q_start[:-1]
    tiles = jnp.where(jnp.arange(rows) >= num_decodes, (q_len + tile - 1) // tile, 0)
    before = jnp.concatenate([jnp.zeros(1, tiles.dtype), jnp.cumsum(tiles)])
    index = before[-1] - 1 - jnp.arange(min(tokens, tokens // tile + rows), dtype=jnp.int32)
    row = jnp.clip(jnp.searchsorted(before, index, side="right") - 1, 0, rows - 1)
    offset = (index - before[row]) * tile
    length = kv_len[row]
    oldest = length - q_len[row] + offset
    newest = jnp.minimum(oldest + tile, length) - 1
    last = jnp.where(index >= 0, newest // block + 1, 0)
    if window:
        first = jnp.minimum(jnp.maximum(oldest - window + 1, 0) // block, last)
        full_first = jnp.maximum(newest - window + block, 0) // block
    else:
        first = full_first = jnp.zeros_like(last)
    full_first = jnp.minimum(full_first, last)
    full_last = jnp.clip((oldest + 1) // block, full_first, last)
    columns = [row, q_start[row] + offset, oldest, length, first, full_first, full_last, last]
    return jnp.stack(columns, axis=1).astype(jnp.int32), before


def expert_tiles(group_sizes: jax.Array, tokens: int, n: int) -> tuple[jax.Array, jax.Array]:
    """Expert (-1: none) and first token of each tile of n tokens, int32 [items, 2]; the place of each token in them.

    Copies begin at multiples of 8 tokens: an expert's first tile may hold some of the expert's before it.
    """
    experts, ends = len(group_sizes), jnp.cumsum(group_sizes)
    starts = (ends - group_sizes) // 8 * 8
    tiles = jnp.where(group_sizes > 0, (ends - starts + n - 1) // n, 0)
    tile_ends = jnp.cumsum(tiles)
    item = jnp.arange(min(tokens, (tokens + experts * (n + 6)) // n))
    expert = jnp.searchsorted(tile_ends, item, side="right")
    owner = jnp.minimum(expert, experts - 1)
    start = starts[owner] + (item - (tile_ends - tiles)[owner]) * n
    items = jnp.stack([jnp.where(expert < experts, expert, -1), start], 1).astype(jnp.int32)

    token = jnp.arange(tokens)
    owner = jnp.minimum(jnp.searchsorted(ends, token, side="right"), experts - 1)
    return items, (tile_ends - tiles)[owner] * n + token - starts[owner]
