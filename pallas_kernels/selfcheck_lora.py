"""Compares products with LoRA adapters with the plain operations in float64, on the device at hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.pallas_kernels.lora.stacks import AdapterStack
from jaxserve.pallas_kernels.selfcheck import REPEATS, Finding, tolerance

PLACES, RANK = 6, 16
# tokens, inputs, outputs of each part
CASES = ((1, 4096, (512,)), (32, 2880, (512, 128, 128)), (33, 4096, (1, 1)), (300, 640, (512,)))
EPSILONS = 4.0  # in eps of the activations' type, relative to a token's largest number: a few roundings in sequence


def check_adapters(add: Callable[..., jax.Array], dtype: np.dtype) -> Iterator[Finding]:
    """Checks a function like `lora.reference.add_adapters`, with activations and matrices of this type. Some tokens
    have no adapter, and some adapters have lower ranks, behind which is zero."""
    add = jax.jit(add)
    for tokens, inputs, widths in CASES:
        rng = np.random.default_rng(tokens)
        out = 1024 if widths == (1, 1) else sum(widths)
        parts, ranks = len(widths), rng.integers(0, RANK + 1, (PLACES, len(widths)))
        a = rng.standard_normal((PLACES, parts, RANK, inputs)) / np.sqrt(inputs)
        b = rng.standard_normal((PLACES, RANK, out)) / np.sqrt(RANK)
        a[np.arange(RANK) >= ranks[:, :, None]] = 0
        b[np.arange(RANK) >= ranks.max(axis=1)[:, None]] = 0
        x, y = rng.standard_normal((tokens, inputs)), rng.standard_normal((tokens, out))
        place = rng.integers(-1, PLACES, tokens)
        given = [jnp.asarray(array, dtype) for array in (y, x, a, b)]
        stack = AdapterStack(given[2].reshape(PLACES, -1, inputs), given[3], jnp.asarray(ranks, jnp.int32), widths)
        where = jnp.asarray(place, jnp.int32)
        found = [np.asarray(add(*given[:2], stack, where), np.float64) for _ in range(REPEATS)]
        exact = _exact([np.asarray(array, np.float64) for array in given], ranks, place, widths)
        same = all(np.array_equal(found[0], again) for again in found)
        scale = np.maximum(np.abs(exact).max(axis=1, keepdims=True), 1.0)
        error = np.abs(found[0] - exact) / scale if same else np.array(np.inf)
        worst = float(error.max()) if np.isfinite(error).all() else np.inf
        yield Finding(f"adapters, {tokens} tokens, {inputs} inputs, parts {widths}", worst, tolerance(dtype, EPSILONS))


def _exact(arrays: list[np.ndarray], ranks: np.ndarray, place: np.ndarray, widths: tuple[int, ...]) -> np.ndarray:
    """y plus what the adapters add, of (y, x, a, b), one token after the other."""
    y, x, a, b = arrays
    made, turn = y.copy(), np.repeat(np.arange(len(widths)), widths)
    owner = np.resize(turn, y.shape[1])
    for token in np.flatnonzero(place >= 0):
        where = place[token]
        for part, rank in enumerate(ranks[where]):
            added = (a[where, part, :rank] @ x[token]) @ b[where, :rank]
            made[token] += np.where(owner == part, added, 0.0)
    return made
