"""From a plan to packed buffers of a few fixed shapes (host side)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from jaxserve.scheduler import Scheduled
from jaxserve.steps import StepShape


@dataclass(frozen=True)
class Batch:
    """Rows that one call of a compiled step advances; those of one token first."""

    shape: StepShape
    rows: list[Scheduled]


def step_shapes(platform: str, max_num_seqs: int, max_tokens: int, page_size: int) -> list[StepShape]:
    """The buckets of an engine, the smaller first within each kind.

    A plan larger than the largest bucket runs as several batches. On CPU that costs nothing from a few rows on, because
    the arithmetic dominates, so there are few buckets, which compile fast; accelerators read all weights for each
    batch, so theirs go up to the engine's limits.
    """
    if platform == "cpu":
        decodes, mixed = {1, 8, 32}, {(32, 8), (256, 32)}
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


def split(rows: list[Scheduled], shapes: list[StepShape]) -> Iterator[Batch]:
    """Cuts a plan's rows into batches that fit the buckets; a prompt's chunk may go on in the next batch.

    Rows of one token go through decode buckets where there are any, alone: they do not pay for a prompt's padding.
    """
    decode_shapes = [shape for shape in shapes if shape.decode_only]
    mixed_shapes = [shape for shape in shapes if not shape.decode_only]
    decodes = [row for row in rows if decode_shapes and row.count == 1 and not row.scores_prompt]
    if decodes:
        most = decode_shapes[-1].rows
        for at in range(0, len(decodes), most):
            some = decodes[at : at + most]
            yield Batch(next(shape for shape in decode_shapes if shape.rows >= len(some)), some)
        rows = [row for row in rows if row.count > 1 or row.scores_prompt]
    largest = mixed_shapes[-1]
    batch: list[Scheduled] = []
    room = largest.tokens
    for row in rows:
        while row.count:
            piece, row = _cut(row, room)
            batch.append(piece)
            room -= piece.count
            if room == 0 or len(batch) == largest.rows:
                yield _mixed(batch, mixed_shapes)
                batch, room = [], largest.tokens
    if batch:
        yield _mixed(batch, mixed_shapes)


def _cut(row: Scheduled, count: int) -> tuple[Scheduled, Scheduled]:
    """The row's first `count` tokens, and what is left of it (maybe nothing)."""
    if row.count <= count:
        return row, Scheduled(row.seq, row.end, 0, False)
    return Scheduled(row.seq, row.start, count, False), Scheduled(
        row.seq, row.start + count, row.count - count, row.samples
    )


def _mixed(rows: list[Scheduled], shapes: list[StepShape]) -> Batch:
    tokens = sum(row.count for row in rows)
    shape = next(shape for shape in shapes if shape.tokens >= tokens and shape.rows >= len(rows))
    return Batch(shape, sorted(rows, key=lambda row: row.count > 1))


def pack(batch: Batch, num_slots: int) -> tuple[np.ndarray, np.ndarray]:
    """The step's buffer, int32 [shape.words], and block-table entries that did not fit in it, int32 [3, any]."""
    shape, rows = batch.shape, batch.rows
    packed = np.zeros(shape.words, np.int32)
    field = {name: packed[at : at + size] for name, (at, size) in shape.fields().items()}
    field["slot"][:] = num_slots
    field["update_slot"][:] = num_slots

    updates: list[tuple[int, int, int]] = []
    at = 0
    for i, row in enumerate(rows):
        seq = row.seq
        known = seq.tokens[row.start : row.end]
        field["tokens"][at : at + row.count] = known if len(known) == row.count else -1
        field["q_start"][i] = at
        field["kv_len"][i] = row.end
        field["slot"][i] = seq.slot
        field["sampled"][i] = row.samples
        at += row.count
        updates.extend((seq.slot, index, seq.pages[index]) for index in range(seq.pages_sent, len(seq.pages)))
        seq.pages_sent = len(seq.pages)
    field["q_start"][len(rows) :] = at
    field["num_decodes"][0] = sum(row.count == 1 for row in rows)

    table = np.asarray(updates, np.int32).reshape(-1, 3).T
    fits = min(table.shape[1], shape.table_updates)
    for name, column in zip(("update_slot", "update_index", "update_page"), table, strict=True):
        field[name][:fits] = column[len(column) - fits :]
    return packed, table[:, : table.shape[1] - fits]
