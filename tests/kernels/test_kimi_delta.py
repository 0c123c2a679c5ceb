"""Kimi delta attention against the rule itself in float64, one token after another."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from state_steps import Steps

from jaxserve.pallas_kernels.delta_net.kimi import CHUNK, kimi_delta
from jaxserve.pallas_kernels.operands import DeltaHeads
from jaxserve.pallas_kernels.state_rows import StateRows
from jaxserve.pallas_kernels.types import DeltaState

HEADS = 3
DIM = 10
WIDTH = 4


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


class Sequences(NamedTuple):
    """Random tokens of sequences: qkv [tokens, heads, 3 * dim], decay [tokens, heads, dim], rate [tokens, heads]."""

    qkv: list[np.ndarray]
    decay: list[np.ndarray]
    rate: list[np.ndarray]
    conv: np.ndarray


def sequences(lengths: list[int], seed: int, *, alike: float = 0.0, fastest: float = 3.0) -> Sequences:
    """`alike`: the share of all tokens' inputs that is the same, which makes triangular systems hard to solve."""
    rng = np.random.default_rng(seed)
    made: tuple[list, list, list] = ([], [], [])
    for length in lengths:
        same = rng.normal(size=(1, HEADS, 3 * DIM))
        made[0].append((1 - alike) * rng.normal(size=(length, HEADS, 3 * DIM)) + alike * same)
        made[1].append(-(10.0 ** rng.uniform(-4, np.log10(fastest), (length, HEADS, DIM))))
        made[2].append(rng.uniform(0.02, 0.999, (length, HEADS)))
    return Sequences(*made, rng.normal(size=(HEADS, 3 * DIM, WIDTH)))


def oracle(given: Sequences, i: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Results [tokens, heads, dim], the last matrix and the last inputs [heads, (width - 1) * 3 * dim]."""
    x = np.concatenate([np.zeros((WIDTH - 1, HEADS, 3 * DIM)), given.qkv[i]])
    matrix = np.zeros((HEADS, DIM, DIM))
    out = []
    for t in range(len(given.qkv[i])):
        mixed = silu(np.einsum("whc,hcw->hc", x[t : t + WIDTH], given.conv))
        for h in range(HEADS):
            q, k, v = np.split(mixed[h], 3)
            q, k = (one / np.sqrt(one @ one + 1e-6) for one in (q, k))
            matrix[h] *= np.exp(given.decay[i][t, h])[:, None]
            matrix[h] += np.outer(k, given.rate[i][t, h] * (v - matrix[h].T @ k))
            out.append(matrix[h].T @ q / np.sqrt(DIM))
    return np.reshape(out, (-1, HEADS, DIM)), matrix, x[-(WIDTH - 1) :].swapaxes(0, 1).reshape(HEADS, -1)


class Runner(Steps):
    def __init__(self, given: Sequences, slot: list[int], **options: Any):
        conv = jnp.asarray(given.conv, jnp.float32)
        self.all = given

        def operation(inputs: list, state: DeltaState, rows: StateRows, first: int, decode_only: bool) -> Any:
            more: Any = {"activation": jax.nn.silu, "decode_only": decode_only}
            return kimi_delta(DeltaHeads(*inputs, conv), state, rows, first, **more, **options)

        shapes: Any = DeltaState((HEADS, DIM, DIM), (HEADS, (WIDTH - 1) * 3 * DIM))
        super().__init__(given[:3], slot, shapes, operation)

    def check(self, rtol: float = 1e-5) -> None:
        self.compare(partial(oracle, self.all), rtol)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("lengths", [[130, 63, 1, 1, 200], [1], [2, 3], [64, 1, 65], [CHUNK * 3]])
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


def test_tokens_that_resemble_each_other():
    """Keys nearly alike, rates near 1 and hardly a decay make the worst of triangular systems."""
    given = sequences([190], 8, alike=0.98, fastest=1e-3)
    given.rate[0][:] = 0.999
    runner = Runner(given, [0])
    runner.step({0: 190}, 190, 1)
    runner.check(rtol=2e-4)


def test_channels_forget_at_once():
    """Decays that leave nothing of some channels neither overflow nor make numbers that are none."""
    given = sequences([140], 9)
    given.decay[0][::3, :, ::2] = -200.0
    given.decay[0][1::4, :, 1] = -60.0
    runner = Runner(given, [0])
    runner.step({0: 140}, 160, 2)
    runner.check()
