"""How many parts a long row has in Hopper's kernel of latent attention, and XLA's sum of the parts' results."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxserve.pallas_kernels.paged_attention.reference import MASKED
from jaxserve.pallas_kernels.work_lists import FIRST, LAST, DecodeItems

PARALLEL = 4 * 132  # programs to aim at where a batch has few rows: four for each multiprocessor of an H200
MOST_PROGRAMS = 2048  # bounds the parts that a long row may have beside many short ones


def most_parts(programs: int) -> int:
    """How many parts a row may have. `programs` is how many the batch takes where no row is split.

    A part that no row needs is a program that returns at once, for an estimated 5 ns. So there are at most about
    MOST_PROGRAMS, or twice the unavoidable number where that is larger.
    """
    return max(PARALLEL // programs, min(MOST_PROGRAMS // programs, 8), 2)


def merge(values: jax.Array, logs: jax.Array, work: DecodeItems) -> jax.Array:
    """Sums the parts' values [items, blocks, heads, rank], weighted by their log2-sum-exp2s `logs` [items, blocks,
    heads] -> [rows, blocks, heads, rank].

    Items that no program wrote may hold anything, as may items of rows without tokens. Such rows get zeros.
    """
    which = jnp.arange(len(logs) // len(work.parts), dtype=jnp.int32)
    written = work.items[:, LAST] > work.items[:, FIRST]
    item = work.begin[:, None] + jnp.minimum(which, work.parts[:, None] - 1)  # [rows, most]
    real = ((which < work.parts[:, None]) & written[item])[..., None, None]
    logs = jnp.where(real, logs[item], MASKED)  # [rows, most, blocks, heads]
    weights = jnp.where(real, jnp.exp2(logs - jnp.max(logs, axis=1)[:, None]), 0.0)
    total = weights.sum(1)
    weighted = (weights[..., None] * jnp.where(real[..., None], values[item], 0.0)).sum(1)
    return weighted / jnp.where(total > 0, total, 1.0)[..., None]
