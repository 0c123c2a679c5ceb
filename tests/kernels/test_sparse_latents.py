"""The choice of an indexer, and latent attention over what it chose, against NumPy in float64, one token at a time."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from latent_batches import TOLERANCE, Config, make_batch, random_rows

from jaxserve.pallas_kernels.latent_attention import sparse
from jaxserve.pallas_kernels.operands import IndexInputs, LatentHeads
from jaxserve.pallas_kernels.ops import Ops
from jaxserve.pallas_kernels.types import LatentPages

INDEX_HEADS = 5
DIM = 24
CONFIGS = [
    (Config(), 13),
    (Config(rank=96, rope=24, heads=7, page_size=8, width=128, max_pages=40, first_page=5), 150),  # more than a block
    (Config(rank=40, rope=10, heads=3, page_size=64, max_pages=3, tokens=64), 32),
    (Config(rank=128, rope=32, kv_dtype="int8", page_size=32, max_pages=11, first_page=1), 40),
    (Config(rank=64, rope=16, heads=2, rows=3, tokens=7), 1),
]


class Indexed:
    """A batch of `latent_batches` with the inputs of an indexer, and what it should choose."""

    def __init__(self, config, rows, top_k, seed):
        self.batch = make_batch(config, rows, seed)
        self.top_k = top_k
        rng = np.random.default_rng(seed)
        # Small integers: sums are exact in any order, and many scores are equal.
        self.q = rng.integers(-2, 3, (config.tokens, INDEX_HEADS, DIM)).astype(np.float32)
        self.weights = rng.integers(-3, 4, (config.tokens, INDEX_HEADS)).astype(np.float32)
        self.keys = [rng.integers(-2, 3, (length, DIM)) for length in self.batch.kv_len]
        self.index_keys = np.full((len(self.batch.pages), config.page_size, DIM), np.nan, np.float32)
        for table, keys in zip(self.batch.tables, self.keys, strict=False):
            place = np.arange(len(keys))
            page = table[place // config.page_size] + config.first_page
            self.index_keys[page, place % config.page_size] = keys

    @property
    def inputs(self):
        return IndexInputs(jnp.asarray(self.q), jnp.asarray(self.weights), jnp.zeros((len(self.q), DIM)))

    @property
    def rows(self):
        return self.batch.arguments()[2:]

    def chosen(self):
        """The positions that each real token sees, best first; of equal scores the earlier token."""
        found = []
        for keys, new, length in zip(self.keys, self.batch.q_len, self.batch.kv_len, strict=True):
            for position in range(length - new, length):
                products = np.maximum(keys[: position + 1] @ self.q[len(found)].T.astype(np.float64), 0)
                scores = products @ self.weights[len(found)]
                found.append(np.argsort(-scores, kind="stable")[: self.top_k])
        return found

    def gold(self):
        """float64 [real tokens, heads, rank]."""
        config = self.batch.config
        out = []
        row = np.repeat(np.arange(len(self.batch.q_len)), self.batch.q_len)
        for at, seen in zip(row, self.chosen(), strict=True):
            keys = self.batch.cached[at][seen]
            scores = self.batch.q[len(out)].astype(np.float64) @ keys.T * config.scale
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            out.append(weights / weights.sum(-1, keepdims=True) @ keys[:, : config.rank])
        return np.stack(out)


def check(indexed, *, decode_only=False):
    config = indexed.batch.config
    first = {"first_page": jnp.int32(config.first_page)}
    options = {"top_k": indexed.top_k, "decode_only": decode_only} | first
    chosen = np.asarray(sparse.choose(indexed.inputs, jnp.asarray(indexed.index_keys), *indexed.rows, **options))
    expected = indexed.chosen()
    for ours, right in zip(chosen, expected, strict=False):
        assert ours[: len(right)].tolist() == right.tolist()
        assert (ours[len(right) :] == -1).all()
    q, pages, tables, q_start, *_ = indexed.batch.arguments()
    own = {"scale": config.scale, "rank": config.rank} | first
    out = np.asarray(sparse.attention_over(q, pages, jnp.asarray(chosen), tables, q_start, **own))
    assert np.isfinite(out).all(), "padding too must be finite"
    np.testing.assert_allclose(out[: len(expected)], indexed.gold(), rtol=0, atol=TOLERANCE[config.dtype])


@pytest.mark.parametrize(("config", "top_k"), CONFIGS, ids=lambda x: str(x))
def test_mixed_batches(config, top_k):
    rng = np.random.default_rng(top_k)
    for seed in range(3):
        rows = random_rows(config, rng, (top_k, sparse.TILE))
        check(Indexed(config, rows, top_k, seed))


def test_decode_steps():
    config = replace(Config(), tokens=9)
    for count in (1, 9):
        lengths = np.random.default_rng(count).integers(1, 384, count)
        check(Indexed(config, [(1, int(n)) for n in lengths], 20, count), decode_only=True)


def test_equal_scores_do_not_depend_on_the_length_of_the_pass():
    """Of equal scores the first tokens are chosen, in a prompt's chunk as in a decode, whatever blocks there are.
    DeepSeek's own code and transformers leave this to the sort of the device, which differs with the length."""
    config = Config(tokens=160, page_size=8, max_pages=40, rows=2)
    found = {}
    for new in (150, 20, 1):
        indexed = Indexed(config, [(new, 300)], 21, 0)
        indexed.weights[:] = 0
        rows = indexed.rows
        chosen = sparse.choose(indexed.inputs, jnp.asarray(indexed.index_keys), *rows, top_k=21)
        found[new] = np.asarray(chosen)[new - 1].tolist()
    assert found == {new: list(range(21)) for new in found}


