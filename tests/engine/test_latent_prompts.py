"""Prompts of models with latent attention in the expanded form: the recorded answers, in one step and in parts."""

import numpy as np
import pytest
from engines import generate, make_engine, request
from test_dense_models import answers
from tiny_models import CASES

pytestmark = pytest.mark.compiles

DEEPSEEK = ("deepseek_v3_groups", "deepseek_v2_lite", "deepseek_v2_groups")
WHOLE = [
    pytest.param(case, devices, marks=() if (case, devices) == (DEEPSEEK[0], 1) else pytest.mark.slow)
    for case in DEEPSEEK
    for devices in (1, 2)
]


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
