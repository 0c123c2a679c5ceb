"""Sampling against float64 NumPy: what is kept, what is drawn, and that nobody's neighbours matter."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.extend.random import threefry_2x32

from jaxserve.execution import sampling
from jaxserve.execution.filters import EXCLUDED, filter_logits
from jaxserve.execution.sampling import Sampled, TokenCounts, draw_plainly, most_likely, sample, score_tokens, threefry
from jaxserve.execution.slots import (
    COUNTED_PER_CALL,
    SLOTS_PER_CALL,
    RowParams,
    count_tokens,
    create_slots,
    decode_slots,
    encode_counts,
    encode_slot,
    padding_slot_params,
    set_slots,
)
from jaxserve.limits import MAX_LOGIT_BIAS, MAX_LOGPROBS, MAX_SEED, MAX_STOP_TOKENS
from jaxserve.pallas_kernels import cpu
from jaxserve.pallas_kernels.draw_noise import gumbel, noise_bits
from jaxserve.pallas_kernels.selfcheck_draw import kept, noise_of
from jaxserve.pallas_kernels.types import DrawSettings
from jaxserve.scheduling.step_plan import read_scores
from jaxserve.types import NO_PENALTY_ROW, SamplingParams

pytestmark = pytest.mark.compiles

ROWS = SLOTS_PER_CALL
VOCAB = 50
GREEDY = SamplingParams(temperature=0.0)

jit_sample = jax.jit(sample)
jit_filter = jax.jit(filter_logits, static_argnames=("unrolled", "bits"))
jit_set_slots = jax.jit(set_slots)
jit_count_tokens = jax.jit(count_tokens)


def penalty_row(slot: int, params: SamplingParams) -> int:
    """Slots 0, 1, … have the rows 1, 2, … where they have penalties."""
    return slot + 1 if params.has_penalties else NO_PENALTY_ROW


def slots_of(params: list[SamplingParams], vocab: int = VOCAB, *, seeds=None, stop_ids=None, prompt_lens=None):
    """Slots 0, 1, … with these parameters, written the way the engine writes them."""
    seeds = seeds or [p.seed or 0 for p in params]
    stop_ids = stop_ids or [()] * len(params)
    prompt_lens = prompt_lens or [0] * len(params)
    slots = create_slots(len(params), 1, vocab, penalty_rows=len(params))
    penalty_rows = [penalty_row(i, each) for i, each in enumerate(params)]
    rows = zip(params, seeds, stop_ids, prompt_lens, penalty_rows, strict=True)
    rows = [encode_slot(i, *each) for i, each in enumerate(rows)]
    for at in range(0, len(rows), SLOTS_PER_CALL):
        some = rows[at : at + SLOTS_PER_CALL]
        padding = [padding_slot_params(len(params))] * (SLOTS_PER_CALL - len(some))
        slots = jit_set_slots(slots, jnp.asarray(np.stack(some + padding)))
    return slots


def draw(logits, params: list[SamplingParams], *, position=None, **options) -> Sampled:
    logits = jnp.asarray(np.asarray(logits, np.float32))
    slots = slots_of(params, logits.shape[1], **options)
    position = jnp.zeros(len(params), jnp.int32) if position is None else jnp.asarray(position, jnp.int32)
    return jit_sample(logits, slots.params[:-1], TokenCounts(slots.counts, slots.in_prompt), position)


def row_params(count: int, **fields) -> RowParams:
    """Parameters that change nothing, but for the given arrays."""
    plain = decode_slots(create_slots(count, 1, 1).params[:-1])
    return plain._replace(**{name: jnp.asarray(value) for name, value in fields.items()})


# Filters


def check_kept(logits: np.ndarray, found: np.ndarray, top_k: int, top_p: float, min_p: float) -> None:
    """Whether the tokens of `found` are those that `kept` defines. Sums of float32 may round over an edge."""
    rounding = 1e-5
    least, most = (
        kept(logits, 1.0, top_k, top_p + edge if top_p < 1 else 1.0, min_p * (1 - edge))
        for edge in (-rounding, rounding)
    )
    assert found.any()
    assert not (found & ~most).any(), "more was kept than the settings ask for"
    assert not (least & ~found).any(), "less was kept than the settings ask for"
    assert (found == (logits >= logits[found].min())).all(), "kept while a likelier or equal one was dropped"


@st.composite
def filter_rows(draw_):
    """ROWS rows of logits of one of a few vocabulary sizes, with a filter each."""
    vocab = draw_(st.sampled_from([1, 2, 7, 129, 2000]))
    rng = np.random.default_rng(draw_(st.integers(0, 2**32)))
    logits = np.empty((ROWS, vocab), np.float32)
    for row in logits:
        kind = draw_(st.sampled_from(["normal", "ties", "equal", "huge", "tiny", "peaked", "excluded", "signed zeros"]))
        row[:] = rng.standard_normal(vocab) * 3
        if kind == "ties":
            row[:] = np.round(row)
        elif kind == "equal":
            row[:] = row[0]
        elif kind == "huge":
            row *= 1e30
        elif kind == "tiny":
            row *= 1e-30
        elif kind == "peaked":
            row[rng.integers(vocab)] = 80
        elif kind == "excluded":
            row[rng.random(vocab) < 0.5] = EXCLUDED
        elif kind == "signed zeros":
            row[:] = rng.choice(np.array([0.0, -0.0, 1.0, -1.0], np.float32), vocab)
    top_k = [draw_(st.sampled_from([0, 0, 1, 2, 5, vocab - 1, vocab, 10**6])) for _ in range(ROWS)]
    top_p = [draw_(st.sampled_from([1.0, 1.0, 1e-9, 0.1, 0.5, 0.9, 0.999999])) for _ in range(ROWS)]
    min_p = [draw_(st.sampled_from([0.0, 0.0, 1e-6, 0.05, 0.5, 1.0])) for _ in range(ROWS)]
    return logits, np.maximum(top_k, 0).astype(np.int32), np.float32(top_p), np.float32(min_p)


FILTERS = {
    "loop": partial(jit_filter, unrolled=False, bits=1),
    "loop of four bits": partial(jit_filter, unrolled=False),
    "unrolled": partial(jit_filter, unrolled=True),
    "cpu": jax.jit(partial(cpu.filter_logits, excluded=EXCLUDED)),
}


@pytest.mark.slow
@pytest.mark.parametrize("implementation", FILTERS)
@settings(max_examples=60, deadline=None)
@given(case=filter_rows())
def test_filters_keep_exactly_what_they_should(implementation, case):
    assert implementation != "cpu" or cpu.available()
    logits, top_k, top_p, min_p = case
    params = row_params(ROWS, top_k=top_k, top_p=top_p, min_p=min_p)
    filtered = np.asarray(FILTERS[implementation](jnp.asarray(logits), params))
    for i, row in enumerate(logits):
        kept = filtered[i] == row
        assert (filtered[i][~kept] == np.float32(EXCLUDED)).all()
        allowed = row > np.float32(EXCLUDED)  # what was excluded before has no say
        if allowed.any():
            check_kept(row[allowed], kept[allowed], int(top_k[i]), float(top_p[i]), float(min_p[i]))


def test_filters_with_unrolled_rounds_keep_what_a_loop_keeps():
    rng = np.random.default_rng(4)
    logits = np.round(rng.standard_normal((5, 60)) * 3).astype(np.float32)  # many ties
    top_k = np.array([0, 3, 0, 7, 60], np.int32)
    top_p = np.float32([0.6, 1, 1, 0.5, 0.9])
    min_p = np.float32([0, 0, 0.2, 0, 0])
    params = row_params(5, top_k=top_k, top_p=top_p, min_p=min_p)
    found = np.asarray(filter_logits(jnp.asarray(logits), params, unrolled=True))
    np.testing.assert_array_equal(found, filter_logits(jnp.asarray(logits), params, unrolled=False))
    for i, row in enumerate(logits):
        check_kept(row, found[i] == row, int(top_k[i]), float(top_p[i]), float(min_p[i]))


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({"top_k": 1}, [4]),
        ({"top_k": 3}, [2, 3, 4]),
        ({"top_k": 100}, [0, 1, 2, 3, 4]),
        ({"top_k": -1}, [0, 1, 2, 3, 4]),
        ({"top_p": 1e-6}, [4]),
        ({"top_p": 0.45}, [3, 4]),
        ({"top_p": 0.72}, [2, 3, 4]),
        ({"min_p": 0.4}, [2, 3, 4]),
        ({"min_p": 1.0}, [4]),
        ({"top_k": 3, "top_p": 0.75}, [3, 4]),  # top_p counts what top_k left: 0.4 + 0.3 of 0.9
        ({"top_k": 2, "min_p": 0.2}, [3, 4]),
    ],
)
def test_filters_through_sampling(params, kept):
    """Over many positions, exactly the kept tokens come up."""
    rows = 400
    probabilities = [0.04, 0.06, 0.2, 0.3, 0.4]
    logits = np.tile(np.log(probabilities), (rows, 1))
    tokens = draw(logits, [SamplingParams(**params)] * rows, position=np.arange(rows)).tokens
    assert sorted(set(np.asarray(tokens).tolist())) == kept


# Penalties, bias, stops: seen through the greedy choice and, to the last digit, through a probe


def modified(logits: np.ndarray, params: SamplingParams, counts: np.ndarray, in_prompt: np.ndarray) -> np.ndarray:
    """What penalties and bias make of one row's logits, in float64."""
    x = logits.astype(np.float64)
    seen = in_prompt | (counts > 0)
    x = np.where(seen, np.where(x > 0, x / params.repetition_penalty, x * params.repetition_penalty), x)
    x = x - params.frequency_penalty * counts - params.presence_penalty * (counts > 0)
    for token, bias in (params.logit_bias or {}).items():
        x[token] += bias
    return x


