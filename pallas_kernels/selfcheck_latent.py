"""Compares latent attention and its write with exact answers on the device at hand, before they are trusted there.

Errors and tolerances are those of `selfcheck`. A row's first and last tokens are LOUD times as large as the others, so
that the loss of one of them shows. Their scores have a larger standard deviation by this factor, too. But where such a
token dominates the softmax, an error of its score changes the result little.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.pallas_kernels.registry import LatentProblem
from jaxserve.pallas_kernels.selfcheck import OTHER_PAGES, REPEATS, Answer, Finding, Program, _code_error, tolerance
from jaxserve.pallas_kernels.selfcheck_cases import DECODES, LAYER, Rows, quantize
from jaxserve.pallas_kernels.types import LatentPages

LOUD = 3.0
PROMPTS = (
    (105, 131),
    (9, 0),
    (41, 500),
    (137, 3),
    (25, 64),
    (1, 1999),
    (73, 0),
    (17, 700),
)  # they begin at every offset mod 8
STARTUP = Rows(DECODES, PROMPTS)


class LatentBatch(NamedTuple):
    """Arguments of `latent_attention` on the host. cached: of each row, float64 [cached tokens, rank + rope]."""

    problem: LatentProblem
    rows: Rows
    q: np.ndarray
    pages: np.ndarray
    scale: np.ndarray | None
    tables: np.ndarray
    cached: list[np.ndarray]

    def arguments(self) -> tuple[Any, ...]:
        """The arguments of `latent_attention`, on the host."""
        new = [new for new, _ in self.rows.lengths] + [0] * self.rows.empty
        lengths = [length for _, length in self.rows.lengths] + [0] * self.rows.empty
        arrays = self.tables, np.cumsum([0, *new]).astype(np.int32), np.asarray(lengths, np.int32)
        cache: Any = self.pages, self.scale
        return self.q, LatentPages(*cache), *arrays, np.int32(len(self.rows.decodes))


def make_latent_batch(problem: LatentProblem, rows: Rows, seed: int = 0) -> LatentBatch:
    """A batch of normally distributed queries and rows of the cache; rotated keys are twice as large as latents. Memory
    that no row owns is NaN (77 in int8): other layers, the layer's own first page, and the rest of each row's last
    page. Entries of the tables beyond a row's pages are stale."""
    rng = np.random.default_rng(seed)
    size = problem.page_size
    dim = problem.rank + problem.rope
    needed = [-(-length // size) for _, length in rows.lengths]
    count = sum(needed) + 1
    poison = 77 if problem.kv_dtype == np.int8 else np.nan
    pages = np.full((LAYER + count, size, problem.row_width), poison, problem.kv_dtype)
    scale = np.full((LAYER + count, 2, size), np.nan, np.float32) if problem.has_scale else None
    tables = rng.integers(0, count, (len(needed) + rows.empty, max(needed))).astype(np.int32)
    owned = np.split(1 + rng.permutation(count - 1).astype(np.int32), np.cumsum(needed)[:-1])
    cached = []
    for row, ((_, length), mine) in enumerate(zip(rows.lengths, owned, strict=True)):
        tables[row, : len(mine)] = mine
        new = rng.standard_normal((length, dim), np.float32)
        new[:, problem.rank :] *= 2
        new[[0, length - 1]] *= LOUD
        codes, own = _codes(new, problem)
        page = LAYER + mine[np.arange(length) // size]
        offset = np.arange(length) % size
        pages[page, offset] = np.pad(codes.astype(np.float32), ((0, 0), (0, problem.row_width - dim)))
        exact = codes.astype(np.float64)
        if scale is not None:
            scale[page, :, offset] = own
            exact *= np.repeat(own, [problem.rank, problem.rope], axis=1)
        cached.append(exact)
    tokens = -(-rows.tokens // 8) * 8  # the engine's buckets are multiples of 8
    q = rng.standard_normal((tokens, problem.heads, dim), np.float32)
    return LatentBatch(problem, rows, q.astype(problem.q_dtype), pages, scale, tables, cached)


def _codes(rows: np.ndarray, problem: LatentProblem) -> tuple[np.ndarray, np.ndarray]:
    """Converts rows [tokens, rank + rope] to the cache's dtype. Returns also their scales [tokens, 2]."""
    if not problem.has_scale:
        return rows.astype(problem.kv_dtype), np.ones((len(rows), 2), np.float32)
    parts = [quantize(part, problem.kv_dtype) for part in np.split(rows, [problem.rank], axis=1)]
    return np.concatenate([codes for codes, _ in parts], axis=1), np.stack([own for _, own in parts], axis=1)


def exact_latent(batch: LatentBatch, scale: float, *, decode_only: bool = False) -> Iterator[Answer]:
    """Yields the tokens of each row, and their results, float64 [tokens, heads, rank]."""
    start = 0
    for (new, length), cached in zip(batch.rows.lengths, batch.cached, strict=True):
        tokens = slice(start, start + new)
        start += new
        if decode_only and new > 1:
            return
        q = batch.q[tokens].astype(np.float64) * scale
        scores = q @ cached.T  # [tokens, heads, keys]
        hidden = np.arange(length) > np.arange(length - new, length)[:, None]
        np.copyto(scores, -np.inf, where=hidden[:, None])
        np.exp(scores - scores.max(-1, keepdims=True), out=scores)
        yield tokens, scores @ cached[:, : batch.problem.rank] / scores.sum(-1, keepdims=True)


def check_latent(
    attend: Callable[..., jax.Array],
    problem: LatentProblem,
    *,
    rows: Rows = STARTUP,
    variants: Sequence[str] = ("mixed", "decode"),
    repeats: int = REPEATS,
) -> list[Finding]:
    """Checks `attend`, a `latent_attention`. Returns a finding for each variant."""
    scale = (problem.rank + problem.rope) ** -0.5
    cases = []
    for variant in variants:
        batch = make_latent_batch(problem, Rows(rows.decodes) if variant == "decode" else rows)
        options = {"scale": scale, "rank": problem.rank, "decode_only": variant == "decode"}

        def call(*arguments: Any, options: dict[str, Any] = options) -> jax.Array:
            return attend(*arguments, first_page=jnp.int32(LAYER), **options)

        cases.append((variant, batch, Program(call, *batch.arguments())))
    answers = [list(exact_latent(batch, scale, decode_only=variant == "decode")) for variant, batch, _ in cases]
    return [
        _judge(f"{variant} rows", batch, exact, program, repeats)
        for (variant, batch, program), exact in zip(cases, answers, strict=True)
    ]


def _judge(what: str, batch: LatentBatch, answers: Sequence[Answer], program: Program, repeats: int) -> Finding:
    used = batch.rows.tokens
    allowed = tolerance(batch.q.dtype)
    shape = (*batch.q.shape[:2], batch.problem.rank)
    found, different = program.repeated((shape, batch.q.dtype), repeats, slice(used))
    whole = found.astype(np.float64)
    if whole.shape != shape or not np.isfinite(whole).all():
        return Finding(what, float("inf"), allowed, f"not finite, or not of shape {shape}")
    if different:
        return Finding(what, float("inf"), allowed, f"{different} of {repeats} equal calls gave another result")
    worst = 0.0
    where = ""
    for row, (tokens, exact) in enumerate(answers):
        error = np.linalg.norm(whole[tokens] - exact, axis=-1) / np.linalg.norm(exact, axis=-1)
        if error.max() > worst:
            token, head = (int(i) for i in np.unravel_index(error.argmax(), error.shape))
            worst = float(error.max())
            cached = batch.rows.lengths[row][1]
            where = f"row {row} of {cached} cached tokens, its new token {token}, head {head}"
    return Finding(what, worst, allowed, where)


# The write


class LatentWrite(NamedTuple):
    """Arguments of `write_latent` on the host."""

    pages: np.ndarray
    scale: np.ndarray | None
    rows: np.ndarray
    slots: np.ndarray

    def arguments(self) -> tuple[Any, ...]:
        cache: Any = self.pages, self.scale
        return LatentPages(*cache), self.rows, self.slots, np.int32(LAYER)


def make_latent_write(problem: LatentProblem) -> LatentWrite:
    """A write with all difficult cases: a prompt's tokens that begin and end within pages; single tokens far apart;
    padding between them and at the end; and a token of zeros, whose scale must not make it NaN."""
    rng = np.random.default_rng(2)
    size = problem.page_size
    dim = problem.rank + problem.rope
    pages = 24 + 64 // size
    before = rng.standard_normal(((LAYER + pages + 1) * size, dim), np.float32)
    codes, own = _codes(before, problem)
    codes = np.pad(codes.astype(np.float32), ((0, 0), (0, problem.row_width - dim))).astype(problem.kv_dtype)
    scale = np.ascontiguousarray(np.moveaxis(own.reshape(-1, size, 2), 2, 1)) if problem.has_scale else None
    run = size + 3 + np.arange(61 + size)  # from page 1 on
    beyond = np.arange((run[-1] // size + 1) * size, pages * size)
    alone = rng.choice(beyond, min(48, len(beyond) // 2), replace=False)
    slots = np.concatenate([run, alone[:24], [-1] * 5, alone[24:]])
    slots = np.concatenate([slots, np.full(8 + -len(slots) % 8, -1)]).astype(np.int32)
    rows = rng.standard_normal((len(slots), dim), np.float32)
    rows[:, problem.rank :] *= 7
    rows[5] = 0
    data = codes.reshape(-1, size, problem.row_width)
    return LatentWrite(data, scale, rows.astype(problem.q_dtype), slots)


def check_write_latent(
    write: Callable[..., LatentPages], problem: LatentProblem, *, repeats: int = REPEATS
) -> list[Finding]:
    """Checks `write`, a `write_latent`: the new rows, and that all other memory is bitwise unchanged."""
    case = make_latent_write(problem)
    program = Program(partial(write, rank=problem.rank), *case.arguments())
    others = np.arange(len(case.pages)) != LAYER  # padding may go to the layer's first page
    pages, different = program.repeated(None, repeats, others)
    findings = _judge_write(case, problem, pages.data, pages.scale)
    return [*findings, OTHER_PAGES] if different else findings


def _judge_write(
    case: LatentWrite, problem: LatentProblem, data: np.ndarray, scale: np.ndarray | None
) -> list[Finding]:
    size = problem.page_size
    rank = problem.rank
    dim = problem.rank + problem.rope
    real = case.slots >= 0
    page = LAYER + case.slots[real] // size
    offset = case.slots[real] % size
    kept = np.ones(data.shape[:2], bool)
    kept[page, offset] = False
    kept[LAYER] = False  # no sequence owns a layer's first page, and padding may go there
    changed = sum(a.tobytes() != b.tobytes() for a, b in zip(case.pages[kept], data[kept], strict=True))
    if scale is not None and case.scale is not None:
        before, after = (np.moveaxis(x, 1, 2)[kept] for x in (case.scale, scale))
        changed += sum(a.tobytes() != b.tobytes() for a, b in zip(before, after, strict=True))
    new = case.rows[real].astype(np.float32)
    found = data[page, offset].astype(np.float32)
    error = 0.0
    allowed = 0.0
    if scale is None:
        error = float(np.abs(found[:, :dim] - new.astype(data.dtype).astype(np.float32)).max())
    else:
        own = scale[page, :, offset]
        allowed = 0.51
        for i, part in enumerate((slice(0, rank), slice(rank, dim))):
            error = max(error, _code_error(found[:, part], own[:, i], new[:, part], data.dtype))
    if not np.isfinite(error) or found[:, dim:].any():
        error = float("inf")
    return [
        Finding("written tokens", error, allowed, "in units of the last place of a code" if scale is not None else ""),
        Finding("places that no token was written to", float(changed), 0.0, "so many have changed"),
    ]
