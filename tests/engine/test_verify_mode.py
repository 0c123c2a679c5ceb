"""With `deterministic_mode` "verify" tokens are decoded ahead, and count once one step of a fixed shape has computed
them again: the same bits whatever else runs, also where kernels keep no order."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from adapter_folders import save_adapter
from engines import Completion, drain, request, run_all
from test_deterministic import bits

from jaxserve.config import ConfigError, EngineConfig
from jaxserve.engine.engine import Engine
from jaxserve.execution import verifying
from jaxserve.execution.programs import StepProgram
from jaxserve.execution.signatures import AuxProgram
from jaxserve.execution.verifying import VerifyingRunner
from jaxserve.pallas_kernels import ops
from jaxserve.types import Grammar

pytestmark = pytest.mark.compiles

RNG = np.random.default_rng(5)
SHARED = RNG.integers(5, 400, 40).tolist()
PROMPTS = [
    RNG.integers(5, 400, 1).tolist(), SHARED + RNG.integers(5, 400, 9).tolist(), SHARED + [7] * 30,
    RNG.integers(5, 400, 90).tolist(),
]  # fmt: skip
SAMPLED = {"temperature": 0.9, "top_p": 0.9, "top_k": 60, "frequency_penalty": 0.3, "repetition_penalty": 1.1}
PARAMS = [{}, SAMPLED, {"temperature": 0.7, "logit_bias": {9: 2.0}}]


def load(folder, rows: int, static: bool | None = None, **options) -> Engine:
    sizes = {"max_num_seqs": rows, "kv_pages": 300, "page_size": 16, "max_model_len": 140}
    options = {"deterministic": True, "deterministic_mode": "verify", **sizes, **options}
    return Engine.load(EngineConfig(model=str(folder), **options), progress=False, static_steps=static)


def requests(engine: Engine):
    """Each prompt with each kind of parameters, under the adapters of the engine in turn, and without one."""
    found = [None]
    if engine.adapters is not None:
        found += [engine.adapters.registry.find(name) for name in ("a0", "a1")]
    made = [
        request(f"{i}-{j}", prompt, max_tokens=24, logprobs=3, prompt_logprobs=2 if j == 0 else None, **params)
        for i, prompt in enumerate(PROMPTS)
        for j, params in enumerate(PARAMS)
    ]
    for i, one in enumerate(made):
        if (adapter := found[i % len(found)]) is not None:
            one.adapter = adapter.name
            one.adapter_digest = adapter.digest
    return made


def facts(one: Completion) -> tuple:
    return one.token_ids, bits(one.logprobs), bits(one.prompt_logprobs or [])


def alone(engine: Engine) -> list[tuple]:
    """One request at a time."""
    found = []
    for one in requests(engine):
        engine.add_request(one)
        found.append(facts(drain(engine)[one.request_id, 0]))
    return found


def together(engine: Engine, seed: int) -> list[tuple]:
    """In a random order, at random times."""
    rng = np.random.default_rng(seed)
    some = requests(engine)
    left = [some[i] for i in rng.permutation(len(some))]
    found = {}
    while left or engine.has_work:
        for _ in range(rng.integers(0, 4)):
            if left:
                engine.add_request(left.pop())
        if not engine.has_work:
            continue
        for update in engine.step():
            one = found.setdefault(update.request_id, Completion())
            one.token_ids += update.token_ids
            one.logprobs += update.logprobs or []
            one.prompt_logprobs = one.prompt_logprobs or update.prompt_logprobs
        engine.scheduler.check_integrity()
    return [facts(found[one.request_id]) for one in some]


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "options"),
    [
        ("qwen3_bfloat16", {"dtype": "bfloat16", "quantization": "int4"}),
        slow("tp_gqa", {"dtype": "bfloat16", "tensor_parallel_size": 2}),
        slow("tp_gqa", {"dtype": "bfloat16", "attention_backend": "xla", "static": True}),
        slow("tp_mha", {"tensor_parallel_size": 4, "quantization": "int8"}),
        slow("deepseek_v2_groups", {"dtype": "bfloat16"}),
        slow("deepseek_v3_groups", {"tensor_parallel_size": 2, "kv_cache_dtype": "int8"}),
        slow("gpt_oss_sinks", {"dtype": "bfloat16", "attention_backend": "xla", "kv_cache_dtype": "fp8"}),
        slow("qwen3_moe_plain", {"tensor_parallel_size": 4, "enable_expert_parallel": True}),
        slow("gpt2_scaled", {"dtype": "float16"}),
        slow("llama4_chunks", {"matmul_backend": "xla", "kv_pages": 38}),
        slow("gemma3_layer_types", {"dtype": "bfloat16", "kv_pages": 26}),
    ],
)
def test_bits_do_not_depend_on_what_else_runs(case, options, model_folders):
    folder = model_folders(case)
    expected = alone(load(folder, 1, prefix_caching=False, **options | {"kv_pages": 300}))
    few = {"max_num_batched_tokens": 24, "prefill_chunk": 16, "kv_pages": 14}
    engine = load(folder, 7, deterministic_window=6, **few | options)
    assert together(engine, 1) == expected
    assert together(engine, 2) == expected  # with cached prefixes
    stats = engine.stats()
    assert stats.preemptions, "no request was preempted"
    assert stats.prefix_hits, "no prefix was cached"
    assert stats.spec_accepted, "nothing was decoded ahead"


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"tensor_parallel_size": 2}, {"matmul_backend": "xla", "dtype": "bfloat16"}])
def test_adapters(options, model_folders, tmp_path):
    """With one place for two adapters, and with two."""
    folder = model_folders("llama3_gqa")
    modules = [(f"a{i}", str(save_adapter(tmp_path / f"a{i}", i, rank=3 + i, model=folder))) for i in range(2)]
    options = {"enable_lora": True, "lora_modules": modules, "max_lora_rank": 8, **options}
    expected = alone(load(folder, 1, max_loras=1, prefix_caching=False, **options))
    assert together(load(folder, 5, max_loras=2, **options), 1) == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "options"),
    [
        ("qwen3_bfloat16", {"dtype": "bfloat16", "quantization": "int4"}),
        slow("deepseek_v2_groups", {"tensor_parallel_size": 2}),
    ],
)
def test_scoring_gives_the_bits_of_sampling(case, options, model_folders):
    """The log-probabilities of an answer, when the prompt and the answer are scored as a prompt. One of the answers is
    sampled with a grammar, apart from the others."""
    engine = load(model_folders(case), 4, max_num_batched_tokens=48, **options)
    params = {"max_tokens": 30, "logprobs": 0, "temperature": 1.0}
    sampled = [request(str(i), prompt, seed=i, **params) for i, prompt in enumerate(PROMPTS)]
    sampled[1] = request("1", PROMPTS[1], grammar=Grammar("regex", "[0-9 ]{60}"), **params)
    results = run_all(engine, *sampled)
    for one in sampled:
        answer = results[one.request_id, 0]
        whole = request("s", one.prompt_token_ids + answer.token_ids, max_tokens=1, prompt_logprobs=0)
        scored = run_all(engine, whole)["s", 0]
        assert bits(scored.prompt_logprobs)[len(one.prompt_token_ids) :] == bits(answer.logprobs)
    assert engine.stats().spec_accepted


@pytest.mark.slow
def test_wrong_proposals_only_cost_time(model_folders, monkeypatch):
    """And the usual mode, with the same kernels, differs."""
    folder = model_folders("qwen3_bfloat16")
    options = {"dtype": "bfloat16", "quantization": "int4"}
    engine = load(folder, 5, **options)
    expected = together(engine, 3)
    before = engine.stats()
    rng = np.random.default_rng(0)
    ahead = VerifyingRunner.decode_ahead

    def sometimes_wrong(runner, *arguments):
        ahead(runner, *arguments)
        tokens = runner.slots.ahead
        wrong = jnp.where(rng.random(tokens.shape) < 0.3, (tokens + 1) % 400, tokens)
        runner.slots = runner.slots._replace(ahead=jax.device_put(wrong, tokens.sharding))
        return wrong

    monkeypatch.setattr(VerifyingRunner, "decode_ahead", sometimes_wrong)
    engine.reset_prefix_cache()
    assert together(engine, 3) == expected
    after = engine.stats()
    kept = (
        before.spec_accepted / before.spec_proposed,
        (after.spec_accepted - before.spec_accepted) / (after.spec_proposed - before.spec_proposed),
    )
    assert kept[0] > 0.9 > 0.6 > kept[1]
    usual = load(folder, 5, deterministic=False, deterministic_mode="kernels", **options)
    assert together(usual, 3) != together(usual, 4)


@pytest.mark.slow
def test_compiled_programs_are_few(model_folders):
    """One step that counts; the others decode ahead. The start checks that rows have the same bits in any company."""
    engine = load(model_folders("tp_gqa"), 3)
    engine.compile()
    names = list(engine.runner.executables)
    steps = [name for name in names if isinstance(name, StepProgram)]
    assert [(step.shape.decode_only, step.keeps_hidden, step.proposals) for step in steps] == [(False, True, 15)]
    others = {(name.kind, name.size) for name in names if isinstance(name, AuxProgram)}
    assert {("propose", 1), ("propose", 3), ("sample_deferred", 64), ("score_prompt", 64)} <= others
    assert not {("propose", 8), ("sample_deferred", 32)} & others
    engine.runner.frozen = True
    together(engine, 0)


@pytest.mark.slow
def test_rows_that_depend_on_their_company_are_noticed(model_folders, monkeypatch):
    engine = load(model_folders("tp_gqa"), 3, dtype="float16")

    def unlike(x, w, count=None):
        return ops.matmul(x, w) * (1 + 1e-3 * jnp.arange(len(x))[:, None])

    def checking(decoder, mesh):
        return decoder.clone(ops=replace(decoder.ops, matmul=unlike))

    monkeypatch.setattr(verifying, "checking", checking)
    with pytest.raises(ConfigError, match="bytes differ between a prompt of 40 tokens that is computed alone, and"):
        engine.compile()


@pytest.mark.parametrize(
    ("case", "options", "reason"),
    [
        ("tp_gqa", {"speculative_config": {"method": "ngram"}}, "speculative_config ngram"),
        ("tp_gqa", {"task": "embed"}, "embed or score"),
        ("tp_gqa", {"tensor_parallel_size": 4, "enable_lora": True}, "enable_lora"),
        ("tp_gqa", {"tensor_parallel_size": 2, "decode_context_parallel_size": 2}, "decode_context_parallel_size 2"),
        ("tp_gqa", {"data_parallel_size": 2}, "deterministic"),
        ("tp_gqa", {"deterministic": False}, "needs deterministic"),
        ("tp_gqa", {"deterministic_window": 17}, "deterministic_window must be between 1 and 16"),
        ("qwen3_next_odd", {}, "recurrent layers"),
        ("qwen3_moe_plain", {"quantization": "int4", "tensor_parallel_size": 2}, "stacks of experts"),
    ],
)
def test_what_is_not_known_is_refused(case, options, reason, model_folders):
    with pytest.raises(ConfigError, match=reason):
        load(model_folders(case), 2, **options)
