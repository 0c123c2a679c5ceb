"""Compares the fused kernels with the plain operations in float32, on the device at hand, before they are trusted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.pallas_kernels.ops import Ops
from jaxserve.pallas_kernels.parts import Heads, Parts, Row
from jaxserve.pallas_kernels.quant_matmul import w8a8
from jaxserve.pallas_kernels.registry import AttentionProblem
from jaxserve.pallas_kernels.selfcheck import REPEATS, Finding, check_attention, tolerance
from jaxserve.pallas_kernels.selfcheck_cases import STARTUP, Rows
from jaxserve.pallas_kernels.types import Activations, KVPages, QuantArray, QuantRows

TOKENS, PARTS, EPS = 37, 3, 1e-5
SIZES = (4096, 2880)  # of a token: a power of two, and another size
EPSILONS = 4.0  # in eps of the activations' type, relative to a token's largest number: a few roundings in sequence
CODES = {"int8": 0.5 / 127, "float8_e4m3fn": 2.0**-4}  # error of a code, relative to its head's largest number
PAGES, FIRST = 5, 2  # pages of a layer, and pages before it


def check_fused(fused: Any, problem: AttentionProblem) -> Iterator[Finding]:
    """Checks a module like `fused_triton`. Yields a finding for each operation, with the problem's heads and pages."""
    dtype, plain = problem.q_dtype, Ops()
    for size in SIZES:
        x, y, scale = (
            _numbers(0, (TOKENS, size), dtype),
            _parts(1, (TOKENS, size), (size,), dtype),
            _row(2, size, dtype),
        )
        found = jax.jit(lambda *a: fused.add_norm(*a, EPS))(x, y, scale)
        expected = plain.add_norm(_wide(x), _wide(y), _wide(scale), EPS)
        yield _compare(f"sum and norm of {size}", found, expected, tolerance(dtype, EPSILONS))
        if dtype != jnp.float32:
            precise = _row(2, size, jnp.float32)
            found = jax.jit(lambda *a: fused.add_norm(*a, EPS))(x, y, precise)
            expected = plain.add_norm(_wide(x), _wide(y), precise, EPS)
            yield _compare(f"norm of {size} with a scale in float32", found, expected, tolerance(dtype, EPSILONS))
        gates = _parts(3, (TOKENS, 2 * size), None, dtype)
        gated = jax.jit(lambda y: fused.gate(y, "silu", dtype))(gates)
        exact = plain.gated(_wide(gates), "silu", jnp.float32)
        yield _compare(f"gate of {size}", gated, exact, tolerance(dtype, EPSILONS))
        yield from _rounded(fused, (x, y, scale), gates, size, dtype)
    heads, pages = _heads(problem), _pages(problem)
    slots = (
        jnp.asarray(np.random.default_rng(5).permutation(PAGES * problem.page_size)[:TOKENS], jnp.int32).at[3].set(-1)
    )

    def run(ops: Any, heads: Heads, dtype: Any) -> tuple[jax.Array, KVPages]:
        return ops.rotate_and_write(heads, EPS, dtype, pages, slots, jnp.int32(FIRST))

    q, written = jax.jit(lambda heads: run(fused, heads, dtype))(heads)
    exact, k, v = plain.rotate(_wide(heads), EPS, jnp.float32)
    yield _compare("queries", q, exact, tolerance(dtype, EPSILONS))
    yield from _judge_pages(written, pages, np.asarray(slots), np.stack([k, v], 1), dtype)


def _rounded(fused: Any, of_norm: tuple, gates: Parts, size: int, dtype: Any) -> Iterator[Finding]:
    """Checks results for a product that takes int8: they must be within one code of the rounded float results."""
    reader = QuantArray(
        jnp.zeros((1, size), jnp.int8), jnp.ones((1, 1)), block=(1, size), activations=Activations("int8")
    )
    pairs = {
        "norm": (lambda *a: fused.add_norm(*a, EPS)[1], lambda *a: fused.add_norm(*a, EPS, reader)[1], of_norm),
        "gate": (lambda y: fused.gate(y, "silu", dtype), lambda y: fused.gate(y, "silu", dtype, reader), (gates,)),
    }
    for name, (floats, codes, arguments) in pairs.items():
        found, exact = jax.jit(codes)(*arguments), jax.jit(floats)(*arguments)
        values = w8a8.dequantize(found) if isinstance(found, QuantRows) else found
        yield _compare(f"{name} of {size} in int8", values, exact.astype(jnp.float32), 1.5 * CODES["int8"])


