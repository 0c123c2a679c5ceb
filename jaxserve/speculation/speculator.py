"""Which running sequences get proposals, and how many."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from jaxserve.config import EngineConfig
from jaxserve.scheduling.running_table import RunningTable
from jaxserve.scheduling.sequence import Sequence
from jaxserve.scheduling.step_plan import Rows
from jaxserve.speculation.ngram import Ngram

METHODS = {"ngram": Ngram}
REST = 16  # tokens without proposals after proposals that failed


class Method(Protocol):
    def propose(self, tokens: np.ndarray, count: int) -> np.ndarray:
        """Up to `count` tokens that may follow `tokens`, int32 [any]."""
        ...


@dataclass
class Record:
    """What is known of a sequence's proposals. most: how many it may get; rests_until: number of its tokens from which
    on it gets some again."""

    most: int
    rests_until: int = 0


class Speculator:
    """Proposes tokens for sequences that decode, fewer where they fail.

    A sequence with proposals waits for the tokens of each step, because the next proposals need them. So a sequence
    whose proposals failed goes on without for a while.

    Args:
      most: proposals of a sequence in a step.
      max_rows: running sequences up to which there are proposals. Beyond, the rows themselves fill the devices.
    """

    def __init__(self, method: Method, most: int, max_rows: int):
        self._method, self._most, self._max_rows = method, most, max_rows
        self._records: dict[Sequence, Record] = {}
        self.num_drafts = self.num_proposed = self.num_accepted = 0
        self.accepted_at = [0] * most  # by position

    def propose(self, running: RunningTable) -> None:
        """Sets `proposed` and `speculates` of the running sequences before a step is planned."""
        seqs = running.lineup.seqs
        few = len(seqs) <= self._max_rows
        for seq in seqs:
            slot = seq.slot
            if running.unsettled[slot]:
                continue
            record = self._records.get(seq) or self._records.setdefault(seq, Record(self._most))
            wanted = few and self._allows(seq) and running.known[slot] >= record.rests_until and seq.num_outputs > 0
            running.speculates[slot], running.proposed[slot] = wanted, 0
            if not wanted or not running.known[slot] == running.total[slot] == running.computed[slot] + 1:
                continue  # a step in flight samples for it, or its prompt is not computed
            known, room = int(running.known[slot]), int(running.limit[slot] - running.known[slot])
            count = min(record.most, room - 1, int(running.ahead(slot)) - 1)
            if count <= 0:
                continue
            tokens = self._method.propose(running.tokens[slot, :known], count)
            running.tokens[slot, known : known + len(tokens)] = tokens
            running.proposed[slot] = len(tokens)
        if len(self._records) > 4 * running.num_slots:
            self._records = {seq: record for seq, record in self._records.items() if seq in set(seqs)}

    @staticmethod
    def _allows(seq: Sequence) -> bool:
        params = seq.params
        return not (params.has_mask or params.use_beam_search or seq.unforked)

    def learn(self, rows: Rows, tokens: np.ndarray) -> None:
        """Takes in what a step kept: tokens int32 [rows, draws], -1 where a row sampled none."""
        for i in np.flatnonzero(rows.checks).tolist():
            proposed, accepted = int(rows.num_new[i]) - 1, max(int(np.count_nonzero(tokens[i] >= 0)) - 1, 0)
            self.num_drafts += 1
            self.num_proposed += proposed
            self.num_accepted += accepted
            for at in range(accepted):
                self.accepted_at[at] += 1
            record = self._records.get(rows.seqs[i])
            if record is None:
                continue
            if accepted == proposed:
                record.most = min(self._most, 2 * record.most)
            elif accepted == 0:
                record.most //= 2
                if record.most == 0:
                    record.most, record.rests_until = 1, int(rows.end[i]) + REST


def make_speculator(config: EngineConfig) -> Speculator | None:
    """The speculator that the settings ask for."""
    given = config.speculative_config
    if given is None:
        return None
    method = Ngram(given.get("prompt_lookup_min", 2), given.get("prompt_lookup_max", 4))
    return Speculator(method, config.num_proposals, given.get("max_rows", 4))
