"""Groups of devices with sequences of their own, which share only the experts: the tokens of one device."""

import jax
import pytest
from engines import generate, make_engine, request
from flax.traverse_util import flatten_dict

from jaxserve.config import ConfigError, EngineConfig
from jaxserve.engine.model_plan import ModelPlan

EXPERTS, LATENT, DENSE = "qwen3_moe_plain", "deepseek_v3_groups", "llama3_gqa"
PROMPTS = [list(range(5 + i, 25 + 13 * i)) for i in range(4)] + [[7, 8, 9] * 10]


def tokens_of(folder, count=None, **options):
    engine = make_engine(folder, **options)
    results = generate(engine, *(request(str(i), p, max_tokens=16) for i, p in enumerate(PROMPTS[:count])))
    return [one.token_ids for one in results], engine


@pytest.mark.parametrize(
    ("case", "groups", "devices", "whole"), [(EXPERTS, 2, 1, True), (LATENT, 2, 2, False), (DENSE, 2, 1, False)]
)
def test_the_same_tokens(case, groups, devices, whole, model_folders):
    folder = model_folders(case)
    sizes = {"data_parallel_size": groups, "tensor_parallel_size": devices, "enable_expert_parallel": whole}
    assert tokens_of(folder, **sizes)[0] == tokens_of(folder)[0]
