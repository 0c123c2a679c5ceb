"""Cuts the rows of a plan into batches of a few fixed shapes, and packs each batch into a buffer (host side)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache, partial

import numpy as np

from jaxserve.execution.cost import FEW, StepCost
from jaxserve.execution.sampling import Sampled
from jaxserve.execution.step_shape import StepShape
from jaxserve.scheduling.running_table import RunningTable
from jaxserve.scheduling.step_plan import Rows


@dataclass(frozen=True)
class StepBatch:
    """The rows that one call of a compiled step advances. Rows of one token come first."""

    shape: StepShape
    rows: Rows

    @property
    def first_tokens(self) -> np.ndarray:
        """The index of each row's first token in the batch."""
        return np.cumsum(self.rows.count) - self.rows.count

    def pack(self, running: RunningTable, table_updates: np.ndarray) -> np.ndarray:
        return pack(self, running, table_updates)

    def of_rows(self, sampled: Sampled) -> Sampled:
        """The samples of the batch's rows, which are the first of the bucket's."""
        return sampled


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
) -> list[StepShape]:
    """The buckets of an engine: first those for decodes only, then mixed ones; the smaller first within each kind.

    A plan larger than the largest bucket runs as several batches. On CPU (`cost` None) several batches cost no more
    than one, because arithmetic dominates from a few rows on. A CPU therefore has few buckets, which compile fast: two
    for decodes and one mixed one if kernels skip padding (`padding_is_free`).

    Accelerators read all weights for each batch, so their buckets go up to the engine's limits, rounded up to sizes
    that kernels take. While reading the weights takes longer than the arithmetic, padding costs little, and a bucket is
    up to four times as large as the one before. Larger buckets cost at most 1.5 times what their smallest batch would
    without padding. Steps with prompts beside decodes mostly have `chunk` tokens, so there is a bucket of that size.
    At most MOST_DECODES and MOST_MIXED of these sizes remain: those that save the most (`_thinned`).

    The buckets of an 8B model on an H200 with 256 sequences and 8,192 tokens (`tests/engine/test_buckets.py` checks
    them, and what padding costs):

      weights   decodes                 mixed
      bf16      1 4 16 64 256           16 64 256 384 512 1024 8192
      int4      1 32 96 128 192 256     32 96 128 192 256 512 8192
    """
    if cost is None:
        decodes, mixed = ({1, 32}, {(128, 32)}) if padding_is_free else ({1, 8, 32}, {(64, 32), (256, 32)})
        decodes = {min(rows, max_num_seqs) for rows in decodes}
        mixed = {(min(tokens, max_tokens), min(rows, max_num_seqs)) for tokens, rows in mixed}
    else:
        decodes = _thinned(_sizes(1, max_num_seqs, cost), MOST_DECODES, {1}, _in_one, cost=cost)
        usual = {_rounded(chunk)} if chunk and FEW <= chunk < max_tokens else set()
        mixed_tokens = {*_sizes(FEW, max_tokens, cost), *usual}
        mixed_tokens = _thinned(mixed_tokens, MOST_MIXED, usual, partial(_cheapest, cost=cost), cost=cost)
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


def split(rows: Rows, shapes: list[StepShape], cost: StepCost | None = None) -> Iterator[StepBatch]:
    """Cuts a plan's rows into batches that fit the buckets. A prompt's chunk may continue in the next batch.

    With `cost`, the batches that cost least are chosen. Rows of one token go through decode buckets, unless computing
    them beside the prompts costs less, or without `cost`, needs no more tokens with padding.
    """
    decode_shapes = [shape for shape in shapes if shape.decode_only]
    mixed_shapes = [shape for shape in shapes if not shape.decode_only]
    if rows.only_decodes and decode_shapes and len(rows) <= decode_shapes[-1].rows:
        yield _batch(decode_shapes, rows, len(rows))
        return
    decodes = (rows.count == 1) & ~rows.scores_prompt & bool(decode_shapes)
    if decodes.any() and not decodes.all() and _go_together(rows, decodes, decode_shapes, mixed_shapes, cost):
        decodes = np.zeros_like(decodes)
    if decodes.any():
        index = np.flatnonzero(decodes)
        most = decode_shapes[-1].rows
        for at in range(0, len(index), most):
            some = rows.take(index[at : at + most])
            yield _batch(decode_shapes, some, len(some))
    checks = rows.checks & rows.scores  # the program that keeps hidden states for scores checks no proposals
    for kind in (~decodes & ~checks, checks):
        if kind.any():
            yield from split_mixed(rows.take(np.flatnonzero(kind)), mixed_shapes, cost)


