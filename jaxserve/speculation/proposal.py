"""What a method of speculation proposes, and what methods have in common."""

from __future__ import annotations

from collections.abc import Sequence as List
from typing import NamedTuple, Protocol

import numpy as np

from jaxserve.scheduling.sequence import Sequence


class Proposal(NamedTuple):
    """tokens: int32 [any], which may follow. kind: index of `Method.chances`; acceptance is measured for each kind."""

    tokens: np.ndarray
    kind: int = 0


class Method(Protocol):
    """Proposes tokens. `chances`: for each kind of proposal, the chance that a token is kept if those before it were,
    as it is assumed at first."""

    @property
    def chances(self) -> List[float]: ...

    def propose(self, seq: Sequence, tokens: np.ndarray, count: int) -> Proposal | None:
        """Up to `count` tokens that may follow a sequence's `tokens`, int32 [any]."""
        ...

    def finished(self, seq: Sequence) -> None:
        """A sequence has ended; its tokens are complete."""
        ...
