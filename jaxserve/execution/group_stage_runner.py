"""The runner of a pipeline stage that several groups of devices have together, each with slots and pages of its own.

As in `group_runner`, a program runs on all groups in lockstep, and arrays have the groups' parts one after the other.
What goes from stage to stage is divided in the same way, so that each group sends to the group with its number.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from jaxserve.execution.group_runner import GatheredRows, GroupRunner, GroupSignatures
from jaxserve.execution.programs import StepProgram
from jaxserve.execution.sampling import Sampled
from jaxserve.execution.signatures import AuxProgram
from jaxserve.execution.stage_runner import StageRunner, StageSignatures
from jaxserve.execution.step_shape import StepShape


class GroupStageSignatures(GroupSignatures, StageSignatures):
    """The programs of a stage, for all groups."""


class GroupStageRunner(StageRunner, GroupRunner):
    """A `StageRunner` with the numbers of a `GroupRunner`."""

    signatures_kind = GroupStageSignatures

    def advance(self, shape: StepShape, packed: np.ndarray, x: jax.Array | None) -> jax.Array:
        return super().advance(shape, self._of_devices(shape, packed), x)

    def finish(self, program: StepProgram, packed: np.ndarray, x: jax.Array) -> tuple[Sampled, jax.Array | None]:
        drawn, hidden = super().finish(program, self._of_devices(program.shape, packed), x)
        return self._side_by_side(drawn), hidden

    def take(self, kind: str, slot: np.ndarray, tokens: jax.Array) -> None:
        """As in `StageRunner`. Slots and tokens of the groups follow each other."""
        name = AuxProgram(kind, len(slot) // self.num_groups)
        self.slots = self._get(name)(self.slots, self._slot(slot).astype(np.int32), tokens)

    def returned(self, draws: np.ndarray, results: list[tuple[int, Sampled]]) -> Iterator[tuple[np.ndarray, jax.Array]]:
        for _, one in results:
            for (some, size), tokens in zip(self._deferred_calls(draws), _arrays_of(one.tokens), strict=True):
                slot = np.full((self.num_groups, size), self.padding_slot)
                for own, index in zip(slot, some, strict=True):
                    own[: len(index)] = draws[index, 0]
                yield slot.ravel(), tokens


def tokens_of(drawn: Sampled) -> jax.Array:
    """The tokens that a step samples, as the devices have them: with several groups [groups * calls, rows]."""
    return _arrays_of(drawn.tokens)[0]


def _arrays_of(tokens: Any) -> list[jax.Array]:
    return tokens.arrays if isinstance(tokens, GatheredRows) else [tokens]