def _go_together(
    rows: Rows,
    decodes: np.ndarray,
    decode_shapes: list[StepShape],
    mixed_shapes: list[StepShape],
    cost: StepCost | None,
) -> bool:
    """Whether decodes and prompts together cost less than apart. Without `cost`: whether one batch for all rows has no
    more tokens, padding included, than two."""
    tokens = int(rows.count.sum())
    alone = int(np.count_nonzero(decodes))
    if cost is not None:
        sizes = _tokens(mixed_shapes[-1:] if rows.scores_prompt.any() else mixed_shapes)  # see `_mixed`
        separate = (*_cheapest(alone, _tokens(decode_shapes), None), *_cheapest(tokens - alone, sizes, cost))
        return sum(map(cost, _cheapest(tokens, sizes, cost))) < sum(map(cost, separate))
    one = fitting(mixed_shapes, tokens, len(rows))
    decode = fitting(decode_shapes, alone, alone)
    other = fitting(mixed_shapes, tokens - alone, len(rows) - alone)
    return bool(one and (not decode or not other or one.tokens <= decode.tokens + other.tokens))


def fitting(shapes: list[StepShape], tokens: int, rows: int) -> StepShape | None:
    """The first bucket with room for `tokens` tokens and `rows` rows; None if there is none."""
    return next((shape for shape in shapes if shape.tokens >= tokens and shape.rows >= rows), None)


def _tokens(shapes: list[StepShape]) -> tuple[int, ...]:
    return tuple(shape.tokens for shape in shapes)


def _cheapest(tokens: int, sizes: tuple[int, ...], cost: StepCost | None) -> tuple[int, ...]:
    """The sizes of the buckets that hold `tokens` tokens at the least cost. All except the last are full."""
    full, rest = divmod(tokens, sizes[-1])
    return (sizes[-1],) * full + (_cheapest_within(rest, sizes, cost) if rest else ())


@lru_cache(maxsize=2**15)
def _cheapest_within(tokens: int, sizes: tuple[int, ...], cost: StepCost | None) -> tuple[int, ...]:
    whole = (next(size for size in sizes if size >= tokens),)
    smaller = max((size for size in sizes if size < tokens), default=None)
    if cost is None or smaller is None:
        return whole
    cut = (smaller, *_cheapest(tokens - smaller, sizes, cost))
    return min(whole, cut, key=lambda some: sum(map(cost, some)))


@dataclass
class Pieces:
    """Rows cut at the ends of batches. Piece i is the tokens [first[i], first[i] + count[i]) of row `row[i]`."""

    row: list[int] = field(default_factory=list)
    first: list[int] = field(default_factory=list)
    count: list[int] = field(default_factory=list)

    def add(self, row: int, first: int, count: int) -> None:
        self.row.append(row)
        self.first.append(first)
        self.count.append(count)

    def __len__(self) -> int:
        return len(self.row)

    def of(self, rows: Rows) -> Rows:
        """The pieces as rows, with rows of one token first. Only the last piece of a row samples."""
        count = np.asarray(self.count, np.int32)
        first = np.asarray(self.first, np.int32)
        order = np.argsort(count > 1, kind="stable")
        pieces = rows.take(np.asarray(self.row)[order])
        ends = pieces.end
        pieces.start = pieces.start + first[order]
        pieces.count = count[order]
        pieces.num_new = np.where(pieces.end == ends, pieces.num_new, 0)
        return pieces


def split_mixed(rows: Rows, shapes: list[StepShape], cost: StepCost | None) -> Iterator[StepBatch]:
    """Fills one batch after the other with as many tokens and rows as its bucket holds."""
    most = shapes[-1]
    cut = cost is not None and not rows.scores_prompt.any()
    sizes = iter(_cheapest(int(rows.count.sum()), _tokens(shapes), cost) if cut else ())
    pieces = Pieces()
    room = next(sizes, most.tokens)
    whole = rows.checks
    for i, left in enumerate(rows.count.tolist()):
        at = 0
        if left > room and whole[i]:  # proposals are checked in one pass
            if len(pieces):
                yield _mixed(pieces.of(rows), shapes)
            pieces = Pieces()
            room = max(next(sizes, most.tokens), left)
        while left:
            count = min(left, room)
            pieces.add(i, at, count)
            at = at + count
            left = left - count
            room = room - count
            if room == 0 or len(pieces) == most.rows:
                yield _mixed(pieces.of(rows), shapes)
                pieces = Pieces()
                room = next(sizes, most.tokens)
    if len(pieces):
        yield _mixed(pieces.of(rows), shapes)


