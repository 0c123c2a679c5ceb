"""Models whose attention sees the tokens that an indexer chooses, or blocks of tokens. See `test_conformance`, too."""

from pathlib import Path

import numpy as np
import pytest
from engines import generate, make_engine, request

from jaxserve.config import ConfigError, EngineConfig
from jaxserve.engine.engine import Engine
from jaxserve.engine.model_plan import ModelPlan

pytestmark = pytest.mark.compiles

GOLDENS = Path(__file__).parent.parent / "goldens"
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}
SHARING = "glm_moe_dsa_hub"  # layers with an indexer, and layers that see what one of these has chosen; top_k is 13


BLOCKS = "minimax_m3_text"  # of three layers the last two choose three blocks of 8 tokens


def recorded(case):
    """The recorded prompts and answers."""
    with np.load(GOLDENS / f"{case}.npz") as golden:
        return [(golden[f"prompt_{i}"].tolist(), golden[f"tokens_{i}"].tolist()) for i in range(4)]


def answers(engine, prompts, tag=""):
    found = generate(engine, *(request(f"{tag}{i}", prompt, max_tokens=64) for i, prompt in enumerate(prompts)))
    return [one.token_ids for one in found]


@pytest.mark.parametrize("case", [SHARING, BLOCKS])
def test_in_parts_from_the_cache_and_after_preemption(case, model_folders):
    """In chunks of a few tokens and with too few pages for all, then once more from the cache."""
    prompts, expected = zip(*recorded(case), strict=True)
    engine = make_engine(model_folders(case), tokens=16, kv_pages=22, page_size=16, max_model_len=256)
    assert answers(engine, prompts) == list(expected)
    assert engine.stats().preemptions > 0
    again = generate(engine, request("again", prompts[3], max_tokens=64))[0]
    assert again.token_ids == expected[3]
    assert again.num_cached >= 64


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "options"),
    [
        (SHARING, {"tensor_parallel_size": 2}),
        (SHARING, {"speculative_config": NGRAM}),
        (SHARING, {"cpu_offload_gib": 1.0}),
        (BLOCKS, {"tensor_parallel_size": 2}),
        (BLOCKS, {"tensor_parallel_size": 4}),  # each head of keys and values is on two devices
        ("minimax_m3_hub", {"tensor_parallel_size": 2, "enable_expert_parallel": True}),
        (BLOCKS, {"data_parallel_size": 2}),
        (BLOCKS, {"pipeline_parallel_size": 2}),
        (BLOCKS, {"speculative_config": NGRAM}),
        (BLOCKS, {"cpu_offload_gib": 1.0}),
        (BLOCKS, {"kv_offload_gib": 1.0}),
        (BLOCKS, {"page_size": 32}),
        (BLOCKS, {"page_size": 8}),
    ],
)
def test_with_other_features(case, options, model_folders):
    prompts, expected = zip(*recorded(case), strict=True)
    engine = make_engine(model_folders(case), tokens=48, max_model_len=256, **options)
    assert answers(engine, prompts) == list(expected)


@pytest.mark.slow
@pytest.mark.parametrize("case", [SHARING, BLOCKS])
def test_8_bit_caches(case, model_folders):
    """The keys of indexers are bfloat16 beside them. Rounding changes some choices; where most are others,
    log-probabilities differ by several units."""
    with np.load(GOLDENS / f"{case}.npz") as golden:
        prompt, tokens, expected = (golden[f"{what}_3"] for what in ("prompt", "tokens", "logprobs"))
    engine = make_engine(model_folders(case), tokens=320, kv_cache_dtype="int8")
    asked = request("0", [*prompt.tolist(), *tokens.tolist()], max_tokens=1, prompt_logprobs=0)
    found = [entry.logprob for entry in generate(engine, asked)[0].prompt_logprobs[len(prompt) :]]
    assert np.median(np.abs(np.array(found) - expected)) < 0.4


def plan(folder, **options):
    return ModelPlan.of(EngineConfig(model=str(folder), **options), checks=False)


def test_keys_are_in_the_pages_unless_there_is_nothing_to_choose(model_folders):
    """A sequence of 13 tokens has no more than may be chosen."""
    rows = 4 * (40 + 8) * 4  # layers, numbers of a latent and its key, bytes
    keys = 4 * 20 * 4
    assert plan(model_folders(SHARING)).one_page.token_bytes == rows + keys
    assert plan(model_folders(SHARING), max_model_len=14).one_page.token_bytes == rows + keys
    short = plan(model_folders(SHARING), max_model_len=13)
    assert short.one_page.token_bytes == rows
    assert plan(model_folders(SHARING), kv_cache_dtype="int8").one_page.token_bytes == 4 * (48 + 2 * 4 + 2 * 20)


def test_keys_of_blocks_are_in_the_pages_unless_there_is_nothing_to_choose(model_folders):
    """A sequence of 24 tokens has no more than three blocks."""
    rows = 3 * 2 * 2 * 24 * 4  # layers, keys and values, heads, their numbers, bytes
    assert plan(model_folders(BLOCKS)).one_page.token_bytes == rows + 3 * 20 * 4
    assert plan(model_folders(BLOCKS), max_model_len=24).one_page.token_bytes == rows


def test_short_sequences_are_answered_without_the_indexers(model_folders):
    prompt, expected = recorded(SHARING)[1]
    engine = make_engine(model_folders(SHARING), max_model_len=13)
    found = generate(engine, request("0", prompt, max_tokens=13 - len(prompt)))[0]
    assert found.token_ids == expected[: 13 - len(prompt)]


@pytest.mark.parametrize(
    ("case", "options", "message"),
    [
        (
            SHARING,
            {"tensor_parallel_size": 2, "decode_context_parallel_size": 2},
            "decode_context_parallel_size must be 1, not 2, for a model with indexers, unless max_model_len is at most",
        ),
        (
            SHARING,
            {"pipeline_parallel_size": 2},
            "pipeline_parallel_size must be 1, not 2, for a model whose layers share what",
        ),
        (
            BLOCKS,
            {"tensor_parallel_size": 4, "decode_context_parallel_size": 2},
            "unless max_model_len is at most the 24 tokens that they choose",
        ),
        (BLOCKS, {"deterministic": True}, "attention over chosen blocks adds in plain XLA"),
    ],
)
def test_what_is_refused(case, options, message, model_folders):
    with pytest.raises(ConfigError, match=message):
        Engine.load(EngineConfig(model=str(model_folders(case)), **options), progress=False)
