"""What a method of speculation proposes, and what methods have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np


class Proposal(NamedTuple):
    """tokens: int32 [any], which may follow. kind: index of `Method.chances`; acceptance is measured for each kind."""

    tokens: np.ndarray
    kind: int = 0


class Method(Protocol):
    """Proposes tokens. `chances`: for each kind of proposal, the chance that a token is kept if those before it were,
    as it is assumed at first."""

    @property
    def chances(self) -> Sequence[float]: ...

    def propose(self, tokens: np.ndarray, count: int) -> Proposal | None:
        """Up to `count` tokens that may follow `tokens`, int32 [any]."""
        ...
