"""`jaxserve plan` of pipelines: the memory of each stage, the time of steps that pass through all, and traffic."""

import json

import numpy as np
import pytest

from jaxserve.commands.cli import main
from jaxserve.config import ConfigError, EngineConfig
from jaxserve.engine.engine import Engine
from jaxserve.plan import measuring
from jaxserve.plan.report import make_plan
from jaxserve.plan.roofline import Constants, PipelineRoofline, Roofline, prompt_seconds
from jaxserve.plan.stages import deployments
from jaxserve.plan.traffic import Goal, simulate

pytestmark = pytest.mark.compiles

SMALL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 6,
    "num_attention_heads": 8, "num_key_value_heads": 8, "intermediate_size": 128, "vocab_size": 512,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "hidden_act": "silu", "torch_dtype": "float32",
}  # fmt: skip
RATES = Constants(1e8, 1e12, call=0.0, link=1e9, link_start=0.0, overlaps=False)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    return tmp_path


def settings(folder, stages=3, **changes) -> EngineConfig:
    sizes = {"max_num_seqs": 12, "max_num_batched_tokens": 64} | changes
    return EngineConfig(model=str(folder), load_format="dummy", pipeline_parallel_size=stages, **sizes)


def rooflines(folder, stages=3, **changes) -> tuple[list, PipelineRoofline]:
    made = deployments(settings(folder, stages, **changes), f"cpu:{stages}")
    return made, PipelineRoofline([Roofline(one, RATES) for one in made])


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
def test_memory_of_each_stage_is_that_of_the_engine(folder, tied):
    (folder / "config.json").write_text(json.dumps(SMALL | {"tie_word_embeddings": tied}))
    config = settings(folder, tensor_parallel_size=2)
    engine = Engine.load(config, progress=False)
    stages = deployments(config, "cpu:6")
    plan = make_plan(config, "cpu:6", estimate=True)
    own = engine.runner.stages
    assert [one.plan.decoder.stage for one in stages] == [one.stage for one in own]
    assert [one.budget.weights for one in stages] == [one.weight_bytes for one in own]
    assert all(one.shapes == engine.shapes for one in stages)
    on_the_way = {one.budget.slots - runner.slot_bytes for one, runner in zip(stages, own, strict=True)}
    assert on_the_way == {4 * 64 * 64 * 4}, "four arrays of 64 tokens of 64 float32 numbers"
    assert [one["weights"] for one in plan["stages"]] == [one.weight_bytes for one in own]
    assert sum(one["layers"] for one in plan["stages"]) == plan["layers"] == 6
    room = plan["capacity"]
    assert plan["devices"] == 6
    assert (room["pages"] - 1, room["longest_request"]) == (engine.stats().pages_total, engine.max_model_len)
    assert room["cache_bytes"] in {one.cache_bytes for one in own}


@pytest.mark.slow
@pytest.mark.parametrize("split", [{"data_parallel_size": 2}, {"decode_context_parallel_size": 2}])
def test_groups_in_stages_and_shared_tokens(folder, split):
    """Two stages of two groups with two devices each, or of two devices that share out the cache's tokens."""
    (folder / "config.json").write_text(json.dumps(SMALL | {"num_key_value_heads": 1}))
    config = settings(folder, 2, tensor_parallel_size=2, **split)
    devices = 4 * split.get("data_parallel_size", 1)
    engine = Engine.load(config, progress=False)
    stages = deployments(config, f"cpu:{devices}")
    plan = make_plan(config, f"cpu:{devices}", estimate=True)
    own = engine.runner.stages
    assert [one.budget.weights for one in stages] == [one.weight_bytes for one in own]
    assert all(one.groups == split.get("data_parallel_size", 1) for one in stages)
    room = plan["capacity"]
    assert plan["devices"] == devices
    assert room["cache_bytes"] in {one.cache_bytes for one in own}
    assert engine.stats().pages_total == (room["pages"] - 1) * stages[0].groups


@pytest.mark.slow
def test_compiled_stages_need_what_the_engine_finds(folder):
    config = settings(folder, tensor_parallel_size=2, kv_pages=100)
    engine = Engine.load(config, progress=False)
    for one, runner in zip(deployments(config, "cpu:6"), engine.runner.stages, strict=True):
        runner.compile(runner.largest(engine.shapes))
        compiled = one.compile()
        needs = runner.needs(engine.shapes)
        assert compiled.layers == 2
        assert compiled.needs.temporaries == pytest.approx(needs.temporaries, rel=0.02)
        assert compiled.needs.results == pytest.approx(needs.results, rel=0.02)
        assert all(step.exchanges["all-reduce"].number >= 4 for step in compiled.steps)
    assert make_plan(config, "cpu:6")["sources"]["temporaries"] == "compiled"


