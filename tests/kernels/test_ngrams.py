"""Hashes of n-grams against whole numbers of Python, and the tokens and inputs before each token, however sequences are
cut into steps."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from state_steps import Steps

from jaxserve.pallas_kernels.ngrams import hashes, multipliers, primes, recent_tokens, spaced_convolution
from jaxserve.pallas_kernels.operands import RecentTokens, SpacedInputs
from jaxserve.pallas_kernels.types import NgramState

END = 2
LONGEST = 4
WIDTH, SPACING, CHANNELS = 3, 4, 5


def test_numbers_of_transformers():
    """What `Qwen4ExpTextNGramEmbedding` of transformers 5.24 has for these configs."""
    assert multipliers(512, 3, 0, 1234) == [4295158889763781, 17440218147737327, 1270917961434445]
    assert multipliers(248320, 4, 1, 99) == [13592083809269, 25300577374959, 3672843961851, 3768105124685]
    assert primes(20_000_000, 0, 4) == (20000003, 20000023, 20000033, 20000047)
    assert primes(90, 6, 3) == (127, 131, 137)


@pytest.mark.parametrize(("vocab", "base"), [(512, 50), (248320, 20_000_000), (2**31 - 1, 2**30 - 100)])
def test_hashes(vocab, base):
    """Of tokens as large as the vocabulary has, of which some end what is before them."""
    rng = np.random.default_rng(vocab)
    tokens = rng.integers(0, vocab, 60)
    tokens[:4] = 0, 1, vocab - 1, END
    tokens[rng.random(60) < 0.2] = END
    factors = multipliers(vocab, LONGEST, 1, 7)
    sizes = [primes(base, 2 * i, 2) for i in range(LONGEST - 1)]
    before = np.array([[tokens[i - b] if i >= b else -1 for b in range(1, LONGEST)] for i in range(60)])
    found = jax.jit(lambda t, b: hashes(t, b, END, factors, sizes))(jnp.int32(tokens), jnp.int32(before))
    for i in range(60):
        mixed, ended, expected = int(tokens[i]) * factors[0], False, []
        for back, of_order in enumerate(sizes, 1):
            ended |= i < back or tokens[i - back] == END
            mixed ^= (END if ended else int(tokens[i - back])) * factors[back]
            expected += [mixed % size for size in of_order]
        assert found[i].tolist() == expected, i


class Sequences(NamedTuple):
    tokens: list[np.ndarray]
    x: list[np.ndarray]


class Kept(NamedTuple):
    tokens: Any
    inputs: Any


class Runner(Steps):
    def __init__(self, given: Sequences, slot: list[int], conv: np.ndarray):
        def operation(inputs: list, state: Any, rows: Any, first: int, decode_only: bool) -> Any:
            held = NgramState(None, state.tokens.astype(jnp.int32), state.inputs)
            tokens = jnp.nan_to_num(inputs[0]).astype(jnp.int32)
            before, held = recent_tokens(RecentTokens(tokens), held, rows, first)
            mixed, held = spaced_convolution(SpacedInputs(inputs[1], jnp.asarray(conv)), held, rows, first)
            kept = state._replace(tokens=held.tokens.astype(jnp.float32), inputs=held.inputs)
            return jnp.concatenate([before.astype(jnp.float32), mixed], axis=1), kept

        shapes: Any = Kept((LONGEST - 1,), ((WIDTH - 1) * SPACING, CHANNELS))
        super().__init__(given, slot, shapes, operation)
        # What other sequences left are whole numbers.
        self.state = self.state._replace(tokens=jnp.round(jnp.abs(self.state.tokens) * 10))


def test_any_cut_into_steps():
    """Prompts cut in pieces of all kinds, also shorter than what is kept, among rows that decode."""
    rng = np.random.default_rng(4)
    lengths = [40, 9, 1, 26]
    tokens = [rng.integers(0, 50, n).astype(np.float64) for n in lengths]
    x = [rng.normal(size=(n, CHANNELS)) for n in lengths]
    conv = rng.normal(size=(CHANNELS, WIDTH)).astype(np.float32)
    runner = Runner(Sequences(tokens, x), [4, 0, 7, 2], conv)
    while left := {i: n - runner.done[i] for i, n in enumerate(lengths) if n > runner.done[i]}:
        runner.step({i: min(n, int(rng.choice([1, 1, 2, 3, 5, 12]))) for i, n in left.items()}, 64, 5)

    def oracle(i: int) -> tuple[np.ndarray, ...]:
        none = np.full(LONGEST - 1, -1.0)
        line = np.concatenate([none, tokens[i]])
        before = [line[LONGEST - 1 - back : len(line) - back] for back in range(1, LONGEST)]
        padded = np.concatenate([np.zeros(((WIDTH - 1) * SPACING, CHANNELS)), x[i]])
        mixed = sum(padded[k * SPACING : k * SPACING + lengths[i]] * conv[:, k] for k in range(WIDTH))
        out = np.concatenate([np.stack(before, axis=1), mixed], axis=1)
        return out, line[1 - LONGEST :] + 1, padded[-(WIDTH - 1) * SPACING :]

    runner.compare(oracle)
