"""Lists of work items that XLA makes from a batch, for kernels whose programs take one item each.

An item of attention is some query tokens of one row against some blocks of its cached tokens. Its int32 columns:

  ROW                     row of the block tables
  TOKEN, POSITION         the first query token: its index in the batch, and its position in the row
  LENGTH                  the row's cached tokens
  FIRST, LAST             the row's blocks FIRST to LAST - 1 are the item's; equal numbers: nothing to do
  FULL_FIRST, FULL_LAST   the blocks FULL_FIRST to FULL_LAST - 1 of these: all query tokens see all their keys

Items of prompts have two columns more:

  SLOT                    place of the result if other items have the same query tokens; otherwise -1
  OLDEST                  the first position that any query token of the row sees
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

MIN_BLOCKS = 4  # minimum of blocks in a part of a row

ROW, TOKEN, POSITION, LENGTH, FIRST, FULL_FIRST, FULL_LAST, LAST, SLOT, OLDEST = range(10)


class KVSplits(NamedTuple):
    """How decode rows are cut into parts: int32, for all rows or for one."""

    first: jax.Array  # a row's blocks first to last - 1 are seen
    last: jax.Array
    each: jax.Array  # blocks in each part but the last, which has the rest
    number: jax.Array  # of parts, from 1 on

    def bounds(self, part: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The blocks `first` to `last` - 1 of a part."""
        start = jnp.minimum(self.first + part * self.each, self.last)
        return start, jnp.minimum(start + self.each, self.last)


class DecodeItems(NamedTuple):
    """The items of decode rows, ordered by row. Row r's items start at begin[r]. Items after the last are empty."""

    items: jax.Array  # int32 [rows * most, 8]
    begin: jax.Array  # int32 [rows]
    parts: jax.Array  # int32 [rows], from 1 to most


def up_to(values: jax.Array) -> jax.Array:
    """Cumulative sums of values [rows]. A GPU does this in one launch; `jnp.cumsum` takes three.

    The number of additions is the square of the rows, of which a batch has a few hundred at most.
    """
    index = jnp.arange(len(values), dtype=jnp.int32)
    return jnp.where(index[:, None] >= index, values, 0).sum(1, dtype=values.dtype)


def cut(length: jax.Array, block: int, window: int | None, most: int) -> KVSplits:
    """Cuts rows with `length` cached tokens and one query token each into up to `most` parts. Kernels call this, too,
    with the length of one row.

    A row's parts depend only on its own length, not on the other rows or the size of the batch. So its result is
    bitwise independent of them, too. The price: short rows are split even where there are enough of them to fill the
    device, and no row has more than `most` parts, even where the other rows are so short that the device is idle.

    A row without tokens has one part without blocks.
    """

    def divided(a: jax.Array, b: jax.Array | int) -> jax.Array:
        """a / b, rounded up. `lax.div` because `//` costs a kernel more: it allows for negative numbers."""
        b = jnp.broadcast_to(jnp.asarray(b, jnp.int32), a.shape)
        return lax.div(a + b - 1, b)

    first = lax.div(jnp.maximum(length - window, 0), jnp.full_like(length, block)) if window else jnp.zeros_like(length)
    last = divided(length, block)
    wanted = jnp.minimum(jnp.maximum(divided(last - first, MIN_BLOCKS), 1), most)
    each = jnp.maximum(divided(last - first, wanted), 1)
    return KVSplits(first, last, each, jnp.maximum(divided(last - first, each), 1))


def decode_items(length: jax.Array, block: int, window: int | None, most: int) -> DecodeItems:
    """The items of decode rows: the parts into which `cut` cuts them. A row without tokens has an item without
    blocks."""
    rows = length.shape[0]
    parts = cut(length, block, window, most)
    ends = up_to(parts.number)
    begin = ends - parts.number
    index = jnp.arange(rows * most, dtype=jnp.int32)
    # The row of an item is the number of rows whose items end before it.
    row = jnp.minimum((index[:, None] >= ends).sum(1, dtype=jnp.int32), rows - 1)
    first, last = KVSplits(*(of_row[row] for of_row in parts)).bounds(index - begin[row])
    columns = [row, row, length[row] - 1, length[row], first, last, last, last]  # all blocks are masked
    return DecodeItems(jnp.stack(columns, axis=1), begin, parts.number)


