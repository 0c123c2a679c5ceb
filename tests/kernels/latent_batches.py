"""Batches for latent attention on the host, and what is right for them in float64. What no row owns is poisoned with
NaN (77 in int8); entries of the tables beyond a row's pages are stale."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jaxserve.pallas_kernels.registry import LatentProblem
from jaxserve.pallas_kernels.types import LatentPages

TOLERANCE = {"float32": 2e-5, "float16": 4e-3, "bfloat16": 2e-2}
DTYPES = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "int8": np.int8,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
}


@dataclass(frozen=True)
class Config:
    rank: int = 64
    rope: int = 16
    heads: int = 4
    page_size: int = 16
    width: int | None = None  # of a row in the cache; None: rank + rope
    dtype: str = "float32"
    kv_dtype: str | None = None  # of codes with scales; None: as the queries
    tokens: int = 96
    rows: int = 9  # one more than the reference takes at once
    max_pages: int = 24
    first_page: int = 0

    def __str__(self) -> str:
        sizes = f"{self.rank}+{self.rope}-heads{self.heads}-page{self.page_size}-table{self.max_pages}"
        return "-".join([sizes, self.dtype, *([self.kv_dtype] if self.kv_dtype else [])])

    @property
    def scale(self) -> float:
        return (self.rank + self.rope) ** -0.5

    @property
    def stored(self) -> int:
        return self.width or self.rank + self.rope

    @property
    def problem(self) -> LatentProblem:
        q, kv = (np.dtype(DTYPES[name]) for name in (self.dtype, self.kv_dtype or self.dtype))
        sizes = (self.heads, self.rank, self.rope, self.page_size)
        return LatentProblem(q, kv, *sizes, self.kv_dtype is not None, self.stored)


@dataclass
class Batch:
    """Arrays as the kernels take them, and each row's own latents and keys in float64 [cached tokens, rank + rope]."""

    config: Config
    q: np.ndarray
    pages: np.ndarray
    scale: np.ndarray | None
    tables: np.ndarray
    q_len: list[int]
    kv_len: list[int]
    num_decodes: int
    cached: list[np.ndarray]

    def arguments(self) -> tuple:
        rows = self.config.rows
        starts = np.cumsum([0, *self.q_len])
        starts = np.append(starts, np.full(rows + 1 - len(starts), starts[-1])).astype(np.int32)
        lengths = np.zeros(rows, np.int32)
        lengths[: len(self.kv_len)] = self.kv_len
        pages = LatentPages(jnp.asarray(self.pages), None if self.scale is None else jnp.asarray(self.scale))
        arrays = (jnp.asarray(x) for x in (self.tables, starts, lengths))
        return jnp.asarray(self.q), pages, *arrays, jnp.int32(self.num_decodes)

    def gold(self) -> np.ndarray:
        """float64 [real tokens, heads, rank], one token at a time."""
        out = []
        for new, length, cached in zip(self.q_len, self.kv_len, self.cached, strict=True):
            for position in range(length - new, length):
                keys = cached[: position + 1]
                scores = self.q[len(out)].astype(np.float64) @ keys.T * self.config.scale
                weights = np.exp(scores - scores.max(-1, keepdims=True))
                out.append(weights / weights.sum(-1, keepdims=True) @ keys[:, : self.config.rank])
        return np.stack(out)


def make_batch(config: Config, rows: list[tuple[int, int]], seed: int) -> Batch:
    """rows: (new tokens, cached tokens with the new ones); those of one token first are the decodes."""
    rng = np.random.default_rng(seed)
    assert sum(new for new, _ in rows) <= config.tokens
    assert len(rows) <= config.rows
    num_decodes = next((i for i, (new, _) in enumerate(rows) if new != 1), len(rows))
    size = config.page_size
    count = config.first_page + config.rows * config.max_pages + 6
    owned = rng.permutation(np.arange(config.first_page + 1, count)).tolist()  # the first is nobody's
    kv_dtype = DTYPES[config.kv_dtype or config.dtype]
    pages = np.full((count, size, config.stored), 77 if kv_dtype == np.int8 else np.nan, kv_dtype)
    scale = np.full((count, 2, size), np.nan, np.float32) if config.kv_dtype else None
    tables = rng.integers(0, count, (config.rows, config.max_pages)).astype(np.int32)
    cached = []
    for i, (_, length) in enumerate(rows):
        row = rng.standard_normal((length, config.stored))
        row[:, config.rank :] *= 3  # not of the latents' size: scales must not be mixed up
        row[:, config.rank + config.rope :] = 0
        own = np.ones((length, 2), np.float32)
        if config.kv_dtype:
            parts = row[:, : config.rank], row[:, config.rank :]
            own = np.stack([np.abs(part).max(-1) / 127 for part in parts], 1).astype(np.float32)
        spread = np.repeat(own, [config.rank, config.stored - config.rank], axis=1)
        codes = row / spread
        codes = (np.round(codes) if kv_dtype == np.int8 else codes).astype(kv_dtype)
        mine = np.array([owned.pop() for _ in range(-(-length // size))], np.int64)
        tables[i, : len(mine)] = mine
        position = np.arange(length)
        pages[mine[position // size], position % size] = codes
        if scale is not None:
            scale[mine[position // size], :, position % size] = own
        cached.append((codes.astype(np.float64) * spread)[:, : config.rank + config.rope])
    tables -= config.first_page
    q = rng.standard_normal((config.tokens, config.heads, config.rank + config.rope)).astype(DTYPES[config.dtype])
    lengths = [n for n, _ in rows], [n for _, n in rows]
    return Batch(config, q, pages, scale, tables, *lengths, num_decodes, cached)


def random_rows(config: Config, rng: np.random.Generator, borders: tuple[int, ...]) -> list[tuple[int, int]]:
    """Decodes, then chunks of prompts; lengths near the borders of pages and blocks more often than not."""
    limit = config.page_size * config.max_pages
    near_to = np.array([1, config.page_size, limit, *borders])

    def length() -> int:
        near = int(rng.choice(near_to)) + int(rng.integers(-1, 2))
        return min(max(near if rng.random() < 0.6 else int(rng.integers(1, limit + 1)), 1), limit)

    count = int(rng.integers(1, config.rows + 1))
    rows = [(1, length()) for _ in range(int(rng.integers(0, count + 1)))]
    room = config.tokens - len(rows)
    while len(rows) < count and room > 0:
        total = length()
        new = min(total, room, int(rng.integers(1, config.tokens + 1)))
        rows.append((new, total))
        room -= new
    return sorted(rows, key=lambda row: row[0] > 1)
