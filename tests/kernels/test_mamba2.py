"""Mamba-2 and the short convolution, against the recurrence itself in float64, one token after another."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from state_steps import Steps, compare_forms, state_rows

from jaxserve.pallas_kernels.mamba2 import cpu, reference
from jaxserve.pallas_kernels.mamba2.reference import CHUNK
from jaxserve.pallas_kernels.operands import ConvInputs, MambaInputs
from jaxserve.pallas_kernels.short_conv import cpu as conv_cpu
from jaxserve.pallas_kernels.short_conv import reference as conv_reference
from jaxserve.pallas_kernels.state_rows import StateRows
from jaxserve.pallas_kernels.types import ConvState, MambaState

HEADS = 6
GROUPS = 3
DIM = 7
STATE = 5
WIDTH = 4
CHANNELS = HEADS * DIM
SHARED = 2 * GROUPS * STATE
FORMS = {"xla": reference.mamba2, "xla, static": partial(reference.mamba2, static=True), "cpu": cpu.mamba2}


@pytest.fixture(params=FORMS)
def form(request):
    return request.param


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


class Sequences(NamedTuple):
    """Random tokens of sequences: x [tokens, channels], bc [tokens, shared], step [tokens, heads]; and the layer's
    numbers."""

    x: list[np.ndarray]
    bc: list[np.ndarray]
    step: list[np.ndarray]
    a: np.ndarray
    d: np.ndarray
    conv: np.ndarray  # of x, then of bc
    bias: np.ndarray


def sequences(lengths: list[int], seed: int) -> Sequences:
    rng = np.random.default_rng(seed)
    made: tuple[list, list, list] = ([], [], [])
    for length in lengths:
        made[0].append(rng.normal(size=(length, CHANNELS)))
        made[1].append(rng.normal(size=(length, SHARED)))
        made[2].append(10.0 ** rng.uniform(-3, 1, (length, HEADS)))
    both = CHANNELS + SHARED
    a = -(10.0 ** rng.uniform(-3, 1, HEADS))
    return Sequences(*made, a, rng.normal(size=HEADS), rng.normal(size=(both, WIDTH)), rng.normal(size=both))


def oracle(given: Sequences, i: int) -> tuple[np.ndarray, ...]:
    """Results [tokens, heads, dim], the last matrix, and the last inputs of the convolution."""
    inputs = np.concatenate([given.x[i], given.bc[i]], axis=1)
    padded = np.concatenate([np.zeros((WIDTH - 1, inputs.shape[1])), inputs])
    matrix = np.zeros((HEADS, DIM, STATE))
    out = []
    for t, step in enumerate(given.step[i]):
        mixed = silu(np.einsum("wc,cw->c", padded[t : t + WIDTH], given.conv) + given.bias)
        x = mixed[:CHANNELS].reshape(HEADS, DIM)
        b, c = mixed[CHANNELS:].reshape(2, GROUPS, STATE)
        for h in range(HEADS):
            group = h // (HEADS // GROUPS)
            matrix[h] = np.exp(step[h] * given.a[h]) * matrix[h] + step[h] * np.outer(x[h], b[group])
            out.append(matrix[h] @ c[group] + given.d[h] * x[h])
    last = padded[-(WIDTH - 1) :]
    return np.reshape(out, (-1, HEADS, DIM)), matrix, last[:, :CHANNELS], last[:, CHANNELS:]


class Runner(Steps):
    def __init__(self, given: Sequences, slot: list[int], form: str, heads: slice = slice(None)):
        """heads: those of one of several devices."""
        self.all = given
        self.heads = heads
        of_heads = slice(*(None if at is None else at * DIM for at in (heads.start, heads.stop)))
        conv, bias, a, d = (jnp.asarray(x, jnp.float32) for x in (given.conv, given.bias, given.a, given.d))
        group = jnp.arange(HEADS) // (HEADS // GROUPS)

        def operation(inputs: list, state: MambaState, rows: StateRows, first: int, decode_only: bool) -> Any:
            x, bc, step = inputs
            given = MambaInputs(
                x[:, of_heads], bc, step[:, heads], a[heads], d[heads], group[heads],
                conv[:CHANNELS][of_heads], bias[:CHANNELS][of_heads], conv[CHANNELS:], bias[CHANNELS:],
            )  # fmt: skip
            more: Any = {"groups": GROUPS, "per_group": HEADS // GROUPS, "activation": jax.nn.silu}
            return FORMS[form](given, state, rows, first, **more, decode_only=decode_only)

        count = len(given.a[heads])
        shapes: Any = MambaState((count, DIM, STATE), (WIDTH - 1, count * DIM), (WIDTH - 1, SHARED))
        super().__init__(given[:3], slot, shapes, operation)

    def check(self, rtol: float = 1e-5) -> None:
        def own(i: int) -> tuple[np.ndarray, ...]:
            out, matrix, x, bc = oracle(self.all, i)
            x = x.reshape(WIDTH - 1, HEADS, DIM)[:, self.heads].reshape(WIDTH - 1, -1)
            return out[:, self.heads], matrix[self.heads], x, bc

        self.compare(own, rtol)


@pytest.mark.parametrize("lengths", [[1], [2, 3], [64, 1, 65], [130, 63, 1, 1, 200], [CHUNK * 3]])
def test_whole_prompts(lengths, form):
    runner = Runner(sequences(lengths, len(lengths)), list(range(2, 2 + len(lengths))), form)
    runner.step(dict(enumerate(lengths)), 420, 6)
    runner.check()


@pytest.mark.parametrize("heads", [slice(None), slice(2, 4), slice(3, 4), slice(2, 6)])
def test_any_cut_into_steps(heads, form):
    """Prompts cut in pieces of all kinds, also shorter than the convolution, among rows that decode. A device may
    have a part of the heads: some groups, or a part of one."""
    lengths = [150, 90, 7, 40]
    runner = Runner(sequences(lengths, 5), [4, 0, 7, 2], form, heads)
    rng = np.random.default_rng(3)
    while left := {i: n - runner.done[i] for i, n in enumerate(lengths) if n > runner.done[i]}:
        runner.step({i: min(n, int(rng.choice([1, 1, 2, 3, 5, 64, 70]))) for i, n in left.items()}, 300, 5)
    runner.check()


def test_decodes_one_by_one(form):
    runner = Runner(sequences([30, 30, 30], 6), [8, 3, 5], form)
    for _ in range(30):
        runner.step(dict.fromkeys(range(3), 1), 4, 4, decode_only=True)
    runner.check()


def test_rows_that_keep_nothing_change_no_state(form):
    """`Steps.step` compares all states but those of its rows, or all where it keeps none."""
    runner = Runner(sequences([80, 40], 7), [1, 6], form)
    runner.step({0: 50, 1: 40}, 100, 3)
    runner.step({0: 30}, 100, 3, keeps=False)
    runner.step({0: 30}, 100, 3)
    runner.check()


def test_chunks_forget_at_once(form):
    """Decays that leave nothing of a state neither overflow nor make numbers that are none."""
    given = sequences([140], 9)
    given.step[0][::3] = 200.0
    runner = Runner(given, [0], form)
    runner.step({0: 140}, 160, 2)
    runner.check()


@pytest.mark.parametrize("counts", [[1, 1, 1], [1, 70, 5]])
@pytest.mark.parametrize(("dim", "state_dim"), [(21, 43), (32, 16)])
def test_larger_matrices_on_cpu(dim, state_dim, counts):
    """Sizes beyond several registers, with and without a rest, and groups of more heads than threads take at a time."""
    rng = np.random.default_rng(4)
    tokens = sum(counts)
    heads, channels, shared = 12, 12 * dim, 4 * state_dim

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    of_heads = jnp.abs(normal(tokens, heads)), -jnp.abs(normal(heads)), normal(heads), jnp.arange(heads) // 6
    conv = normal(channels, 4), None, normal(shared, 4), normal(shared)
    inputs = MambaInputs(normal(tokens, channels), normal(tokens, shared), *of_heads, *conv)
    state = MambaState(normal(7, heads, dim, state_dim), normal(7, 3, channels), normal(7, 3, shared))
    rows = state_rows(counts, source=[1, 3, 0], fresh=[False, True, False])
    options = {"groups": 2, "per_group": 6, "activation": jax.nn.silu}
    compare_forms(cpu.mamba2, reference.mamba2, inputs, state, rows, **options)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("convolve", [conv_reference.short_conv, conv_cpu.short_conv])
def test_short_convolutions(convolve, with_bias):
    rng = np.random.default_rng(2)
    lengths = [40, 9, 1]
    given = [rng.normal(size=(length, CHANNELS)) for length in lengths]
    conv = rng.normal(size=(CHANNELS, WIDTH))
    bias = rng.normal(size=CHANNELS) if with_bias else None

    def operation(inputs: list, state: ConvState, rows: StateRows, first: int, decode_only: bool) -> Any:
        weights = (None if x is None else jnp.asarray(x, jnp.float32) for x in (conv, bias))
        return convolve(ConvInputs(*inputs, *weights), state, rows, first, decode_only=decode_only)

    def expected(i: int) -> tuple[np.ndarray, ...]:
        padded = np.concatenate([np.zeros((WIDTH - 1, CHANNELS)), given[i]])
        out = [np.einsum("wc,cw->c", padded[t : t + WIDTH], conv) for t in range(len(given[i]))]
        return np.stack(out) + (0.0 if bias is None else bias), padded[-(WIDTH - 1) :]

    shapes: Any = ConvState((WIDTH - 1, CHANNELS))
    steps = Steps([given], [3, 8, 0], shapes, operation)
    steps.step({0: 2, 1: 1}, 8, 4)
    steps.step({0: 30, 2: 1}, 40, 3)
    steps.step({0: 1, 1: 1}, 2, 2, decode_only=True)
    steps.step({0: 7, 1: 7}, 20, 4)
    steps.compare(expected)
