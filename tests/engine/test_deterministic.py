"""With `deterministic` a request's tokens and log-probabilities are the same bits, whatever else runs."""

from types import SimpleNamespace

import numpy as np
import pytest
from engines import Completion, drain, generate, make_engine, request
from first_difference import Tracer, first_difference

from jaxserve.config import ConfigError, EngineConfig
from jaxserve.engine.determinism import ordered

pytestmark = pytest.mark.compiles

RNG = np.random.default_rng(5)
SHARED = RNG.integers(5, 400, 40).tolist()
PROMPTS = [
    RNG.integers(5, 400, 1).tolist(), SHARED + RNG.integers(5, 400, 9).tolist(), SHARED + [7] * 30,
    RNG.integers(5, 400, 70).tolist(), RNG.integers(5, 400, 8).tolist() * 4,
]  # fmt: skip
SAMPLED = {"temperature": 0.9, "top_p": 0.9, "top_k": 60, "frequency_penalty": 0.3, "repetition_penalty": 1.1}
PARAMS = [{}, SAMPLED, {"temperature": 0.7}]


def requests(tag=""):
    return [
        request(f"{tag}{i}-{j}", prompt, max_tokens=24, logprobs=3, prompt_logprobs=2 if j == 0 else None, **params)
        for i, prompt in enumerate(PROMPTS)
        for j, params in enumerate(PARAMS)
    ]


def bits(values) -> list:
    return [
        None if one is None else (np.float32(one.logprob).view(np.uint32).item(), one.rank, one.top) for one in values
    ]


def facts(one: Completion) -> tuple:
    return one.token_ids, bits(one.logprobs), bits(one.prompt_logprobs or [])


def alone(folder, **options) -> list[tuple]:
    """One request at a time, without the prefix cache."""
    engine = make_engine(folder, rows=1, tokens=128, prefix_caching=False, **options)
    return [facts(generate(engine, one)[0]) for one in requests()]


def together(folder, **options) -> list[tuple]:
    """In another order, in small chunks, with proposals and too few pages; the second time with cached prefixes, and
    with the first answers as proposals, so that some are accepted."""
    order = np.random.default_rng(6)
    speculation = {"method": "suffix", "num_speculative_tokens": 4}
    sizes = {"rows": 7, "tokens": 24, "kv_pages": 14, "max_model_len": 140, "page_size": 16}
    engine = make_engine(folder, speculative_config=speculation, **sizes, **options)
    rounds = []
    for tag in ("first-", "again-"):
        some = requests(tag)
        for i in order.permutation(len(some)):
            engine.add_request(some[i])
        results = drain(engine)
        rounds.append([facts(results[one.request_id, 0]) for one in some])
    stats = engine.stats()
    assert stats.preemptions, "no request was preempted"
    assert stats.prefix_hits, "no prefix was cached"
    assert stats.spec_accepted, "no proposal was accepted"
    return rounds[1] if rounds[0] == rounds[1] else [*rounds[0], *rounds[1]]


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "options"),
    [
        ("tp_gqa", {"dtype": "bfloat16"}),
        slow("tp_gqa", {"dtype": "bfloat16", "quantization": "int4"}),
        slow("qwen3_moe_plain", {"dtype": "bfloat16", "quantization": "int8"}),
        slow("qwen3_moe_plain", {"kv_cache_dtype": "int8"}),
        slow("mistral_window", {"dtype": "bfloat16"}),
        slow("llama_head80", {"dtype": "float32"}),
        slow("llama_biases", {"dtype": "bfloat16", "kv_cache_dtype": "fp8"}),
    ],
)
def test_bits_do_not_depend_on_what_else_runs(case, options, model_folders):
    folder = model_folders(case)
    assert together(folder, deterministic=True, **options) == alone(folder, deterministic=True, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "options"),
    [
        ("tp_gqa", {"dtype": "bfloat16"}),
        slow("tp_gqa", {"dtype": "bfloat16", "quantization": "int4", "kv_cache_dtype": "fp8"}),
        slow("qwen3_moe_plain", {"dtype": "bfloat16", "kv_cache_dtype": "int8"}),
        slow("mistral_window", {"dtype": "float32", "quantization": "int8"}),
    ],
)
def test_scoring_gives_the_bits_of_sampling(case, options, model_folders):
    """The log-probabilities of an answer, when the prompt and the answer are scored as a prompt."""
    engine = make_engine(model_folders(case), rows=4, tokens=48, deterministic=True, **options)
    sampled = generate(
        engine, *(request(str(i), p, max_tokens=30, logprobs=0, seed=i, temperature=1.0) for i, p in enumerate(PROMPTS))
    )
    for prompt, one in zip(PROMPTS, sampled, strict=True):
        (scored,) = generate(engine, request("s", prompt + one.token_ids, max_tokens=1, prompt_logprobs=0))
        assert bits(scored.prompt_logprobs)[len(prompt) :] == bits(one.logprobs)


