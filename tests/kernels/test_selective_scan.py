"""The selective scan and the convolution before it, against the recurrence itself in float64, token after token."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest
from state_steps import Steps

from jaxserve.pallas_kernels.operands import ConvInputs, ScanInputs
from jaxserve.pallas_kernels.selective_scan import CHUNK, selective_scan
from jaxserve.pallas_kernels.state_rows import StateRows
from jaxserve.pallas_kernels.types import ScanState

CHANNELS = 7
STATE = 5
WIDTH = 4


class Sequences(NamedTuple):
    """Random tokens of sequences: x and step [tokens, channels], b and c [tokens, state]; and the layer's numbers."""

    x: list[np.ndarray]
    step: list[np.ndarray]
    b: list[np.ndarray]
    c: list[np.ndarray]
    a: np.ndarray
    d: np.ndarray
    conv: np.ndarray
    bias: np.ndarray


def sequences(lengths: list[int], seed: int) -> Sequences:
    rng = np.random.default_rng(seed)
    made: tuple[list, list, list, list] = ([], [], [], [])
    for length in lengths:
        made[0].append(rng.normal(size=(length, CHANNELS)))
        made[1].append(10.0 ** rng.uniform(-3, 1, (length, CHANNELS)))
        made[2].append(rng.normal(size=(length, STATE)))
        made[3].append(rng.normal(size=(length, STATE)))
    a = -(10.0 ** rng.uniform(-3, 1, (CHANNELS, STATE)))
    return Sequences(*made, a, rng.normal(size=CHANNELS), rng.normal(size=(CHANNELS, WIDTH)), rng.normal(size=CHANNELS))


def oracle(given: Sequences, i: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Results [tokens, channels], the last vectors, and the last inputs of the convolution."""
    padded = np.concatenate([np.zeros((WIDTH - 1, CHANNELS)), given.x[i]])
    vectors = np.zeros((CHANNELS, STATE))
    out = []
    for t, step in enumerate(given.step[i]):
        x = np.einsum("wc,cw->c", padded[t : t + WIDTH], given.conv) + given.bias
        vectors = np.exp(step[:, None] * given.a) * vectors + np.outer(step * x, given.b[i][t])
        out.append(vectors @ given.c[i][t] + given.d * x)
    return np.stack(out), vectors, padded[-(WIDTH - 1) :]


class Runner(Steps):
    def __init__(self, given: Sequences, slot: list[int], **options: Any):
        self.all = given
        a, d, conv, bias = (jnp.asarray(x, jnp.float32) for x in given[4:])

        def operation(inputs: list, state: ScanState, rows: StateRows, first: int, decode_only: bool) -> Any:
            x, step, b, c = inputs
            more: Any = {"decode_only": decode_only, **options}
            mixed, state = selective_scan(ConvInputs(x, conv, bias), state, rows, first, **more)
            return selective_scan(ScanInputs(mixed, step, b, c, a, d), state, rows, first, **more)

        shapes: Any = ScanState((CHANNELS, STATE), (WIDTH - 1, CHANNELS))
        super().__init__(given[:4], slot, shapes, operation)

    def check(self) -> None:
        self.compare(lambda i: oracle(self.all, i))


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("lengths", [[130, 63, 1, 1, 200], [1], [2, 3], [CHUNK, 1, CHUNK + 1], [CHUNK * 3]])
def test_whole_prompts(lengths, static):
    runner = Runner(sequences(lengths, len(lengths)), list(range(2, 2 + len(lengths))), static=static)
    runner.step(dict(enumerate(lengths)), 420, 6)
    runner.check()


@pytest.mark.parametrize("static", [False, True])
def test_any_cut_into_steps(static):
    """Prompts cut in pieces of all kinds, also shorter than the convolution, among rows that decode."""
    lengths = [150, 90, 7, 40]
    runner = Runner(sequences(lengths, 5), [4, 0, 7, 2], static=static)
    rng = np.random.default_rng(3)
    while left := {i: n - runner.done[i] for i, n in enumerate(lengths) if n > runner.done[i]}:
        runner.step({i: min(n, int(rng.choice([1, 1, 2, 3, 5, 64, 70]))) for i, n in left.items()}, 300, 5)
    runner.check()


def test_decodes_one_by_one():
    runner = Runner(sequences([30, 30, 30], 6), [8, 3, 5])
    for _ in range(30):
        runner.step(dict.fromkeys(range(3), 1), 4, 4, decode_only=True)
    runner.check()


def test_rows_that_keep_nothing_change_no_state():
    """`Steps.step` compares all states but those of its rows, or all where it keeps none."""
    runner = Runner(sequences([80, 40], 7), [1, 6])
    runner.step({0: 50, 1: 40}, 100, 3)
    runner.step({0: 30}, 100, 3, keeps=False)
    runner.step({0: 30}, 100, 3)
    runner.check()


def test_chunks_forget_at_once():
    """Decays that leave nothing of a state neither overflow nor make numbers that are none."""
    given = sequences([140], 9)
    given.step[0][::3] = 200.0
    runner = Runner(given, [0])
    runner.step({0: 140}, 160, 2)
    runner.check()
