"""The choice of blocks by the means of their keys against NumPy in float64, one token at a time; the attention over
blocks is that of `test_chosen_blocks`."""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.pallas_kernels.operands import PooledInputs
from jaxserve.pallas_kernels.paged_attention import pooled_blocks

FIRST_PAGE = 3
EPS = 1e-3


@dataclass(frozen=True)
class Config:
    size: int
    most: int
    page_size: int
    heads: int = 8
    dim: int = 10
    turned: int = 6
    max_pages: int = 12


CONFIGS = [
    Config(3, 4, 16),
    Config(4, 7, 8, max_pages=30),
    Config(16, 2, 8, turned=10, max_pages=30),
    Config(24, 1, 16),
]
# The new tokens of each row, and the tokens it then has; decodes come first.
ROWS = [(1, 70), (1, 5), (1, 192), (1, 96), (40, 190), (0, 0), (3, 3), (21, 100)]


class Batch:
    def __init__(self, config: Config, rows: list[tuple[int, int]]):
        self.config, self.rows = config, rows
        rng = np.random.default_rng(len(rows))
        self.count = sum(new for new, _ in rows)
        self.tables = rng.permutation(len(rows) * config.max_pages).reshape(len(rows), -1).astype(np.int32) + 1
        self.keys = [rng.standard_normal((length, config.dim)) for _, length in rows]
        self.q = rng.standard_normal((self.count + 5, config.heads, config.dim))
        self.scale = rng.uniform(0.5, 1.5, config.dim)
        self.decodes = next((i for i, (new, _) in enumerate(rows) if new != 1), len(rows))

    def angles(self, position: np.ndarray) -> np.ndarray:
        return position[..., None] * 0.3 ** np.arange(1, self.config.turned // 2 + 1)

    def entries(self, row: int) -> np.ndarray:
        """The keys of a row's complete blocks."""
        size = self.config.size
        whole = len(self.keys[row]) // size
        mean = self.keys[row][: whole * size].reshape(whole, size, self.config.dim).mean(1)
        normed = mean / np.sqrt(np.mean(mean**2, axis=-1, keepdims=True) + EPS) * self.scale
        angle = self.angles(np.arange(whole) * size)
        first, second, rest = np.split(normed, [self.config.turned // 2, self.config.turned], axis=1)
        turned = first * np.cos(angle) - second * np.sin(angle), second * np.cos(angle) + first * np.sin(angle)
        return np.concatenate([*turned, rest], axis=1)

    def pages(self, left_out: list[int]) -> np.ndarray:
        """The pages with all tokens of each row but the last `left_out` ones."""
        config = self.config
        shape = (FIRST_PAGE + 1 + self.tables.size, config.page_size, config.dim)
        found = np.full(shape, np.nan, np.float32)
        for row, (keys, table, out) in enumerate(zip(self.keys, self.tables, left_out, strict=True)):
            place = np.arange(len(keys) - out)
            kept = keys[: len(place)].copy()
            done = len(place) // config.size
            kept[config.size - 1 :: config.size] = self.entries(row)[:done]
            found[table[place // config.page_size] + FIRST_PAGE, place % config.page_size] = kept
        return found

    def check(self, decode_only: bool = False) -> None:
        config = self.config
        new = [count for count, _ in self.rows]
        q_start = np.cumsum([0, *new])
        of_token = [(row, place) for row, (n, length) in enumerate(self.rows) for place in range(length - n, length)]
        position = np.array([place for _, place in of_token] + [0] * 5)
        key = np.concatenate(
            [self.keys[row][place : place + 1] for row, place in of_token] + [np.zeros((5, config.dim))]
        )
        slots = [
            self.tables[row, p // config.page_size] * config.page_size + p % config.page_size for row, p in of_token
        ]
        angle = self.angles(position // config.size * config.size)
        arrays = (self.q, key, self.scale, np.cos(angle), np.sin(angle))
        inputs = PooledInputs(*(jnp.asarray(x, jnp.float32) for x in arrays))
        kv_len = jnp.int32([length for _, length in self.rows])
        rows = jnp.asarray(self.tables), jnp.int32(q_start), kv_len
        how = {"size": config.size, "first_page": jnp.int32(FIRST_PAGE), "decode_only": decode_only}
        before = jnp.asarray(self.pages(new))
        made = pooled_blocks.write_keys(inputs, before, jnp.int32(slots + [-1] * 5), *rows, eps=EPS, **how)
        expected = self.pages([0] * len(new))
        own = np.isfinite(expected)
        np.testing.assert_allclose(np.asarray(made)[own], expected[own], rtol=0, atol=1e-5)
        chosen = pooled_blocks.choose(inputs, made, *rows, jnp.int32(self.decodes), most=config.most, **how)
        for token, (row, place) in enumerate(of_token):
            whole, rest = divmod(place + 1, config.size)
            products = self.q[token] @ self.entries(row)[:whole].T
            best = np.argsort(-np.maximum(products, 0).sum(0), kind="stable")[: config.most]
            found = np.asarray(chosen[token]).tolist()
            real = [one for one in found if one >= 0]
            assert found[: len(real)] == real, "what fills the places up comes last"
            assert sorted(real) == sorted([*best.tolist(), *[whole] * (rest > 0)]), (token, row, place)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_mixed_batches(config):
    Batch(config, ROWS).check()


def test_decode_steps():
    for count in (1, 11):
        lengths = np.random.default_rng(count).integers(1, 190, count)
        Batch(CONFIGS[0], [(1, int(n)) for n in lengths]).check(decode_only=True)
