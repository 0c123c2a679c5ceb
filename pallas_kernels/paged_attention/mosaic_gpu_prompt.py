"""Prompt attention for Hopper GPUs (compute capability 9.0) in Pallas Mosaic GPU. Compiled for H200, not yet run on
one.

XLA makes a list of work items from the batch (`work_lists.prompt_items`). An item is a tile of query rows against some
blocks of one row's cached tokens. After the kernel, XLA gathers the tokens' results from the items' results.

  grid      (kv_heads x shares of the group, items); programs whose item the batch does not need return at once
  tiles     128 query rows, (heads) x (tokens). Copies into swizzled shared memory begin at multiples of eight rows (see
            `hopper_rules`). So tiles begin at multiples of eight tokens of the batch and may hold up to seven tokens of
            the row before. Each head's queries are copied separately. A group whose heads do not fill tiles of this
            form is divided among several tiles (`heads_of_tile`), which read the same keys
  threads   three warpgroups: one fetches, two compute 64 query rows each
  pipeline  The fetching warpgroup reads page numbers from the block table. It copies a block of keys and values (pages,
            or part of one) into a ring in shared memory by TMA. Each slot has barriers `full` and `free` for its keys,
            and two more for its values. Codes have a ring of their own, from which the fetching warpgroup converts
            them. A computing warpgroup issues Q K^T of block i and P V of block i - 1 together (wgmma; P in registers,
            a running softmax in float32). It turns the scores of block i into exponentials while P V runs. The two
            computing warpgroups issue their products in turns, so that one computes exponentials while the other's
            products run (Shah et al. 2024, "FlashAttention-3", arXiv:2407.08608, section 3.2)
  parts     A few query tokens over a long context make too few tiles for the device. The blocks of such a row are
            divided among several items, whose float32 results XLA weighs by their log-sum-exps in the fusion that
            gathers. The number of parts follows from the row's own lengths and the shapes of the batch, so that a row's
            result is bitwise independent of the other rows. The price is room for all parts that rows may have, at
            head_dim 128 64 KiB for each of at most PROGRAMS programs. Batches of many rows (more than 272 / kv_heads)
            or tokens (more than 1,024) split none: they have many tiles, and the sums would cost another launch
  masks     Blocks that all query tokens see entirely are not masked, except an item's first block

A row's last page may hold NaN beyond the row's end. The fetching warpgroup clears such values before they are used.

Estimates for a block of 128 keys at head_dim 128, both computing warpgroups. The products take 2,048 clocks, at the
H200's 2,048 bf16 multiply-adds per clock and multiprocessor. 16,384 exponentials at 16 a clock take 1,024, and four
more operations for each score at 128 a clock take 512. Together these are fewer than the products' clocks and can
overlap with them. A tile's first and last block, masks, and the rescaling of values cannot overlap. That
leaves 70 to 80% of the matmul rate from about 4k cached tokens on. A program takes 229,504 of 232,448 bytes of shared
memory (three blocks in flight) and all registers, 216 of them for a computing thread. ptxas 12.9 keeps the products
asynchronous (asserted: no C7510 to C7518). It spills at most 16 bytes a thread, and a few dozen with codes at head_dim
256. JAX's own causal kernel refuses CUDA 12.8 and 12.9.0, because their ptxas miscompiles it; whether this kernel is
affected is unknown.
"""

from __future__ import annotations

from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp

from jaxserve.pallas_kernels import tuning
from jaxserve.pallas_kernels.paged_attention.mosaic_gpu_prompt_kernel import LOG2E, launch
from jaxserve.pallas_kernels.paged_attention.mosaic_gpu_prompt_tile import PromptTile, heads_of_tile, tokens_of_tile
from jaxserve.pallas_kernels.paged_attention.reference import MASKED
from jaxserve.pallas_kernels.types import KVPages
from jaxserve.pallas_kernels.work_lists import FIRST, LAST, TOKEN, Tiles, prompt_items

PROGRAMS = 1088  # that the parts of rows may take: eight for each of 132 multiprocessors and a few more
MOST_PARTS = 34  # even, since eight tokens may lie in two tiles; 17 parts for each of 8 KV heads fill the device
MOST_PARTS_OF_TOKENS = 4096  # limits (tokens of a batch) x (parts of a row), which XLA writes to memory
LEAST_PARTS = 4  # where a row may not have as many, it has one
UNROLLED = 8  # parts that are summed in one fusion


