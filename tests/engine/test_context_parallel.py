"""Tokens of the cache shared out over devices that have the same key-value head: the tokens of one device."""

import jax
import numpy as np
import pytest
from engines import generate, make_engine, request

from jaxserve.config import ConfigError, EngineConfig
from jaxserve.engine.model_plan import ModelPlan
from jaxserve.pallas_kernels.paged_attention.reference import MASKED
from jaxserve.pallas_kernels.token_shares import part_weights

pytestmark = pytest.mark.compiles

ONE_HEAD = "llama_mqa"  # 1 key-value head, 8 query heads
LATENT = "deepseek_v3_groups"
NGRAM = {"method": "ngram", "num_speculative_tokens": 3}
FEW_PAGES = {"page_size": 8, "kv_pages": 14, "prefill_chunk": 16}
PROMPTS = [list(range(5 + i, 25 + 13 * i)) for i in range(4)] + [[7, 8, 9] * 10, [5]]


def split(devices, shares, **others):
    return {"tensor_parallel_size": devices, "decode_context_parallel_size": shares} | others


def tokens_of(folder, **options):
    engine = make_engine(folder, **options)
    results = generate(engine, *(request(str(i), p, max_tokens=16) for i, p in enumerate(PROMPTS)))
    again = generate(engine, request("again", PROMPTS[3], max_tokens=4))  # from the prefix cache
    return [one.token_ids for one in results + again], again[0].num_cached, engine


@pytest.mark.parametrize(
    ("case", "devices", "shares"),
    [
        (ONE_HEAD, 8, 4),
        (LATENT, 4, 4),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("gpt_oss_sinks", 4, 2),
                (ONE_HEAD, 8, 8),
                (LATENT, 8, 2),
                ("gemma2_caps", 4, 2),
                ("llama4_chunks", 4, 2),
            )
        ),
    ],
)
def test_the_same_tokens(case, devices, shares, model_folders):
    folder = model_folders(case)
    options = {"page_size": 16, "max_model_len": 128}
    alone, cached, _ = tokens_of(folder, **options)
    made, also_cached, engine = tokens_of(folder, **options, **split(devices, shares))
    assert made == alone
    assert cached == also_cached > 0
    values = jax.tree.leaves(engine.runner.cache[0])[0]
    parts = shares if case == LATENT else devices  # groups of devices have the same latents, and different heads
    assert values.addressable_shards[0].data.size * parts == values.size


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        (LATENT, "int8"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((LATENT, "fp8"), (ONE_HEAD, "int8"))),
    ],
)
def test_codes(case, dtype, model_folders):
    """A token's scale does not depend on where it is kept."""
    options = {"kv_cache_dtype": dtype, "page_size": 32, "max_model_len": 128, "tensor_parallel_size": 4}
    folder = model_folders(case)
    assert tokens_of(folder, **options, decode_context_parallel_size=4)[0] == tokens_of(folder, **options)[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "options"),
    [
        (ONE_HEAD, FEW_PAGES | {"speculative_config": NGRAM}),
        pytest.param(LATENT, {"enable_expert_parallel": True}, marks=pytest.mark.slow),
        pytest.param(
            LATENT,
            FEW_PAGES | {"enable_expert_parallel": True, "speculative_config": NGRAM},
            marks=pytest.mark.slow,
        ),
        pytest.param(ONE_HEAD, {"static_steps": True}, marks=pytest.mark.slow),
    ],
    ids=["preempted chunks and speculation", "whole experts", "whole experts preempted", "static"],
)
def test_with_other_features(case, options, model_folders):
    folder = model_folders(case)
    length = {"max_model_len": 96}
    made, _, engine = tokens_of(folder, **length, **options, **split(4, 2))
    assert made == tokens_of(folder, **length)[0]
    assert engine.scheduler.num_preemptions > 0 or "kv_pages" not in options


def test_merged_parts():
    """As one softmax over all scores, with sinks; parts without scores count for nothing."""
    rng = np.random.default_rng(3)
    scores = rng.normal(size=(3, 2, 7)) * 5
    values = rng.normal(size=(3, 7, 4))
    sinks = rng.normal(size=2)
    parts = np.full((4, 2, 5), MASKED, np.float32)
    parts[3, :, :4] = 0
    for i in range(3):
        weights = np.exp(scores[i])
        parts[i, :, :4] = weights @ values[i] / weights.sum(-1, keepdims=True)
        parts[i, :, 4] = np.log(weights.sum(-1))
    weights = np.exp(scores).transpose(1, 0, 2).reshape(2, -1)
    for some, extra in ((None, 0.0), (sinks, np.exp(sinks))):
        wanted = weights @ values.reshape(-1, 4) / (weights.sum(-1) + extra)[:, None]
        merged = (parts[..., :4] * np.asarray(part_weights(parts[..., 4], some))[..., None]).sum(0)
        np.testing.assert_allclose(merged, wanted, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (split(4, 3), "decode_context_parallel_size 3 must divide tensor_parallel_size 4"),
        (split(2, 2), "decode_context_parallel_size 2 must divide 1, the number of devices that have the same"),
        (split(4, 2, page_size=8, attention_backend="triton"), "attention_backend must be auto with decode_context"),
    ],
)
def test_refusals(options, message, model_folders):
    config = EngineConfig(model=str(model_folders("llama3_gqa")), **options)  # 2 key-value heads
    with pytest.raises(ConfigError, match=message):
        ModelPlan.of(config, jax.devices())
