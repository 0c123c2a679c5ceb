"""Finds the first layer and token at which two runs of a request compute other bits."""

from __future__ import annotations

from collections import defaultdict

import jax
import numpy as np
import pytest
from engines import drain

from jaxserve.engine.engine import Engine
from jaxserve.execution import forward
from jaxserve.types import Request

Trace = list[np.ndarray]  # for each layer, what it adds to each token [tokens, hidden], by position


class Tracer:
    """Watches the layers of engines that load and run within it. Their only request must have no neighbours.

    Each layer of a step passes its result and the number of tokens to the host. The number is that of the step's last
    row, which is the only one.
    """

    def __init__(self, patch: pytest.MonkeyPatch):
        self._seen: dict[int, list[np.ndarray]] = defaultdict(list)
        self._calls = 0
        self._layers = 0
        original = forward.run_layer

        def traced(params, x, y, ropes, pages, where, seen, **options):
            x, y, *rest = original(params, x, y, ropes, pages, where, seen, **options)
            jax.debug.callback(self._take, y.sums[0], where[2][-1], ordered=True)
            return x, y, *rest

        patch.setattr(forward, "run_layer", traced)

    def run(self, engine: Engine, request: Request) -> Trace:
        """What each layer computes for the request's tokens."""
        self._seen.clear()
        self._calls = 0
        self._layers = len(engine.model.layers)
        engine.add_request(request)
        drain(engine)
        jax.effects_barrier()
        return [np.concatenate(self._seen[layer]) for layer in range(self._layers)]

    def _take(self, y: jax.Array, count: jax.Array) -> None:
        if self._layers:
            self._seen[self._calls % self._layers].append(np.array(y[: int(count)]))
            self._calls += 1


def first_difference(one: Trace, other: Trace) -> tuple[int, int] | None:
    """(layer, position) of the first difference: in the lowest layer, of the first token there. None: all are equal."""
    for layer, (a, b) in enumerate(zip(one, other, strict=True)):
        size = min(len(a), len(b))  # a run may have computed tokens that were then dropped
        rows = np.flatnonzero((a[:size].view(np.uint32) != b[:size].view(np.uint32)).any(axis=1))
        if len(rows):
            return layer, int(rows[0])
    return None