@pytest.mark.slow
def test_where_the_usual_mode_differs(model_folders, monkeypatch):
    """Usually decodes differ from prompts from the first layer's attention on. In the mode no layer differs."""
    prompt = PROMPTS[3]
    found = {}
    tracer = Tracer(monkeypatch)
    for mode in (False, True):
        options = {"dtype": "bfloat16", "deterministic": mode, "decode_steps": False}
        whole = make_engine(model_folders("tp_gqa"), rows=1, tokens=128, **options)
        pieces = make_engine(model_folders("tp_gqa"), rows=1, tokens=1, **options)
        one = request("r", prompt, max_tokens=1)
        found[mode] = first_difference(tracer.run(whole, one), tracer.run(pieces, one))
    assert found[True] is None
    assert found[False] is not None
    assert found[False][0] == 0


def test_equal_requests_without_a_seed_get_equal_answers(model_folders):
    engine = make_engine(model_folders("tp_gqa"), rows=4, tokens=64, deterministic=True)
    one = request("one", PROMPTS[1], max_tokens=12, temperature=1.0)
    two = request("two", PROMPTS[1], max_tokens=12, temperature=1.0)
    n = request("n", PROMPTS[1], max_tokens=12, temperature=1.0, n=2)
    engine.add_request(n)
    first, second = generate(engine, two, one)
    assert first.token_ids == second.token_ids
    assert np.unique(first.token_ids).size > 4


@pytest.mark.parametrize(
    ("case", "options", "reason"),
    [
        ("tp_gqa", {"tensor_parallel_size": 2}, "tensor_parallel_size must be 1"),
        ("tp_gqa", {"attention_backend": "xla"}, "attention_backend must be auto or cpu, got xla"),
        ("tp_gqa", {"matmul_backend": "xla"}, "matmul_backend must be auto or cpu, got xla"),
        ("tp_gqa", {"dtype": "float16"}, "float16"),
        ("tp_gqa", {"enable_lora": True}, "enable_lora"),
        ("tp_gqa", {"task": "embed"}, "embed or score"),
        ("olmo2_post", {}, "norms of queries and keys"),
        ("lfm2_tied", {}, "recurrent layers"),
        ("qwen3_bfloat16", {"quantization": "int4"}, "are not in panels"),
    ],
)
def test_what_is_not_known_is_refused(case, options, reason, model_folders):
    with pytest.raises(ConfigError, match=reason):
        make_engine(model_folders(case), deterministic=True, **options)


def test_accelerators_are_refused():
    """The message says where the promise holds, and names no setting that would keep it elsewhere."""
    mesh = SimpleNamespace(devices=np.array([SimpleNamespace(platform="gpu")]))
    with pytest.raises(ConfigError) as refused:
        ordered(None, EngineConfig(model="x", deterministic=True), mesh, pools=False)
    assert str(refused.value) == (
        "deterministic must be False: the same bits are promised on one CPU only; on a GPU, products in plain XLA may "
        "differ with the number of rows"
    )
