"""Background sequences, those of batches, which step aside for all others (host side)."""

from __future__ import annotations

from collections.abc import Callable

from jaxserve.scheduling.running_table import RunningTable
from jaxserve.scheduling.sequence import Sequence
from jaxserve.scheduling.waiting import Waiting


def step_aside(
    running: RunningTable,
    waiting: Waiting,
    can_admit: Callable[[], bool],
    preempt: Callable[[Sequence], None],
    tokens_per_call: int,
) -> int:
    """Decides what the next step does about background sequences. Returns how many tokens each row may sample in it.

    While others wait or have a prompt to compute, background sequences compute nothing and do not begin, and lose slots
    and pages that a waiting one needs. Otherwise, if there are any, the step is short (`RunningTable.short_steps`),
    because somebody may come: it computes no more tokens than one with prompts beside decodes, and one token of each
    row, and the engine does not plan the next one before it has ended.
    """
    has_background = len(running) > 0 and running.last.is_background
    aside = waiting.has_foreground
    if not aside and has_background:
        slot = running.batch.slot[~running.batch.background]
        aside = bool((running.total[slot] - running.computed[slot] > 1).any())
    running.steps_aside = waiting.holds_background = aside
    running.short_steps = not aside and (has_background or bool(waiting))
    if not aside:
        return 1 if running.short_steps else tokens_per_call
    if has_background and running.proposes:
        running.drop_proposals(running.batch.slot[running.batch.background])
    while len(running) > 0 and running.last.is_background and waiting.has_foreground:
        if waiting.peek().pending_tokens or can_admit():
            break
        preempt(running.last)
    return tokens_per_call
