"""The real engine, in which a step fails wherever a request has a certain parameter."""

from __future__ import annotations

from jaxserve.engine import engine

POISON = 13  # top_k


class PoisonedEngine(engine.Engine):
    def _fill_slots(self, placed):
        if any(seq.params.top_k == POISON for seq in placed):
            raise ValueError("poison")
        super()._fill_slots(placed)
