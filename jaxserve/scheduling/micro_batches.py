"""Which sequences decode in the next step of a pipeline, so that its stages work on different steps at the same time.

A sequence that has sampled in a step can sample again when that step has left the last stage. So running sequences take
turns in as many groups as there are stages: while one group is in the last stage, the next one is in the stage before.
"""

from __future__ import annotations

import numpy as np

from jaxserve.scheduling.running_table import RunningTable
from jaxserve.scheduling.step_plan import Rows

LONG_AGO = -(2**40)


class MicroBatches:
    """Chooses the decodes of each step. With one stage these are all decodes.

    Attributes:
      held_back: sequences that could decode and were not chosen the last time.
    """

    def __init__(self, stages: int, num_slots: int):
        self.stages, self.held_back = stages, 0
        self._step = 0
        self._planned = np.full(num_slots, LONG_AGO)  # the last step in which each slot's sequence sampled

    def choose(self, running: RunningTable, decodes: np.ndarray, *, may_wait: bool) -> np.ndarray:
        """Some of `decodes`, bool [sequences of the lineup]: as many as the groups need to be equal, those first that
        have waited longest. They are sequences whose last token has left the last stage when the step begins. If there
        is none and the step `may_wait`, they are sequences whose last token is still computed: the devices wait for it,
        and the host is still ahead of them.
        """
        if self.stages == 1:
            return decodes
        slot, stages = running.lineup.slot, self.stages
        planned, pending = self._planned[slot], running.total[slot] - running.known[slot]
        ready = decodes & ((planned <= self._step - stages) | (pending == 0))
        if may_wait and not ready.any():
            waits = decodes & (pending == 1) & ~running.lineup.one_at_a_time
            ready = waits & (planned == planned[waits].min(initial=self._step))
        groups = len(np.unique(planned[decodes & ~ready]))  # those on their way through the stages
        count = np.count_nonzero(decodes), np.count_nonzero(ready)
        size = min(-(-int(count[0]) // stages), -(-int(count[1]) // max(stages - groups, 1)))
        index = np.flatnonzero(ready)
        chosen = np.zeros_like(decodes)
        chosen[index[np.argsort(planned[index], kind="stable")[:size]]] = True
        self.held_back = int(np.count_nonzero(decodes & ~chosen))
        return chosen

    def begin(self, rows: Rows) -> None:
        """A step of these rows is planned."""
        self._planned[rows.slot[rows.num_new > 0]] = self._step
        self._step += 1
