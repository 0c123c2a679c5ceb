"""DeepSeek V4: windows and compressed entries, which lie in pages. See `test_conformance`, too."""

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
CASE = "deepseek_v4_hub"  # windows of 24 tokens, entries of 4 and of 20
ODD = "deepseek_v4_saved"  # windows of 16 tokens, entries of 3 and of 10


def recorded(case):
    """The recorded prompts and answers."""
    with np.load(GOLDENS / f"{case}.npz") as golden:
        return [(golden[f"prompt_{i}"].tolist(), golden[f"tokens_{i}"].tolist()) for i in range(4)]


def answers(engine, prompts, tag=""):
    found = generate(engine, *(request(f"{tag}{i}", prompt, max_tokens=64) for i, prompt in enumerate(prompts)))
    return [one.token_ids for one in found]


@pytest.mark.parametrize("case", [CASE, pytest.param(ODD, marks=pytest.mark.slow)])
def test_in_parts_and_from_the_cache(case, model_folders):
    """In chunks of a few tokens, which end within entries; then once more, from cached pages."""
    prompts, expected = zip(*recorded(case), strict=True)
    engine = make_engine(model_folders(case), tokens=16, page_size=16, max_model_len=256)
    assert answers(engine, prompts) == list(expected)
    again = generate(engine, request("again", prompts[3], max_tokens=64))[0]
    assert again.token_ids == expected[3]
    assert again.num_cached == 128


@pytest.mark.slow
@pytest.mark.parametrize(("case", "page_size", "pages"), [(CASE, 16, 44), (ODD, 8, 70), (ODD, 16, 36), (ODD, 64, 13)])
def test_after_preemption(case, page_size, pages, model_folders):
    """With too few pages for all. Pages of 8 tokens are smaller than entries, and entries of 3 and 10 end anywhere."""
    prompts, expected = zip(*recorded(case), strict=True)
    engine = make_engine(model_folders(case), tokens=16, kv_pages=pages, page_size=page_size, max_model_len=256)
    assert answers(engine, prompts) == list(expected)
    assert engine.stats().preemptions > 0


@pytest.mark.slow
@pytest.mark.parametrize("case", [CASE, ODD])
@pytest.mark.parametrize(
    "options",
    [{"tensor_parallel_size": 2}, {"data_parallel_size": 2}, {"speculative_config": NGRAM}, {"kv_offload_gib": 1.0}],
)
def test_with_other_features(case, options, model_folders):
    if case == ODD and "tensor_parallel_size" in options:
        options = {"tensor_parallel_size": 3}
    prompts, expected = zip(*recorded(case), strict=True)
    engine = make_engine(model_folders(case), tokens=48, max_model_len=256, **options)
    assert answers(engine, prompts) == list(expected)


def test_entries_of_all_layers_share_the_parts_of_pages(model_folders):
    """Three of four layers have entries. Tokens of each layer are in a group of its own, since all of them together
    would take more of the pages for entries."""
    layout = ModelPlan.of(EngineConfig(model=str(model_folders(CASE)), page_size=16), checks=False).one_page
    assert layout.groups.windows == (24, 24, 24, 24, None)
    assert layout.groups.fits[-1] >= 3
    key_and_inputs = 24 + 2 * 2 * (24 + 16)  # a token's key, and the values and gates of two series of both kinds
    rows = -(-key_and_inputs // 24)
    assert layout.page_bytes == 16 * rows * 24 * 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel_size": 4}, r"does not divide 2 groups of heads \(o_groups\); this model allows \[1, 2\]"),
        ({"kv_cache_dtype": "int8"}, "kv_cache_dtype must be auto or bf16 for compressed attention, got int8"),
        (
            {"tensor_parallel_size": 2, "decode_context_parallel_size": 2},
            "decode_context_parallel_size must be 1, not 2, for compressed attention",
        ),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size must be 1 for models"),
        ({"attention_backend": "cpu"}, "attention_backend must be auto for compressed attention, got 'cpu'"),
    ],
)
def test_what_is_refused(options, message, model_folders):
    with pytest.raises(ConfigError, match=message):
        Engine.load(EngineConfig(model=str(model_folders(CASE)), **options), progress=False)
