"""`jaxserve plan`: its memory against the engine's own, its simulation, its output and what it refuses."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
from fake_hub import running_hub

from jaxserve.commands.cli import main
from jaxserve.config import ConfigError, EngineConfig
from jaxserve.engine.engine import Engine
from jaxserve.plan.deployment import Deployment, plan_devices
from jaxserve.plan.report import make_plan
from jaxserve.plan.roofline import Constants, Roofline, prompt_seconds
from jaxserve.plan.traffic import Goal, simulate

pytestmark = pytest.mark.compiles

SMALL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 6,
    "num_attention_heads": 8, "num_key_value_heads": 8, "intermediate_size": 128, "vocab_size": 512,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "hidden_act": "silu", "torch_dtype": "float32",
}  # fmt: skip


MIXTURE = SMALL | {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 16, "num_experts_per_tok": 2,
    "moe_intermediate_size": 64, "norm_topk_prob": True, "head_dim": 8, "num_hidden_layers": 4,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    return tmp_path


def settings(folder, **changes) -> EngineConfig:
    return EngineConfig(model=str(folder), load_format="dummy", max_num_seqs=8, **changes)


@pytest.mark.slow
@pytest.mark.parametrize(("target", "devices"), [pytest.param("cpu", 1, marks=pytest.mark.slow), ("cpu:8", 8)])
def test_memory_is_that_of_the_engine(folder, target, devices):
    config = settings(folder, kv_pages=100, tensor_parallel_size=devices, max_num_batched_tokens=128)
    engine = Engine.load(config, progress=False)
    names = engine.runner.programs.bounding(engine.shapes)
    engine.runner.compile(names)
    runner = engine.runner
    needs = engine.runner.needs(engine.shapes)
    deployment = Deployment.of(config, target)
    compiled = deployment.compile()
    assert compiled.layers == 2, "this test is about extrapolation"
    assert deployment.shapes == engine.shapes
    assert deployment.budget.weights == pytest.approx(runner.weight_bytes, rel=0.02)
    assert deployment.budget.slots == runner.slot_bytes
    assert deployment.pages(compiled.needs) == (100, engine.max_model_len)
    assert deployment.plan.one_page.device_page_bytes(deployment.plan.mesh) * 100 == runner.cache_bytes
    assert compiled.needs.temporaries == pytest.approx(needs.temporaries, rel=0.02)
    assert compiled.needs.results == pytest.approx(needs.results, rel=0.02)
    if devices > 1:  # two sums over the devices in each layer, at least
        assert all(step.exchanges["all-reduce"].number >= 12 for step in compiled.steps)


@pytest.mark.slow
def test_extrapolation_equals_all_layers(folder):
    deployment = Deployment.of(settings(folder, tensor_parallel_size=8, max_num_batched_tokens=128), "cpu:8")
    few = deployment.compile()
    whole = deployment.compile(all_layers=True)
    assert (few.layers, whole.layers) == (2, 6)
    for one, other in zip(few.steps, whole.steps, strict=True):
        assert one.exchanges["all-reduce"].number == other.exchanges["all-reduce"].number
        assert one.exchanges["all-reduce"].bytes == pytest.approx(other.exchanges["all-reduce"].bytes, rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize(("quantization", "dtype"), [("auto", "bfloat16"), ("int8", "float16")])
def test_weights_of_a_bare_config_are_rounded_as_the_engine_rounds_them(folder, quantization, dtype):
    config = settings(folder, kv_pages=40, quantization=quantization, dtype=dtype)
    assert Deployment.of(config, "cpu").budget.weights == Engine.load(config, progress=False).runner.weight_bytes


def test_roofline_grows_as_it_must(folder):
    deployment = Deployment.of(settings(folder), "cpu")
    roofline = Roofline(deployment, Constants(1e9, 1e10, call=0.0, overlaps=False))
    one = roofline.decode(1, 100)
    two = roofline.decode(2, 100)
    assert two.weights == one.weights
    assert two.products == pytest.approx(2 * one.products)
    assert two.attention == pytest.approx(2 * one.attention)
    # All weights are read once, but of the table only rows: the model has a head of its own.
    table = SMALL["vocab_size"] * SMALL["hidden_size"] * 4
    assert one.weights * 1e9 == pytest.approx(deployment.budget.weights - table, rel=0.01)
    row = 2 * 6 * 8 * 8 * 4  # keys and values of a token in all layers
    assert one.bytes - one.weights * 1e9 == pytest.approx(100 * row)


GROUPS = {"data_parallel_size": 4, "tensor_parallel_size": 2, "enable_expert_parallel": True}


@pytest.mark.slow
def test_groups_have_the_memory_of_the_engine(folder):
    (folder / "config.json").write_text(json.dumps(MIXTURE))
    config = settings(folder, kv_pages=40, max_num_batched_tokens=64, **GROUPS)
    engine = Engine.load(config, progress=False)
    plan = make_plan(config, "cpu:8", estimate=True, shape=(100, 20))
    deployment = Deployment.of(config, "cpu:8")
    assert deployment.shapes == engine.shapes
    assert plan["memory"]["weights"] == engine.runner.weight_bytes
    assert plan["memory"]["slots"] == engine.runner.slot_bytes
    room = plan["capacity"]
    assert (room["groups"], room["pages"], room["longest_request"]) == (4, 40, engine.max_model_len)
    assert 4 * (room["pages"] - 1) == engine.stats().pages_total
    assert room["cache_bytes"] == engine.runner.cache_bytes
    assert room["requests_of_shape"] == 4 * (39 // 8)  # 120 tokens are 8 pages of 16
    with pytest.raises(ConfigError, match="--for simulates one group"):
        make_plan(config, "cpu:8", estimate=True, goal=Goal(1, 100, 20))


def test_groups_in_the_roofline(folder):
    (folder / "config.json").write_text(json.dumps(MIXTURE))
    of_groups, of_one = (
        Roofline(Deployment.of(settings(folder, kv_pages=40, enable_expert_parallel=True, **sizes), "cpu:8"), rates)
        for rates in [Constants(1e9, 1e10, call=0.0, link=1e9, link_start=0.0, overlaps=False)]
        for sizes in ({"data_parallel_size": 8}, {"tensor_parallel_size": 8})
    )
    assert of_groups.weights.expert_bytes == of_one.weights.expert_bytes, "all devices share the experts in either way"
    assert of_groups.weights.dense_bytes > 6 * of_one.weights.dense_bytes, "each group has the other weights whole"
    groups = of_groups.decode(64, 100)
    one = of_one.decode(64, 100)
    assert groups.products == pytest.approx(one.products), "an eighth of the rows, by a whole device"
    assert groups.attention == pytest.approx(one.attention), "the same, where each device has a head of all rows"
    read = of_groups.work(8, 8, [100] * 8).weights
    other = of_one.work(64, 64, [100] * 64).weights
    assert read - of_groups.weights.dense_bytes == pytest.approx(other - of_one.weights.dense_bytes), (
        "experts serve all groups' tokens"
    )
    # Sums over the group: two a layer. Between groups: a gather and a scatter for each mixture.
    assert one.communication == pytest.approx(2 * 4 * 2 * 7 / 8 * 64 * 64 * 4 / 1e9)
    assert groups.communication == pytest.approx(4 * 2 * 7 / 8 * 64 * 64 * 4 / 1e9)


@pytest.mark.slow
def test_compiled_groups_exchange_what_the_roofline_counts(folder):
    (folder / "config.json").write_text(json.dumps(MIXTURE))
    compiled = Deployment.of(settings(folder, kv_pages=40, max_num_batched_tokens=64, **GROUPS), "cpu:8").compile()
    decode = next(step for step in compiled.steps if step.program.startswith("decode"))
    assert {"all-gather", "reduce-scatter", "all-reduce"} <= set(decode.exchanges)
    assert decode.exchanges["reduce-scatter"].number == MIXTURE["num_hidden_layers"]


def test_simulation_depends_on_the_load(folder):
    deployment = Deployment.of(settings(folder, kv_pages=200), "cpu")
    roofline = Roofline(deployment, Constants(1e9, 1e10, overlaps=False))
    light, heavy = (
        simulate(deployment, roofline, 200, 512, Goal(rate, 100, 20, ttft=1.0, tpot=0.1)) for rate in (1, 400)
    )
    assert heavy.ttft > 2 * light.ttft
    assert heavy.tokens_per_second > light.tokens_per_second
    assert light.most_running < heavy.most_running == 8
    alone = prompt_seconds(roofline, 100, 128) + roofline.decode(1, 100).total
    assert light.ttft < 3 * alone
    with pytest.raises(ConfigError, match="exceed the longest"):
        simulate(deployment, roofline, 200, 512, Goal(1, 500, 20))


def test_goal_is_read_and_checked():
    assert Goal.of("ttft<500ms, tpot<25ms,rps=20,in=1000,out=300") == Goal(20, 1000, 300, 0.5, 0.025)
    for wrong in ("ttft<500", "rps=20,in=1000", "rps=0,in=1,out=1", "latency<1s,rps=1,in=1,out=1"):
        with pytest.raises(ConfigError, match="--for"):
            Goal.of(wrong)


def test_json_text_and_page(folder, capsys):
    out = folder / "plan.json"
    page = folder / "plan.html"
    given = [str(folder / "config.json"), "--estimate", "--max-num-seqs", "8", "--kv-pages", "300", "--price", "2"]
    goal = "ttft<5s,tpot<1s,rps=2,in=50,out=10"
    flags = ["--json", str(out), "--html", str(page), "--request", "100+20", "--for", goal]
    assert main(["plan", *given, *flags]) == 0
    text = capsys.readouterr().out
    plan = json.loads(out.read_text())
    assert plan["schema"] == 1
    keys = {
        "schema", "model", "target", "devices", "device_kind", "parallel", "quantization", "dtype", "layers", "steps",
        "stages", "sources", "memory", "fits", "capacity", "roofline", "constants", "price", "served", "label",
    }  # fmt: skip
    assert set(plan) == keys
    assert plan["sources"]["temporaries"] == "estimated"
    assert plan["capacity"]["requests_of_shape"] == 299 // 8  # 120 tokens are 8 pages of 16
    assert plan["served"]["holds"]
    assert "holds" in text
    assert "37 requests of 100 + 20 tokens" in text
    html = page.read_text()
    assert html.count("<svg") == 2
    assert "default-src 'none'" in html
    assert "http://" not in html


def test_json_without_a_file_is_all_of_standard_output(folder, capsys):
    flags = ["--estimate", "--kv-pages", "300"]
    for given in (
        [str(folder), *flags, "--json"],
        ["--json", str(folder), *flags],
        [str(folder), *flags, "--json", "-"],
    ):
        assert main(["plan", *given]) == 0
        out, others = capsys.readouterr()
        assert json.loads(out)["layers"] == 6
        assert others.startswith("planning by config.json")
    assert main(["plan", str(folder), *flags, "--compare", "cpu", "cpu,max_num_seqs=4", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 2
    assert main(["plan", "--json"]) == 1
    assert "needs a model" in capsys.readouterr().err


def test_compare_names_the_cheapest(folder, capsys):
    goal = "ttft<5s,tpot<1s,rps=2,in=50,out=10"
    several = ["cpu", "cpu,max_num_seqs=4", "cpu:2,quantization=int8,kv_pages=50"]
    flags = ["--estimate", "--kv-pages", "300", "--for", goal, "--price", "3", "--compare", *several]
    assert main(["plan", str(folder), *flags]) == 0
    text = capsys.readouterr().out
    assert "cheapest that holds: cpu " in text
    assert "$3.00 an hour" in text
    assert "quantization=int8" in text


def test_what_does_not_fit_says_so(folder):
    plan = make_plan(settings(folder, max_model_len=512, kv_pages=4), "cpu", estimate=True)
    assert not plan["fits"]
    assert "KV pages" in plan["reason"]
    assert "capacity" not in plan


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"speculative_config": {"method": "ngram"}}, "speculation"),
        ({"pipeline_parallel_size": 2, "kv_offload_gib": 1.0}, "cannot be combined with kv_offload_gib"),
        ({"pipeline_parallel_size": 2}, "needs 2 devices"),
        ({"num_hosts": 2, "coordinator": "a:1", "host_secret_file": "x"}, "one host"),
    ],
)
def test_refusals(folder, changes, message):
    with pytest.raises(ConfigError, match=message):
        make_plan(settings(folder, **changes), "cpu", estimate=True)


def test_unknown_targets_are_refused(folder):
    with pytest.raises(ConfigError, match="needs 99 devices"):
        plan_devices("cpu:99")
    with pytest.raises(ConfigError, match="no target 'tpu9'"):
        plan_devices("tpu9")
    assert main(["plan", str(folder), "--compare", "cpu,colour=red"]) == 1
    assert main(["plan", str(folder), "--target", "cpu", "--constants", str(folder / "none.json")]) == 1


@pytest.mark.slow
def test_hub_ids_need_only_the_config(tmp_path):
    with running_hub() as hub:
        hub.commit("org/small", {"config.json": json.dumps(SMALL).encode()}, "main")
        command = ["-m", "jaxserve", "plan", "org/small", "--estimate", "--kv-pages", "100", "--json", "-"]
        env = os.environ | hub.environment(tmp_path / "cache") | {"JAX_PLATFORMS": "cpu"}
        done = subprocess.run([sys.executable, *command], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["layers"] == 6


def test_price_is_of_all_devices(folder):
    config = replace(settings(folder, kv_pages=300), tensor_parallel_size=8)
    plan = make_plan(config, "cpu:8", estimate=True, price=1.5, shape=(100, 20))
    cost = plan["price"]
    assert cost["dollars_per_hour"] == 12
    assert cost["output_tokens_per_dollar"] == pytest.approx(cost["tokens_per_second"] * 3600 / 12)