def test_stages_share_what_one_device_does(folder):
    _, roofline = rooflines(folder)
    whole = Roofline(deployments(settings(folder, 1), "cpu")[0], RATES)
    alone = roofline.decode(1, 100)
    one = whole.decode(1, 100)
    sent = 2 * SMALL["hidden_size"] * 4 / 1e9  # to the second and the third stage
    assert alone.weights == pytest.approx(one.weights, rel=1e-3), "a sequence waits for all weights, as on one device"
    assert alone.products == pytest.approx(one.products)
    assert alone.attention == pytest.approx(one.attention)
    assert alone.communication == pytest.approx(sent)
    assert alone.total == pytest.approx(one.total + sent, rel=1e-3)
    assert roofline.decode(2, 100).total < 1.05 * alone.total, "two sequences are in different stages"
    slowest = max(roofline.stage_seconds(4, 4, np.full(4, 100)))
    assert roofline.decode(12, 100).total == pytest.approx(3 * slowest), "each stage has work; the slowest one limits"


def test_parts_of_a_prompt_are_in_several_stages(folder):
    _, roofline = rooflines(folder)
    first, last = (max(roofline.stage_seconds(64, 1, [seen], [64])) for seen in (64, 6 * 64))
    short = prompt_seconds(roofline, 64, 64)
    long = prompt_seconds(roofline, 6 * 64, 64)
    assert short + 5 * first <= long <= short + 5 * last, "the slowest stage limits, once all have work"
    whole = Roofline(deployments(settings(folder, 1), "cpu")[0], RATES)
    assert long < 0.6 * prompt_seconds(whole, 6 * 64, 64)


@pytest.mark.slow
def test_the_scheduler_fills_the_stages_as_the_roofline_says(folder):
    """Requests that begin at once: the real scheduler in micro-batches against the formula for a full batch."""
    stages = 3
    made, roofline = rooflines(folder, stages)
    goal = Goal(rps=1e6, tokens_in=20, tokens_out=60)
    served = simulate(made[0], roofline, 200, 512, goal)
    assert served.most_running == 12
    assert served.tpot == pytest.approx(roofline.decode(12, 50).total, rel=0.15)
    few = rooflines(folder, stages, max_num_seqs=1)
    alone = simulate(few[0][0], few[1], 200, 512, Goal(rps=0.01, tokens_in=20, tokens_out=30))
    assert alone.tpot == pytest.approx(few[1].decode(1, 35).total, rel=0.05), "one sequence leaves stages idle"


def test_command(folder, capsys):
    flags = ["--target", "cpu:6", "--estimate", "--max-num-seqs", "12", "--pipeline-parallel-size", "3"]
    goal = ["--request", "40+20", "--for", "tpot<1s,rps=2,in=40,out=20", "--price", "2"]
    assert main(["plan", str(folder), *flags, *goal]) == 0
    text = capsys.readouterr().out
    assert "6 x cpu" in text
    assert "3 stages of 2, 2, 2 layers" in text
    assert "$12.00 an hour" in text
    assert ": holds" in text


@pytest.mark.parametrize(
    ("changes", "target", "message"),
    [
        ({}, "cpu:2", "needs 3 devices"),
        ({"stages": 7}, "cpu:8", "needs as many layers"),
        ({"kv_offload_gib": 1.0}, "cpu:3", "cannot be combined with kv_offload_gib"),
    ],
)
def test_refused(folder, changes, target, message):
    with pytest.raises(ConfigError, match=message):
        make_plan(settings(folder, **changes), target, estimate=True)


def test_a_stage_that_does_not_fit_is_named(folder):
    plan = make_plan(settings(folder, max_model_len=512, kv_pages=4), "cpu:3", estimate=True)
    assert not plan["fits"]
    assert "stage 1 of 3: " in plan["reason"]
    assert "KV pages" in plan["reason"]


def test_pipelines_are_not_measured(folder):
    with pytest.raises(ConfigError, match="--measure does not run pipelines"):
        measuring.measure(settings(folder), "cpu:3", folder / "rates.json")
