"""Tables of block sizes: how they are read, that plans follow them, and how they are made."""

import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import tpu as pltpu

from jaxserve.bench import timing, tune
from jaxserve.bench.kernel_cases import AttentionCase, MatmulCase
from jaxserve.commands.cli import main
from jaxserve.pallas_kernels import tuning
from jaxserve.pallas_kernels.paged_attention import tpu_plan
from jaxserve.pallas_kernels.quant_matmul import reference, tpu
from jaxserve.pallas_kernels.quant_matmul.tpu_plan import make_plan
from jaxserve.pallas_kernels.registry import Device

HOPPER, CPU = "NVIDIA H200", "cpu"
INT4 = MatmulCase("int4", "float32", "int4", (1, 32), 256, 512, tokens=16)
PROBLEM = {"bits": 4, "group": 128, "out": 4096, "inputs": 4096}


@pytest.fixture(autouse=True)
def folders(tmp_path, monkeypatch):
    """Empty folders instead of the package's and the user's."""
    shipped, user = tmp_path / "shipped", tmp_path / "user"
    shipped.mkdir()
    user.mkdir()
    monkeypatch.setattr(tuning, "SHIPPED", shipped)
    monkeypatch.setenv("JAXSERVE_TUNING", str(user))
    tuning.clear()
    yield shipped, user
    tuning.clear()


def write(folder, sizes, kind=HOPPER, operation="matmul", backend="mosaic_gpu", **problem):
    entry = {"sizes": sizes, "us": 1.0, "default_us": 2.0}
    table = {"device": kind, "comment": "", "sizes": {operation: {backend: {tuning.problem_key(**problem): entry}}}}
    (folder / tuning.file_name(kind)).write_text(json.dumps(table))
    tuning.clear()


def test_lookup(folders, monkeypatch):
    shipped, user = folders
    assert tuning.lookup("matmul", "mosaic_gpu", HOPPER, tokens=16, **PROBLEM) == {}
    write(shipped, {"stages": 6, "n": 16}, tokens=16, **PROBLEM)
    for tokens in (9, 13, 16):
        assert tuning.lookup("matmul", "mosaic_gpu", HOPPER, tokens=tokens, **PROBLEM) == {"stages": 6, "n": 16}
    for tokens in (8, 17):
        assert tuning.lookup("matmul", "mosaic_gpu", HOPPER, tokens=tokens, **PROBLEM) == {}
    assert tuning.lookup("matmul", "mosaic_gpu", HOPPER, tokens=16, **PROBLEM | {"bits": 8}) == {}
    assert tuning.lookup("matmul", "triton", HOPPER, tokens=16, **PROBLEM) == {}
    assert tuning.lookup("matmul", "mosaic_gpu", "NVIDIA A100", tokens=16, **PROBLEM) == {}
    write(user, {"stages": 4}, tokens=16, **PROBLEM)
    assert tuning.lookup("matmul", "mosaic_gpu", HOPPER, tokens=16, **PROBLEM) == {"stages": 4}, (
        "the user's comes first"
    )
    monkeypatch.setenv("JAXSERVE_TUNING", "")
    assert tuning.lookup("matmul", "mosaic_gpu", HOPPER, tokens=16, **PROBLEM) == {"stages": 6, "n": 16}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "no table of block sizes"),
        ('{"device": "NVIDIA H200"}', "KeyError"),
        ('{"device": "TPU v5 lite", "sizes": {}}', "is for TPU v5 lite, and must be for NVIDIA H200"),
        ('{"device": "NVIDIA H200", "sizes": {"matmul": {"cuda": {"": {"sizes": {}}}}}}', "matmul cuda has no sizes"),
        ('{"device": "NVIDIA H200", "sizes": {"matmul": {"triton": {"k": {"sizes": {"m": 1}}}}}}', "m = 1; .* warps"),
        ('{"device": "NVIDIA H200", "sizes": {"matmul": {"triton": {"k": {"sizes": {"warps": 0}}}}}}', "warps = 0"),
        ('{"device": "NVIDIA H200", "sizes": {"matmul": {"triton": {"k": {"sizes": {"warps": "4"}}}}}}', "warps = '4'"),
        (
            '{"device": "NVIDIA H200", "sizes": {"matmul": {"triton": {"k": {"sizes": [4]}}}}}',
            "no table of block sizes",
        ),
    ],
)
def test_a_damaged_table_is_named(folders, text, said):
    (folders[1] / "nvidia-h200.json").write_text(text)
    with pytest.raises(tuning.TuningError, match=rf"nvidia-h200\.json.*{said}"):
        tuning.lookup("matmul", "mosaic_gpu", HOPPER, tokens=1)


