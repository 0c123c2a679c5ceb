"""Lists of work: each token and each block is in one item, and a row's items depend on the row alone."""

from functools import partial
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.pallas_kernels import work_lists
from jaxserve.pallas_kernels.work_lists import FIRST, LAST


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


@partial(jax.jit, static_argnums=(1, 2))
def spans_of(lengths, heads, programs):
    return work_lists.equal_spans(lengths, work_lists.cut(lengths, 64, None, 16), heads, programs)


@pytest.mark.parametrize("lengths", [LENGTHS, [0], [1], [0, 0, 0], [1024] * 16, [128_000, *[1] * 63], [33_000] * 3])
@pytest.mark.parametrize(("heads", "programs"), [(8, 264), (1, 7), (3, 1)])
def test_equal_spans_deal_each_item_and_head_once(lengths, heads, programs):
    work = decode(lengths, None, 16)
    spans = np.asarray(spans_of(jnp.asarray(lengths, jnp.int32), heads, programs))
    assert spans.shape == (programs + 1, 5)
    part = np.concatenate([np.arange(count) for count in work.parts])
    row = np.repeat(np.arange(len(lengths)), work.parts)
    places = [(r, p, head, lengths[r]) for r, p in zip(row, part, strict=True) for head in range(heads)]
    number = spans[:, 0]
    assert (number[0], number[-1]) == (0, len(places))
    assert (np.diff(number) >= 0).all()
    for first, *place in spans[number < len(places)]:
        assert tuple(place) == places[first]
    costs = np.repeat(work.items[:, LAST] - work.items[:, FIRST] + 1, heads)[: len(places)]
    shares = [costs[a:b].sum() for a, b in pairwise(number)]
    assert max(shares) <= costs.sum() / programs + costs.max()
    if lengths == [1024] * 16 and programs == 264:
        assert np.mean(shares) / max(shares) > 0.96


def test_spans_of_the_longest_batches_do_not_overflow():
    number = np.asarray(spans_of(jnp.full(2_000, 131_072), 32, 264))[:, 0]
    assert (np.diff(number) > 0).all()
    assert number[-1] == 2_000 * 16 * 32


@pytest.mark.parametrize("most", [1, 2, 9, 64])
@pytest.mark.parametrize("window", [None, 1, 130, 5000])
def test_prompt_items_hold_each_token_and_block_once_and_unmasked_blocks_are_seen_in_full(window, most):
    q_len = [1, 1, 300, 0, 17, 40, 5]
    kv_len = [70, 200, 1000, 30, 17, 257, 9000]
    q_start = np.cumsum([0, *q_len])
    items = jax.jit(work_lists.prompt_items, static_argnums=(0, 1, 2, 3, 4))
    starts = jnp.asarray(q_start, jnp.int32)
    lengths = jnp.asarray(kv_len, jnp.int32)
    items, tiles = items(32, 128, window, 400, most, starts, lengths, jnp.int32(2))
    items = np.asarray(items)
    assert len(items) >= tiles.before[-1]
    assert (items[:, work_lists.TOKEN] % 8 == 0).all()
    assert (items[:, work_lists.TOKEN] <= 400 - 32).all()
    used = items[: int(tiles.before[-1])]
    slots = [slot for slot in used[:, work_lists.SLOT].tolist() if slot >= 0]
    assert sorted(slots) == list(range(len(slots)))
    assert len(slots) <= most * len(q_len)
    assert (items[len(used) :, FIRST] == items[len(used) :, LAST]).all()
    row_of = np.repeat(np.arange(len(q_len)), q_len)
    token = np.arange(2, q_start[-1])
    item, slot, parts = map(np.asarray, tiles.of_tokens(32, jnp.asarray(row_of[2:]), jnp.asarray(token)))
    longest = parts[-1]  # the row of five tokens has one tile
    assert longest == min(most, 17 if window is None else 10 if window == 5000 else 1)
    for at, first, of_slot, count in zip(token, item, slot, parts, strict=True):
        row = row_of[at]
        position = kv_len[row] - q_len[row] + at - q_start[row]
        low = max(0, position - window + 1) if window else 0
        blocks = []
        for part in range(count):
            mine, start, oldest, length, begin, full_begin, full_end, end, its_slot, seen = items[first - part].tolist()
            assert (max(0, kv_len[row] - q_len[row] - window + 1) if window else 0) <= seen <= low
            assert (mine, length, its_slot) == (row, kv_len[row], of_slot + part if count > 1 else -1)
            assert start <= at < start + 32
            assert oldest + at - start == position
            blocks += range(begin, end)
            for block in range(full_begin, full_end):
                assert begin <= block < end
                assert low <= block * 128
                assert block * 128 + 127 <= position
        assert blocks == sorted(set(blocks))
        assert set(range(low // 128, position // 128 + 1)) <= set(blocks)
        assert len(blocks) <= (position - low + 32) // 128 + 2


@pytest.mark.parametrize("window", [None, 700])
def test_a_prompt_row_has_the_same_parts_wherever_it_begins_in_the_batch(window):
    """Other tiles, as it begins at another remainder of eight, but each token's keys end at the same blocks."""
    ends = []
    for before in (0, 8, 11, 255):
        q_start = jnp.asarray([0, before, before + 40, before + 41], jnp.int32)
        lengths = jnp.asarray([before, 9000, 1], jnp.int32)
        items, tiles = work_lists.prompt_items(32, 128, window, 400, 34, q_start, lengths, jnp.int32(0))
        token = before + jnp.arange(40)
        item, _, parts = tiles.of_tokens(32, jnp.ones(40, jnp.int32), token)
        ends.append([[int(items[i - p, LAST]) for p in range(n - 1)] for i, n in zip(item, parts, strict=True)])
        assert int(parts[0]) == (17 if window is None else 1)
    assert all(one == ends[0] for one in ends)


def test_eight_tokens_over_a_long_context_fill_the_device():
    from jaxserve.pallas_kernels.paged_attention.mosaic_gpu_prompt import most_parts

    for rows, tokens in ((1, 8), (8, 16), (8, 64)):
        most = most_parts(rows * 8, tokens)
        q_start = jnp.asarray([0, *[8] * rows], jnp.int32)
        lengths = jnp.asarray([32_768, *[0] * (rows - 1)], jnp.int32)
        items, _ = work_lists.prompt_items(min(32, tokens), 128, None, tokens, most, q_start, lengths, jnp.int32(0))
        assert 8 * int((items[:, LAST] > items[:, FIRST]).sum()) >= 132


@pytest.mark.parametrize("sizes", [(3, 0, 40, 1, 0), (0, 0, 0), (64,), (16, 16, 16, 16), (1,) * 9])
@pytest.mark.parametrize("n", [8, 16])
def test_tiles_of_experts_hold_each_token_once(sizes, n):
    tokens = 66
    ends = np.cumsum(sizes)
    items, column = map(np.asarray, work_lists.expert_tiles(jnp.asarray(sizes, jnp.int32), tokens, n))
    for token in range(ends[-1]):
        expert, start = items[column[token] // n]
        assert start + column[token] % n == token
        assert ends[expert] - sizes[expert] <= token < ends[expert]
    assert (items[:, 1] % 8 == 0).all()
    assert len(items) <= tokens
