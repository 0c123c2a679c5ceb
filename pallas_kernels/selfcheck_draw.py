"""Compares the kernel that draws tokens with sorted float64 probabilities, on the device at hand.

Of the tokens that a row may draw, the one with the largest sum of scaled logit and noise is right. The error is by how
much the sum of the token that was drawn is smaller, or infinite if the token may not be drawn. Sums in float32 are
right to about 1e-5.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from jaxserve.pallas_kernels.draw_noise import LARGEST, noise_bits
from jaxserve.pallas_kernels.selfcheck import Finding, Program
from jaxserve.pallas_kernels.types import DrawSettings

ALLOWED = 3e-5
COLDEST = 1e-5  # lower temperatures are greedy
REPEATS = 5
DRAWS = 4
# temperature, top_k, top_p, min_p
ROWS = (
    (0.0, 0, 1.0, 0.0),
    (1e-6, 5, 0.5, 0.0),
    (1.0, 0, 1.0, 0.0),
    (0.7, 20, 0.8, 0.0),
    (0.6, 20, 0.95, 0.05),
    (1.0, 1, 1.0, 0.0),
    (1.3, 64, 1.0, 0.0),
    (1.0, 0, 0.9, 0.0),
    (0.5, 0, 0.999, 0.0),
    (1.0, 0, 0.0, 0.0),
    (1.0, 0, 1.0, 0.1),
    (2.0, 1500, 0.99, 0.0),
    (1.0, 10**6, 1.0, 0.0),
)


def check_draw(draw: Callable[..., jax.Array], vocab: int) -> Iterator[Finding]:
    """Checks a function like `draw_triton.draw`. Yields findings for each kind of row, peaked, flat and greedy."""
    given = _settings(np.zeros((len(ROWS), 2), np.uint32), None)
    some = np.zeros((len(ROWS), vocab), np.float32)
    every: Any = np.arange(vocab, dtype=np.int32)
    whole = Program(draw, some, given)
    part = Program(draw, some, given._replace(ids=every))
    likeliest = Program(lambda logits: draw(logits, None), some)
    for spread in (4.0, 0.5):
        rng = np.random.default_rng(int(10 * spread))
        logits = (rng.standard_normal((len(ROWS), vocab)) * spread).astype(np.float32)
        worst = np.zeros(len(ROWS))
        for i in range(DRAWS):
            keys = rng.integers(0, 1 << 32, (len(ROWS), 2), dtype=np.uint32)
            ids = rng.permutation(2 * vocab)[:vocab].astype(np.int32) if i % 2 else None  # a part of a vocabulary
            noise = noise_of(keys, every if ids is None else ids)
            arguments = logits, _settings(keys, ids)
            tokens = [(whole if ids is None else part).run(*arguments) for _ in range(REPEATS)]
            same = all((tokens[0] == again).all() for again in tokens)
            errors = [error(logits[i], *row, noise[i], tokens[0][i]) for i, row in enumerate(ROWS)]
            worst = np.maximum(worst, errors if same else np.inf)
        for row, found in zip(ROWS, worst, strict=True):
            yield Finding("draw, spread {}, temperature {}, k {}, p {}, min-p {}".format(spread, *row), found, ALLOWED)
        greedy = likeliest.run(logits) == logits.argmax(1)
        yield Finding(f"greedy, spread {spread}", 0.0 if greedy.all() else np.inf, 0.0)


def _settings(keys: Any, ids: Any) -> DrawSettings:
    types = np.float32, np.int32, np.float32, np.float32
    kind: Any = DrawSettings  # of NumPy's arrays
    columns = [np.asarray(column, dtype) for column, dtype in zip(zip(*ROWS, strict=True), types, strict=True)]
    return kind(*columns, keys, ids)


def noise_of(keys: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """The noise [rows, n] of keys [rows, 2] and tokens [n], in float64 but for the rounding of random bits."""
    x = noise_bits(keys, ids.astype(np.uint32)).astype(np.float32) * np.float32(2**-32) + np.float32(2**-33)
    return -np.log(-np.log1p(-np.minimum(x, LARGEST).astype(np.float64)))


def kept(logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """The tokens that a row may draw, bool [vocab], as `DrawSettings` defines them."""
    x = logits.astype(np.float64)
    relative = np.exp((x - x.max()) / temperature)
    keep = np.ones(x.shape, bool)
    if 0 < top_k < len(x):
        keep &= x >= np.partition(x, -top_k)[-top_k]
    if top_p < 1:
        order = np.argsort(-x, kind="stable")
        up_to = np.cumsum(np.where(keep, relative, 0)[order])
        enough = np.searchsorted(up_to, top_p * up_to[-1] * (1 - 1e-7)) if top_p > 0 else 0
        keep &= x >= x[order[min(enough, len(x) - 1)]]
    return keep & (relative >= min_p)


def error(
    logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float, noise: np.ndarray, token: int
) -> float:
    """The error of `token` for a row of logits and noise [vocab], as the module defines it."""
    if temperature < COLDEST:
        return 0.0 if token == logits.argmax() else np.inf
    keep = kept(logits, temperature, top_k, top_p, min_p)
    if not 0 <= token < len(logits) or not keep[token]:
        return np.inf
    scores = logits.astype(np.float64) / temperature + noise
    return float(scores[keep].max() - scores[token])
