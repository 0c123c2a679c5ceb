"""Compares the fused kernels, on the device at hand, with NumPy's results in float32, before they are trusted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.pallas_kernels.operands import Heads, Partials, Row
from jaxserve.pallas_kernels.registry import AttentionProblem
from jaxserve.pallas_kernels.selfcheck import REPEATS, Finding, Program, check_attention, tolerance
from jaxserve.pallas_kernels.selfcheck_cases import STARTUP, Rows
from jaxserve.pallas_kernels.types import Activations, KVPages, QuantArray, QuantRows

TOKENS = 37
PARTS = 3
EPS = 1e-5
SIZES = (4096, 2880)  # of a token: a power of two, and another size
EPSILONS = 4.0  # in eps of the activations' type, relative to a token's largest number: a few roundings in sequence
CODES = {"int8": 0.5 / 127, "float8_e4m3fn": 2.0**-4}  # error of a code, relative to its head's largest number
PAGES = 5  # pages of a layer
FIRST = 2  # pages before it


def check_fused(fused: Any, problem: AttentionProblem) -> Iterator[Finding]:
    """Checks a module like `fused_triton`. Yields a finding for each operation, with the problem's heads and pages."""
    dtype = problem.q_dtype
    cases = [one for size in SIZES for one in _dense(fused, size, dtype)]
    heads = _heads(problem)
    pages = _pages(problem)
    slots = np.random.default_rng(5).permutation(PAGES * problem.page_size)[:TOKENS].astype(np.int32)
    slots[3] = -1

    def rotate_and_write(heads: Heads, pages: KVPages, slots: jax.Array) -> tuple[jax.Array, KVPages]:
        return fused.rotate_and_write(heads, EPS, dtype, pages, slots, jnp.int32(FIRST))

    rotating = Program(rotate_and_write, heads, pages, slots)
    for what, run, exact, allowed in cases:
        found = run()
        yield _compare(what, dequantized(found) if isinstance(found, QuantRows) else found, exact(), allowed)
    turned, k, v = rotated(heads)
    q, written = rotating.run()
    yield _compare("queries", q, turned, tolerance(dtype, EPSILONS))
    yield from _judge_pages(written, pages, slots, np.stack([k, v], 1), dtype)


# What is compared, functions that return its results and what they should be, and the error that it may have.
Case = tuple[str, Callable[[], Any], Callable[[], Any], float]


def _dense(fused: Any, size: int, dtype: Any) -> Iterator[Case]:
    """Sums, norms and gates of vectors of this size."""
    x = _numbers(0, (TOKENS, size), dtype)
    y = _parts(1, (TOKENS, size), (size,), dtype)
    scale = _row(2, size, dtype)
    allowed = tolerance(dtype, EPSILONS)

    def add_norm(*arrays: Any) -> Any:
        return fused.add_norm(*arrays, EPS)

    floats = cache(Program(add_norm, x, y, scale).run)
    yield f"sum and norm of {size}", floats, partial(added_and_normed, x, y, scale), allowed
    if dtype != np.float32:
        precise = _row(2, size, np.dtype(np.float32))
        exact = partial(added_and_normed, x, y, precise)
        yield f"norm of {size} with a scale in float32", Program(add_norm, x, y, precise).run, exact, allowed
    gates = _parts(3, (TOKENS, 2 * size), None, dtype)
    gated = cache(Program(lambda y: fused.gate(y, "silu", dtype), gates).run)
    yield f"gate of {size}", gated, partial(gated_by_silu, gates), allowed
    # Results for a product that takes int8 must be within one code of the float results, which are rounded themselves.
    reader = QuantArray(
        np.zeros((1, size), np.int8), np.ones((1, 1), np.float32), block=(1, size), activations=Activations("int8")
    )
    codes = Program(lambda *arrays: fused.add_norm(*arrays, EPS, reader)[1], x, y, scale)
    yield f"norm of {size} in int8", codes.run, lambda: floats()[1].astype(np.float32), 1.5 * CODES["int8"]
    codes = Program(lambda y: fused.gate(y, "silu", dtype, reader), gates)
    yield f"gate of {size} in int8", codes.run, lambda: gated().astype(np.float32), 1.5 * CODES["int8"]


def whole(parts: Any) -> np.ndarray:
    """The sum of parts with their bias, in float32."""
    return parts.sums.sum(0) + (0 if parts.bias is None else parts.bias.astype(np.float32))