PENALTIES = st.builds(
    SamplingParams,
    temperature=st.just(0.0),
    repetition_penalty=st.sampled_from([1.0, 0.5, 1.3, 5.0]),
    presence_penalty=st.sampled_from([0.0, -2.0, 0.5, 2.0]),
    frequency_penalty=st.sampled_from([0.0, -1.0, 0.3, 2.0]),
    logit_bias=st.one_of(st.none(), st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100), max_size=5)),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(PENALTIES, min_size=ROWS, max_size=ROWS), st.integers(0, 2**32))
def test_penalties_and_bias(params, seed):
    rng = np.random.default_rng(seed)
    logits = (rng.standard_normal((ROWS, VOCAB)) * 4).astype(np.float32)
    sequences = [rng.integers(0, VOCAB, rng.integers(1, 40)).tolist() for _ in range(ROWS)]
    prompt_lens = [int(rng.integers(0, len(tokens) + 1)) for tokens in sequences]
    slots = slots_of(params)
    for i, (tokens, prompt_len) in enumerate(zip(sequences, prompt_lens, strict=True)):
        slots = jit_count_tokens(slots, count_buffer(i + 1, tokens, prompt_len))
    # Rows in another order than slots.
    order = rng.permutation(ROWS).astype(np.int32)
    seen = TokenCounts(slots.counts, slots.in_prompt)
    tokens = np.asarray(jit_sample(jnp.asarray(logits), slots.params[order], seen, jnp.zeros(ROWS, jnp.int32)).tokens)
    for row, slot in enumerate(order):
        prompt = sequences[slot][: prompt_lens[slot]]
        output = sequences[slot][prompt_lens[slot] :]
        counts = np.bincount(output, minlength=VOCAB)
        in_prompt = np.isin(np.arange(VOCAB), prompt)
        expected = modified(logits[row], params[slot], counts, in_prompt)
        assert expected[tokens[row]] >= expected.max() - 1e-4


