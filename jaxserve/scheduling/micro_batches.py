"""Which sequences decode in the next step of a pipeline, so that its stages work on different steps at the same time.

A sequence that has sampled in a step can sample again when that step has left the last stage. So running sequences take
as many turns as there are stages: while one turn is in the last stage, the next one is in the stage before.
"""

from __future__ import annotations

import numpy as np

from jaxserve.scheduling.running_table import RunningTable
from jaxserve.scheduling.step_plan import Rows

LONG_AGO = -(2**40)


class MicroBatches:
    """Chooses the decodes of each step. With one stage these are all decodes.

    If there are several groups of devices with sequences of their own (`groups`), each step has its share of the
    sequences of every group, so that no group idles while others work.

    Attributes:
      held_back: sequences of each group that could decode and were not chosen the last time, intp [groups].
    """

    def __init__(self, stages: int, num_slots: int, groups: int = 1):
        self.stages = stages
        self.held_back = np.zeros(groups, np.intp)
        self._step = 0
        self._planned = np.full(num_slots, LONG_AGO)  # the last step in which each slot's sequence sampled

    def choose(self, running: RunningTable, decodes: np.ndarray, *, may_wait: bool) -> np.ndarray:
        """Some of `decodes`, bool [sequences of the lineup]: as many as the turns need to be equal, those first that
        have waited longest. They are sequences whose last token has left the last stage when the step begins. If there
        is none and the step `may_wait`, they are sequences whose last token is still computed: the devices wait for it,
        and the host is still ahead of them.
        """
        if self.stages == 1:
            return decodes
        slot = running.lineup.slot
        planned = self._planned[slot]
        pending = running.total[slot] - running.known[slot]
        ready = decodes & ((planned <= self._step - self.stages) | (pending == 0))
        if may_wait and not ready.any():
            waits = decodes & (pending == 1) & ~running.lineup.one_at_a_time
            ready = waits & (planned == planned[waits].min(initial=self._step))
        chosen = np.zeros_like(decodes)
        owner = running.group_of(slot)
        for group in range(len(self.held_back)):
            some = decodes & (owner == group)
            here = np.flatnonzero(ready & (owner == group))
            under_way = len(np.unique(planned[some & ~ready]))  # turns on their way through the stages
            count = int(np.count_nonzero(some))
            most = max(self.stages - under_way, 1)
            size = min(-(-count // self.stages), -(-len(here) // most))
            chosen[here[np.argsort(planned[here], kind="stable")[:size]]] = True
            self.held_back[group] = count - size
        return chosen

    def begin(self, rows: Rows) -> None:
        """A step of these rows is planned."""
        self._planned[rows.slot[rows.num_new > 0]] = self._step
        self._step += 1
