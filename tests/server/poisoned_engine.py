"""The real engine, in which a step fails wherever a request has a certain parameter."""

from __future__ import annotations

from jaxserve.engine import engine

POISON = 13  # top_k


class PoisonedEngine(engine.Engine):
    def dispatch(self, plan):
        if any(seq.params.top_k == POISON for seq in plan.placed):
            raise ValueError("poison")
        return super().dispatch(plan)
