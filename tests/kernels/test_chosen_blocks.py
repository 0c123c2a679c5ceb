"""The choice of blocks of tokens, and attention over them, against NumPy in float64, one token at a time."""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.pallas_kernels.operands import ChoiceInputs
from jaxserve.pallas_kernels.paged_attention import chosen_blocks
from jaxserve.pallas_kernels.types import KVPages

FIRST_PAGE = 3


@dataclass(frozen=True)
class Config:
    size: int
    most: int
    local: int
    page_size: int
    heads: int = 2
    group: int = 3
    dim: int = 16
    index_dim: int = 12
    max_pages: int = 12


CONFIGS = [
    Config(8, 3, 1, 16),
    Config(16, 2, 2, 8, max_pages=40),
    Config(12, 4, 0, 8, heads=1, max_pages=25),
    Config(128, 1, 1, 16, max_pages=70),
]
# The new tokens of each row, and the tokens it then has; decodes come first.
ROWS = [(1, 70), (1, 5), (1, 181), (40, 190), (0, 0), (3, 3), (21, 100)]


class Batch:
    def __init__(self, config, rows, seed=0):
        self.config = config
        self.rows = rows = [(new, min(length, config.max_pages * config.page_size)) for new, length in rows]
        rng = np.random.default_rng(seed)
        count = sum(new for new, _ in rows) + 5
        shape = (FIRST_PAGE + len(rows) * config.max_pages, 2, config.heads, config.page_size, config.dim)
        self.pages = np.full(shape, np.nan, np.float32)
        self.index_keys = np.full((len(self.pages), config.page_size, config.index_dim), np.nan, np.float32)
        self.tables = rng.permutation(len(rows) * config.max_pages).reshape(len(rows), -1).astype(np.int32)
        self.q = rng.standard_normal((count, config.heads, config.group, config.dim)).astype(np.float32)
        # Small integers: products are exact, and many are equal.
        self.choice = rng.integers(-2, 3, (count, config.heads, config.index_dim)).astype(np.float32)
        self.keys = [rng.integers(-2, 3, (length, config.index_dim)).astype(np.float32) for _, length in rows]
        self.cached = [rng.standard_normal((length, 2, config.heads, config.dim)) for _, length in rows]
        self.cached = [x.astype(np.float32) for x in self.cached]
        for table, keys, cached in zip(self.tables, self.keys, self.cached, strict=True):
            place = np.arange(len(keys))
            page, offset = table[place // config.page_size] + FIRST_PAGE, place % config.page_size
            self.index_keys[page, offset] = keys
            self.pages[page, :, :, offset] = cached
        self.decodes = next((i for i, (new, _) in enumerate(rows) if new != 1), len(rows))

    def gold(self):
        """The set of each token's blocks for each head, and results, float64 [tokens, heads, group, dim]."""
        config, sets, results = self.config, [], []
        for (new, length), keys, cached in zip(self.rows, self.keys, self.cached, strict=True):
            for last in range(length - new, length):
                token = len(results)
                out = np.zeros((config.heads, config.group, config.dim))
                own = last // config.size
                for head in range(config.heads):
                    products = keys[: last + 1].astype(np.float64) @ self.choice[token, head]
                    scores = np.array([products[b * config.size : (b + 1) * config.size].max() for b in range(own + 1)])
                    scores[max(own - config.local + 1, 0) :] = np.inf if config.local else scores[own + 1 :]
                    blocks = np.argsort(-scores, kind="stable")[: config.most]
                    sets.append(set(blocks.tolist()))
                    seen = [p for p in range(last + 1) if p // config.size in blocks]
                    k, v = cached[seen, :, head].astype(np.float64).swapaxes(0, 1)
                    weights = np.exp(self.q[token, head].astype(np.float64) @ k.T * 0.25)
                    out[head] = weights / weights.sum(-1, keepdims=True) @ v
                results.append(out)
        return sets, np.stack(results)

    def check(self, decode_only=False):
        config = self.config
        q_start = jnp.asarray(np.cumsum([0, *(new for new, _ in self.rows)]), jnp.int32)
        kv_len = jnp.asarray([length for _, length in self.rows], jnp.int32)
        rows = jnp.asarray(self.tables), q_start, kv_len
        inputs = ChoiceInputs(jnp.asarray(self.choice), jnp.zeros((len(self.choice), config.index_dim)))
        how = {"size": config.size, "most": config.most, "local": config.local, "first_page": jnp.int32(FIRST_PAGE)}
        decodes = jnp.int32(self.decodes)
        keys = jnp.asarray(self.index_keys)
        chosen = chosen_blocks.choose(inputs, keys, *rows, decodes, **how, decode_only=decode_only)
        sets, expected = self.gold()
        real = np.asarray(chosen)[: len(expected)].reshape(-1, config.most)
        assert [set(row[row >= 0].tolist()) for row in real] == sets
        pages = KVPages(jnp.asarray(self.pages))
        own = {"scale": 0.25, "size": config.size, "first_page": jnp.int32(FIRST_PAGE)}
        out = np.asarray(chosen_blocks.attention_over(jnp.asarray(self.q), pages, chosen, *rows, **own))
        assert np.isfinite(out).all(), "padding too must be finite"
        np.testing.assert_allclose(out[: len(expected)], expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_mixed_batches(config):
    Batch(config, ROWS).check()


def test_decode_steps():
    for count in (1, 11):
        lengths = np.random.default_rng(count).integers(1, 190, count)
        Batch(CONFIGS[0], [(1, int(n)) for n in lengths]).check(decode_only=True)
