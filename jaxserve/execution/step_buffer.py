"""Cuts the rows of a plan into batches of a few fixed shapes, and packs each batch into a buffer (host side)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from jaxserve.execution.cost import StepCost
from jaxserve.execution.sampling import Sampled
from jaxserve.execution.step_shape import StepShape
from jaxserve.scheduling.running_table import RunningTable
from jaxserve.scheduling.step_plan import Rows

Piece = tuple[int, int, int]  # of a row: its number, its first token in this piece, how many tokens


@dataclass(frozen=True)
class StepBatch:
    """The rows that one call of a compiled step advances. Rows of one token come first."""

    shape: StepShape
    rows: Rows

    @property
    def first_tokens(self) -> np.ndarray:
        """The index of each row's first token in the batch."""
        return np.cumsum(self.rows.count) - self.rows.count

    def pack(self, running: RunningTable, table_updates: np.ndarray, *, defers: bool = True) -> np.ndarray:
        """The step's buffer, int32 [shape.words]; table_updates: int32 [3, up to shape.table_updates]. defers: rows
        with a mask are left to `sample_deferred`.

        For example, the sequence in slot 3 decodes: it computes its last token, which only the devices know yet. The
        sequence in slot 5 computes the first three tokens of its prompt, 11, 12 and 13, for which page 9 enters its
        block table. In a bucket of 8 tokens, 4 rows and 4 table updates, of an engine with 6 slots:

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
        shape = self.shape
        rows = self.rows
        n = len(rows)
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

    def of_rows(self, sampled: Sampled) -> Sampled:
        """The samples of the batch's rows, which are the first of the bucket's."""
        return sampled


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
        separate = (*cheapest(alone, _tokens(decode_shapes), None), *cheapest(tokens - alone, sizes, cost))
        return sum(map(cost, cheapest(tokens, sizes, cost))) < sum(map(cost, separate))
    one = fitting(mixed_shapes, tokens, len(rows))
    decode = fitting(decode_shapes, alone, alone)
    other = fitting(mixed_shapes, tokens - alone, len(rows) - alone)
    return bool(one and (not decode or not other or one.tokens <= decode.tokens + other.tokens))


def fitting(shapes: list[StepShape], tokens: int, rows: int) -> StepShape | None:
    """The first bucket with room for `tokens` tokens and `rows` rows; None if there is none."""
    return next((shape for shape in shapes if shape.tokens >= tokens and shape.rows >= rows), None)


def _tokens(shapes: list[StepShape]) -> tuple[int, ...]:
    return tuple(shape.tokens for shape in shapes)


def cheapest(tokens: int, sizes: tuple[int, ...], cost: StepCost | None) -> tuple[int, ...]:
    """The sizes of the buckets that hold `tokens` tokens at the least cost. All except the last are full."""
    full, rest = divmod(tokens, sizes[-1])
    return (sizes[-1],) * full + (_cheapest_within(rest, sizes, cost) if rest else ())


@lru_cache(maxsize=2**15)
def _cheapest_within(tokens: int, sizes: tuple[int, ...], cost: StepCost | None) -> tuple[int, ...]:
    whole = (next(size for size in sizes if size >= tokens),)
    smaller = max((size for size in sizes if size < tokens), default=None)
    if cost is None or smaller is None:
        return whole
    cut = (smaller, *cheapest(tokens - smaller, sizes, cost))
    return min(whole, cut, key=lambda some: sum(map(cost, some)))


def split_mixed(rows: Rows, shapes: list[StepShape], cost: StepCost | None) -> Iterator[StepBatch]:
    """Fills one batch after the other with as many tokens and rows as its bucket holds."""
    most = shapes[-1]
    cut = cost is not None and not rows.scores_prompt.any()
    sizes = iter(cheapest(int(rows.count.sum()), _tokens(shapes), cost) if cut else ())
    pieces: list[Piece] = []
    room = next(sizes, most.tokens)
    whole = rows.checks
    for i, left in enumerate(rows.count.tolist()):
        at = 0
        while left:
            count = min(left, room)
            if whole[i]:  # proposals are checked in one pass
                count = left if left <= room else 0
            elif rows.seqs[i].images:  # and pictures may have to be computed in one
                begin = int(rows.start[i]) + at
                count = rows.seqs[i].step_end(begin, begin + count) - begin
            if not count:
                if pieces:
                    yield _mixed(rows, pieces, shapes)
                pieces = []
                room = max(next(sizes, most.tokens), left if whole[i] else most.tokens)
                continue
            pieces.append((i, at, count))
            at = at + count
            left = left - count
            room = room - count
            if room == 0 or len(pieces) == most.rows:
                yield _mixed(rows, pieces, shapes)
                pieces = []
                room = next(sizes, most.tokens)
    if pieces:
        yield _mixed(rows, pieces, shapes)


def _mixed(rows: Rows, pieces: list[Piece], shapes: list[StepShape]) -> StepBatch:
    """A batch of pieces, those of one token first. Only the last piece of a row samples."""
    row, first, count = np.asarray(pieces, np.int32).T
    order = np.argsort(count > 1, kind="stable")
    some = rows.take(row[order])
    ends = some.end
    some.start = some.start + first[order]
    some.count = count[order]
    some.num_new = np.where(some.end == ends, some.num_new, 0)
    # Hidden states are scored in the largest bucket only, so that one program returns them.
    return _batch(shapes[-1:] if some.scores_prompt.any() else shapes, some, int(some.count.sum()))


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