def count_buffer(penalty_row: int, tokens: list[int], prompt_len: int) -> jax.Array:
    packed = np.full((3, COUNTED_PER_CALL), VOCAB, np.int32)
    packed[:, : len(tokens)] = encode_counts(penalty_row, np.asarray(tokens), prompt_len)
    return jnp.asarray(packed)


def test_bias_of_a_whole_request_counts():
    bias = {token: 100.0 if token == 7 else -50.0 for token in range(MAX_LOGIT_BIAS)}
    logits = np.zeros((2, 600))
    logits[:, 599] = 60
    tokens = draw(logits, [SamplingParams(temperature=0.0, logit_bias=bias), GREEDY]).tokens
    assert np.asarray(tokens).tolist() == [7, 599]


def test_no_stop_token_before_min_tokens():
    """Position p is output number p - prompt_len."""
    prompt_len = 10
    least = 3
    stops = tuple(range(MAX_STOP_TOKENS))
    positions = np.arange(10, 16)
    logits = np.zeros((6, VOCAB))
    logits[:, :MAX_STOP_TOKENS] = 50 + np.arange(MAX_STOP_TOKENS)
    logits[:, 40] = 1
    for temperature in (0.0, 0.01):
        params = SamplingParams(temperature=temperature, min_tokens=least, max_tokens=100)
        tokens = draw(
            logits, [params] * 6, position=positions, stop_ids=[stops] * 6, prompt_lens=[prompt_len] * 6
        ).tokens
        last = MAX_STOP_TOKENS - 1
        assert np.asarray(tokens).tolist() == [40, 40, 40, last, last, last]


