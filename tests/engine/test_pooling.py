"""Embeddings and scores by the engine, compared with what transformers computes (tests/goldens/pooling.npz)."""

import json
import shutil

import numpy as np
import pooling_models
import pytest
from engines import request
from safetensors.numpy import load_file

from jaxserve.config import ConfigError, EngineConfig
from jaxserve.engine.engine import Engine
from jaxserve.execution.step_shape import StepShape
from jaxserve.models.load import read_model
from jaxserve.models.pooling import unit
from jaxserve.models.pooling_files import find_task, read_pooler
from jaxserve.text.tokenizer import load_tokenizer
from jaxserve.types import InvalidRequestError, Request, SamplingParams

pytestmark = pytest.mark.compiles

GOLDEN = np.load(pooling_models.GOLDEN)
NOTHING = SamplingParams(max_tokens=0, ignore_eos=True)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}

    def folder(name):
        if name not in made:
            made[name] = pooling_models.build(name, tmp_path_factory.mktemp(name))
        return made[name]

    return folder


def make(folder, *, tokens=64, rows=4, static_steps=None, **config):
    config = {"max_num_seqs": rows, "max_num_batched_tokens": tokens, "kv_pages": 200, "max_model_len": 256} | config
    engine = Engine.load(EngineConfig(model=str(folder), **config), progress=False, static_steps=static_steps)
    engine.shapes = [StepShape.of(tokens, rows, engine.page_size, decode_only=False)]
    return engine


def pool(engine, prompts, prefix="r"):
    """The results of prompts that are submitted together, float32 each, and how many of their tokens were cached."""
    for i, prompt in enumerate(prompts):
        ids = [int(token) for token in prompt]
        engine.add_request(Request(request_id=f"{prefix}{i}", prompt_token_ids=ids, params=NOTHING, pools=True))
    results = {}
    cached = {}
    while engine.has_work:
        for update in engine.step():
            assert update.finish_reason == "length"
            assert not update.token_ids
            results[update.request_id] = np.frombuffer(update.pooled, "<f4")
            cached[update.request_id] = update.num_cached_tokens
        engine.scheduler.check_integrity()
    assert engine.blocks.num_used == 0
    names = [f"{prefix}{i}" for i in range(len(prompts))]
    return [results[name] for name in names], [cached[name] for name in names]


def check(name, results):
    for i, result in enumerate(results):
        golden = GOLDEN[f"{name}_{i}"]
        assert result.shape == golden.shape
        np.testing.assert_allclose(result, golden, rtol=0, atol=1e-4 * np.abs(golden).max())


@pytest.mark.parametrize("name", pooling_models.CASES)
def test_chunked_batched_and_cached(name, folders):
    """A prompt of 130 tokens takes three steps of 64, beside others. The second time its beginning is cached where only
    the last token is pooled."""
    engine = make(folders(name))
    prompts = pooling_models.prompts_of(name)
    results, _ = pool(engine, prompts)
    check(name, results)
    again, cached = pool(engine, prompts, "again")
    check(name, again)
    assert (cached[-1] > 0) == (engine.pooler.method == "last")
    assert engine.stats().generation_tokens == 0


@pytest.mark.parametrize("name", ["embed_mean", "embed_last"])
def test_one_at_a_time_and_for_accelerators(name, folders):
    engine = make(folders(name), tokens=16, static_steps=True, prefix_caching=False)
    check(name, [pool(engine, [prompt], f"{i}-")[0][0] for i, prompt in enumerate(pooling_models.prompts_of(name))])


@pytest.mark.parametrize("name", ["embed_mean", "embed_last", "embed_cls"])
def test_preempted_prompts_are_pooled_anew(name, folders):
    """Prompts lose their pages while steps of theirs are in flight, and begin again."""
    engine = make(folders(name))
    prompts = pooling_models.prompts_of(name)
    schedule = engine.scheduler.schedule
    calls = 0

    def preempting(tokens_per_call):
        nonlocal calls
        calls += 1
        if calls in (2, 3, 5) and len(engine.scheduler.running):
            engine.scheduler._preempt(engine.scheduler.running.last)
        return schedule(tokens_per_call)

    engine.scheduler.schedule = preempting
    check(name, pool(engine, prompts)[0])
    assert engine.stats().preemptions >= 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["embed_last", "embed_mean"])
def test_tensor_parallel(name, folders):
    engine = make(folders(name), tensor_parallel_size=2)
    check(name, pool(engine, pooling_models.prompts_of(name))[0])


