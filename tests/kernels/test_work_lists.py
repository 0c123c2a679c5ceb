"""Lists of work: each token and each block is in one item, and a row's items depend on the row alone."""

from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import work_lists
from pallas_kernels.work_lists import FIRST, LAST


def decode(lengths, window, most):
    items = jax.jit(work_lists.decode_items, static_argnums=(1, 2, 3))
    work = jax.tree.map(np.asarray, items(jnp.asarray(lengths, jnp.int32), 64, window, most))
    assert work.items.shape == (len(lengths) * most, 8)
    return work


def items_of(row, work):
    return work.items[work.begin[row] : work.begin[row] + work.parts[row]]


LENGTHS = [6400, 1, 0, 64, 65, 3000, 0, 128, 1_100]


@pytest.mark.parametrize(("window", "most"), [(None, 9), (700, 2), (100, 9), (None, 1), (None, 30)])
def test_decode_items_cover_each_row_once(window, most):
    work = decode(LENGTHS, window, most)
    assert work.begin.tolist() == np.cumsum([0, *work.parts[:-1]]).tolist()
    for row, length in enumerate(LENGTHS):
        mine = items_of(row, work)
        assert (mine[:, work_lists.ROW] == row).all()
        assert (mine[:, work_lists.BEGIN] == work.begin[row]).all()
        assert (mine[:, work_lists.PARTS] == len(mine)).all()
        blocks = [b for item in mine for b in range(item[FIRST], item[LAST])]
        oldest = max(length - window, 0) if window else 0
        assert blocks == list(range(oldest // 64, -(-length // 64))), row
        assert 1 <= len(mine) <= most
        assert len(mine) == 1 or all(item[LAST] > item[FIRST] for item in mine)
    unused = work.items[work.parts.sum() :]
    assert (unused[:, FIRST] == unused[:, LAST]).all()


@pytest.mark.parametrize("length", [1, 64, 300, 1_100, 6_400])
def test_a_decode_row_has_the_same_parts_in_any_company(length):
    spans = []
    for others in ([0, 0, 0], [1, 6400, 64], [100_000] * 3, [5] * 30):
        mine = items_of(1, decode([others[0], length, *others[1:]], None, 9))
        spans.append([(item[FIRST], item[LAST]) for item in mine])
    assert spans[0] == spans[1] == spans[2] == spans[3]
    assert len(spans[0]) == min(-(-length // 64) // 4 + (-(-length // 64) % 4 > 0), 9) or length == 6_400


@pytest.mark.parametrize("lengths", [LENGTHS, [0], [1], [0, 0, 0], [1024] * 16, [128_000, *[1] * 63], [33_000] * 3])
@pytest.mark.parametrize(("heads", "programs"), [(8, 264), (1, 7), (3, 1)])
def test_equal_spans_deal_each_item_and_head_once(lengths, heads, programs):
    work = decode(lengths, None, 16)
    spans = np.asarray(jax.jit(work_lists.equal_spans, static_argnums=(1, 2))(work, heads, programs))
    pairs = int(work.parts.sum()) * heads
    assert spans.shape == (programs + 1,)
    assert (spans[0], spans[-1]) == (0, pairs)
    assert (np.diff(spans) >= 0).all()
    costs = np.repeat(work.items[:, LAST] - work.items[:, FIRST] + 1, heads)[:pairs]
    shares = [costs[a:b].sum() for a, b in pairwise(spans)]
    assert max(shares) <= costs.sum() / programs + costs.max()
    if lengths == [1024] * 16 and programs == 264:
        assert np.mean(shares) / max(shares) > 0.96


def test_spans_of_the_longest_batches_do_not_overflow():
    work = decode([131_072] * 2_000, None, 16)
    spans = np.asarray(work_lists.equal_spans(work, 32, 264))
    assert (np.diff(spans) > 0).all()
    assert spans[-1] == 2_000 * 16 * 32


@pytest.mark.parametrize("window", [None, 1, 130])
def test_only_blocks_that_all_tokens_see_in_full_are_left_unmasked(window):
    q_len, kv_len = [1, 1, 300, 0, 17, 40], [70, 200, 1000, 30, 17, 257]
    q_start = jnp.asarray(np.cumsum([0, *q_len]), jnp.int32)
    items = jax.jit(work_lists.prompt_items, static_argnums=(0, 1, 2, 3))
    items, before = items(32, 128, window, 400, q_start, jnp.asarray(kv_len, jnp.int32), jnp.int32(2))
    assert before[-1] == 10 + 1 + 2
    seen = []
    for row, token, position, length, first, full_first, full_last, last in np.asarray(items).tolist():
        if first == last:
            continue
        count = min(32, length - position)
        seen += range(token, token + count)
        position_of = kv_len[row] - q_len[row] + token - int(q_start[row])
        assert (position, length) == (position_of, kv_len[row])
        ranges = [(max(0, p - window + 1) if window else 0, p) for p in range(position, position + count)]
        for block in range(1000 // 128 + 2):
            keys = block * 128, block * 128 + 127
            needed = any(low <= keys[1] and keys[0] <= high for low, high in ranges)
            full = all(low <= keys[0] and keys[1] <= high for low, high in ranges)
            assert needed <= (first <= block < last)
            assert (full_first <= block < full_last) <= full
    assert sorted(seen) == list(range(2, 359))


@pytest.mark.parametrize("sizes", [(3, 0, 40, 1, 0), (0, 0, 0), (64,), (16, 16, 16, 16), (1,) * 9])
@pytest.mark.parametrize("n", [8, 16])
def test_tiles_of_experts_hold_each_token_once(sizes, n):
    tokens, ends = 66, np.cumsum(sizes)
    items, column = map(np.asarray, work_lists.expert_tiles(jnp.asarray(sizes, jnp.int32), tokens, n))
    for token in range(ends[-1]):
        expert, start = items[column[token] // n]
        assert start + column[token] % n == token
        assert ends[expert] - sizes[expert] <= token < ends[expert]
    assert (items[:, 1] % 8 == 0).all()
    assert len(items) <= tokens
