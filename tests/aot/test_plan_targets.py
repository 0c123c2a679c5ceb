"""`jaxserve plan` with the compilers of its targets, and the committed plans of published models."""

import importlib.util
import json
import re
import sys
from pathlib import Path

import jax
import pytest
from devices import devices_of

from jaxserve.config import EngineConfig
from jaxserve.devices.targets import target_memory
from jaxserve.plan.report import make_plan

ROOT = Path(__file__).parent.parent.parent
SHAPE = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 1024, "num_hidden_layers": 6,
    "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 2048, "vocab_size": 2048,
    "max_position_embeddings": 1024, "rms_norm_eps": 1e-5, "hidden_act": "silu", "torch_dtype": "bfloat16",
}  # fmt: skip


@pytest.fixture(autouse=True)
def no_compilation_cache():
    jax.config.update("jax_enable_compilation_cache", False)


@pytest.fixture(scope="module")
def published():
    path = ROOT / "benchmarks" / "plan_published.py"
    spec = importlib.util.spec_from_file_location("plan_published", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["plan_published"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.parametrize("target", ["h200x1", "v6e-8"])
def test_compiled_plan(target, tmp_path):
    devices = len(devices_of(target))
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    config = EngineConfig(
        model=str(tmp_path), load_format="dummy", tensor_parallel_size=devices, max_num_seqs=8,
        max_num_batched_tokens=64,
    )  # fmt: skip
    plan = make_plan(config, target)
    assert plan["fits"]
    assert plan["sources"]["temporaries"] == "extrapolated from 2 layers and twice these"
    held = plan["memory"]
    used = sum(held[name] for name in ("weights", "slots", "states", "temporaries", "results", "code", "reserve"))
    assert used + plan["capacity"]["cache_bytes"] <= held["total"] * held["utilization"]
    decode = next(step for step in plan["steps"] if step["program"].startswith("decode"))
    if target == "h200x1":
        assert 6 * 7 <= decode["launches"] <= 6 * 9 + 60  # with the costliest branch of each choice of the sampler
        assert decode["exchanges"] == {}
    else:
        assert 2 * 6 <= decode["exchanges"]["all-reduce"]["number"] <= 2 * 6 + 8


@pytest.mark.parametrize("target", ["v5e-1", "v6e-1", "v5p-1", "tpu7x-1"])
def test_the_memory_of_a_tpu_is_what_its_compiler_allows(target):
    (device,) = devices_of(target)
    x = jax.ShapeDtypeStruct((1 << 18, 1 << 18), "float32", sharding=jax.sharding.SingleDeviceSharding(device))
    with pytest.raises(jax.errors.JaxRuntimeError, match="exceeds available HBM") as refused:
        jax.jit(lambda x: x @ x).lower(x).compile()
    available = re.search(r"available HBM \(([\d.]+)G\)", str(refused.value))[1]
    assert target_memory(device) / 2**30 == pytest.approx(float(available), abs=0.02)  # versions of libtpu differ by it


@pytest.mark.parametrize(
    ("row", "compiled"), [(("Llama 3.1 8B", "h200x1", "bf16"), True), (("Gemma 3 27B", "v6e-8", "int4"), False)]
)
def test_committed_plans_are_what_the_arithmetic_gives(published, row, compiled):
    devices_of(row[1])
    (kept,) = (one for one in json.loads(published.RESULT.read_text()) if tuple(one.values())[:3] == row)
    facts = published.known(*row)
    assert (facts is not None) is compiled, "one row of each kind"
    again = published.entry(*row, facts)
    assert again == {
        name: value if isinstance(value, str | int) else pytest.approx(value) for name, value in kept.items()
    }
    assert (kept["source"] == "estimated") is not compiled


def test_the_table_is_that_of_the_file(published):
    assert published.table(json.loads(published.RESULT.read_text())) in (ROOT / "docs" / "plan.md").read_text()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_published_model_compiled(published):
    row = "Llama 3.1 8B", "h200x1", "bf16"
    devices_of(row[1])
    kept = published.known(*row)
    again = published.compile_row(*row)
    assert again.needs.temporaries == pytest.approx(kept.needs.temporaries, rel=0.05)
    assert again.needs.results == kept.needs.results
    assert [step.program for step in again.steps] == [step.program for step in kept.steps]
    assert [step.launches for step in again.steps] == pytest.approx([step.launches for step in kept.steps], rel=0.05)
