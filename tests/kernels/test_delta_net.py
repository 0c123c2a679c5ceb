"""The gated delta rule and the convolution before it, against the rule itself in float64, one token after another."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from state_steps import Steps, compare_forms, state_rows

from jaxserve.pallas_kernels.delta_net import cpu, reference
from jaxserve.pallas_kernels.delta_net.reference import CHUNK
from jaxserve.pallas_kernels.operands import DeltaHeads
from jaxserve.pallas_kernels.state_rows import StateRows
from jaxserve.pallas_kernels.types import DeltaState

HEADS = 2
GROUP = 3
KEY = 10
VALUE = 7
WIDTH = 4
CHANNELS = 2 * KEY + GROUP * VALUE
FORMS = {
    "xla": reference.delta_net,
    "xla, static": partial(reference.delta_net, static=True),
    "cpu": cpu.delta_net,
}


@pytest.fixture(params=FORMS)
def form(request):
    return request.param


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


class Sequences(NamedTuple):
    """Random tokens of sequences: qkv [tokens, heads, channels], decay and rate [tokens, heads, group]."""

    qkv: list[np.ndarray]
    decay: list[np.ndarray]
    rate: list[np.ndarray]
    conv: np.ndarray


def sequences(lengths: list[int], seed: int, *, alike: float = 0.0, fastest: float = 3.0) -> Sequences:
    """`alike`: the share of all tokens' inputs that is the same, which makes triangular systems hard to solve."""
    rng = np.random.default_rng(seed)
    made: tuple[list, list, list] = ([], [], [])
    for length in lengths:
        same = rng.normal(size=(1, HEADS, CHANNELS))
        made[0].append((1 - alike) * rng.normal(size=(length, HEADS, CHANNELS)) + alike * same)
        made[1].append(-(10.0 ** rng.uniform(-4, np.log10(fastest), (length, HEADS, GROUP))))
        made[2].append(rng.uniform(0.02, 0.999, (length, HEADS, GROUP)))
    return Sequences(*made, rng.normal(size=(HEADS, CHANNELS, WIDTH)))