def equal_spans(length: jax.Array, parts: KVSplits, heads: int, programs: int) -> jax.Array:
    """Int32 [programs + 1, 5]: the first item of each program, and the end. An item is a part of a row for one head.
    Items are numbered by row, then part, then head. Columns: the item's number, row, part, head, and the row's length.
    In the last entry only the number has a meaning: it is that of all items.

    Items are divided by their cost in blocks: their own blocks, and one for the start and end. An item is not divided,
    so a program's share exceeds the average by less than the largest item.
    """
    costs = parts.last - parts.first + parts.number  # cost of a row, for one head
    ends = up_to(costs)
    begin = up_to(parts.number) - parts.number
    # total * heads * program may exceed 32 bits. So shares are rounded down, and the first programs take the rest.
    share = ends[-1] * heads // programs
    rest = ends[-1] * heads % programs
    program = jnp.arange(programs + 1, dtype=jnp.int32)
    target = program * share + jnp.minimum(program, rest)
    row = jnp.minimum((target[:, None] >= ends * heads).sum(1, dtype=jnp.int32), len(costs) - 1)
    within = target - (ends - costs)[row] * heads
    each = parts.each[row] + 1  # cost of each part of a row but the last
    part = jnp.minimum(within // (each * heads), parts.number[row] - 1)
    cost = jnp.minimum(each, costs[row] - part * each)
    head = -(-(within - part * each * heads) // cost)
    number = (begin[row] + part) * heads + head
    # After the last head of a part comes the first of the next part.
    part = jnp.where(head < heads, part, part + 1)
    head = jnp.where(head < heads, head, 0)
    ended = part == parts.number[row]
    part = jnp.where(ended, 0, part)
    row = jnp.minimum(jnp.where(ended, row + 1, row), len(costs) - 1)
    return jnp.stack([number, row, part, head, length[row]], axis=1)


class Tiles(NamedTuple):
    """The items of prompt rows. Row r's begin before[r] items from the end of the list; a tile has parts[r] items."""

    origin: jax.Array  # int32 [rows]: the token at which the row's first tile begins
    before: jax.Array  # int32 [rows + 1]: items of all rows before the row
    parts: jax.Array  # int32 [rows]
    slots: jax.Array  # int32 [rows]: slots of all rows before the row; rows with several parts have slots

    def of_tokens(self, tile: int, row: jax.Array, token: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """For tokens of prompt rows: the item of the first part (part i's is i earlier), its slot, number of parts."""
        parts = self.parts[row]
        first = (token - self.origin[row]) // tile * parts
        return self.before[-1] - 1 - self.before[row] - first, self.slots[row] + first, parts


def prompt_items(
    tile: int,
    block: int,
    window: int | None,
    tokens: int,
    most: int,
    q_start: jax.Array,
    kv_len: jax.Array,
    num_decodes: jax.Array,
) -> tuple[jax.Array, Tiles]:
    """The items [count, 10] of tiles of up to `tile` query tokens, for rows from num_decodes on. The last tiles of rows
    come first, as they have most work.

    tile, tokens: multiples of 8, tile <= tokens; `tokens` is the batch's capacity. Tiles begin at multiples of eight
    tokens, which copies of queries require. So a row's first tile may begin with tokens of the row before it. No tile
    extends beyond the batch. TOKEN and POSITION are of the tile's first token, whichever row it belongs to.

    The blocks of a row are divided among up to `most` items: tiles times parts. The number of parts, and the blocks at
    which they end, follow only from the row's own lengths, so that its result is bitwise independent of other rows. (A
    tile's start depends on them, but this only adds or removes keys that a token does not see, whose weight is zero.)
    Items of rows with several parts have a SLOT of their own, others have -1.
    """
    rows = kv_len.shape[0]
    q_len = jnp.where(jnp.arange(rows) >= num_decodes, q_start[1:] - q_start[:-1], 0)
    origin = q_start[:-1] // 8 * 8
    tiles = jnp.where(q_len > 0, (q_start[1:] - origin + tile - 1) // tile, 0)
    row_first = jnp.maximum(kv_len - q_len - window + 1, 0) // block if window else jnp.zeros_like(kv_len)
    blocks = (kv_len + block - 1) // block - row_first
    parts = jnp.minimum(most // ((q_len + tile + 6) // tile), blocks // MIN_BLOCKS)  # at most that many tiles
    parts = jnp.where(q_len > 0, jnp.maximum(parts, 1), 1)

    def before(count: jax.Array) -> jax.Array:
        return jnp.concatenate([jnp.zeros(1, jnp.int32), up_to(count)])

    ends = before(tiles * parts)
    slots = before(jnp.where(parts > 1, tiles * parts, 0))[:-1]
    index = ends[-1] - 1 - jnp.arange(prompt_item_count(tile, tokens, rows, most), dtype=jnp.int32)
    row = jnp.searchsorted(ends, index, side="right", method="compare_all").astype(jnp.int32) - 1
    row = jnp.clip(row, 0, rows - 1)
    local = index - ends[row]
    start = origin[row] + local // parts[row] * tile
    token = jnp.minimum(start, tokens - tile)
    length = kv_len[row]
    past = length - q_start[row + 1]  # turns places in the batch into positions in the row
    oldest = jnp.maximum(start, q_start[row]) + past
    newest = jnp.minimum(start + tile, q_start[row + 1]) - 1 + past
    part = local % parts[row]
    begin, end = (row_first[row] + at * blocks[row] // parts[row] for at in (part, part + 1))
    last = jnp.where(index >= 0, jnp.minimum(newest // block + 1, end), 0)
    if window:
        seen = jnp.maximum(oldest - window + 1, 0)
        first = jnp.maximum(seen // block, begin)
        full_first = jnp.maximum(newest - window + block, 0) // block
    else:
        seen = jnp.zeros_like(begin)
        first = begin
        full_first = first
    first = jnp.minimum(first, last)
    full_first = jnp.clip(full_first, first, last)
    full_last = jnp.clip((oldest + 1) // block, full_first, last)
    slot = jnp.where((parts[row] > 1) & (index >= 0), slots[row] + local, -1)
    columns = [row, token, token + past, length, first, full_first, full_last, last, slot, seen]
    return jnp.stack(columns, axis=1).astype(jnp.int32), Tiles(origin, ends, parts, slots)


def prompt_item_count(tile: int, tokens: int, rows: int, most: int) -> int:
    """The maximum of items that `prompt_items` may need."""
    rows = min(rows, tokens)
    return min(tokens, (tokens + rows * (tile + 6)) // tile) + rows * (most - 1)


def expert_tiles(group_sizes: jax.Array, tokens: int, n: int) -> tuple[jax.Array, jax.Array]:
    """Expert (-1: none) and first token of each tile of n tokens, int32 [items, 2]; and each token's place in the
    tiles.

    Copies begin at multiples of 8 tokens, so an expert's first tile may hold tokens of the expert before it.
    """
    experts = len(group_sizes)
    ends = jnp.cumsum(group_sizes)
    starts = (ends - group_sizes) // 8 * 8
    tiles = jnp.where(group_sizes > 0, (ends - starts + n - 1) // n, 0)
    tile_ends = jnp.cumsum(tiles)
    item = jnp.arange(min(tokens, (tokens + experts * (n + 6)) // n))
    expert = jnp.searchsorted(tile_ends, item, side="right", method="compare_all")
    owner = jnp.minimum(expert, experts - 1)
    start = starts[owner] + (item - (tile_ends - tiles)[owner]) * n
    items = jnp.stack([jnp.where(expert < experts, expert, -1), start], 1).astype(jnp.int32)

    token = jnp.arange(tokens)
    owner = jnp.minimum(jnp.searchsorted(ends, token, side="right", method="compare_all"), experts - 1)
    return items, (tile_ends - tiles)[owner] * n + token - starts[owner]
