"""What a method of speculation proposes, and what methods have in common."""

from __future__ import annotations

from collections.abc import Sequence as List
from typing import NamedTuple

import numpy as np

from jaxserve.scheduling.running_table import RunningTable
from jaxserve.scheduling.sequence import Sequence
from jaxserve.scheduling.step_plan import StepPlan


class Proposal(NamedTuple):
    """tokens: int32 [any], which may follow. kind: index of `Method.chances`; acceptance is measured for each kind."""

    tokens: np.ndarray
    kind: int = 0


class Method:
    """Proposes tokens. `chances`: for each kind of proposal, the chance that a token is kept if those before it were,
    as it is assumed at first. `proposes_later`: the tokens of a proposal are not known before `prepare`."""

    chances: List[float]
    proposes_later = False

    def propose(self, seq: Sequence, tokens: np.ndarray, count: int) -> Proposal | None:
        """Up to `count` tokens that may follow a sequence's `tokens`, int32 [any]."""
        raise NotImplementedError

    def seconds(self, rows: int, count: np.ndarray) -> np.ndarray:
        """Seconds for proposing `count` tokens, int [any], for each of `rows` sequences; next to none by default."""
        return np.zeros(len(count))

    def allocate(self) -> None:
        """Allocates what the method keeps on the devices. There are no requests."""

    def measure(self) -> None:
        """Compiles the method's programs and measures their times. There are no requests."""

    def prepare(self, plan: StepPlan, running: RunningTable) -> None:
        """A plan is about to be dispatched. The pages for its proposals are allocated now, and tokens that stand in
        `running` behind the known ones may still be changed."""

    def finished(self, seq: Sequence) -> None:
        """A sequence has ended; its tokens are complete."""
