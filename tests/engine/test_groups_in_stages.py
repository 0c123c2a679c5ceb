"""Stages of several groups of devices, and stages that share out the cache's tokens: the tokens of one device."""

import pytest
from same_answers import check_equal

DENSE, ONE_HEAD, EXPERTS, LATENT = "llama3_gqa", "llama_mqa", "qwen3_moe_plain", "deepseek_v3_groups"
SLOW = pytest.mark.slow
TIGHT = {"kv_pages": 12, "page_size": 16, "max_model_len": 96, "prefill_chunk": 16}
FEW = TIGHT | {"kv_pages": 7}  # of each group


def stages(count, devices=1, *, groups=1, shares=1, whole=False):
    return {
        "pipeline_parallel_size": count,
        "tensor_parallel_size": devices,
        "data_parallel_size": groups,
        "decode_context_parallel_size": shares,
        "enable_expert_parallel": whole,
    }


@pytest.mark.parametrize(
    ("case", "layers", "split", "others"),
    [
        (LATENT, 3, stages(2, 2, shares=2), TIGHT),
        (EXPERTS, 3, stages(2, groups=2, whole=True), FEW),
        *(
            pytest.param(*case, marks=SLOW)
            for case in (
                (ONE_HEAD, 2, stages(2, 4, shares=2), {"page_size": 16}),
                (ONE_HEAD, 4, stages(4, 2, shares=2), {"page_size": 16}),
                (LATENT, 3, stages(2, 4, shares=4, whole=True), {"page_size": 16}),
                (LATENT, 3, stages(2, 4, shares=2, whole=True), TIGHT | {"static_steps": True}),
                ("gemma2_caps", 3, stages(2, 4, shares=2), {"page_size": 16}),
                (DENSE, 4, stages(2, groups=2), FEW),
                (DENSE, 4, stages(2, 2, groups=2), {"page_size": 16}),
                (EXPERTS, 3, stages(3, groups=2), {"page_size": 16, "static_steps": True}),
                (EXPERTS, 3, stages(2, 2, groups=2, whole=True), FEW),
                (LATENT, 3, stages(2, groups=4, whole=True), FEW),
                (LATENT, 3, stages(2, 2, groups=2, shares=2, whole=True), FEW),
                ("gemma2_caps", 3, stages(2, groups=2), {"page_size": 16}),
            )
        ),
    ],
)
def test_the_same_answers(case, layers, split, others, deep_folders):
    engine = check_equal(deep_folders(case, layers), split, others, reuses=others.get("kv_pages") != FEW["kv_pages"])
    assert engine.scheduler.num_preemptions > 0 or "kv_pages" not in others
