"""Layers divided among stages of devices: the tokens of one device."""

from itertools import pairwise
from types import SimpleNamespace

import jax
import pytest
from engines import fail_at, generate, make_engine, request
from flax.traverse_util import flatten_dict
from same_answers import PROMPTS, answers, check_equal

from jaxserve.config import ConfigError, EngineConfig
from jaxserve.engine.engine import Engine
from jaxserve.engine.pipeline import check_devices
from jaxserve.models.stages import split_layers

pytestmark = pytest.mark.compiles

PLAIN = "llama3_gqa"
PP2 = {"pipeline_parallel_size": 2}
SLOW = pytest.mark.slow


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "layers", "stages", "tensor"),
    [
        (PLAIN, 2, 2, 1),
        *(
            pytest.param(*case, marks=SLOW)
            for case in (
                (PLAIN, 5, 4, 1),
                (PLAIN, 4, 2, 2),
                (PLAIN, 4, 2, 4),
                (PLAIN, 4, 4, 2),
                (PLAIN, 8, 8, 1),
                ("llama32_tied", 4, 2, 1),
                ("llama32_tied", 5, 4, 1),
                ("qwen3_moe_plain", 4, 2, 1),
                ("qwen3_moe_plain", 4, 4, 1),
                ("qwen3_moe_plain", 4, 2, 2),
                ("deepseek_v3_groups", 3, 2, 1),
                ("deepseek_v3_groups", 3, 2, 2),
                ("gemma2_caps", 3, 2, 1),
                ("gpt_oss_sinks", 4, 4, 1),
                ("doge_saved", 3, 2, 1),
                ("diffllama_hub", 3, 3, 2),
            )
        ),
    ],
)
def test_the_same_answers(case, layers, stages, tensor, deep_folders):
    check_equal(deep_folders(case, layers), {"pipeline_parallel_size": stages, "tensor_parallel_size": tensor}, {})


TIGHT = {"kv_pages": 12, "max_model_len": 96, "prefill_chunk": 16}


@pytest.mark.slow
@pytest.mark.parametrize(
    "others",
    [
        TIGHT,
        pytest.param(TIGHT | {"async_scheduling": False}, marks=SLOW),
        pytest.param({"static_steps": True}, marks=SLOW),
        pytest.param({"quantization": "int8"}, marks=SLOW),
        pytest.param({"kv_cache_dtype": "int8"}, marks=SLOW),
    ],
    ids=["preempted chunks", "synchronous", "static", "int8", "int8 cache"],
)
def test_with_other_settings(others, deep_folders):
    engine = check_equal(deep_folders(PLAIN, 2), PP2, others)
    assert engine.scheduler.num_preemptions > 0 or "kv_pages" not in others


@SLOW
@pytest.mark.parametrize(
    ("case", "layers", "tensor", "others"),
    [
        ("qwen3_moe_plain", 4, 2, {}),
        ("qwen3_moe_plain", 4, 4, {"prefill_chunk": 16}),
        ("deepseek_v3_groups", 3, 2, TIGHT),
    ],
)
def test_whole_experts(case, layers, tensor, others, deep_folders):
    """Expert parallelism within each stage, also where sequences are preempted."""
    split = PP2 | {"tensor_parallel_size": tensor, "enable_expert_parallel": True}
    engine = check_equal(deep_folders(case, layers), split, others)
    assert engine.scheduler.num_preemptions > 0 or "kv_pages" not in others


@pytest.mark.slow
def test_what_stages_hold(deep_folders):
    """Only the weights and the layers of the cache that are theirs; and nothing compiles after the start."""
    folder = deep_folders("llama32_tied", 5)
    engine = make_engine(folder, pipeline_parallel_size=2, forbid_compile=True)
    engine.compile()
    held = [set(flatten_dict(one.params, sep="/")) for one in engine.runner.stages]
    layers = [{int(path.split("/")[0][7:]) for path in some if path.startswith("layers_")} for some in held]
    assert sorted(layers[0]) + sorted(layers[1]) == list(range(5))
    assert all(layers)
    assert held[0] & held[1] == {"embed/table"}  # the head is tied to it
    assert "norm/scale" in held[1] - held[0]
    for one, own in zip(engine.runner.stages, layers, strict=True):
        devices = {one.mesh.devices.flat[0]}
        for x in jax.tree.leaves((one.weights, one.cache, one.slots)):
            assert x.devices() == devices
        assert one.layout.groups.depth == len(own)
        assert one.layout.num_pages == engine.blocks.num_pages
    compiled = engine.programs.compilations
    answers(engine)
    assert engine.programs.compilations == compiled


