"""Pages that sequences share: those that the next step would write to are copied first (host side)."""

from __future__ import annotations

from jaxserve.scheduling.block_manager import BlockManager
from jaxserve.scheduling.running_table import RunningTable
from jaxserve.scheduling.sequence import Sequence
from jaxserve.scheduling.step_plan import Rows


def shared_pages(rows: Rows, running: RunningTable, blocks: BlockManager) -> list[tuple[Sequence, int]]:
    """Pages that rows would write to and that have other owners or are cached: (sequence, index in its pages)."""
    shared = []
    groups = blocks.num_groups
    for seq in running.maybe_shared.intersection(rows.seqs):
        block = int(running.computed[seq.slot]) // blocks.page_size
        for index in range(block * groups, min((block + 1) * groups, len(seq.pages))):
            if not blocks.is_writable(seq.pages[index]):
                shared.append((seq, index))
    return sorted(shared, key=lambda pair: pair[0].order)


def unshare(
    rows: Rows, shared: list[tuple[Sequence, int]], running: RunningTable, blocks: BlockManager
) -> list[tuple[int, int]]:
    """Replaces shared pages by copies; returns the copies to make, (source, target) each."""
    copies = []
    for seq, index in shared:
        if not blocks.is_writable(seq.pages[index]):  # the last owner keeps the page
            copies.append(blocks.make_writable(seq.pages, index))
            running.show_pages(seq, index)
    if running.maybe_shared:
        running.maybe_shared.difference_update(rows.seqs)
    return copies


def common_prefix(one: list[int], other: list[int]) -> int:
    """How many of the first pages of two lists are equal. A binary search over slices takes microseconds for thousands
    of pages."""
    same = 0
    most = min(len(one), len(other))
    while same < most:
        middle = (same + most + 1) // 2
        if one[same:middle] == other[same:middle]:
            same = middle
        else:
            most = middle - 1
    return same