def normed(x: np.ndarray, scale: Row) -> np.ndarray:
    """`ops.rms_norm` in float32."""
    factor = scale.array[scale.place].astype(np.float32)
    return x / np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True) + EPS) * factor


def added_and_normed(x: np.ndarray, y: Partials, scale: Row) -> tuple[np.ndarray, np.ndarray]:
    """`Ops.add_norm` in float32."""
    total = x.astype(np.float32) + whole(y)
    return total, normed(total, scale)


def gated_by_silu(y: Partials) -> np.ndarray:
    """`Ops.gated` with silu, in float32."""
    gate = whole(y)[:, ::2]
    up = whole(y)[:, 1::2]
    return gate / (1 + np.exp(-gate)) * up


def rotated(heads: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`Ops.rotate` in float32."""
    qkv = whole(heads.qkv)

    def rotate(x: np.ndarray) -> np.ndarray:
        cos, sin = (t.reshape(len(t), *(1,) * (x.ndim - 2), -1) for t in (heads.cos, heads.sin))
        first, second = np.split(x, 2, axis=-1)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

    return rotate(normed(qkv[:, :, :-2], heads.q_norm)), rotate(normed(qkv[:, :, -2], heads.k_norm)), qkv[:, :, -1]


def dequantized(rows: QuantRows) -> np.ndarray:
    """The values of rounded inputs of which each token has one scale."""
    return rows.codes.astype(np.float32) * rows.scale


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
        decodes = len(tables)
        size = pages.page_size
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
    found = np.asarray(written.data)
    kept = slots >= 0
    at = FIRST + slots[kept] // before.page_size, slice(None), slice(None), slots[kept] % before.page_size
    values = found[at].astype(np.float32)
    if written.scale is not None:
        values = values * np.asarray(written.scale)[at][..., None]
    allowed = tolerance(dtype, EPSILONS) + CODES.get(found.dtype.name, 0.0)
    yield _compare("keys and values", values, new[kept], allowed)
    for name, after, was in zip(("pages", "scales"), written[:2], before[:2], strict=True):
        if after is not None and was is not None:
            mask = np.ones(was.shape[:4], bool)
            mask[at] = False
            same = np.asarray(after)[mask].tobytes() == np.asarray(was)[mask].tobytes()
            yield Finding(f"{name} that nobody wrote", 0.0 if same else float("inf"), 0.0)


def _compare(what: str, found: Any, expected: Any, allowed: float) -> Finding:
    """The largest difference in any vector of the last axis, relative to the largest number of that vector."""
    worst = 0.0
    for one, right in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        one = np.asarray(one).astype(np.float32)
        right = np.asarray(right)
        error = (np.abs(one - right).max(-1) / np.abs(right).max(-1)).max()
        worst = max(worst, float(error) if np.isfinite(one).all() else float("inf"))
    return Finding(what, worst, allowed)


def _numbers(seed: int, shape: tuple[int, ...], dtype: Any) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32).astype(dtype)


def _row(seed: int, size: int, dtype: Any) -> Row:
    place: Any = np.int32(1)
    return Row(_numbers(seed, (3, size), dtype), place)


def _parts(seed: int, shape: tuple[int, ...], bias: tuple[int, ...] | None, dtype: Any) -> Partials:
    sums = _numbers(seed, (PARTS, *shape), np.float32)
    return Partials(sums, None if bias is None else _numbers(seed + 1, bias, dtype))


def _heads(problem: AttentionProblem) -> Heads:
    shape = (problem.kv_heads, problem.group + 2, problem.head_dim)
    dtype = problem.q_dtype
    angles: Any = np.random.default_rng(6).uniform(0, 6, (TOKENS, problem.head_dim // 2)).astype(np.float32)
    q_norm, k_norm = (_row(seed, problem.head_dim, dtype) for seed in (7, 8))
    return Heads(_parts(9, (TOKENS, *shape), shape, dtype), np.cos(angles), np.sin(angles), q_norm, k_norm)


def _pages(problem: AttentionProblem) -> KVPages:
    shape = (FIRST + PAGES, 2, problem.kv_heads, problem.page_size)
    scale = _numbers(11, shape, np.float32) if problem.has_scale else None
    return KVPages(_numbers(10, (*shape, problem.head_dim), problem.kv_dtype), scale)
