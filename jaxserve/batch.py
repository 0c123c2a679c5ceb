"""From a plan to the packed buffer of a step (host side)."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from jaxserve.scheduler import StepPlan
from jaxserve.steps import StepShape


def step_shapes(max_num_seqs: int, max_tokens: int, page_size: int) -> list[StepShape]:
    """All buckets of an engine, smallest first: decode steps by powers of two, mixed steps by powers of four.

    Mixed steps come with few or with all rows, because each row costs a pass of the output head.
    """
    shapes = []
    for rows in _powers(1, max_num_seqs, 2):
        shapes.append(StepShape(rows, rows, _updates(rows, rows, page_size), decode_only=True))
    for tokens in _powers(32, max_tokens, 4):
        most = min(tokens, max_num_seqs)
        for rows in sorted({min(8, most), most}):
            shapes.append(StepShape(tokens, rows, _updates(tokens, rows, page_size), decode_only=False))
    return shapes


def _powers(first: int, last: int, factor: int) -> Iterable[int]:
    size = first
    while size < last:
        yield size
        size *= factor
    yield last


def _updates(tokens: int, rows: int, page_size: int) -> int:
    """Block-table entries that a step of so many tokens can add by itself."""
    return rows + tokens // page_size


def choose_shape(shapes: list[StepShape], plan: StepPlan) -> StepShape:
    """The smallest bucket that holds the plan."""
    tokens, rows = plan.num_tokens, len(plan.rows)
    decode_only = all(row.count == 1 and not row.scores_prompt for row in plan.rows)
    fitting = [s for s in shapes if s.tokens >= tokens and s.rows >= rows and (decode_only or not s.decode_only)]
    return min(fitting, key=lambda s: (not s.decode_only, s.tokens, s.rows))


def pack(plan: StepPlan, shape: StepShape, num_slots: int) -> tuple[np.ndarray, np.ndarray]:
    """The step's buffer, int32 [shape.words], and block-table entries that did not fit in it, int32 [3, any]."""
    packed = np.zeros(shape.words, np.int32)
    field = {name: packed[at : at + size] for name, (at, size) in shape.fields().items()}
    field["slot"][:] = num_slots
    field["update_slot"][:] = num_slots

    updates: list[tuple[int, int, int]] = []
    at = 0
    for i, row in enumerate(plan.rows):
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
    field["q_start"][len(plan.rows) :] = at
    field["num_decodes"][0] = sum(row.count == 1 for row in plan.rows)

    table = np.asarray(updates, np.int32).reshape(-1, 3).T
    fits = min(table.shape[1], shape.table_updates)
    for name, column in zip(("update_slot", "update_index", "update_page"), table, strict=True):
        field[name][:fits] = column[len(column) - fits :]
    return packed, table[:, : table.shape[1] - fits]
