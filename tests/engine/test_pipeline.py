"""Layers divided among stages of devices: the tokens of one device."""

import jax
import numpy as np
import pytest
from engines import drain, generate, make_engine, request
from flax.traverse_util import flatten_dict

from jaxserve.config import ConfigError, EngineConfig
from jaxserve.engine.engine import Engine
from jaxserve.types import Grammar

PLAIN = "llama3_gqa"
PROMPTS = [list(range(5 + i, 25 + 13 * i)) for i in range(4)] + [[7, 8, 9] * 10, [5]]
PP2 = {"pipeline_parallel_size": 2}
SLOW = pytest.mark.slow


def requests():
    """Requests that use what sampling can do."""
    shared = PROMPTS[3]
    return [
        *(request(str(i), prompt, max_tokens=12) for i, prompt in enumerate(PROMPTS)),
        request("seeded", shared, max_tokens=9, temperature=0.9, seed=3, top_p=0.9),
        request("several", shared, max_tokens=6, temperature=1.0, seed=4, n=3),
        request("penalties", PROMPTS[0], max_tokens=12, repetition_penalty=1.3, presence_penalty=0.5),
        request("scores", PROMPTS[1], max_tokens=5, logprobs=3, prompt_logprobs=2),
        request("stops", PROMPTS[0], max_tokens=30, temperature=1.5, seed=5, stop_token_ids=list(range(0, 256, 17))),
        request("allowed", PROMPTS[2], max_tokens=7, allowed_token_ids=[11, 12, 13, 14]),
    ]


def answers(engine):
    for one in requests():
        engine.add_request(one)
    found = drain(engine)
    again = generate(engine, request("again", PROMPTS[3], max_tokens=4))[0]  # from the prefix cache
    tokens = {name: (one.token_ids, one.finish_reason) for name, one in found.items()}
    scores = [score.logprob for score in found["scores", 0].logprobs]
    return tokens | {("again", 0): (again.token_ids, again.num_cached)}, scores


def check_equal(folder, options, others):
    alone = answers(make_engine(folder, **others))
    engine = make_engine(folder, **others, **options)
    made = answers(engine)
    assert made[0] == alone[0]
    np.testing.assert_allclose(made[1], alone[1], atol=1e-5)
    return engine


@pytest.mark.parametrize(
    ("case", "options"),
    [
        (PLAIN, PP2),
        pytest.param(PLAIN, PP2 | {"tensor_parallel_size": 2}, marks=SLOW),
        pytest.param(PLAIN, {"pipeline_parallel_size": 2, "tensor_parallel_size": 4}, marks=SLOW),
        *(
            pytest.param(case, {"pipeline_parallel_size": stages}, marks=SLOW)
            for case in ("qwen3_moe_plain", "deepseek_v3_groups", "gemma2_caps", "gpt_oss_sinks", "mixtral_window")
            for stages in (2, 4)
        ),
    ],
)
def test_the_same_answers(case, options, model_folders):
    check_equal(model_folders(case), options, {})
