"""From a plan to packed buffers of a few fixed shapes (host side)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from jaxserve.running import Rows, Running
from jaxserve.steps import StepShape


@dataclass(frozen=True)
class Batch:
    """Rows that one call of a compiled step advances; those of one token first."""

    shape: StepShape
    rows: Rows


def step_shapes(
    platform: str, max_num_seqs: int, max_tokens: int, page_size: int, *, padding_is_free: bool = False
) -> list[StepShape]:
    """The buckets of an engine, those of decodes first, the smaller first within each kind.

    A plan larger than the largest bucket runs as several batches. On CPU that costs nothing from a few rows on, because
    the arithmetic dominates, so there are few buckets, which compile fast; accelerators read all weights for each
    batch, so theirs go up to the engine's limits. Where kernels skip the padding, two and one will do.
    """
    if platform == "cpu":
        decodes, mixed = ({1, 32}, {(128, 32)}) if padding_is_free else ({1, 8, 32}, {(64, 32), (256, 32)})
    else:
        decodes = set(_powers(1, max_num_seqs, 2))
        mixed = {(tokens, tokens) for tokens in _powers(16, max_tokens, 4)}
    decodes = {min(rows, max_num_seqs) for rows in decodes}
    mixed = {(min(tokens, max_tokens), min(rows, max_num_seqs)) for tokens, rows in mixed}
    return [StepShape.of(rows, rows, page_size, decode_only=True) for rows in sorted(decodes)] + [
        StepShape.of(tokens, rows, page_size, decode_only=False) for tokens, rows in sorted(mixed)
    ]


def _powers(first: int, last: int, factor: int) -> Iterable[int]:
    size = first
    while size < last:
        yield size
        size *= factor
    yield last


def split(rows: Rows, shapes: list[StepShape]) -> Iterator[Batch]:
    """Cuts a plan's rows into batches that fit the buckets; a prompt's chunk may go on in the next batch.

    Rows of one token go through decode buckets where there are any, unless they fill a place that would be padding
    beside the prompts.
    """
    decode_shapes = [shape for shape in shapes if shape.decode_only]
    mixed_shapes = [shape for shape in shapes if not shape.decode_only]
    if rows.only_decodes and decode_shapes and len(rows) <= decode_shapes[-1].rows:
        yield _batch(decode_shapes, rows, len(rows))
        return
    decodes = (rows.count == 1) & ~rows.scores_prompt & bool(decode_shapes)
    if decodes.any() and not decodes.all() and _fit_together(rows, decodes, decode_shapes, mixed_shapes):
        decodes = np.zeros_like(decodes)
    if decodes.any():
        index = np.flatnonzero(decodes)
        most = decode_shapes[-1].rows
        for at in range(0, len(index), most):
            some = rows.take(index[at : at + most])
            yield _batch(decode_shapes, some, len(some))
    if not decodes.all():
        yield from _split_mixed(rows.take(np.flatnonzero(~decodes)), mixed_shapes)


def _fit_together(
    rows: Rows, decodes: np.ndarray, decode_shapes: list[StepShape], mixed_shapes: list[StepShape]
) -> bool:
    """One batch of all rows costs no more tokens, padding included, than decodes and prompts apart."""
    tokens, alone = int(rows.count.sum()), int(np.count_nonzero(decodes))
    together = _fitting(mixed_shapes, tokens, len(rows))
    one, other = _fitting(decode_shapes, alone, alone), _fitting(mixed_shapes, tokens - alone, len(rows) - alone)
    return bool(together and (not one or not other or together.tokens <= one.tokens + other.tokens))


def _fitting(shapes: list[StepShape], tokens: int, rows: int) -> StepShape | None:
    """The first bucket that is large enough."""
    return next((shape for shape in shapes if shape.tokens >= tokens and shape.rows >= rows), None)


def _split_mixed(rows: Rows, shapes: list[StepShape]) -> Iterator[Batch]:
    """Fills batch after batch with as many tokens and rows as the largest bucket holds."""
    most = shapes[-1]
    whole, first, count = [], [], []  # of each piece: its row, its first token in that row, its tokens
    room = most.tokens
    for i, left in enumerate(rows.count.tolist()):
        at = 0
        while left:
            piece = min(left, room)
            whole.append(i)
            first.append(at)
            count.append(piece)
            at, left, room = at + piece, left - piece, room - piece
            if room == 0 or len(whole) == most.rows:
                yield _mixed(rows, whole, first, count, shapes)
                whole, first, count, room = [], [], [], most.tokens
    if whole:
        yield _mixed(rows, whole, first, count, shapes)


def _mixed(rows: Rows, whole: list[int], first: list[int], count: list[int], shapes: list[StepShape]) -> Batch:
    """A batch of pieces of rows, those of one token first; a row's last piece draws its tokens."""
    order = np.argsort(np.asarray(count) > 1, kind="stable")
    pieces = rows.take(np.asarray(whole)[order])
    pieces.start, end = pieces.start + np.asarray(first, np.int32)[order], pieces.end
    pieces.count = np.asarray(count, np.int32)[order]
    pieces.draws = np.where(pieces.end == end, pieces.draws, 0)
    if pieces.scores_prompt.any():
        shapes = shapes[-1:]  # hidden states are scored in this bucket alone, which makes for one program less
    return _batch(shapes, pieces, sum(count))


def _batch(shapes: list[StepShape], rows: Rows, tokens: int) -> Batch:
    shape = _fitting(shapes, tokens, len(rows))
    assert shape is not None
    return Batch(shape, rows)


def pack(batch: Batch, running: Running, table_updates: np.ndarray) -> np.ndarray:
    """The step's buffer, int32 [shape.words]; table_updates: int32 [3, up to shape.table_updates]."""
    shape, rows, n = batch.shape, batch.rows, len(batch.rows)
    packed = shape.empty(running.num_slots)
    field = {name: packed[at : at + size] for name, (at, size) in shape.fields.items()}
    slot, end = rows.slot, rows.end
    field["slot"][:n] = slot
    field["kv_len"][:n] = end
    draws = rows.draws
    if running.lineup.any_masked:
        draws = np.where(running.masked[slot] & (draws > 0), -1, draws)
    field["draws"][:n] = draws
    field["steps"][0] = max(rows.draws.max(), 1)
    if rows.only_decodes:
        field["q_start"][:n] = np.arange(n)
        field["q_start"][n:] = n
        field["num_decodes"][0] = n
        position = rows.start
    else:
        q_end = np.cumsum(rows.count)
        field["q_start"][1 : n + 1] = q_end
        field["q_start"][n + 1 :] = q_end[-1]
        field["num_decodes"][0] = np.count_nonzero(rows.count == 1)
        row = np.repeat(np.arange(n), rows.count)
        position, slot = (end - q_end)[row] + np.arange(len(row)), slot[row]
    known = np.flatnonzero(position < running.known[slot])
    if len(known):
        field["tokens"][known] = running.tokens[slot[known], position[known]]
    if table_updates.size:
        for name, column in zip(("update_slot", "update_index", "update_page"), table_updates, strict=True):
            field[name][: len(column)] = column
    return packed
