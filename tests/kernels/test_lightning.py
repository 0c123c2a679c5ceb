"""Lightning attention against the recurrence itself in float64, one token after another."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from state_steps import Steps

from jaxserve.pallas_kernels.lightning import lightning
from jaxserve.pallas_kernels.operands import LightningHeads
from jaxserve.pallas_kernels.state_rows import StateRows
from jaxserve.pallas_kernels.types import LightningState

HEADS = 3
DIM = 6
DECAY = np.array([-0.9, -0.05, -1e-4])  # of each head


class Runner(Steps):
    def __init__(self, lengths: list[int], slot: list[int], seed: int, **options: Any):
        rng = np.random.default_rng(seed)
        self.qkv = [rng.normal(size=(length, HEADS, 3 * DIM)) for length in lengths]

        def operation(inputs: list, state: LightningState, rows: StateRows, first: int, decode_only: bool) -> Any:
            heads = LightningHeads(inputs[0], jnp.asarray(DECAY, jnp.float32))
            return lightning(heads, state, rows, first, decode_only=decode_only, **options)

        shapes: Any = LightningState((HEADS, DIM, DIM))
        super().__init__([self.qkv], slot, shapes, operation)

    def oracle(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        """Results [tokens, heads, dim], and the last matrix [heads, value, key]."""
        matrix = np.zeros((HEADS, DIM, DIM))
        out = []
        for token in self.qkv[i]:
            q, k, v = np.split(token, 3, axis=-1)
            matrix = np.exp(DECAY)[:, None, None] * matrix + v[:, :, None] * k[:, None]
            out.append(np.einsum("hvk,hk->hv", matrix, q))
        return np.stack(out), matrix


@pytest.mark.parametrize("static", [False, True])
def test_any_cut_into_steps(static):
    """Prompts cut in pieces of all kinds, among rows that decode."""
    lengths = [150, 90, 7, 40]
    runner = Runner(lengths, [4, 0, 7, 2], 5, static=static)
    rng = np.random.default_rng(3)
    while left := {i: n - runner.done[i] for i, n in enumerate(lengths) if n > runner.done[i]}:
        runner.step({i: min(n, int(rng.choice([1, 1, 2, 3, 5, 64, 70]))) for i, n in left.items()}, 300, 5)
    runner.compare(runner.oracle)


def test_decodes_one_by_one():
    runner = Runner([30, 30, 30], [8, 3, 5], 6)
    for _ in range(30):
        runner.step(dict.fromkeys(range(3), 1), 4, 4, decode_only=True)
    runner.compare(runner.oracle)