def test_steps_in_flight(deep_folders):
    """With as many sequences as stages, each step has other sequences than the step before, and the host sends a step
    before it has the tokens of the last step of the same sequence."""
    engine = make_engine(deep_folders(PLAIN, 2), **PP2)
    for i in range(4):
        engine.add_request(request(str(i), PROMPTS[i][:8], max_tokens=20))
    groups = []
    depths = []
    while engine.has_work:
        engine.step()
        depths.append(len(engine.in_flight))
        if engine.in_flight:
            groups.append({seq.request_id for batch in engine.in_flight[-1].batches for seq in batch.rows.seqs})
    steady = groups[6:20]
    assert all(one.isdisjoint(other) and len(one) == 2 for one, other in pairwise(steady))
    assert max(depths) == 2  # and one more while the host waits


@pytest.mark.slow
def test_after_a_failed_step(deep_folders):
    """Tokens on their way back from a step that failed are forgotten."""
    folder = deep_folders(PLAIN, 2)
    asked = [request(str(i), prompt, max_tokens=12) for i, prompt in enumerate(PROMPTS)]
    expected = [one.token_ids for one in generate(make_engine(folder), *asked)]
    engine = make_engine(folder, **PP2)
    fail_at(9, engine.runner.stages[-1])
    made = generate(engine, *(request(str(i), prompt, max_tokens=12) for i, prompt in enumerate(PROMPTS)))
    assert engine.counters.failed_steps == 1
    assert [one.token_ids for one in made] == expected


@pytest.mark.parametrize(
    ("case", "options", "message"),
    [
        (PLAIN, {"enable_lora": True}, "cannot be combined with enable_lora True: leave enable_lora at False"),
        (PLAIN, {"kv_offload_gib": 1.0}, "cannot be combined with kv_offload_gib"),
        (PLAIN, {"deterministic": True}, "cannot be combined with deterministic True"),
        (PLAIN, {"pipeline_parallel_size": 3}, "needs as many layers; the model has 2"),
        (PLAIN, {"tensor_parallel_size": 8}, "needs 16 devices, but JAX sees 8 cpu"),
        ("qwen3_next_groups", {}, "must be 1 for models that have recurrent layers"),
    ],
)
def test_refusals(case, options, message, model_folders):
    with pytest.raises(ConfigError, match=message):
        Engine.load(EngineConfig(model=str(model_folders(case)), **PP2 | options), progress=False)


@pytest.mark.parametrize(
    ("stages", "tensor", "devices", "fits"),
    [(2, 8, (8, 8), True), (2, 16, (8, 8, 8, 8), True), (3, 4, (4, 4, 4), True), (2, 4, (2, 2, 4), True),
     (4, 4, (8, 8), False), (3, 4, (6, 6), False), (2, 3, (2, 2, 2), False)],
)  # fmt: skip
def test_stages_of_whole_hosts(stages, tensor, devices, fits):
    """No host may have devices of two stages. devices: of each host."""
    of_hosts = [SimpleNamespace(process_index=host) for host, count in enumerate(devices) for _ in range(count)]
    hosts = {"num_hosts": len(devices), "coordinator": "a:1"}
    config = EngineConfig(model="m", pipeline_parallel_size=stages, tensor_parallel_size=tensor, **hosts)
    if fits:
        check_devices(config, of_hosts)
    else:
        with pytest.raises(ConfigError, match=f"pipeline_parallel_size {stages} over .* needs stages of whole hosts"):
            check_devices(config, of_hosts)


@pytest.mark.parametrize(
    ("layers", "first", "last", "stages", "begins"),
    [
        ([1] * 8, 0, 0, 4, [0, 2, 4, 6]),
        ([2] * 8, 3, 3, 4, [0, 1, 4, 7]),  # 5, 6, 6 and 5
        ([1, 1, 1, 9, 1], 0, 0, 2, [0, 3]),
        ([5], 1, 1, 1, [0]),
    ],
)
def test_layers_are_divided_by_cost(layers, first, last, stages, begins):
    found = split_layers(layers, first, last, stages)
    assert [stage.begin for stage in found] == begins
    assert [*(stage.end for stage in found)] == [*begins[1:], len(layers)]
    assert found[0].is_first
    assert found[-1].is_last
