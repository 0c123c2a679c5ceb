"""Compares attention within segments, on the device at hand, with NumPy in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from jaxserve.pallas_kernels.registry import SegmentProblem
from jaxserve.pallas_kernels.selfcheck import REPEATS, Finding, Program, tolerance

ROWS = 1024
# Rows of pictures, one behind the other: longer than a block and shorter; padding is behind them.
PICTURES = (451, 1, 200, 260)
WINDOWS = 7  # that take turns within each picture of more than a row


def check_segments(
    attend: Callable[..., jax.Array], problem: SegmentProblem, repeats: int = REPEATS
) -> Iterator[Finding]:
    """Checks `attend`, a `segment_attention`, with pictures as segments, then with windows whose rows take turns.
    Padding is no number. Errors are those of `selfcheck`."""
    rng = np.random.default_rng(0)
    shape = ROWS, problem.heads, problem.head_dim
    q, k, v = (rng.standard_normal(shape, np.float32).astype(problem.dtype) for _ in range(3))
    used = sum(PICTURES)
    for x in (q, k, v):
        x[used:] = np.nan
    scale = problem.head_dim**-0.5
    number = np.repeat(np.arange(len(PICTURES), dtype=np.int32), PICTURES)
    turn = np.concatenate([np.arange(count) % min(WINDOWS, count) for count in PICTURES]).astype(np.int32)
    segments = {}
    for name, own in (("pictures", number), ("windows", number * WINDOWS + turn)):
        segments[name] = np.full(ROWS, -1, np.int32)
        segments[name][:used] = own
    programs = {name: Program(_call(attend, scale), q, k, v, segment) for name, segment in segments.items()}
    for name, segment in segments.items():
        exact = _exact(q, k, v, segment, scale)[:used]  # while compilers work
        found, different = programs[name].repeated((shape, problem.dtype), repeats, slice(used))
        error = np.linalg.norm(found[:used].astype(np.float64) - exact, axis=-1) / np.linalg.norm(exact, axis=-1)
        worst = float(error.max()) if np.isfinite(error).all() and not different else float("inf")
        yield Finding(f"attention within {name}", worst, tolerance(problem.dtype))


def _call(attend: Callable[..., jax.Array], scale: float) -> Callable[..., jax.Array]:
    return lambda q, k, v, segment: attend(q, k, v, segment, scale)


def _exact(q: Any, k: Any, v: Any, segment: np.ndarray, scale: float) -> np.ndarray:
    out = np.zeros(q.shape)
    for own in set(segment[segment >= 0].tolist()):
        rows = np.flatnonzero(segment == own)
        queries, keys, values = (x[rows].astype(np.float64) for x in (q, k, v))
        scores = np.einsum("qhd,khd->hqk", queries, keys) * scale
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        out[rows] = np.einsum("hqk,khd->qhd", shares / shares.sum(-1, keepdims=True), values)
    return out
