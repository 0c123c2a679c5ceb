"""Bitmasks of a request's own lists: against sets, and made once."""

import numpy as np
import pytest
from engines import generate, make_engine, request
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.grammars import token_mask
from jaxserve.grammars.token_mask import AllowedTokens, TokenMask, bits_of
from jaxserve.types import SamplingParams

pytestmark = pytest.mark.compiles

VOCAB = 70
WORDS = 3
TOKENS = st.integers(0, VOCAB - 1)


def tokens_of(mask: np.ndarray) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


@settings(max_examples=200, deadline=None)
@given(
    allowed=st.none() | st.lists(TOKENS, min_size=1, max_size=8, unique=True),
    words=st.lists(st.lists(TOKENS, min_size=1, max_size=3).map(tuple), max_size=6),
    ends=st.lists(TOKENS, max_size=2),
    stops=st.lists(TOKENS, max_size=3),
    min_tokens=st.integers(0, 4),
    output=st.lists(TOKENS, max_size=5),
    given_=st.sets(TOKENS, min_size=1),
)
def test_masks_are_what_the_lists_say(allowed, words, ends, stops, min_tokens, output, given_):
    params = SamplingParams(
        allowed_token_ids=None if allowed is None else tuple(allowed),
        bad_words=tuple(words),
        min_tokens=min_tokens,
        max_tokens=9,
    )
    mask = bits_of(given_, WORDS)
    one = TokenMask(params, AllowedTokens(WORDS).mask(params.allowed_token_ids), ends, WORDS)
    one.apply(mask, np.asarray(output, np.int32), stops)

    expected = given_ if allowed is None else given_ & set(allowed)
    unwanted = set(ends) | (set(stops) if len(output) < min_tokens else set())
    for word in words:
        if len(word) == 1 or tuple(output[1 - len(word) :]) == word[:-1]:
            unwanted.add(word[-1])
    assert tokens_of(mask) == (expected - unwanted or expected)


def test_equal_lists_share_a_mask():
    ids = tuple(range(0, VOCAB, 3))
    masks = AllowedTokens(WORDS)
    assert masks.mask(ids) is masks.mask(tuple(range(0, VOCAB, 3)))
    assert tokens_of(masks.mask(ids)) == set(ids)
    assert masks.mask(None) is None


@pytest.mark.slow
def test_masks_are_made_once_per_request_and_not_in_every_step(model_folders, monkeypatch):
    """Also for the n completions of a request, and for requests with the same list."""
    made = []
    make = token_mask.bits_of

    def counted(ids, words):
        made.append(tuple(ids))
        return make(made[-1], words)

    monkeypatch.setattr(token_mask, "bits_of", counted)
    engine = make_engine(model_folders("qwen3_tied"), rows=8)
    allowed = tuple(range(7, 400, 2))
    lists = {"allowed_token_ids": allowed, "bad_words": ((9,), (11,), (13, 15))}
    results = generate(
        engine, *(request(f"r{i}", [5 + i, 6], max_tokens=20, n=2 if i == 0 else 1, **lists) for i in range(3))
    )
    assert all(set(result.token_ids) <= set(allowed) - {9, 11} for result in results)
    large = [ids for ids in made if len(ids) == len(allowed)]
    assert len(large) == 1
    assert len([ids for ids in made if ids == (9, 11)]) == 3


@pytest.mark.parametrize("count", [1, 131_072])
def test_a_mask_of_a_whole_vocabulary(count):
    words = 131_072 // 32
    assert tokens_of(bits_of(range(count), words)) == set(range(count))
