"""Keys and values as int8, fp8 or bfloat16: the same answer whatever happens to their pages, and a close one."""

import numpy as np
import pytest
from engines import drain, generate, make_engine, request

from jaxserve.config import ConfigError, EngineConfig

pytestmark = pytest.mark.compiles

CASE = "tp_gqa"
RNG = np.random.default_rng(3)
PROMPTS = [RNG.integers(5, 500, n).tolist() for n in (1, 9, 33, 70)]
DTYPES = {"bf16": 2.0, "int8": 1.0 + 4 / 32, "fp8": 1.0 + 4 / 32}  # bytes of a number, its scale's share included


def requests(tag: str = "", **params):
    sampled = {"temperature": 0.9, "seed": 4, "max_tokens": 30}
    return [request(f"{tag}{i}", prompt, **{**sampled, **params}) for i, prompt in enumerate(PROMPTS)]


def tokens(completions):
    return [completion.token_ids for completion in completions]


@pytest.fixture(scope="module", params=DTYPES)
def dtype(request):
    return request.param


@pytest.fixture(scope="module")
def alone(dtype, model_folders):
    engine = make_engine(model_folders(CASE), rows=1, tokens=128, prefix_caching=False, kv_cache_dtype=dtype)
    return [tokens(generate(engine, one))[0] for one in requests()]


@pytest.mark.slow
def test_with_its_prefix_cached_and_copied(dtype, model_folders, alone):
    engine = make_engine(model_folders(CASE), rows=8, tokens=128, kv_cache_dtype=dtype)
    assert tokens(generate(engine, *requests("first-"))) == alone
    again = generate(engine, *requests("again-"))
    assert tokens(again) == alone
    assert sum(one.num_cached for one in again) == 16 * (2 + 4)
    engine.add_request(request("four", PROMPTS[1], n=4, max_tokens=30, temperature=0.9, seed=4))
    assert drain(engine)["four", 0].token_ids == alone[1]


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
def test_after_preemption(dtype, devices, model_folders, alone):
    few = {"kv_pages": 12, "max_model_len": 110, "tensor_parallel_size": devices}
    engine = make_engine(model_folders(CASE), rows=4, tokens=32, kv_cache_dtype=dtype, **few)
    assert tokens(generate(engine, *requests())) == alone
    assert engine.stats().preemptions > 0


def test_close_to_a_cache_in_floats(dtype, model_folders):
    scores = {}
    for kind in ("auto", dtype):
        engine = make_engine(model_folders(CASE), kv_cache_dtype=kind)
        (one,) = generate(engine, request("r", PROMPTS[3], max_tokens=1, prompt_logprobs=0))
        scores[kind] = np.array([p.logprob for p in one.prompt_logprobs[1:]])
    error = np.abs(scores[dtype] - scores["auto"]).mean()
    assert 0 < error < {"bf16": 0.01, "int8": 0.03, "fp8": 0.12}[dtype]


def test_bytes_of_the_cache(dtype, model_folders):
    sizes = [make_engine(model_folders(CASE), kv_cache_dtype=kind).runner for kind in ("auto", dtype)]
    assert sizes[1].cache_bytes == sizes[0].cache_bytes / 4 * DTYPES[dtype]
    assert sizes[1].cache_bytes == sizes[1].layout.page_bytes * sizes[1].layout.num_pages


def test_an_unknown_dtype():
    with pytest.raises(ConfigError, match="kv_cache_dtype must be one of auto, bf16, fp8, int8, got 'int4'"):
        EngineConfig(model="demo", kv_cache_dtype="int4")


def test_biases_need_floats(model_folders):
    with pytest.raises(ConfigError, match=r"kv_cache_dtype int8 cannot hold the positions .* use auto or bf16"):
        make_engine(model_folders("mpt_untied"), kv_cache_dtype="int8")
    with pytest.raises(ConfigError, match=r"kv_cache_dtype int8 cannot hold the biases by values that Doge keeps"):
        make_engine(model_folders("doge_saved"), kv_cache_dtype="int8")
