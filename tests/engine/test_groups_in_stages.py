"""Stages of several groups of devices, and stages that share out the cache's tokens: the tokens of one device."""

import json

import pytest
from engines import fail_at, generate, make_engine, request
from json_schemas import PERSON
from same_answers import PROMPTS, check_equal

from jaxserve.types import Grammar

pytestmark = pytest.mark.compiles

DENSE = "llama3_gqa"
ONE_HEAD = "llama_mqa"
EXPERTS = "qwen3_moe_plain"
LATENT = "deepseek_v3_groups"
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


@pytest.mark.slow
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
    runs_out = "kv_pages" in others and case != EXPERTS  # the mixture preempts nothing with these pages
    assert engine.scheduler.num_preemptions > 0 or not runs_out


@pytest.mark.slow
def test_each_step_has_its_share_of_every_group(deep_folders):
    engine = make_engine(deep_folders(EXPERTS, 2), rows=8, **stages(2, groups=2))
    for i in range(8):
        engine.add_request(request(str(i), PROMPTS[0][:8], max_tokens=20, ignore_eos=True))
    steady = []
    while engine.has_work:
        engine.step()
        if len(engine.in_flight) == 2 and not len(engine.scheduler.waiting):
            rows = [batch.rows for batch in engine.in_flight[-1].batches]
            if all(one.only_decodes for one in rows):
                steady.append(sorted(seq.group for one in rows for seq in one.seqs))
    assert len(steady) > 20
    assert steady.count([0, 0, 1, 1]) >= len(steady) - 4, "but for the last ones"


@pytest.mark.slow
def test_grammars_and_a_failed_step(deep_folders):
    """Tokens that are drawn apart go back to their groups; those of a step that failed are forgotten."""
    folder = deep_folders(EXPERTS, 2)
    schema = Grammar("json", json.dumps(PERSON))
    asked = [request(str(i), PROMPTS[i], max_tokens=12, seed=i, grammar=schema) for i in range(4)]
    asked += [request(f"free {i}", PROMPTS[i], max_tokens=12) for i in range(4)]
    expected = [one.token_ids for one in generate(make_engine(folder, rows=8), *asked)]
    engine = make_engine(folder, rows=8, **stages(2, groups=2))
    fail_at(9, engine.runner.stages[-1])
    assert [one.token_ids for one in generate(engine, *asked)] == expected
    assert engine.counters.failed_steps == 1