def test_stops_are_masked_even_against_the_strongest_bias():
    params = SamplingParams(temperature=0.0, min_tokens=1, logit_bias={3: 100.0})
    tokens = draw(np.zeros((1, VOCAB)), [params], stop_ids=[(3,)], prompt_lens=[5], position=[5]).tokens
    assert tokens[0] != 3


def test_without_min_tokens_stops_are_free():
    logits = np.zeros((1, VOCAB))
    logits[0, 3] = 5
    assert draw(logits, [GREEDY], stop_ids=[(3,)], prompt_lens=[5], position=[5]).tokens[0] == 3


# Log-probabilities


@pytest.mark.parametrize("sorts", [True, False])
@pytest.mark.parametrize("vocab", [1, 5, MAX_LOGPROBS, 500, 5000])
def test_log_probabilities(vocab, sorts):
    rng = np.random.default_rng(vocab)
    logits = (rng.standard_normal((ROWS, vocab)) * 5).astype(np.float32)
    logits[0] = 0  # all equal: every rank is 1
    if vocab > 2:
        logits[1, :2] = logits[1].max() + 1  # a tie at the top
    tokens = rng.integers(0, vocab, ROWS).astype(np.int32)
    score = jax.jit(partial(score_tokens, sorts=sorts))
    packed = np.asarray(score(jnp.asarray(logits), jnp.asarray(tokens)))
    np.testing.assert_array_equal(packed, jax.jit(partial(score_tokens, sorts=True))(logits, tokens))
    assert packed.shape == (ROWS, 2 + 2 * MAX_LOGPROBS)
    exact = logits.astype(np.float64)
    exact -= np.log(np.exp(exact - exact.max(1, keepdims=True)).sum(1, keepdims=True)) + exact.max(1, keepdims=True)
    for i, token in enumerate(tokens):
        for count in (0, 1, MAX_LOGPROBS):
            scores = read_scores(packed[i], int(token), count)
            assert scores.token_id == token
            np.testing.assert_allclose(scores.logprob, exact[i, token], atol=1e-5)
            assert scores.rank == 1 + (logits[i] > logits[i, token]).sum()
            assert len(scores.top) == min(count, vocab)
            ids = [entry for entry, _ in scores.top]
            assert len(set(ids)) == len(ids)
            np.testing.assert_array_equal(logits[i][ids], np.sort(logits[i])[::-1][: len(ids)])
            np.testing.assert_allclose([value for _, value in scores.top], exact[i, ids], atol=1e-5)


def test_the_most_likely_tokens_without_sorting():
    """In the order of `lax.top_k`, by which the first of equal ones comes first."""
    x = np.round(np.random.default_rng(6).standard_normal((4, 700)) * 2).astype(np.float32)
    values, ids = most_likely(jnp.asarray(x), 9)
    expected, places = jax.lax.top_k(jnp.asarray(x), 9)
    np.testing.assert_array_equal(values, expected)
    np.testing.assert_array_equal(ids, places)


