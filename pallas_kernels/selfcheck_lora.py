"""Compares products with LoRA adapters, on the device at hand, with NumPy's in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from jaxserve.pallas_kernels.lora.stacks import AdapterStack
from jaxserve.pallas_kernels.selfcheck import REPEATS, Finding, Program, tolerance

PLACES = 6
RANK = 16
# tokens, inputs, outputs of each part
CASES = ((1, 4096, (512,)), (32, 2880, (512, 128, 128)), (33, 4096, (1, 1)), (300, 640, (512,)))
EPSILONS = 4.0  # in eps of the activations' type, relative to a token's largest number: a few roundings in sequence


def check_adapters(add: Callable[..., jax.Array], dtype: np.dtype) -> Iterator[Finding]:
    """Checks a function like `lora.reference.add_adapters`, with activations and matrices of this type. Some tokens
    have no adapter, and some adapters have lower ranks, behind which is zero."""
    cases = [(_Case(*case), case) for case in CASES]
    programs = [Program(add, *one.arguments(dtype)) for one, _ in cases]
    for (one, (tokens, inputs, widths)), program in zip(cases, programs, strict=True):
        exact = one.exact(dtype)  # while compilers work
        found, different = program.repeated((exact.shape, dtype), REPEATS - 1)
        scale = np.maximum(np.abs(exact).max(axis=1, keepdims=True), 1.0)
        error = np.abs(found.astype(np.float64) - exact) / scale
        worst = float(error.max()) if np.isfinite(error).all() and not different else np.inf
        yield Finding(f"adapters, {tokens} tokens, {inputs} inputs, parts {widths}", worst, tolerance(dtype, EPSILONS))


class _Case:
    """Results y and inputs x of tokens, the matrices of all places in the pool, and the place of each token."""

    def __init__(self, tokens: int, inputs: int, widths: tuple[int, ...]):
        rng = np.random.default_rng(tokens)
        self.widths = widths
        out = 1024 if widths == (1, 1) else sum(widths)
        parts = len(widths)
        self.ranks = rng.integers(0, RANK + 1, (PLACES, parts))
        a = rng.standard_normal((PLACES, parts, RANK, inputs)) / np.sqrt(inputs)
        b = rng.standard_normal((PLACES, RANK, out)) / np.sqrt(RANK)
        a[np.arange(RANK) >= self.ranks[:, :, None]] = 0
        b[np.arange(RANK) >= self.ranks.max(axis=1)[:, None]] = 0
        x = rng.standard_normal((tokens, inputs))
        y = rng.standard_normal((tokens, out))
        self.arrays, self.place = (y, x, a, b), rng.integers(-1, PLACES, tokens)

    def arguments(self, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray, AdapterStack, np.ndarray]:
        y, x, a, b = (array.astype(dtype) for array in self.arrays)
        kind: Any = AdapterStack  # of NumPy's arrays
        stack = kind(a.reshape(PLACES, -1, a.shape[-1]), b, self.ranks.astype(np.int32), self.widths)
        return y, x, stack, self.place.astype(np.int32)

    def exact(self, dtype: np.dtype) -> np.ndarray:
        arrays = [array.astype(dtype).astype(np.float64) for array in self.arrays]
        return _exact(arrays, self.ranks, self.place, self.widths)


def _exact(arrays: list[np.ndarray], ranks: np.ndarray, place: np.ndarray, widths: tuple[int, ...]) -> np.ndarray:
    """y plus what the adapters add, of (y, x, a, b), one token after the other."""
    y, x, a, b = arrays
    made = y.copy()
    turn = np.repeat(np.arange(len(widths)), widths)
    owner = np.resize(turn, y.shape[1])
    for token in np.flatnonzero(place >= 0):
        where = place[token]
        for part, rank in enumerate(ranks[where]):
            added = (a[where, part, :rank] @ x[token]) @ b[where, :rank]
            made[token] += np.where(owner == part, added, 0.0)
    return made