def check_write_and_attend(
    fused: Callable[..., tuple[jax.Array, KVPages]],
    attend: Callable[..., jax.Array],
    problem: AttentionProblem,
    *,
    rows: Rows = STARTUP,
    repeats: int = REPEATS,
) -> list[Finding]:
    """Checks `fused`, a `write_and_attend`, on the decodes of `rows`: its result, and the result of `attend`, which is
    right, on the pages that it leaves. Both become NaN if anything but the new tokens' places has changed."""

    def call(q, pages, tables, q_start, kv_len, num_decodes, *, again: bool, first_page, **options):
        """`pages` have the new tokens, which are removed from them first."""
        decodes, size = len(tables), pages.page_size
        newest = jnp.maximum(kv_len - 1, 0)
        slot = jnp.take_along_axis(tables, (newest // size)[:, None], axis=1)[:, 0] * size + newest % size
        slots = jnp.where(jnp.arange(decodes) < num_decodes, slot, -1)
        page = jnp.where(slots < 0, len(pages.data), first_page + slots // size)  # beyond the pages: dropped
        place = page, slice(None), slice(None), slots % size
        new = pages.data.at[place].get(mode="clip").astype(jnp.float32)
        if pages.scale is not None:
            new *= pages.scale.at[place].get(mode="clip")[..., None]
        k, v = (jnp.pad(x, ((0, max(len(q) - decodes, 0)), (0, 0), (0, 0)))[: len(q)] for x in (new[:, 0], new[:, 1]))
        slots = jnp.pad(slots, (0, max(len(q) - decodes, 0)), constant_values=-1)[: len(q)]
        wiped = jax.tree.map(lambda x: x.at[place].set(77 if x.dtype == jnp.int8 else jnp.nan, mode="drop"), pages)
        where = (tables, q_start, kv_len, num_decodes)
        arrays = (q, k.astype(q.dtype), v.astype(q.dtype), wiped, slots, *where)
        out, after = fused(*arrays, first_page=first_page, **options)
        if again:
            out = attend(q, after, *where, first_page=first_page, **options)
        others = [
            _bits(x.at[place].set(0, mode="drop").at[first_page].set(0))  # the page for padding
            for both in zip(jax.tree.leaves(after), jax.tree.leaves(pages), strict=True)
            for x in both
        ]
        same = [(x == y).all() for x, y in zip(others[::2], others[1::2], strict=True)]
        return jnp.where(jnp.stack(same).all(), out, jnp.nan)

    found = []
    for again in (False, True):
        one = partial(call, again=again)
        found += check_attention(one, problem, rows=Rows(rows.decodes), variants=("decode",), repeats=repeats)
    return found


def _bits(x: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(x, {1: jnp.int8, 2: jnp.int16, 4: jnp.int32}[x.dtype.itemsize])


def _judge_pages(
    written: KVPages, before: KVPages, slots: np.ndarray, new: np.ndarray, dtype: Any
) -> Iterator[Finding]:
    """Checks the written `new` [tokens, 2, kv_heads, head_dim], and that all other memory is bitwise unchanged."""
    found, kept = np.asarray(written.data), slots >= 0
    at = FIRST + slots[kept] // before.page_size, slice(None), slice(None), slots[kept] % before.page_size
    values = found[at].astype(np.float32)
    if written.scale is not None:
        values = values * np.asarray(written.scale)[at][..., None]
    allowed = tolerance(dtype, EPSILONS) + CODES.get(found.dtype.name, 0.0)
    yield _compare("keys and values", values, new[kept], allowed)
    for name, after, was in zip(("pages", "scales"), written, before, strict=True):
        if after is not None and was is not None:
            mask = np.ones(was.shape[:4], bool)
            mask[at] = False
            same = np.asarray(after)[mask].tobytes() == np.asarray(was)[mask].tobytes()
            yield Finding(f"{name} that nobody wrote", 0.0 if same else float("inf"), 0.0)


def _compare(what: str, found: Any, expected: Any, allowed: float) -> Finding:
    """The largest difference in any vector of the last axis, relative to the largest number of that vector."""
    worst = 0.0
    for one, right in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        one, right = np.asarray(one).astype(np.float32), np.asarray(right)
        error = (np.abs(one - right).max(-1) / np.abs(right).max(-1)).max()
        worst = max(worst, float(error) if np.isfinite(one).all() else float("inf"))
    return Finding(what, worst, allowed)


def _wide(arrays: Any) -> Any:
    """Converts to float32, except arrays that count rows."""
    return jax.tree.map(lambda a: a if jnp.issubdtype(a.dtype, jnp.integer) else a.astype(jnp.float32), arrays)


def _numbers(seed: int, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32).astype(dtype)


def _row(seed: int, size: int, dtype: Any) -> Row:
    return Row(_numbers(seed, (3, size), dtype), jnp.int32(1))


def _parts(seed: int, shape: tuple[int, ...], bias: tuple[int, ...] | None, dtype: Any) -> Parts:
    return Parts(
        _numbers(seed, (PARTS, *shape), jnp.float32), None if bias is None else _numbers(seed + 1, bias, dtype)
    )


def _heads(problem: AttentionProblem) -> Heads:
    shape, dtype = (problem.kv_heads, problem.group + 2, problem.head_dim), problem.q_dtype
    angles = np.random.default_rng(6).uniform(0, 6, (TOKENS, problem.head_dim // 2)).astype(np.float32)
    norms = (_row(seed, problem.head_dim, dtype) for seed in (7, 8))
    return Heads(_parts(9, (TOKENS, *shape), shape, dtype), jnp.cos(angles), jnp.sin(angles), *norms)


def _pages(problem: AttentionProblem) -> KVPages:
    shape = (FIRST + PAGES, 2, problem.kv_heads, problem.page_size)
    scale = _numbers(11, shape, jnp.float32) if problem.has_scale else None
    return KVPages(_numbers(10, (*shape, problem.head_dim), jnp.float32).astype(problem.kv_dtype), scale)