def test_log_probabilities_are_of_the_raw_distribution():
    """Before temperature, filters, penalties, bias and stops; rows that did not ask do not change those that did."""
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((2, VOCAB)).astype(np.float32)
    params = SamplingParams(temperature=1.7, top_k=3, logit_bias={4: 100.0}, repetition_penalty=3.0, logprobs=5)
    sampled = draw(logits, [params, GREEDY])
    exact = logits[0] - np.log(np.exp(logits[0]).sum())
    scores = read_scores(np.asarray(sampled.scores)[0], int(sampled.tokens[0]), 5)
    assert int(sampled.tokens[0]) == 4
    np.testing.assert_allclose(scores.logprob, exact[4], atol=1e-5)
    assert not np.asarray(draw(logits, [GREEDY, GREEDY]).scores).any()


def test_log_probabilities_of_named_tokens():
    """A row that names tokens gets theirs, in their order, instead of the most likely ones; other rows do not."""
    rng = np.random.default_rng(1)
    logits = rng.standard_normal((3, VOCAB)).astype(np.float32)
    named = (VOCAB - 1, 0, 7)
    params = [SamplingParams(temperature=0.0, logprob_token_ids=(*named, 0)), GREEDY, SamplingParams(logprobs=2)]
    assert params[0].logprobs == len(named)
    scores = np.asarray(draw(logits, params).scores)
    exact = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    first = read_scores(scores[0], int(logits[0].argmax()), len(named))
    assert [token for token, _ in first.top] == list(named)
    np.testing.assert_allclose([value for _, value in first.top], exact[0, list(named)], atol=1e-5)
    np.testing.assert_allclose(first.logprob, exact[0].max(), atol=1e-5)
    assert [token for token, _ in read_scores(scores[2], 0, 2).top] == logits[2].argsort()[::-1][:2].tolist()


# Randomness


def chi_square_is_plausible(tokens: np.ndarray, probabilities: np.ndarray) -> bool:
    """p > 1e-4, by the Wilson-Hilferty approximation; expected counts are all above 20."""
    expected = probabilities * len(tokens)
    assert expected.min() > 20
    statistic = ((np.bincount(tokens, minlength=len(probabilities)) - expected) ** 2 / expected).sum()
    degrees = len(probabilities) - 1
    z = ((statistic / degrees) ** (1 / 3) - (1 - 2 / (9 * degrees))) / np.sqrt(2 / (9 * degrees))
    return z < 3.72


DRAWS = 4096