def oracle(given: Sequences, i: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Results [tokens, heads, group, value], the last matrix and the last inputs [heads, (width - 1) * channels]."""
    x = np.concatenate([np.zeros((WIDTH - 1, HEADS, CHANNELS)), given.qkv[i]])
    matrix = np.zeros((HEADS, GROUP, KEY, VALUE))
    out = []
    for t in range(len(given.qkv[i])):
        mixed = silu(np.einsum("whc,hcw->hc", x[t : t + WIDTH], given.conv))
        for h in range(HEADS):
            q = mixed[h, :KEY]
            k = mixed[h, KEY : 2 * KEY]
            q, k = (one / np.sqrt(one @ one + 1e-6) for one in (q, k))
            for g, v in enumerate(mixed[h, 2 * KEY :].reshape(GROUP, VALUE)):
                matrix[h, g] *= np.exp(given.decay[i][t, h, g])
                matrix[h, g] += np.outer(k, given.rate[i][t, h, g] * (v - matrix[h, g].T @ k))
                out.append(matrix[h, g].T @ q / np.sqrt(KEY))
    return np.reshape(out, (-1, HEADS, GROUP, VALUE)), matrix, x[-(WIDTH - 1) :].swapaxes(0, 1).reshape(HEADS, -1)


class Runner(Steps):
    def __init__(self, given: Sequences, slot: list[int], form: str):
        conv = jnp.asarray(given.conv, jnp.float32)
        self.all = given

        def operation(inputs: list, state: DeltaState, rows: StateRows, first: int, decode_only: bool) -> Any:
            more: Any = {"key_dim": KEY, "activation": jax.nn.silu, "decode_only": decode_only}
            return FORMS[form](DeltaHeads(*inputs, conv), state, rows, first, **more)

        shapes: Any = DeltaState((HEADS, GROUP, KEY, VALUE), (HEADS, (WIDTH - 1) * CHANNELS))
        super().__init__(given[:3], slot, shapes, operation)

    def check(self, rtol: float = 1e-5) -> None:
        self.compare(partial(oracle, self.all), rtol)


@pytest.mark.parametrize("lengths", [[1], [2, 3], [64, 1, 65], [130, 63, 1, 1, 200], [CHUNK * 3]])
def test_whole_prompts(lengths, form):
    runner = Runner(sequences(lengths, len(lengths)), list(range(2, 2 + len(lengths))), form)
    runner.step(dict(enumerate(lengths)), 420, 6)
    runner.check()


def test_any_cut_into_steps(form):
    """Prompts cut in pieces of all kinds, also shorter than the convolution, among rows that decode."""
    lengths = [150, 90, 7, 40]
    runner = Runner(sequences(lengths, 5), [4, 0, 7, 2], form)
    rng = np.random.default_rng(3)
    while left := {i: n - runner.done[i] for i, n in enumerate(lengths) if n > runner.done[i]}:
        runner.step({i: min(n, int(rng.choice([1, 1, 2, 3, 5, 64, 70]))) for i, n in left.items()}, 300, 5)
    runner.check()


def test_decodes_one_by_one(form):
    lengths = [30, 30, 30]
    runner = Runner(sequences(lengths, 6), [8, 3, 5], form)
    for _ in range(30):
        runner.step(dict.fromkeys(range(3), 1), 4, 4, decode_only=True)
    runner.check()


def test_rows_that_keep_nothing_change_no_state(form):
    """`Runner.step` compares all states but those of its rows, or all where it keeps none."""
    runner = Runner(sequences([80, 40], 7), [1, 6], form)
    runner.step({0: 50, 1: 40}, 100, 3)
    runner.step({0: 30}, 100, 3, keeps=False)
    runner.step({0: 30}, 100, 3)
    runner.check()


@pytest.mark.parametrize("value", [32, 128, 168])
def test_wide_values_of_many_heads(value):
    """A decode on CPU takes many columns at once, and several heads of a row after each other."""
    heads, rows = 16, 5
    rng = np.random.default_rng(value)
    channels = 2 * KEY + value

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    inputs = DeltaHeads(
        normal(rows, heads, channels),
        -jnp.abs(normal(rows, heads, 1)),
        jax.nn.sigmoid(normal(rows, heads, 1)),
        normal(heads, channels, WIDTH),
    )
    state = DeltaState(normal(7, heads, 1, KEY, value), normal(7, heads, (WIDTH - 1) * channels))
    slots = jnp.arange(rows)
    where = StateRows(slots, slots, slots == 3, jnp.arange(rows + 1), jnp.int32(rows), slots)
    options: Any = {"key_dim": KEY, "activation": jax.nn.silu, "decode_only": True}
    known = reference.delta_net(inputs, state, where, 1, **options)
    found = cpu.delta_net(inputs, state, where, 1, **options)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), found, known)


def test_tokens_that_resemble_each_other(form):
    """Keys nearly alike, rates near 1 and hardly a decay make the worst of triangular systems."""
    given = sequences([190], 8, alike=0.98, fastest=1e-3)
    given.rate[0][:] = 0.999
    runner = Runner(given, [0], form)
    runner.step({0: 190}, 190, 1)
    runner.check(rtol=2e-4)


def test_chunks_forget_at_once(form):
    """Decays that leave nothing of a state neither overflow nor make numbers that are none."""
    given = sequences([140], 9)
    given.decay[0][::3] = -200.0
    runner = Runner(given, [0], form)
    runner.step({0: 140}, 160, 2)
    runner.check()


@pytest.mark.parametrize("counts", [[1, 1, 1], [1, 70, 5]])
@pytest.mark.parametrize(("key", "value"), [(33, 43), (16, 64)])
def test_larger_matrices_on_cpu(key, value, counts):
    """Sizes beyond several registers, with and without a rest."""
    rng = np.random.default_rng(4)
    tokens = sum(counts)
    channels = 2 * key + GROUP * value
    shapes = (tokens, HEADS, channels), (tokens, HEADS, GROUP), (tokens, HEADS, GROUP), (HEADS, channels, 3)
    qkv, decay, rate, conv = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes)
    heads = DeltaHeads(qkv, -jnp.abs(decay), jax.nn.sigmoid(rate), conv)
    shapes = (7, HEADS, GROUP, key, value), (7, HEADS, 2 * channels)
    state = DeltaState(*(jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes))
    rows = state_rows(counts, source=[1, 3, 0], fresh=[False, True, False])
    compare_forms(cpu.delta_net, reference.delta_net, heads, state, rows, key_dim=key, activation=jax.nn.silu)