@pytest.mark.parametrize("most", [12, 60])
def test_layers_see_all_tokens_as_long_as_no_row_has_more_than_may_be_chosen(most):
    """Then an indexer's inputs change nothing; a longer row makes them matter. New keys are in the cache afterwards."""
    config = Config(heads=2, rank=32, rope=8, tokens=16, rows=3, max_pages=4)
    indexed = Indexed(config, [(1, 9), (5, most)], 12, 1)
    q, pages, *rows = indexed.batch.arguments()
    rng = np.random.default_rng(0)
    k_up, v_up = (jnp.asarray(rng.standard_normal((2, size, 32)), jnp.float32) for size in (10, 14))
    q = jnp.asarray(rng.standard_normal((16, 2, 18)), jnp.float32)
    slots = np.full(16, -1, np.int32)
    for token, (row, place) in enumerate([(0, 8), *((1, p) for p in range(most - 5, most))]):
        slots[token] = indexed.batch.tables[row, place // 16] * 16 + place % 16
    row = jnp.asarray(rng.standard_normal((16, 40)), jnp.float32)
    pages = LatentPages(jnp.nan_to_num(pages.data), None, jnp.nan_to_num(jnp.asarray(indexed.index_keys)))
    seen = jnp.full((16, 12), -1, jnp.int32)
    given = jnp.asarray(slots), tuple(rows), jnp.int32(0)
    found = []
    for inputs in (indexed.inputs, indexed.inputs._replace(weights=-indexed.inputs.weights)):
        heads = LatentHeads(q, row, k_up, v_up, inputs._replace(key=inputs.key + 3))
        out, after, _ = Ops().attend_chosen(heads, pages, *given, seen, scale=0.3, decode_only=False)
        assert (after.index_keys[slots[0] // 16, slots[0] % 16] == 3).all()
        found.append(np.asarray(out)[:6])
    plain = Ops().attend_latent(heads._replace(indexer=None), pages, *given, scale=0.3, decode_only=False)[0]
    same = np.allclose(found[0], found[1]), np.allclose(found[0], np.asarray(plain)[:6], atol=1e-5)
    assert same == ((True, True) if most <= 12 else (False, False))