@pytest.mark.parametrize("varied", ["positions", "seeds", "high words of seeds", "both"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_tokens_follow_the_distribution(varied, temperature):
    rng = np.random.default_rng(5)
    logits = np.linspace(-1.5, 1.5, 12)
    probabilities = np.exp(logits / temperature)
    probabilities /= probabilities.sum()
    index = np.arange(DRAWS)
    position = {"positions": index, "both": rng.permutation(DRAWS)}.get(varied, np.full(DRAWS, 17))
    seeds = {"seeds": index, "both": index * 7919, "high words of seeds": index << 32}.get(varied, np.full(DRAWS, 3))
    params = SamplingParams(temperature=temperature)
    words = jnp.asarray(np.stack([encode_slot(0, params, seed, (), 0) for seed in seeds.tolist()]))
    none_seen = TokenCounts(jnp.zeros((1, 12), jnp.int32), jnp.zeros((1, 12), bool))
    batch = jnp.asarray(np.tile(logits, (DRAWS, 1)).astype(np.float32))
    tokens = [
        np.asarray(jit_sample(batch, words, none_seen, jnp.asarray(position + DRAWS * block, jnp.int32)).tokens)
        for block in range(5)
    ]
    assert chi_square_is_plausible(np.concatenate(tokens), probabilities)
    # Neighbouring positions or seeds are independent: pairs follow the product.
    pairs = np.concatenate([block[:-1] // 4 * 3 + block[1:] // 4 for block in tokens])
    thirds = probabilities.reshape(3, 4).sum(1)
    assert chi_square_is_plausible(pairs, np.outer(thirds, thirds).reshape(-1))


@pytest.mark.slow
@pytest.mark.parametrize("vocab", [1, 2, 127, 128, 129, 4096, 50257])
def test_the_token_drawn_has_the_largest_sum_of_logit_and_noise(vocab):
    rng = np.random.default_rng(vocab)
    logits = rng.normal(0, 3, (64, vocab)).astype(np.float32)
    logits[:, rng.random(vocab) < 0.5] = EXCLUDED
    logits[:, vocab // 2] = 0.0
    keys = rng.integers(0, 1 << 32, (64, 2), dtype=np.uint32)
    one = jnp.ones(64)
    settings = DrawSettings(one, jnp.zeros(64, jnp.int32), one, jnp.zeros(64), jnp.asarray(keys))
    tokens = np.asarray(jax.jit(draw_plainly)(jnp.asarray(logits), settings))
    sums = logits + noise_of(keys, np.arange(vocab))
    assert (sums[np.arange(64), tokens] > sums.max(axis=1) - 1e-5).all()
    assert (logits[np.arange(64), tokens] > EXCLUDED).all()


def test_noise():
    """It has Gumbel's distribution, in float32 as in float64, and other keys or tokens have other noise."""
    keys = np.random.default_rng(3).integers(0, 1 << 32, (64, 2), dtype=np.uint32)
    expected = noise_of(keys, np.arange(4096))
    found = np.asarray(jax.jit(lambda keys: gumbel(noise_bits(keys, jnp.arange(4096, dtype=jnp.uint32))))(keys))
    np.testing.assert_allclose(found, expected, atol=1e-5, rtol=1e-6)
    limits = np.linspace(-2, 8, 41)
    chances = np.diff(np.exp(-np.exp(-limits)), prepend=0.0, append=1.0)
    assert chi_square_is_plausible(np.digitize(found.reshape(-1), limits), chances)
    rows = np.corrcoef(found)
    columns = np.corrcoef(found.T[:64])
    for correlations, count in ((rows, 4096), (columns, 64)):
        assert np.abs(correlations - np.eye(64)).max() < 5.5 / np.sqrt(count)
    ends = np.asarray(gumbel(jnp.array([0, 2**32 - 1], jnp.uint32)))
    np.testing.assert_allclose(ends, [22.87, -2.81], atol=0.01)


def test_a_row_does_not_depend_on_its_place_or_neighbours():
    rng = np.random.default_rng(2)
    logits = rng.standard_normal((ROWS, VOCAB)).astype(np.float32)
    params = [
        SamplingParams(temperature=1.0, seed=1),
        SamplingParams(temperature=0.8, top_k=9, seed=2),
        SamplingParams(temperature=1.2, top_p=0.8, seed=3),
        SamplingParams(temperature=1.0, min_p=0.1, seed=4, logprobs=3),
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.5, logit_bias={3: 2.0}, seed=5),
        SamplingParams(temperature=1.0, presence_penalty=1.0, seed=6),
        SamplingParams(temperature=1.0, min_tokens=9, seed=7),
    ]
    position = np.arange(ROWS) * 3
    stops = [(1, 2)] * ROWS
    together = np.asarray(draw(logits, params, position=position, stop_ids=stops).tokens)
    for order in (rng.permutation(ROWS), rng.permutation(ROWS)):
        moved = draw(logits[order], [params[i] for i in order], position=position[order], stop_ids=stops).tokens
        np.testing.assert_array_equal(np.asarray(moved), together[order])
    for i in range(ROWS):
        alone = draw(logits[i : i + 1], [params[i]], position=position[i : i + 1], stop_ids=stops[:1]).tokens
        assert alone[0] == together[i]


def test_seed_and_position_fix_the_draw():
    rows = 64
    logits = np.zeros((rows, 2000))
    params = [SamplingParams(seed=11)] * rows
    one = np.asarray(draw(logits, params, position=np.arange(rows)).tokens)
    again = np.asarray(draw(logits, params, position=np.arange(rows)).tokens)
    other = np.asarray(draw(logits, [SamplingParams(seed=12)] * rows, position=np.arange(rows)).tokens)
    np.testing.assert_array_equal(one, again)
    assert len(set(one.tolist())) > rows * 0.8
    assert (one == other).mean() < 0.1
    assert len(set(np.asarray(draw(logits, params).tokens).tolist())) == 1


@pytest.mark.parametrize("temperature", [1e-2, 1e-5, 1e-20, 1e-37, 1e-40])
def test_a_vanishing_temperature_is_greedy(temperature):
    logits = np.tile(np.linspace(-40.0, 40.0, VOCAB), (4, 1))
    logits[:, [3, 20]] = 50.0, 55.0
    params = [
        SamplingParams(temperature=temperature, **filters)
        for filters in ({}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1})
    ]
    assert np.asarray(draw(logits, params, position=np.arange(4)).tokens).tolist() == [20] * 4


@pytest.mark.parametrize("top_p", [0.0, 1e-300, 1e-45, 1e-38, 1e-37])
def test_a_vanishing_top_p_is_greedy(top_p):
    logits = np.tile(np.linspace(-1.0, 1.0, VOCAB), (8, 1))
    logits[:, [3, 20]] = 1.5, 1.5000001
    params = [SamplingParams(temperature=10.0, top_p=top_p, seed=seed) for seed in range(8)]
    assert np.asarray(draw(logits, params, position=np.arange(8)).tokens).tolist() == [20] * 8


# Slots


def test_slots_hold_what_was_encoded():
    params = [
        SamplingParams(
            temperature=0.3, top_p=0.25, min_p=0.5, repetition_penalty=1.5, presence_penalty=-0.5,
            frequency_penalty=0.75, top_k=2**31 - 1, min_tokens=4, logprobs=0, logit_bias={5: 1.5, 2: -100.0},
        ),
        SamplingParams(temperature=0.0, top_k=-1),
    ]  # fmt: skip
    seeds = [2**64 - 2, -MAX_SEED - 1]
    slots = slots_of(params, seeds=seeds, stop_ids=[(9, 8), tuple(range(MAX_STOP_TOKENS))], prompt_lens=[7, 3])
    held = jax.tree.map(np.asarray, decode_slots(slots.params))
    for name, field in (
        ("temperature", "temperature"), ("top_p", "top_p"), ("min_p", "min_p"), ("repetition", "repetition_penalty"),
        ("presence", "presence_penalty"), ("frequency", "frequency_penalty"),
    ):  # fmt: skip
        assert getattr(held, name)[:2].tolist() == [np.float32(getattr(p, field)) for p in params]
    assert held.top_k[:2].tolist() == [2**31 - 1, 0]
    assert held.seed[:2].tolist() == [[2**32 - 1, 2**32 - 2], [2**31, 0]]
    assert held.no_stop_before[:2].tolist() == [11, 0]
    assert held.logprobs[:2].tolist() == [True, False]
    assert held.stop_ids[0].tolist() == [9, 8] + [-1] * (MAX_STOP_TOKENS - 2)
    assert held.stop_ids[1].tolist() == list(range(MAX_STOP_TOKENS))
    assert held.bias_ids[0, :3].tolist() == [5, 2, -1]
    assert held.bias[0, :3].tolist() == [1.5, -100.0, 0.0]
    assert (held.bias_ids[1] == -1).all()


@pytest.mark.parametrize("min_tokens", [2**31 - 1, 2**31 - 8])
def test_the_largest_min_tokens_can_be_encoded(min_tokens):
    """A request may ask for more tokens than there is room for; it is cut off by its length, not by an overflow."""
    params = SamplingParams(temperature=0.0, min_tokens=min_tokens, max_tokens=None)
    slots = slots_of([params], prompt_lens=[100])
    assert int(decode_slots(slots.params).no_stop_before[0]) >= 2**30


def test_a_slot_is_taken_over_whole():
    """Nothing of the one who had it before is left; the other slots stay as they were."""
    full = SamplingParams(
        top_k=3, logit_bias=dict.fromkeys(range(MAX_LOGIT_BIAS), 1.0), presence_penalty=1.0, min_tokens=5, max_tokens=9
    )
    slots = slots_of([full] * 3, stop_ids=[tuple(range(MAX_STOP_TOKENS))] * 3, seeds=[5] * 3)
    rows = [encode_slot(1, GREEDY, 0, (), 4)] + [padding_slot_params(3)] * (SLOTS_PER_CALL - 1)
    after = jit_set_slots(slots, jnp.asarray(np.stack(rows)))
    plain = slots_of([GREEDY] * 3, prompt_lens=[4] * 3)

    def compare(now, before, fresh):
        np.testing.assert_array_equal(now[1], fresh[1])
        np.testing.assert_array_equal(now[0], before[0])
        np.testing.assert_array_equal(now[2], before[2])

    jax.tree.map(compare, *(decode_slots(state.params) for state in (after, slots, plain)))


def test_biases_in_pieces():
    """As the programs of TPUs add them."""
    rng = np.random.default_rng(4)
    bias = {int(token): float(value) for token, value in zip(range(0, VOCAB, 2), rng.normal(size=VOCAB), strict=False)}
    slots = slots_of([SamplingParams(logit_bias=bias), SamplingParams(min_tokens=5), GREEDY], stop_ids=[(3, 4)] * 3)
    logits = jnp.asarray(rng.normal(size=(3, VOCAB)), jnp.float32)
    add = jax.jit(sampling._add_bias, static_argnames="in_pieces")
    given = logits, slots.params[:3], jnp.zeros(3, jnp.int32)
    whole = add(*given, in_pieces=False)
    np.testing.assert_array_equal(whole, add(*given, in_pieces=True))
    assert (np.asarray(whole) != np.asarray(logits)).any(axis=1).tolist() == [True, True, False]


def test_counting_in_pieces():
    """As the programs of TPUs count; the last piece is not full."""
    rng = np.random.default_rng(3)
    size = 2 * COUNTED_PER_CALL + 100
    packed = np.stack([rng.integers(0, 3, size), rng.integers(0, VOCAB + 1, size), rng.integers(0, 2, size)])
    slots = slots_of([SamplingParams(presence_penalty=1.0)] * 2)
    whole = jit_count_tokens(slots, packed.astype(np.int32))
    pieces = jax.jit(count_tokens, static_argnames="in_pieces")(slots, packed.astype(np.int32), in_pieces=True)
    np.testing.assert_array_equal(whole.counts, pieces.counts)
    np.testing.assert_array_equal(whole.in_prompt, pieces.in_prompt)
    assert np.asarray(whole.counts).sum() > COUNTED_PER_CALL


def test_counting_tokens():
    penal = SamplingParams(presence_penalty=1.0)
    slots = slots_of([penal, penal])
    slots = jit_count_tokens(slots, count_buffer(2, [1, 1, 2, 3, 3, 3, 0], 3))
    slots = jit_count_tokens(slots, count_buffer(2, [3, 4], 0))
    slots = jit_count_tokens(slots, count_buffer(1, [7] * COUNTED_PER_CALL, COUNTED_PER_CALL))
    counts = np.asarray(slots.counts)
    in_prompt = np.asarray(slots.in_prompt)
    assert {t: n for t, n in enumerate(counts[2].tolist()) if n} == {0: 1, 3: 4, 4: 1}
    assert np.flatnonzero(in_prompt[2]).tolist() == [1, 2]
    assert not counts[:2].any()
    assert np.flatnonzero(in_prompt[1]).tolist() == [7]
    # The next owner of a penalty row counts from zero, whatever its slot. Padding and plain sequences clear no row.
    rows = [encode_slot(0, penal, 0, (), 0, penalty_row=2), encode_slot(1, GREEDY, 0, (), 0)]
    rows += [padding_slot_params(2)] * (SLOTS_PER_CALL - len(rows))
    slots = jit_set_slots(slots, jnp.asarray(np.stack(rows)))
    assert not np.asarray(slots.counts)[2].any()
    assert not np.asarray(slots.in_prompt)[2].any()
    assert np.flatnonzero(np.asarray(slots.in_prompt)[1]).tolist() == [7]


def test_the_random_bits_are_those_of_jax():
    rng = np.random.default_rng(0)
    key = rng.integers(2**32, size=2, dtype=np.uint32)
    counter = rng.integers(2**32, size=(2, 100), dtype=np.uint32)
    ours = threefry(key[0], key[1], *map(jnp.asarray, counter))
    np.testing.assert_array_equal(np.concatenate(ours), threefry_2x32(key, jnp.asarray(counter.reshape(-1))))