def test_shipped_tables_are_in_order(monkeypatch):
    monkeypatch.undo()
    for path in tuning.SHIPPED.glob("*.json"):
        kind = json.loads(path.read_text())["device"]
        assert path.name == tuning.file_name(kind)
        tuning.read(path, kind)


def test_the_device_is_that_of_the_mesh(monkeypatch):
    assert tuning.device_kind() == CPU
    mesh = SimpleNamespace(abstract_device=SimpleNamespace(device_kind=HOPPER))
    monkeypatch.setattr(jax.sharding, "get_abstract_mesh", lambda: mesh)
    assert tuning.device_kind() == HOPPER


def test_plans_follow_the_tables(folders, monkeypatch):
    from jaxserve.pallas_kernels.quant_matmul import mosaic_gpu

    monkeypatch.setattr(tuning, "device_kind", lambda: HOPPER)
    before = mosaic_gpu.plan(13, (4096, 4096), (1, 128), 4)
    write(folders[0], {"stages": 3, "splits": 2, "n": 32}, tokens=16, **PROBLEM)
    after = mosaic_gpu.plan(13, (4096, 4096), (1, 128), 4)
    assert (after.stages, after.splits, after.n) == (3, 2, 32) != (before.stages, before.splits, before.n)
    assert after.steps * after.splits * after.k == 4096

    w = INT4.arguments(0)[1]
    with tuning.trial("matmul", "mosaic_tpu", {"inputs": 256, "outs": 128}) as asked:
        plan = make_plan(w, jnp.bfloat16, 16)
    assert (plan.ins, plan.outs) == (256, 128)
    assert asked == {"codes=int4 group=32 inputs=512 out=256 tokens=16"}
    assert (make_plan(w, jnp.bfloat16, 16).ins, make_plan(w, jnp.bfloat16, 16).outs) == (512, 256)

    problem = AttentionCase("", "bfloat16", ((1, 1000),), kv_heads=2, page_size=32).problem
    options = {"scale": 1.0, "window": None, "softcap": None}
    with tuning.trial("prompts", "mosaic_tpu", {"tile": 32, "block": 256}):
        plan = tpu_plan.make_plan(problem, 100, 40, **options)
        assert (plan.tile, plan.block_tokens) == (32, 256)
        assert tpu_plan.make_plan(problem, 1, 40, **options).block_tokens == 512, "decode is not on trial"


def test_triton_plans_follow_the_tables():
    triton_gpu = pytest.importorskip("jaxserve.pallas_kernels.quant_matmul.triton_gpu")
    target = triton_gpu.Target(90, 132)
    before = triton_gpu.tiles("bfloat16", "int4", 16, 4096, 4096, 128, target)
    with tuning.trial("matmul", "triton", {"step": 64, "warps": 8, "outputs": 128}):
        after = triton_gpu.tiles("bfloat16", "int4", 16, 4096, 4096, 128, target)
    assert (after.step, after.inputs, after.warps, after.outputs) == (64, 64, 8, 128)
    assert (before.step, before.inputs, before.warps, before.outputs) == (256, 128, 4, 64)
    with tuning.trial("matmul", "triton", {"splits": 3}):
        assert triton_gpu.tiles("bfloat16", "int4", 16, 4096, 4096, 128, target).splits == 3


@pytest.mark.parametrize("backend", ["mosaic_gpu", "triton"])
def test_attention_on_gpus_asks_for_both_kernels(backend, monkeypatch):
    """Traced only; the sizes of a table change what is traced."""
    if backend == "triton":
        triton_compat = pytest.importorskip("jaxserve.pallas_kernels.triton_compat")
        monkeypatch.setattr(triton_compat, "target", lambda: triton_compat.Target(90, 132))
    from jaxserve.pallas_kernels.registry import load

    case = AttentionCase("", "bfloat16", ((1, 300), (1, 200), (40, 100)), kv_heads=2)
    arguments = case.arguments(0)
    choice = {
        "decode": {"mosaic_gpu": {"parallel": 2}, "triton": {"splits": 32}},
        "prompts": {"mosaic_gpu": {"block": 64}, "triton": {"block": 128}},
    }

    def traced() -> str:
        jax.clear_caches()
        return str(jax.make_jaxpr(case.call(load("attention", backend)))((), *arguments))

    plain = traced()
    for operation, sizes in choice.items():
        with tuning.trial(operation, backend, sizes[backend]) as asked:
            changed = traced()
        (key,) = asked
        rows = "rows=4" if operation == "decode" else "tokens=64"
        assert {"context=512", "group=4", "head_dim=128", "heads=2", "page_size=16", rows} <= set(key.split())
        assert changed != plain
    assert traced() == plain


