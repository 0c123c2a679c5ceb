"""`jaxserve plan --measure`: the steps that are timed, rates from a probe, the file of rates, and predictions."""

import importlib
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxserve.commands.cli import main
from jaxserve.config import ConfigError, EngineConfig
from jaxserve.engine.engine import Engine
from jaxserve.execution.slots import LENGTH
from jaxserve.plan import constants, measuring, probe
from jaxserve.plan.decode_steps import STEPS, DecodeSteps, Point, Timed, pages_for
from jaxserve.plan.deployment import Deployment
from jaxserve.plan.roofline import Constants, Roofline

ROOT = Path(__file__).parent.parent.parent
SMALL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 512,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "hidden_act": "silu", "torch_dtype": "float32",
}  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    return tmp_path


@pytest.fixture
def small_probe(monkeypatch):
    """A probe whose steps take microseconds."""
    wide = {"hidden": 128, "layers": 2, "head_dim": 16, "vocabulary": 256}
    monkeypatch.setitem(probe.CPU_SHAPES, probe.WIDE, wide)
    monkeypatch.setitem(probe.CPU_SHAPES, probe.DEEP, probe.CPU_SHAPES[probe.SHALLOW] | {"layers": 4})
    monkeypatch.setattr(measuring, "ROUNDS", 2)


def settings(folder, **changes) -> EngineConfig:
    return EngineConfig(model=str(folder), load_format="dummy", max_num_seqs=8, **changes)


def test_the_timed_step_is_a_decode_over_its_context(folder):
    points = [Point(3, 20), Point(1, 70)]
    pages = pages_for(points, 8, 1)
    assert pages == 1 + 10 + 3 + 3  # 74, 24 and 24 tokens in pages of 8
    config = settings(folder, kv_pages=pages, page_size=8, max_model_len=80, prefix_caching=False)
    engine = Engine.load(config, progress=False)
    steps = DecodeSteps(engine, points, time.perf_counter)
    tables = np.asarray(engine.runner.slots.block_tables)[:3]
    used = [*tables[0, :10], *tables[1, :3], *tables[2, :3]]
    assert sorted(used) == list(range(1, pages)), "each sequence has pages of its own"
    assert steps.seconds(Point(3, 20)) > 0
    lengths = np.asarray(engine.runner.slots.progress)[:3, LENGTH]
    assert lengths.tolist() == [20 + STEPS] * 3, "a token for each step and sequence"
    cache = [np.asarray(x) for x in jax.tree.leaves(engine.runner.cache)]
    changed = sum(int((x != 1).sum()) for x in cache)
    row = 2 * SMALL["num_hidden_layers"] * SMALL["num_key_value_heads"] * 16
    null_page = 8 * row  # where padding writes
    assert 3 * STEPS * row * 0.99 <= changed <= 3 * STEPS * row + null_page, "nothing else is written"


@pytest.mark.slow
def test_a_probe_tells_the_rates_of_a_known_device(folder, tmp_path):
    deployment = Deployment.of(settings(folder), "cpu")
    (tmp_path / "probe").mkdir()
    given = probe.settings(deployment.config, deployment, tmp_path / "probe")
    known = Constants(2e10, 1e11, call=2e-4, layer=3e-4, cache=5e9, overlaps=False)
    probes = {name: Roofline(Deployment.of(one, "cpu"), known) for name, one in given.items()}
    times = {
        name: {point: Timed(roofline.decode(*point).total, 1.0) for point in probe.points(name)}
        for name, roofline in probes.items()
    }
    unknown = Constants(1.0, 1.0, overlaps=False)
    found = probe.fit(unknown, probes, times)
    assert found.source == "measured"
    # Call and layer are told by models whose few weights count as part of them.
    for name in ("bandwidth", "matmul", "cache", "layer", "call"):
        assert getattr(found, name) == pytest.approx(getattr(known, name), rel=0.05), name
    given_matmul = probe.fit(replace(unknown, overlaps=True), probes, times).matmul
    assert given_matmul == unknown.matmul, "few rows do not tell it where reading weights takes longer"


