"""The sizes of an engine's buckets: few, and so many that padding costs little."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial

from jaxserve.execution.cost import FEW, StepCost
from jaxserve.execution.step_buffer import cheapest
from jaxserve.execution.step_shape import StepShape

MAX_PADDING = 1.5  # most cost of a bucket, relative to that of its smallest batch without padding
MAX_GROWTH = 4  # most tokens of a bucket, relative to the one before: padding is never quite free
TOKEN_MULTIPLE = 8  # kernels take numbers of tokens that are multiples of this one, and smaller powers of two
# Each bucket is a program that an accelerator compiles for seconds. With the three others that multiply with the output
# head, a start compiles at most 16 of them.
MOST_DECODES = 6
MOST_MIXED = 7
# A bucket with twice a batch's tokens costs this share more even where the roofline says that padding is free. Assumed.
PADDING_COST = 0.03
BATCH_SECONDS = 1e-3  # of a further batch for the same tokens: dispatch, and cached tokens are read again. Assumed.
SAMPLES = 64  # numbers of tokens at which sets of buckets are compared


def step_shapes(
    max_num_seqs: int,
    max_tokens: int,
    page_size: int,
    *,
    cost: StepCost | None = None,
    chunk: int | None = None,
    num_groups: int = 1,
    padding_is_free: bool = False,
    three_positions: bool = False,
    least: int = 0,
) -> list[StepShape]:
    """The buckets of an engine: first those for decodes only, then mixed ones; the smaller first within each kind.

    A plan larger than the largest bucket runs as several batches. On CPU (`cost` None) several batches cost no more
    than one, because arithmetic dominates from a few rows on. A CPU therefore has few buckets, which compile fast: two
    for decodes and one mixed one if kernels skip padding (`padding_is_free`).

    Accelerators read all weights for each batch, so their buckets go up to the engine's limits, rounded up to sizes
    that kernels take. While reading the weights takes longer than the arithmetic, padding costs little, and a bucket is
    up to four times as large as the one before. Larger buckets cost at most 1.5 times what their smallest batch would
    without padding. Steps with prompts beside decodes mostly have `chunk` tokens, so there is a bucket of that size.
    At most MOST_DECODES and MOST_MIXED of these sizes remain: those that save the most (`_thinned`). The largest has at
    least `least` tokens, if a step may have as many.

    The buckets of an 8B model on an H200 with 256 sequences and 8,192 tokens (`tests/engine/test_buckets.py` checks
    them, and what padding costs):

      weights   decodes                 mixed
      bf16      1 4 16 64 256           16 64 256 384 512 1024 8192
      int4      1 32 96 128 192 256     32 96 128 192 256 512 8192
    """
    if cost is None:
        decodes, mixed = ({1, 32}, {(128, 32)}) if padding_is_free else ({1, 8, 32}, {(64, 32), (256, 32)})
        decodes = {min(rows, max_num_seqs) for rows in decodes}
        mixed = {(min(max(tokens, least), max_tokens), min(rows, max_num_seqs)) for tokens, rows in mixed}
    else:
        decodes = _thinned(_sizes(1, max_num_seqs, cost), MOST_DECODES, {1}, _in_one, cost=cost)
        usual = {_rounded(chunk)} if chunk and FEW <= chunk < max_tokens else set()
        mixed_tokens = {*_sizes(FEW, max_tokens, cost), *usual}
        mixed_tokens = _thinned(mixed_tokens, MOST_MIXED, usual, partial(cheapest, cost=cost), cost=cost)
        mixed = {(tokens, min(tokens, max_num_seqs)) for tokens in mixed_tokens}
    of_any = partial(StepShape.of, page_size=page_size, num_groups=num_groups, three_positions=three_positions)
    of_decodes = partial(of_any, decode_only=True)
    of_mixed = partial(of_any, decode_only=False)
    *smaller, largest = sorted(mixed)
    mixed_shapes = [*(of_mixed(*sizes) for sizes in smaller), of_mixed(*largest, scored=True)]
    return [*(of_decodes(rows, rows) for rows in sorted(decodes)), *mixed_shapes]


def _sizes(first: int, last: int, cost: StepCost) -> Iterator[int]:
    """Tokens of buckets for 1 to `last` tokens, the largest first and none below `first`."""
    size = max(_rounded(last), first)
    yield size
    while size > first:
        least = next(n for n in range(1, size) if cost(size) <= MAX_PADDING * cost(n + 1))
        step = 1 << max(least.bit_length() - 2, 0)
        below = -(-least // step) * step  # two significant bits, unless that adds much padding
        largest = size // 2 if size <= FEW else size - TOKEN_MULTIPLE
        below = min(_rounded(below if 8 * below <= 7 * size else least), largest)
        size = max(below, 1 << ((size - 1) // MAX_GROWTH).bit_length(), first)
        yield size


def _thinned(
    sizes: Iterable[int], most: int, kept: set[int], divided: Callable[[int, tuple[int, ...]], tuple[int, ...]],
    *, cost: StepCost,
) -> set[int]:  # fmt: skip
    """Leaves out sizes until there are at most `most`: each time the one whose absence costs least, as a mean over
    numbers of tokens that lie evenly on a logarithmic scale. The largest size and those in `kept` stay. `divided` gives
    the sizes of the batches that a step runs as, by its tokens and the sizes that there are."""
    found = tuple(sorted(sizes))
    numbers = [round(found[-1] ** (i / SAMPLES)) for i in range(SAMPLES + 1)]

    def mean(some: tuple[int, ...]) -> float:
        return sum(_relative(n, divided(n, some), cost) for n in numbers)

    while len(found) > most:
        fewer = [tuple(size for size in found if size != left_out) for left_out in found[:-1] if left_out not in kept]
        found = min(fewer, key=mean)
    return set(found)


def _relative(tokens: int, batches: tuple[int, ...], cost: StepCost) -> float:
    """What these batches cost for so many tokens, relative to one batch without padding."""
    padding = PADDING_COST * math.log2(sum(batches) / tokens)
    return padding + (sum(map(cost, batches)) + BATCH_SECONDS * (len(batches) - 1)) / cost(tokens)


def _in_one(tokens: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """The size of the bucket that holds so many rows in one batch."""
    return (next(size for size in sizes if size >= tokens),)


def _rounded(tokens: int) -> int:
    """The smallest size from `tokens` on that kernels take: a power of two, or a multiple of TOKEN_MULTIPLE."""
    return 1 << (tokens - 1).bit_length() if tokens <= TOKEN_MULTIPLE else -(-tokens // TOKEN_MULTIPLE) * TOKEN_MULTIPLE
