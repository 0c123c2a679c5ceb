"""A kernel against plain XLA on the device at hand, before it is trusted there.

Kernels are compiled for devices that nobody has run them on yet; drivers and compilers change. A small ragged batch
tells within seconds whether this one computes what it should.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.kv_write import quantize
from pallas_kernels.paged_attention import reference
from pallas_kernels.quant_matmul import reference as quantized
from pallas_kernels.registry import AttentionProblem, MatmulProblem
from pallas_kernels.types import KVPages, QuantArray

MATMUL_ROWS = (1, 64, 256)
ROWS, WIDTH, TOKENS = 5, 6, 64  # two decodes, an empty row, a whole prompt and a late chunk


def attention_error(attend: Callable[..., jax.Array], problem: AttentionProblem) -> float:
    """The largest difference from `reference.paged_attention`, over the largest value; a right kernel stays below
    `tolerance`."""
    q, pages, *rest = _batch(problem)
    options = {"scale": problem.head_dim**-0.5}
    if problem.softcap:
        options["softcap"] = 5.0
    if problem.sinks:
        options["sinks"] = jnp.ones((problem.kv_heads, problem.group), jnp.float32)
    found = jax.jit(lambda *args: attend(*args, **options))(q, pages, *rest)
    expected = reference.paged_attention(q, pages, *rest, **options)
    used = int(rest[1][-1])
    found, expected = (np.asarray(x[:used], np.float32) for x in (found, expected))
    error = np.abs(found - expected).max() / np.abs(expected).max()
    return float(error) if np.isfinite(found).all() else float("inf")


def tolerance(problem: AttentionProblem) -> float:
    """Of `attention_error`: a few units in the last place of the queries' type."""
    return 16 * float(jnp.finfo(problem.q_dtype).eps) if problem.q_dtype != np.float32 else 1e-4


def matmul_error(multiply: Callable[..., jax.Array], problem: MatmulProblem) -> float:
    """The same for products with a weight of `problem`'s form, for one row and for many; see `matmul_tolerance`."""
    w, rng = _weight(problem), np.random.default_rng(1)
    worst = 0.0
    for rows in MATMUL_ROWS:
        x = jnp.asarray(rng.standard_normal((rows, problem.inputs)), problem.x_dtype)
        found = np.asarray(jax.jit(multiply)(x, w))
        expected = np.asarray(jax.jit(quantized.quant_matmul)(x, w))
        error = np.abs(found - expected).max() / np.abs(expected).max()
        worst = max(worst, float(error) if np.isfinite(found).all() else float("inf"))
    return worst


def matmul_tolerance(problem: MatmulProblem) -> float:
    """Of `matmul_error`: a weight may be rounded to the type of the activations."""
    return 8 * float(jnp.finfo(problem.x_dtype).eps)


def _weight(problem: MatmulProblem) -> QuantArray:
    shape, rng = (problem.rows, problem.inputs), np.random.default_rng(0)
    blocks = tuple(-(-size // block) for size, block in zip(shape, problem.block, strict=True))
    codes = jnp.asarray(rng.integers(-7, 8, shape), jnp.int8).astype(problem.codes_dtype)
    scale = jnp.asarray(rng.uniform(0.5, 1.5, blocks), jnp.float32)
    zero = jnp.asarray(rng.integers(-7, 8, blocks), jnp.int8) if problem.has_zero else None
    bias = jnp.asarray(rng.standard_normal(blocks), jnp.float32) if problem.has_bias else None
    return QuantArray(codes, scale, zero, bias, problem.block)


def _batch(problem: AttentionProblem) -> tuple:
    size, rng = problem.page_size, np.random.default_rng(0)
    kv_len = np.array([WIDTH * size, size + 1, 0, 24, 3 * size + 30], np.int32).clip(max=WIDTH * size)
    q_len = np.array([1, 1, 0, 24, min(30, TOKENS - 26)])
    tables = 1 + rng.permutation(ROWS * WIDTH).reshape(ROWS, WIDTH).astype(np.int32)
    shape = (ROWS * WIDTH + 1, 2, problem.kv_heads, size, problem.head_dim)
    data, scale = jnp.asarray(rng.standard_normal(shape), jnp.float32), None
    if problem.has_scale:
        data, scale = quantize(data, problem.kv_dtype)
    q = jnp.asarray(rng.standard_normal((TOKENS, problem.kv_heads, problem.group, problem.head_dim)), problem.q_dtype)
    q_start = np.concatenate([[0], np.cumsum(q_len)]).astype(np.int32)
    pages = KVPages(data.astype(problem.kv_dtype), scale)
    return q, pages, jnp.asarray(tables), jnp.asarray(q_start), jnp.asarray(kv_len), jnp.int32(2)