def _mixed(rows: Rows, shapes: list[StepShape]) -> StepBatch:
    # Hidden states are scored in the largest bucket only, so that one program returns them.
    return _batch(shapes[-1:] if rows.scores_prompt.any() else shapes, rows, int(rows.count.sum()))


def _batch(shapes: list[StepShape], rows: Rows, tokens: int) -> StepBatch:
    shape = fitting(shapes, tokens, len(rows))
    assert shape is not None
    return StepBatch(shape, rows)


def _show(
    fields: dict[str, np.ndarray], running: RunningTable, known: np.ndarray, slot: np.ndarray, position: np.ndarray
) -> None:
    """Tells the devices where features of pictures stand in the place of the `known` tokens of a buffer, and the
    positions of those in prompts with pictures."""
    prompts = running.looks[slot] & (position < running.prompt_len[slot])
    slot = slot[prompts]
    position = position[prompts]
    shown = running.shown[slot, position]
    place = known[prompts]
    fields["tokens"][place] = np.where(shown < 0, shown, fields["tokens"][place])
    if len(fields["positions"]):
        fields["positions"].reshape(3, -1)[:, place] = running.positions[:, slot, position]


def pack(batch: StepBatch, running: RunningTable, table_updates: np.ndarray, *, defers: bool = True) -> np.ndarray:
    """The step's buffer, int32 [shape.words]; table_updates: int32 [3, up to shape.table_updates]. defers: rows with a
    mask are left to `sample_deferred`.

    For example, the sequence in slot 3 decodes: it computes its last token, which only the devices know yet. The
    sequence in slot 5 computes the first three tokens of its prompt, 11, 12 and 13, for which page 9 enters its block
    table. In a bucket of 8 tokens, 4 rows and 4 table updates, of an engine with 6 slots:

      tokens           -1 11 12 13 -1 -1 -1 -1    -1: the slot's last token, or padding
      q_start          0 1 4 4 4                  where each row's tokens begin; padding rows have none
      slot             3 5 6 6                    6 is the padding slot, for padding
      num_new          1 0 0 0                    the prompt goes on in the next step, so it samples nothing
      tokens_per_call  1
      num_decodes      1
      update_slot      5 6 6 6
      update_index     0 0 0 0
      update_page      9 0 0 0
    """
    shape = batch.shape
    rows = batch.rows
    n = len(batch.rows)
    packed = shape.empty(running.num_slots)
    fields = {name: packed[at : at + size] for name, (at, size) in shape.fields.items()}
    slot = rows.slot
    fields["slot"][:n] = slot
    num_new = rows.num_new
    if defers and running.batch.any_masked:
        num_new = np.where(running.masked[slot], -num_new, num_new)
    fields["num_new"][:n] = num_new
    fields["tokens_per_call"][0] = max(rows.num_new.max(), 1)
    if rows.only_decodes:
        fields["q_start"][:n] = np.arange(n)
        fields["q_start"][n:] = n
        fields["num_decodes"][0] = n
        position = rows.start
    else:
        q_end = np.cumsum(rows.count)
        fields["q_start"][1 : n + 1] = q_end
        fields["q_start"][n + 1 :] = q_end[-1]
        fields["num_decodes"][0] = np.count_nonzero(rows.count == 1)
        row = np.repeat(np.arange(n), rows.count)
        position = (rows.end - q_end)[row] + np.arange(len(row))
        slot = slot[row]
    known = np.flatnonzero(position < running.known[slot] + running.proposed[slot])
    if len(known):
        fields["tokens"][known] = running.tokens[slot[known], position[known]]
        if running.looks.any():
            _show(fields, running, known, slot[known], position[known])
    if table_updates.size:
        for name, column in zip(("update_slot", "update_index", "update_page"), table_updates, strict=True):
            fields[name][: len(column)] = column
    return packed
