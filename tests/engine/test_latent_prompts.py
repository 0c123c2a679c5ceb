"""Prompts of models with latent attention in the expanded form: the recorded answers, in one step and in parts."""

import jax.numpy as jnp
import numpy as np
import pytest
from engines import generate, make_engine, request
from test_dense_models import answers
from tiny_models import CASES

from jaxserve.pallas_kernels.latent_attention import expanded, reference
from jaxserve.pallas_kernels.types import LatentPages

pytestmark = pytest.mark.compiles

DEEPSEEK = ("deepseek_v3_groups", "deepseek_v2_lite", "deepseek_v2_groups")
WHOLE = [
    pytest.param(case, devices, marks=() if (case, devices) == (DEEPSEEK[0], 1) else pytest.mark.slow)
    for case in DEEPSEEK
    for devices in (1, 2)
]


@pytest.mark.parametrize("dtype", [np.float32, np.int8])
def test_both_forms_give_what_heads_of_their_own_give(dtype):
    """A decode and two prompts, one of which continues, against float64. Codes are read as what they stand for."""
    rank = 16
    rope = 4
    heads = 2
    nope = 8
    v_dim = 6
    page = 4
    rng = np.random.default_rng(3)
    k_up = rng.standard_normal((heads, nope, rank))
    v_up = rng.standard_normal((heads, v_dim, rank))
    rows = [(1, 11), (7, 7), (5, 9)]  # new tokens, and all
    tables = np.array([[1, 2, 3], [4, 5, 0], [8, 7, 6]], np.int32)
    cached = rng.standard_normal((3, 12, rank + rope)).astype(np.float32)
    slots = (tables[:, :, None] * page + np.arange(page)).reshape(3, 12)
    scale = jnp.zeros((9, 2, page)) if dtype == np.int8 else None
    pages = LatentPages(jnp.zeros((9, page, rank + rope), dtype), scale)
    pages = reference.write_latent(pages, cached.reshape(-1, rank + rope), jnp.asarray(slots.reshape(-1)), rank=rank)
    if scale is not None:
        of_latent, of_rope = np.asarray(pages.scale)[tables].swapaxes(1, 2).reshape(3, 2, 12).swapaxes(0, 1)
        codes = np.asarray(pages.data)[tables].reshape(3, 12, rank + rope)
        stored = np.concatenate([codes[..., :rank] * of_latent[..., None], codes[..., rank:] * of_rope[..., None]], -1)
        np.testing.assert_allclose(stored, cached, atol=0.02)
        cached = stored
    q = rng.standard_normal((16, heads, nope + rope)).astype(np.float32)  # three of padding
    gold = []
    for row, (new, length) in enumerate(rows):
        for position in range(length - new, length):
            seen = cached[row, : position + 1].astype(np.float64)
            keys = np.einsum("sr,hnr->hsn", seen[:, :rank], k_up)
            query = q[len(gold)]
            scores = np.einsum("hn,hsn->hs", query[:, :nope], keys) + query[:, nope:] @ seen[:, rank:].T
            weights = np.exp(scores / 3 - (scores / 3).max(-1, keepdims=True))
            weights /= weights.sum(-1, keepdims=True)
            gold.append(np.einsum("hs,sr,hvr->hv", weights, seen[:, :rank], v_up))
    starts = jnp.array([0, 1, 8, 13])
    lengths = jnp.array([length for _, length in rows])
    projections = jnp.asarray(k_up, jnp.float32), jnp.asarray(v_up, jnp.float32)
    for expand in (False, True):
        found = expanded.attention_of_heads(
            reference.latent_attention, jnp.asarray(q), pages, *projections, jnp.asarray(tables), starts, lengths,
            jnp.int32(1), scale=1 / 3, expand=expand,
        )  # fmt: skip
        assert np.isfinite(found).all()
        np.testing.assert_allclose(found[:13], gold, rtol=0, atol=1e-4)


def plain_engine(folder, case, **options):
    """An engine whose attention is plain XLA; checks that its mixed steps expand, and that its decodes do not."""
    engine = make_engine(folder, attention_backend="xla", **CASES[case].options, **options)
    programs = {shape.decode_only: engine.runner.lower(shape).as_text() for shape in engine.shapes}
    assert "expanded_attention" in programs[False]
    assert "expanded_attention" not in programs[True]
    return engine


@pytest.mark.slow
@pytest.mark.parametrize(("case", "devices"), WHOLE)
def test_whole(case, devices, model_folders):
    answers(plain_engine(model_folders(case), case, tokens=320, tensor_parallel_size=devices), case)


@pytest.mark.slow
@pytest.mark.parametrize("case", DEEPSEEK)
def test_in_parts(case, model_folders):
    """In chunks and with too few pages for all, then once more from the cache."""
    tokens = 48 if case == DEEPSEEK[0] else 120
    options = {"tokens": tokens, "rows": 2, "max_model_len": 256, "page_size": 16}
    engine = plain_engine(model_folders(case), case, kv_pages=18, **options)
    answers(engine, case)
    assert engine.stats().preemptions > 0
    engine = plain_engine(model_folders(case), case, **options)
    answers(engine, case)
    assert sum(one.num_cached for one in answers(engine, case, "again-")) >= 128


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_with_latents_as_codes(dtype, model_folders):
    """Both forms give the same log-probabilities up to a token whose latent is rounded to another code: they add in
    different orders, so that a latent of a later layer may lie on the other side of a code's border. The tokens after
    it differ by about the step of a code."""
    case = DEEPSEEK[0]
    found = []
    prompt = np.random.default_rng(2).integers(3, 200, 150).tolist()
    for build in (plain_engine, lambda folder, case, **options: make_engine(folder, **options)):
        engine = build(model_folders(case), case, tokens=48, rows=2, kv_cache_dtype=dtype)
        result = generate(engine, request("0", prompt, max_tokens=8, prompt_logprobs=0))[0]
        found.append((result.token_ids, [entry.logprob for entry in result.prompt_logprobs if entry is not None]))
    assert found[0][0] == found[1][0]
    errors = np.abs(np.subtract(found[0][1], found[1][1]))
    assert np.sort(errors)[: len(errors) // 4].max() < 1e-5
    assert errors.max() < 5e-3