@pytest.mark.slow
def test_odds_of_two_tokens(tmp_path, folders):
    """A model that generates scores by two of its tokens; its embeddings are its head as well."""
    folder = tmp_path / "model"
    shutil.copytree(folders("score_one"), folder)
    config = json.loads((folder / "config.json").read_text()) | {"architectures": ["Qwen3ForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(folder)
    engine = make(folder, task="score", score_tokens=tuple(tokenizer.decode([token]) for token in (7, 300)))
    results, _ = pool(engine, pooling_models.prompts_of("score_one"))
    for i, (odds,) in enumerate(results):
        log_no, log_yes = GOLDEN[f"tokens_{i}"]
        assert abs(-np.logaddexp(0, -odds) - log_yes) < 1e-4
        assert abs(-np.logaddexp(0, odds) - log_no) < 1e-4
    with pytest.raises(ConfigError, match="2 tokens in this model's tokenizer"):
        make(folder, task="score", score_tokens=("no", "zq"))


@pytest.mark.slow
def test_everything_is_compiled_before_readiness(folders):
    """Nothing that samples is compiled, and nothing later."""
    engine = Engine.load(EngineConfig(model=str(folders("embed_last")), kv_pages=50, max_num_seqs=4,
                                      max_num_batched_tokens=64, max_model_len=160, forbid_compile=True),
                         progress=False)  # fmt: skip
    engine.compile()
    names = [str(name) for name in engine.runner.names(engine.shapes)]
    assert not any(name.startswith(("score_prompt", "sample_deferred")) for name in names)
    assert all(shape.decode_only is False for shape in engine.shapes)
    check("embed_last", pool(engine, pooling_models.prompts_of("embed_last"))[0])


def test_what_is_refused(folders):
    engine = make(folders("embed_last"))
    with pytest.raises(InvalidRequestError, match="does not generate"):
        engine.add_request(request("a", [7, 8, 9], max_tokens=3))
    longest = Request(request_id="b", prompt_token_ids=[9] * 257, params=NOTHING, pools=True)
    with pytest.raises(InvalidRequestError, match="maximum context length"):
        engine.add_request(longest)
    (whole,), _ = pool(engine, [[9] * 256])
    assert abs(np.linalg.norm(whole) - 1) < 1e-6


def test_how_a_model_pools_is_read_from_its_files(tmp_path, folders):
    for name, case in pooling_models.CASES.items():
        folder = folders(name)
        model = read_model(folder)
        pooler = read_pooler(EngineConfig(model=str(folder)), folder, model, {}.__getitem__)
        if case.labels:
            assert (pooler.task, pooler.method, pooler.size, pooler.prompt) == ("score", "last", 1, "plain")
            head = pooling_models.matrix(name, "score", case.labels, model.hidden_size)
            np.testing.assert_array_equal(pooler.head.weight, head if case.labels == 1 else head[1:] - head[:1])
        else:
            assert (pooler.task, pooler.method, pooler.head) == ("embed", case.method or "last", None)
            assert pooler.size == (pooling_models.DENSE if case.dense else model.hidden_size)
            assert pooler.normalized == case.normalized
    folder = tmp_path / "model"
    shutil.copytree(folders("score_one"), folder)
    config = json.loads((folder / "config.json").read_text()) | {"architectures": ["Qwen3ForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config))
    settings = EngineConfig(model=str(folder), task="score", score_tokens=("no", "yes"))
    pooler = read_pooler(settings, folder, read_model(folder), {"no": 7, "yes": 300}.__getitem__)
    embeddings = load_file(folder / "model.safetensors")["model.embed_tokens.weight"].astype(np.float32)
    np.testing.assert_array_equal(pooler.head.weight, (embeddings[300] - embeddings[7])[None])
    assert pooler.prompt == "qwen3"
    assert read_pooler(EngineConfig(model=str(folder)), folder, read_model(folder), {}.__getitem__) is None


def test_files_that_are_not_understood(tmp_path, folders):
    folder = tmp_path / "model"
    shutil.copytree(folders("embed_mean"), folder)
    pooling = folder / "1_Pooling" / "config.json"
    pooling.write_text(json.dumps({"pooling_mode_max_tokens": True}))
    with pytest.raises(ConfigError, match="pooling_mode_max_tokens"):
        make(folder)
    pooling.write_text(json.dumps({"pooling_mode": "mean"}))  # as newer versions write it
    assert make(folder).pooler.method == "mean"
    modules = json.loads((folder / "modules.json").read_text())
    (folder / "modules.json").write_text(json.dumps([*modules, {"type": "x.models.CNN", "path": "4_CNN"}]))
    with pytest.raises(ConfigError, match="CNN"):
        make(folder)
    assert find_task(EngineConfig(model=str(folder), task="generate"), folder) == "generate"


def test_attention_in_both_directions_is_refused(tmp_path, folders):
    folder = tmp_path / "model"
    shutil.copytree(folders("embed_cls"), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"is_causal": False}))
    with pytest.raises(ConfigError, match="is_causal"):
        make(folder)


def test_unit_vectors():
    np.testing.assert_allclose(unit(np.array([3.0, 4.0], np.float32)), [0.6, 0.8], rtol=1e-7)
    assert not unit(np.zeros(3, np.float32)).any()
