"""With `deterministic_mode` "verify" tokens are decoded ahead, and count once one step of a fixed shape has computed
them again: the same bits whatever else runs, also where kernels keep no order."""

import numpy as np
import pytest
from engines import Completion, drain, request
from test_deterministic import bits

from jaxserve.config import ConfigError, EngineConfig
from jaxserve.engine.engine import Engine

RNG = np.random.default_rng(5)
SHARED = RNG.integers(5, 400, 40).tolist()
PROMPTS = [
    RNG.integers(5, 400, 1).tolist(), SHARED + RNG.integers(5, 400, 9).tolist(), SHARED + [7] * 30,
    RNG.integers(5, 400, 90).tolist(),
]  # fmt: skip
SAMPLED = {"temperature": 0.9, "top_p": 0.9, "top_k": 60, "frequency_penalty": 0.3, "repetition_penalty": 1.1}
PARAMS = [{}, SAMPLED, {"temperature": 0.7, "logit_bias": {9: 2.0}}]


def load(folder, rows: int, **options) -> Engine:
    sizes = {"max_num_seqs": rows, "kv_pages": 300, "page_size": 16, "max_model_len": 140}
    options = {"deterministic": True, "deterministic_mode": "verify", **sizes, **options}
    return Engine.load(EngineConfig(model=str(folder), **options), progress=False)


def requests():
    return [
        request(f"{i}-{j}", prompt, max_tokens=24, logprobs=3, prompt_logprobs=2 if j == 0 else None, **params)
        for i, prompt in enumerate(PROMPTS)
        for j, params in enumerate(PARAMS)
    ]


def facts(one: Completion) -> tuple:
    return one.token_ids, bits(one.logprobs), bits(one.prompt_logprobs or [])


def alone(engine: Engine) -> list[tuple]:
    """One request at a time."""
    found = []
    for one in requests():
        engine.add_request(one)
        found.append(facts(drain(engine)[one.request_id, 0]))
    return found


def together(engine: Engine, seed: int) -> list[tuple]:
    """In a random order, at random times."""
    rng, some = np.random.default_rng(seed), requests()
    left, found = [some[i] for i in rng.permutation(len(some))], {}
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


@pytest.mark.parametrize(
    ("case", "options"),
    [
        ("qwen3_bfloat16", {"dtype": "bfloat16", "quantization": "int4"}),
        slow("deepseek_v2", {}),
        slow("tp_gqa", {"dtype": "bfloat16", "tensor_parallel_size": 2}),
    ],
)
def test_bits_do_not_depend_on_what_else_runs(case, options, model_folders):
    folder = model_folders(case)
    expected = alone(load(folder, 1, prefix_caching=False, **options))
    few = {"max_num_batched_tokens": 24, "prefill_chunk": 16, "kv_pages": 14}
    engine = load(folder, 7, deterministic_window=6, **few, **options)
    assert together(engine, 1) == expected
    assert together(engine, 2) == expected  # with cached prefixes
    stats = engine.stats()
    assert stats.preemptions, "no request was preempted"
    assert stats.prefix_hits, "no prefix was cached"
    assert stats.spec_accepted, "nothing was decoded ahead"
