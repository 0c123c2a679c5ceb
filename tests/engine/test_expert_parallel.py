"""Whole experts on each device, beside attention and dense MLPs that all devices share: the tokens of one device."""

import jax
import pytest
from engines import generate, make_engine, request
from flax.traverse_util import flatten_dict

from jaxserve.config import ConfigError, EngineConfig
from jaxserve.engine.model_plan import ModelPlan

pytestmark = pytest.mark.compiles

PLAIN = "qwen3_moe_plain"  # 8 experts, 2 for each token, windows
OTHERS = (
    "gpt_oss_sinks", "mixtral_window", "glm4_moe_groups", "ernie4_5_moe_mixed", "llama4_chunks", "qwen3_next_groups",
    "qwen3_5_moe_whole", "qwen3_vl_moe_wide",
)  # fmt: skip
SLOW = pytest.mark.slow
PROMPTS = [list(range(5 + i, 25 + 13 * i)) for i in range(4)] + [[7, 8, 9] * 10]


def tokens_of(folder, count=None, **options):
    engine = make_engine(folder, **options)
    results = generate(engine, *(request(str(i), p, max_tokens=16) for i, p in enumerate(PROMPTS[:count])))
    return [one.token_ids for one in results], engine


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "devices"),
    [
        (PLAIN, 2),
        ("deepseek_v3_groups", 4),
        pytest.param(PLAIN, 8, marks=SLOW),
        *(pytest.param(case, 2, marks=SLOW) for case in OTHERS),
    ],
)
def test_the_same_tokens(case, devices, model_folders):
    folder = model_folders(case)
    alone, _ = tokens_of(folder)
    split, engine = tokens_of(folder, tensor_parallel_size=devices, enable_expert_parallel=True)
    assert split == alone
    stacks = [w for path, w in flatten_dict(engine.runner.params, sep="/").items() if path.endswith("/experts_down")]
    assert stacks
    for stack in stacks:
        count, out, inputs = stack.shape
        assert {part.data.shape for part in stack.addressable_shards} == {(count // devices, out, inputs)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "options"),
    [
        ("deepseek_v3_groups", {"page_size": 8, "kv_pages": 14, "max_model_len": 96, "prefill_chunk": 16}),
        pytest.param(PLAIN, {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}, marks=SLOW),
        pytest.param(PLAIN, {"static_steps": True}, marks=SLOW),
    ],
    ids=["preempted chunks", "speculation", "static"],
)
def test_with_other_features(case, options, model_folders):
    folder = model_folders(case)
    split = {"tensor_parallel_size": 4, "enable_expert_parallel": True}
    made, engine = tokens_of(folder, **options, **split)
    assert made == tokens_of(folder)[0]
    assert engine.scheduler.num_preemptions > 0 or "kv_pages" not in options


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["int4", *(pytest.param(s, marks=SLOW) for s in ("int8", "fp8"))])
def test_quantized(scheme, model_folders):
    """As on two devices that share each expert, where groups of weights are cut in the same way."""
    options = {"quantization": scheme, "tensor_parallel_size": 2}
    shared, _ = tokens_of(model_folders(PLAIN), 3, **options)
    assert tokens_of(model_folders(PLAIN), 3, **options, enable_expert_parallel=True)[0] == shared


@pytest.mark.parametrize(
    ("case", "devices", "message"),
    [
        (PLAIN, 3, "tensor_parallel_size 3 does not divide .* and 8 experts; this model allows"),
        ("mixtral_experts", 2, r"tensor_parallel_size 2 does not divide 5 experts; this model allows \[1\]"),
        ("llama3_gqa", 2, "enable_expert_parallel must be False for a model without experts"),
    ],
)
def test_refusals(case, devices, message, model_folders):
    config = EngineConfig(model=str(model_folders(case)), tensor_parallel_size=devices, enable_expert_parallel=True)
    with pytest.raises(ConfigError, match=message):
        ModelPlan.of(config, jax.devices())