def prompts(
    out: jax.Array,
    q: jax.Array,
    pages: KVPages,
    block_tables: jax.Array,
    q_start: jax.Array,
    kv_len: jax.Array,
    num_decodes: jax.Array,
    *,
    first_page: jax.Array,
    sinks: jax.Array | None,
    interpret: Any,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> jax.Array:
    """Returns `out` with the tokens of rows from num_decodes on filled in. See `reference.paged_attention`."""
    tokens, _, group, head_dim = q.shape
    q = jnp.pad(q, [(0, -tokens % 8), (0, 0), (0, 0), (0, 0)])  # the engine's batches already have multiples of eight
    tuned = tuning.lookup("prompts", "mosaic_gpu", **tuning.of_attention(q, pages.data, block_tables), tokens=tokens)
    block = tuned.get("block") or (128 if head_dim <= 128 else 64)
    heads = heads_of_tile(group)
    sizes = heads, group // heads, min(tokens_of_tile(heads), q.shape[0]), head_dim, pages.page_size, block
    codes = None if pages.scale is None else pages.data.dtype
    tile = PromptTile(*sizes, q.dtype, scale, window, softcap, interpret, codes)
    rows = min(kv_len.shape[0], tokens)
    most = most_parts(rows * pages.kv_heads * tile.shares, q.shape[0])
    items, tiles = prompt_items(tile.tokens, block, window, q.shape[0], most, q_start, kv_len, num_decodes)
    slots = rows * most if most > 1 else 0
    results = launch(tile, slots, items, block_tables, first_page, q, pages)
    chosen = _of_tokens(tile, tokens, most, items, tiles, q_start, results, sinks)
    token = jnp.arange(tokens, dtype=jnp.int32)
    theirs = (token >= q_start[num_decodes]) & (token < q_start[-1])
    return jnp.where(theirs[:, None, None, None], chosen.reshape(out.shape).astype(out.dtype), out)


def most_parts(programs: int, tokens: int) -> int:
    """How many parts a row may have. `programs` (rows x KV heads) is how many the batch takes with one tile a row.

    The limit follows from shapes only, and a row's number of parts from its own length, so that its result is bitwise
    independent of other rows.
    """
    most = min(PROGRAMS // programs, MOST_PARTS, MOST_PARTS_OF_TOKENS // tokens)
    return most if most >= LEAST_PARTS else 1


def _of_tokens(
    tile: PromptTile, tokens: int, most: int, items: jax.Array, tiles: Tiles, q_start: jax.Array, results: list, sinks
) -> jax.Array:
    """Gathers the tokens' results [tokens, kv_heads, shares, heads, head_dim] from those of the tiles.

    The places are the same in all layers, so XLA computes them once a step.
    """
    token = jnp.arange(tokens, dtype=jnp.int32)
    row = jnp.searchsorted(q_start, token, side="right", method="compare_all").astype(jnp.int32) - 1
    item, slot, parts = tiles.of_tokens(tile.tokens, jnp.clip(row, 0, len(tiles.parts) - 1), token)
    count = len(items)
    used = tile.heads * tile.tokens

    def places(which: jax.Array, of: jax.Array) -> jax.Array:
        """Gathers the tokens' places in items `which` [tokens, …], as [tokens, …, kv_heads, shares, heads, …]."""
        shape = len(of), -1, tile.shares, tile.heads, tile.tokens, *of.shape[3:]
        return of[:, :, :used].reshape(shape)[which, :, :, :, lane.reshape(-1, *[1] * (which.ndim - 1))]

    item = jnp.clip(item, 0, count - 1)
    lane = jnp.clip(token - items[item, TOKEN], 0, tile.tokens - 1)
    values = places(item, results[0])
    logs = places(item, results[1])
    of_head = None if sinks is None else (sinks * LOG2E).reshape(1, -1, tile.shares, tile.heads)
    if of_head is not None:
        values = values.astype(jnp.float32) * jax.nn.sigmoid((logs - of_head) / LOG2E)[..., None]
    if most == 1:
        return values
    merged = _merged(most, items, item, slot, parts, places, results, of_head)
    return jnp.where((parts > 1)[:, None, None, None, None], merged, values.astype(jnp.float32))


def _merged(most, items, item, slot, parts, places, results, of_head) -> jax.Array:
    """Sums the parts' values, weighted by their log-sum-exps."""

    def logs(item: jax.Array, part: jax.Array | int, parts: jax.Array) -> tuple[jax.Array, jax.Array]:
        at = jnp.clip(item - part, 0, len(items) - 1)
        real = (part < parts) & (items[at, LAST] > items[at, FIRST])
        return real, jnp.where(real[..., None, None, None], places(at, results[1]), MASKED)

    def values(which: jax.Array, real: jax.Array) -> jax.Array:
        found = places(jnp.clip(which, 0, len(results[2]) - 1), results[2])
        return jnp.where(real[..., None, None, None, None], found, 0.0)

    if most > UNROLLED:  # XLA writes the products to memory before it sums them
        part = jnp.arange(most, dtype=jnp.int32)
        real, found = logs(item[:, None], part, parts[:, None])
        peak = found.max(axis=1) if of_head is None else jnp.maximum(found.max(axis=1), of_head)
        weights = jnp.exp2(found - peak[:, None])  # [tokens, most, kv_heads, shares, heads]
        total = weights.sum(axis=1) + (0.0 if of_head is None else jnp.exp2(of_head - peak))
        return ((weights / total[:, None])[..., None] * values(slot[:, None] + part, real)).sum(axis=1)
    # Part by part: slicing the weights of all parts at once would cost XLA a launch.
    each = [logs(item, i, parts) for i in range(most)]
    sink = [] if of_head is None else [of_head]
    highest = reduce(jnp.maximum, [found for _, found in each] + sink)
    weight = [jnp.exp2(found - highest) for _, found in each]
    whole = reduce(jnp.add, weight + [jnp.exp2(x - highest) for x in sink])
    weighed = [(weight[i] / whole)[..., None] * values(slot + i, real) for i, (real, _) in enumerate(each)]
    return reduce(jnp.add, weighed)