@pytest.mark.slow
def test_measure_then_plan(folder, small_probe, capsys):
    file = folder / "kept" / "rates.json"
    out = folder / "plan.json"
    page = folder / "plan.html"
    flags = ["--estimate", "--max-num-seqs", "8", "--kv-pages", "300", "--constants", str(file)]
    assert main(["plan", str(folder), *flags, "--measure", "--json", str(out), "--html", str(page)]) == 0
    text = capsys.readouterr().out
    plan = json.loads(out.read_text())
    rows = plan["measured"]["decode"]
    assert [(row["batch"], row["context"]) for row in rows] == [(1, 32), (1, 508), (8, 32), (8, 508)]
    for row in rows:
        assert row["median"] >= row["tpot"] > 0
        assert row["error"] == pytest.approx(row["predicted"] / row["tpot"] - 1)
    assert plan["sources"]["roofline"] == plan["constants"]["source"] == "measured"
    assert "measured ms  predicted ms" in text
    assert str(file) in text
    assert page.read_text().count("<svg") == 3
    (kind,) = kept = json.loads(file.read_text())
    assert kind.startswith("cpu: ")
    assert f"{len(os.sched_getaffinity(0))} core" in kind
    assert list(kept[kind]) == ["auto float32"]
    # Later plans use the rates; those of other forms and of several devices do not.
    assert main(["plan", str(folder), *flags, "--json", str(out)]) == 0
    assert "rates measured on this kind of device" in capsys.readouterr().out
    assert json.loads(out.read_text())["constants"] == plan["constants"]
    assert "measured" not in json.loads(out.read_text())
    assert main(["plan", str(folder), *flags, "--compare", "cpu,quantization=int8", "cpu:2", "--json", str(out)]) == 0
    assert [one["constants"]["source"] for one in json.loads(out.read_text())] == ["assumed", "assumed"]


def test_rates_are_kept_beside_others(folder, tmp_path):
    file = tmp_path / "rates.json"
    others = {"NVIDIA H200": {"auto bfloat16": {"bandwidth": 4e12, "matmul": 8e14}}}
    file.write_text(json.dumps(others))
    deployment = Deployment.of(settings(folder, quantization="int8", kv_cache_dtype="int8"), "cpu")
    constants.keep(file, deployment, Constants(1e10, 1e11, source="measured"))
    known = constants.read(file, required=True)
    assert known["NVIDIA H200"]["auto bfloat16"].bandwidth == 4e12
    assert constants.form_of(deployment) == "int8 float32 kv_cache_dtype=int8"
    assert constants.find(known, deployment) == Constants(1e10, 1e11, source="measured")
    assert constants.find(known, Deployment.of(settings(folder), "cpu")) is None
    file.write_text('{"cpu": {"auto float32": {"speed": 1}}}')
    with pytest.raises(ConfigError, match="has no constants"):
        constants.keep(file, deployment, Constants(1e10, 1e11))


@pytest.mark.parametrize(
    ("changes", "target", "message"),
    [
        ({"tensor_parallel_size": 2}, "cpu:2", "one device of a CPU"),
        ({"max_model_len": 4}, "cpu", "more than 4 tokens"),
        ({"task": "embed"}, "cpu", "models that generate"),
    ],
)
def test_refused_before_anything_loads(folder, changes, target, message, monkeypatch):
    monkeypatch.setattr(Engine, "load", lambda *_, **__: pytest.fail("an engine was loaded"))
    with pytest.raises(ConfigError, match=message):
        measuring.measure(settings(folder, **changes), target, folder / "rates.json")
    assert not (folder / "rates.json").exists()


def test_weights_that_the_probe_cannot_have_are_refused(folder):
    own, other = (Deployment.of(settings(folder, quantization=how), "cpu") for how in ("int4", "auto"))
    probe.check_form(own, own)
    with pytest.raises(ConfigError, match=r"no probe for weights like the checkpoint's, of 0\.6"):
        probe.check_form(own, other)


def test_the_table_is_that_of_the_kept_measurements(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    plan_cpu = importlib.import_module("plan_cpu")
    kept = json.loads(plan_cpu.RESULT.read_text())
    assert plan_cpu.table(kept) in (ROOT / "docs" / "plan.md").read_text()
    assert [one["form"] for one in kept] == list(plan_cpu.NAMES)
    for row in (row for one in kept for row in [*one["steps"], *one["served"]]):
        assert row["predicted"] == pytest.approx(row["tpot"], rel=0.25)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_predictions_of_the_100m_shape():
    """Rates of a probe predict another model's steps within a quarter, and the requests of its engine; configurations
    whose times differ by more than a sixth are ranked as measured."""
    script = ROOT / "benchmarks" / "plan_cpu.py"
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    done = subprocess.run([sys.executable, script], env=env, capture_output=True, text=True, timeout=3600)
    assert done.returncode == 0, done.stderr[-2000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == 4
    steps = {(one["form"], row["batch"], row["context"]): row for one in found for row in one["steps"]}
    assert {batch for _, batch, _ in steps} == {1, 8, 32}
    served = {(one["form"], row["batch"]): row for one in found for row in one["served"]}
    for where, row in steps.items():
        assert row["predicted"] == pytest.approx(row["tpot"], rel=0.25), where
    for where, row in served.items():  # the scheduler's work adds to it, on the one core
        assert row["predicted"] == pytest.approx(row["tpot"], rel=0.3), where
    for first, second in combinations(steps.values(), 2):
        faster, slower = sorted((first, second), key=lambda row: row["tpot"])
        if slower["tpot"] > 7 / 6 * faster["tpot"]:
            assert slower["predicted"] > faster["predicted"], (first, second)
