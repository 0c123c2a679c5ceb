"""Groups of devices with sequences of their own, which share only the experts: the tokens of one device."""

import numpy as np
import pytest
from engines import make_engine, request, run_all
from flax.traverse_util import flatten_dict

from jaxserve.config import ConfigError, EngineConfig
from jaxserve.devices.mesh import make_mesh
from jaxserve.engine.engine import Engine

EXPERTS, LATENT, DENSE = "qwen3_moe_plain", "deepseek_v3_groups", "llama3_gqa"
PROMPTS = [list(range(5 + i, 25 + 13 * i)) for i in range(4)] + [[7, 8, 9] * 10]
slow = pytest.mark.slow


def requests():
    """Requests of every kind that groups serve. Several of them begin with the same tokens."""
    shared = list(range(40, 80))
    yield request("plain", shared + [3], max_tokens=12)
    yield request("long", list(range(2, 90)), max_tokens=9)
    yield request("siblings", shared + [4, 5], max_tokens=8, n=3, temperature=1.0, seed=5)
    yield request("penalties", [9, 8, 7] * 5, max_tokens=14, presence_penalty=1.5, repetition_penalty=1.3)
    yield request("scores", shared, max_tokens=6, logprobs=2, prompt_logprobs=1)
    yield request("drawn", PROMPTS[1], max_tokens=10, temperature=0.9, top_p=0.8, top_k=20, seed=77, min_p=0.01)
    yield request("stops", PROMPTS[2], max_tokens=30, temperature=1.2, seed=3, stop_token_ids=list(range(0, 48, 3)))
    yield request("biased", PROMPTS[0], max_tokens=7, logit_bias={5: 3.0, 9: -100.0}, min_tokens=3)
    yield request("masked", PROMPTS[3], max_tokens=9, allowed_token_ids=[11, 12, 13, 40, 41], temperature=1.0, seed=1)
    yield request("more penalties", shared[:20], max_tokens=11, frequency_penalty=0.7, n=2, temperature=0.7, seed=8)
    yield request("nothing", shared, max_tokens=0, prompt_logprobs=0)
    for i in range(5):
        yield request(f"again {i}", shared + [100 + i], max_tokens=5 + i)
    for i in range(10):  # they begin with few pages, and need more than a small cache has
        yield request(f"grows {i}", [20 + i, 21, 22], max_tokens=70, ignore_eos=True)


def completions(engine):
    """Results by request and index: tokens, why they end, and log-probabilities."""
    found = run_all(engine, *requests())
    return {key: (one.token_ids, one.finish_reason) for key, one in found.items()}, found


def assert_same(folder, sizes, **options):
    """The same requests give the same tokens in groups as on one device, and log-probabilities that are close."""
    alone, scores = completions(make_engine(folder))
    engine = make_engine(folder, **sizes, **options)
    split, others = completions(engine)
    assert split == alone
    for key, one in scores.items():
        for mine, other in zip(
            [*one.logprobs, *(one.prompt_logprobs or [])],
            [*others[key].logprobs, *(others[key].prompt_logprobs or [])],
            strict=True,
        ):
            assert (mine is None) == (other is None)
            if mine is not None:
                np.testing.assert_allclose(mine.logprob, other.logprob, atol=1e-3)
    return engine


def sizes_of(groups, devices=1, whole=False):
    return {"data_parallel_size": groups, "tensor_parallel_size": devices, "enable_expert_parallel": whole}


@pytest.mark.parametrize(
    ("case", "sizes"),
    [
        (EXPERTS, sizes_of(2, 2, True)),
        (LATENT, sizes_of(2, 1, False)),
        pytest.param(DENSE, sizes_of(4), marks=slow),
        pytest.param(DENSE, sizes_of(2, 2), marks=slow),
        *(
            pytest.param(case, sizes_of(*shape, whole), marks=slow)
            for case in (EXPERTS, LATENT)
            for whole in (False, True)
            for shape in ((2, 1), (4, 1), (2, 2), (4, 2))
        ),
    ],
)
def test_the_same_tokens(case, sizes, model_folders):
    engine = assert_same(model_folders(case), sizes)
    stats, groups = engine.stats(), sizes["data_parallel_size"]
    assert stats.pages_total == groups * (engine.runner.layout.num_pages - 1)
    assert stats.prefix_hits > 0
    stacks = [w for path, w in flatten_dict(engine.runner.params, sep="/").items() if path.endswith("/experts_down")]
    for stack in stacks:  # no device has more than its share
        assert {part.data.size for part in stack.addressable_shards} == {stack.size // engine.runner.mesh.size}


@pytest.mark.parametrize(
    "options",
    [
        {"kv_pages": 9, "max_model_len": 128, "prefill_chunk": 16},
        pytest.param({"static_steps": True, "kv_pages": 9, "max_model_len": 128}, marks=slow),
        pytest.param({"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}, marks=slow),
        pytest.param({"async_scheduling": False, "decode_steps": 1}, marks=slow),
        pytest.param({"prefix_caching": False, "tokens": 16}, marks=slow),
        pytest.param({"quantization": "int8"}, marks=slow),
    ],
    ids=["preempted chunks", "static", "speculation", "synchronous", "no prefixes", "quantized"],
)
def test_with_other_features(options, model_folders):
    folder = model_folders(DENSE if "kv_pages" in options else EXPERTS)  # layers that see all tokens keep all pages
    if "quantization" in options:
        alone, _ = completions(make_engine(folder, tensor_parallel_size=2, **options))
        split, _ = completions(make_engine(folder, **sizes_of(2), **options))
        assert split == alone
        return
    engine = assert_same(folder, sizes_of(2, 1, "kv_pages" not in options), **options)
    assert bool(engine.stats().preemptions) == ("kv_pages" in options)


@pytest.mark.parametrize(
    "setting",
    [
        {"pipeline_parallel_size": 2},
        {"enable_lora": True},
        {"kv_offload_gib": 1.0},
        {"speculative_config": {"method": "draft_model", "model": "demo-draft", "num_speculative_tokens": 2}},
        {"deterministic": True},
    ],
    ids=str,
)
def test_what_cannot_be_combined_is_refused_before_anything_is_read(setting):
    config = EngineConfig(model="a folder that does not exist", data_parallel_size=2, **setting)
    with pytest.raises(ConfigError, match="data_parallel_size 2 cannot be combined with"):
        Engine.load(config)


def test_too_few_devices():
    with pytest.raises(ConfigError, match="data_parallel_size 4 x tensor_parallel_size 4 needs 16 devices"):
        make_mesh(4, data_parallel_size=4)