class Pretend:
    """A module whose kernel takes as long as its sizes say, is wrong with some, and does not compile with others."""

    seconds = 0.0

    def quant_matmul(self, x, w):
        sizes = {"stages": 3, "warps": 4, **tuning.lookup("matmul", "triton", tokens=len(x), out=w.shape[0])}
        if sizes["warps"] == 8 and sizes["stages"] == 4:
            raise RuntimeError("too many registers")
        self.seconds = 10.0 / sizes["stages"] + (1.0 if sizes.get("splits") == 2 else 2.0) - 1e-3 * sizes.get("step", 0)
        return reference.quant_matmul(x, w) * (2.0 if sizes["stages"] == 5 else 1.0)

    def measure(self, work):
        return timing.Timing([self.seconds], False)


def test_the_search_keeps_what_is_right_and_faster():
    module = Pretend()
    best = tune.search(INT4, "triton", module, module.measure)
    assert best.problems == {"out=256 tokens=16"}
    assert best.sizes == {"stages": 4, "splits": 2, "step": 256}, "5 stages would be faster, and are wrong"
    assert best.default == pytest.approx(10 / 3 + 2)
    assert best.seconds == pytest.approx(10 / 4 + 1 - 0.256)
    assert any("'stages': 5" in failure and "off by 1" in failure for failure in best.failed)
    assert any("'warps': 8" in failure and "too many registers" in failure for failure in best.failed)


def test_tune_writes_a_table_of_a_real_kernel(folders, monkeypatch, capsys):
    """The TPU's kernel, interpreted, with a clock that likes small tiles; afterwards its plan follows the table."""
    case = MatmulCase("", "float32", "int4", (1, 128), 256, 256, tokens=8)
    monkeypatch.setattr(tune, "cases", lambda *_: [case])
    monkeypatch.setattr(tune, "backends", lambda case, device: [("mosaic_tpu", tpu)])
    monkeypatch.setitem(tuning.SIZES, ("matmul", "mosaic_tpu"), {"inputs": (128,), "outs": (128,)})
    x, w = case.arguments(0)
    seconds = iter([4.0, 3.0, 2.0])
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams()):
        assert tune.tune(["matmul"], measure=lambda work: timing.Timing([next(seconds)], False)) == 0
        (path,) = folders[1].iterdir()
        table = json.loads(path.read_text())
        assert table["device"] == CPU
        (entry,) = table["sizes"]["matmul"]["mosaic_tpu"].values()
        assert entry == {"sizes": {"inputs": 128, "outs": 128}, "us": 2e6, "default_us": 4e6}
        assert "the plan's own 4,000,000.0" in capsys.readouterr().out
        plan = make_plan(w, x.dtype, 16)
        assert (plan.ins, plan.outs) == (128, 128)
        seconds = iter([1.0, 1.0, 1.0])
        assert tune.tune(["matmul"], measure=lambda work: timing.Timing([next(seconds)], False)) == 0
    assert json.loads(path.read_text())["sizes"]["matmul"]["mosaic_tpu"] == {}, "the plan's own are as good now"


def test_tune_says_where_there_is_nothing_to_do_and_what_failed(folders, monkeypatch, capsys):
    assert main(["tune", "--sizes", "small"]) == 0
    assert "nothing to tune on cpu" in capsys.readouterr().out
    assert not list(folders[1].iterdir())

    def broken(x, w):
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(tune, "backends", lambda case, device: [("triton", SimpleNamespace(quant_matmul=broken))])
    assert main(["tune", "--sizes", "small", "--op", "matmul"]) == 1
    assert "failed: RuntimeError: no such instruction" in capsys.readouterr().out
    monkeypatch.setenv("JAXSERVE_TUNING", "")
    assert main(["tune", "--sizes", "small", "--op", "matmul"]) == 1
    assert "--out FILE" in capsys.readouterr().err


def test_backends_with_sizes_to_choose():
    assert list(tune.backends(INT4, Device("cpu", CPU))) == []
    on_tpu = list(tune.backends(INT4, Device("tpu", "TPU v5 lite")))
    assert on_tpu == [("mosaic_tpu", tpu)]
