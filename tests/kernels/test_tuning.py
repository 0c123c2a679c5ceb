"""Tables of block sizes: how they are read, that plans follow them, and how they are made."""

import json
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from jaxserve.bench import tune
from jaxserve.bench.kernel_cases import AttentionCase, MatmulCase
from jaxserve.bundles import environment
from jaxserve.bundles.container import KERNELS
from jaxserve.commands.cli import main
from jaxserve.config import EngineConfig
from jaxserve.devices.mesh import make_mesh, on_one_cpu
from jaxserve.engine import kernel_timing
from jaxserve.engine.prepared import Prepared
from jaxserve.models.spec import AttentionSpec, LayerSpec, MLPSpec, NormSpec
from jaxserve.pallas_kernels import cpu_panels, device_ops, tuning
from jaxserve.pallas_kernels.device_ops import matmul_of
from jaxserve.pallas_kernels.paged_attention import reference as attention
from jaxserve.pallas_kernels.paged_attention import tpu_plan
from jaxserve.pallas_kernels.quant_matmul import reference, tpu, ways
from jaxserve.pallas_kernels.quant_matmul.tpu_plan import make_plan
from jaxserve.pallas_kernels.registry import Device
from jaxserve.pallas_kernels.tuning import Product, Table, products, timing
from jaxserve.pallas_kernels.types import Activations

HOPPER = "NVIDIA H200"
CPU = "cpu"
INT4 = MatmulCase("int4", "float32", "int4", (1, 32), 256, 512, tokens=16)
PROBLEM = {"bits": 4, "group": 128, "out": 4096, "inputs": 4096}


@pytest.fixture(autouse=True)
def folders(tmp_path, monkeypatch):
    """Empty folders instead of the package's and the user's."""
    shipped = tmp_path / "shipped"
    user = tmp_path / "user"
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
        ("{", "no table of jaxserve tune"),
        ('{"device": "NVIDIA H200"}', "KeyError"),
        ('{"device": "TPU v5 lite", "sizes": {}}', "is for TPU v5 lite, and must be for NVIDIA H200"),
        ('{"device": "NVIDIA H200", "sizes": {"matmul": {"cuda": {"": {"sizes": {}}}}}}', "matmul cuda has no sizes"),
        ('{"device": "NVIDIA H200", "sizes": {"matmul": {"triton": {"k": {"sizes": {"m": 1}}}}}}', "m = 1; .* warps"),
        ('{"device": "NVIDIA H200", "sizes": {"matmul": {"triton": {"k": {"sizes": {"warps": 0}}}}}}', "warps = 0"),
        ('{"device": "NVIDIA H200", "sizes": {"matmul": {"triton": {"k": {"sizes": {"warps": "4"}}}}}}', "warps = '4'"),
        (
            '{"device": "NVIDIA H200", "sizes": {"matmul": {"triton": {"k": {"sizes": [4]}}}}}',
            "no table of jaxserve tune",
        ),
        ('{"device": "NVIDIA H200", "sizes": {}, "products": {"k": {"shuffled": true}}}', "no table .*ways"),
        (
            '{"device": "NVIDIA H200", "sizes": {}, "products": {"k": {"shuffled": false, "ways": {"8": "cuda"}}}}',
            "'cuda' is no way; .* dequantize",
        ),
        (
            '{"device": "NVIDIA H200", "sizes": {}, "products": {"k": {"shuffled": 1, "ways": {"8": "dot"}}}}',
            "shuffled must be true or false",
        ),
        ('{"device": "NVIDIA H200", "sizes": {}, "decode": {"k": {"backend": "dot"}}}', "'dot' is no backend"),
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
    from jaxserve.pallas_kernels.paged_attention import mosaic_gpu_decode
    from jaxserve.pallas_kernels.registry import load

    monkeypatch.setattr(mosaic_gpu_decode, "spans_triton", None)  # would ask for which GPU this is

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

    def quant_matmul(self, x, w, direct):
        assert direct, "the weight is not dequantized first"
        sizes = {"stages": 3, "warps": 4, **tuning.lookup("matmul", "triton", tokens=len(x), out=w.shape[0])}
        if sizes["warps"] == 8 and sizes["stages"] == 4:
            raise RuntimeError("too many registers")
        seconds = 10.0 / sizes["stages"] + (1.0 if sizes.get("splits") == 2 else 2.0) - 1e-3 * sizes.get("step", 0)
        wrong = 2.0 if sizes["stages"] == 5 else 1.0
        return reference.quant_matmul(x, w) * wrong + jax.pure_callback(self.note(seconds), SCALAR, vmap_method=None)

    def note(self, seconds):
        def noted():
            self.seconds = seconds
            return np.zeros((), np.float32)

        return noted

    def measure(self, work):
        work.enqueue(1)
        work.wait()
        return timing.Timing([self.seconds], False)


SCALAR = jax.ShapeDtypeStruct((), jnp.float32)


def test_the_search_keeps_what_is_right_and_faster():
    module = Pretend()
    best = tune.search(tune.Search(INT4, "triton", module), module.measure)
    assert best.problems == {"out=256 tokens=16"}
    assert best.sizes == {"stages": 4, "splits": 2, "step": 256}, "5 stages would be faster, and are wrong"
    assert best.default == pytest.approx(10 / 3 + 2)
    assert best.seconds == pytest.approx(10 / 4 + 1 - 0.256)
    assert any("'stages': 5" in failure and "off by 1" in failure for failure in best.failed)
    assert any("'warps': 8" in failure and "too many registers" in failure for failure in best.failed)
    best = tune.search(tune.Search(INT4, "triton", module), module.measure, until=lambda: True)
    assert best.sizes == {}, "the time was over"


SECONDS = {  # of each way of a product, by rows
    1: {"plain": 2.0, "cpu": 1.0, "xla": 9.0, "dot": 3.0},
    32: {"plain": 2.0, "cpu": 4.0, "xla": 9.0, "dot": 3.0},
    256: {"plain": 5.0, "cpu": 50.0, "xla": 4.0, "dot": 9.0},
}


class FakeTimer:
    """Knows the time of each way, and counts what it was asked for."""

    def __init__(self):
        self.asked = []

    def __call__(self, work):
        _, rows, entry = work.name
        self.asked.append((rows, entry.way))
        return timing.Timing([SECONDS[rows][entry.way]], False)


@pytest.fixture
def fewer_rows(monkeypatch):
    monkeypatch.setattr(products, "ROWS", tuple(SECONDS))
    monkeypatch.setattr(tune, "cases", lambda *_: [INT4])
    monkeypatch.setattr(tune.Tuning, "bandwidth", 1e9)


def lowered(rows: int) -> str:
    """The program of a product of INT4's weight, as a model on this CPU makes it."""
    _, w = INT4.arguments(0)
    return jax.jit(matmul_of(Device(CPU, CPU))).lower(jnp.zeros((rows, w.shape[1])), w).as_text()


@pytest.mark.slow
def test_tune_writes_the_fastest_ways_and_products_follow(folders, fewer_rows, capsys):
    """On CPU, with its own kernels: the shape of a table, and that `auto` reads it."""
    plain = {rows: lowered(rows) for rows in SECONDS}
    timer = FakeTimer()
    assert tune.tune(["matmul"], measure=timer) == 0
    assert sorted(timer.asked) == sorted((rows, way) for rows, ways in SECONDS.items() for way in ways)
    entry = json.loads((folders[1] / "cpu.json").read_text())["products"][ways.key(INT4.problem)]
    assert (entry["shuffled"], entry["ways"]) == (False, {"1": "cpu", "32": "dot", "256": "xla"})
    assert entry["us"]["32"] == {
        "floor": pytest.approx(180.224),
        "plain": 2e6,
        "cpu": 4e6,
        "xla": 9e6,
        "dot": 3e6,
    }
    said = capsys.readouterr().out
    assert "warning: at 32 rows a weight in float32 takes 2,000,000.0 us, the quantized one 3,000,000.0" in said
    assert "at 1 rows" not in said
    assert "at 256 rows" not in said, "where prompts are computed, which is no decode"
    assert all("quant_matmul" in text and "dot_general" not in text for text in plain.values())
    assert lowered(1) == plain[1]
    assert "dot_general" in lowered(32)
    assert "while" not in lowered(32)
    assert lowered(200) != plain[256]
    assert ways.kernels(Device(CPU, CPU), INT4.problem) == ["cpu", "xla"], "which a start checks"
    x, w = INT4.arguments(0)
    close = np.testing.assert_allclose
    for rows in (1, 16, 100):
        some = jnp.tile(x, (7, 1))[:rows]
        close(matmul_of(Device(CPU, CPU))(some, w), reference.quant_matmul(some, w), rtol=1e-4, atol=1e-3)


def test_without_time_a_race_keeps_what_is_complete():
    race = products.Race(INT4.problem, "", [products.Entry(way) for way in ("cpu", "xla", "dot")])
    race.seconds = {rows: {products.Entry(way): n for way, n in ways.items()} for rows, ways in SECONDS.items()}
    assert race.choice() == Product(False, ((1, "cpu"), (32, "dot"), (256, "xla")))
    race.seconds[32].pop(products.Entry("dot"))
    race.seconds[256][products.Entry("xla")] = float("inf")
    assert race.choice() == Product(False, ((1, "cpu"), (256, "dot"))), "one is missing, and one has failed"
    now, options = iter(range(10**6)), {"measure": FakeTimer(), "clock": lambda: float(next(now))}
    (race,) = products.run(Device(CPU, CPU), {INT4.problem: "x"}, until=3, **options)
    assert race.choice() is None


def test_the_arrangement_is_that_of_the_least_weighted_sum():
    """Codes are shuffled for all numbers of rows or for none: decodes weigh more."""
    moved = products.Entry("mosaic_gpu", True)
    order = products.Entry("triton")
    race = products.Race(INT4.problem, "", [moved, order])
    race.seconds = {1: {moved: 1.0, order: 1.5}, 1024: {moved: 90.0, order: 50.0}}
    assert race.choice() == Product(True, ((1, "mosaic_gpu"), (1024, "mosaic_gpu"))), "4 + 1.8 against 6 + 1"
    race.seconds[1][order] = 1.1
    assert race.choice() == Product(False, ((1, "triton"), (1024, "triton")))


def test_an_unknown_device_is_timed_once(folders, monkeypatch):
    device = Device(CPU, CPU)
    timer = FakeTimer()
    monkeypatch.setattr(products, "DECODE_ROWS", (32, 1))
    monkeypatch.setattr(kernel_timing, "SECONDS", 600.0)
    before = lowered(32)

    def start(timer) -> None:
        tuning.clear()
        kernel_timing.KernelTiming(device, lambda: [INT4.problem], timer).finish()

    start(timer)
    assert len(timer.asked) == 6
    assert "dot_general" in lowered(32), "what was measured counts"
    again = FakeTimer()
    start(again)
    assert again.asked == [], "the second start reads what the first one kept"
    assert "dot_general" in lowered(32)
    assert not list(folders[1].glob("*.json")), "hosts compare these files"
    assert tuning.describe() == {}
    ((name, kept),) = tuning.describe_kept().items()
    assert (name, kept["products"][ways.key(INT4.problem)]["ways"]) == ("kept/cpu.json", {"1": "cpu", "32": "dot"})
    monkeypatch.setattr(tuning, "versions", lambda: {"jax": "another"})
    start(again)
    assert len(again.asked) == 6, "kernels of another version"
    tuning.clear()
    assert lowered(32) == before, "without timing, what was kept does not count"
    table = {
        "device": CPU,
        "sizes": {},
        "products": {ways.key(INT4.problem): {"shuffled": False, "ways": {"1": "cpu"}}},
    }
    (folders[1] / "cpu.json").write_text(json.dumps(table))
    known = FakeTimer()
    start(known)
    assert known.asked == [], "a table knows"
    assert lowered(32) == before, "and goes first"


def test_gates_of_weights_in_floats_are_timed(folders, monkeypatch):
    """The product of gates and ups, with the activation: by XLA, and by a kernel for both. The latter is plain here."""
    mesh = make_mesh(1)
    gate_up = "layers_1/mlp/gate_up/kernel"
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    attention = AttentionSpec(num_heads=2, num_kv_heads=2, head_dim=64)
    layers = [
        LayerSpec(attention=attention, mlp=MLPSpec(size=128, bias=bias), norm=NormSpec()) for bias in (True, False)
    ]
    decoder = SimpleNamespace(config=SimpleNamespace(layers=layers))
    plan = SimpleNamespace(mesh=mesh, dtype=jnp.dtype("bfloat16"), decoder=decoder)
    paths = gate_up, gate_up.replace("mlp/", "mlp/shared/"), "layers_1/mlp/down/kernel", "layers_1/attention/qkv/kernel"
    paths = *paths, gate_up.replace("layers_1", "layers_0")
    weights = {path: jax.ShapeDtypeStruct((256, 128), jnp.bfloat16, sharding=place) for path in paths}
    ((problem, count),) = kernel_timing.problems_of(weights, plan).items()
    assert (problem.rows, problem.inputs, problem.activation, count) == (256, 128, "silu", 2)
    assert kernel_timing.name_of(problem) == "256 x 128 bfloat16 and silu"
    assert ways.candidates(Device(CPU, CPU), problem) == [("dot", False)], "XLA's product is the only way on CPU"

    def gated(way, x, w, activation):
        y = jnp.dot(x, w.codes.T, preferred_element_type=jnp.float32)
        gate = y[:, ::2]
        up = y[:, 1::2]
        return (jax.nn.silu(gate) * up * factor.get(way, 1.0)).astype(x.dtype)

    factor = {}
    monkeypatch.setattr(ways, "candidates", lambda *_: [("mosaic_gpu", False), ("dot", False)])
    monkeypatch.setattr(ways, "gated_product", gated)

    def race(seconds):
        measure = lambda work: timing.Timing([seconds[work.name[2].way]], False)  # noqa: E731
        (found,) = products.run(Device(CPU, CPU), {problem: "x"}, (8,), measure=measure, plain=True, checks=True)
        assert products.PLAIN not in found.seconds[8], "cuBLAS is one of the ways"
        return found.choice()

    assert race({"mosaic_gpu": 1.0, "dot": 2.0}) == Product(False, ((8, "mosaic_gpu"),))
    assert race({"mosaic_gpu": 3.0, "dot": 2.0}) == Product(False, ((8, "dot"),))
    factor["mosaic_gpu"] = 1.1
    assert race({"mosaic_gpu": 1.0, "dot": 2.0}) == Product(False, ((8, "dot"),)), "the faster one is wrong"


def test_where_a_start_times_nothing(folders, monkeypatch):
    settings = EngineConfig(model="x")
    assert settings.times_kernels
    hosts = {"num_hosts": 2, "coordinator": "127.0.0.1:1"}
    others = {"deterministic": True}, {"kernel_timing": False}, {"matmul_backend": "xla"}, {"pipeline_parallel_size": 2}
    assert not any(replace(settings, **one).times_kernels for one in (hosts, *others))
    monkeypatch.setattr(tuning, "user_folder", lambda: None)
    plan = SimpleNamespace(mesh=SimpleNamespace(devices=np.asarray([HOPPER_DEVICE])))
    assert kernel_timing.KernelTiming.begin(settings, plan) is None, "there is nowhere to keep what it found"
    monkeypatch.undo()
    plan = SimpleNamespace(mesh=SimpleNamespace(devices=np.asarray(jax.devices()[:1])))
    assert kernel_timing.KernelTiming.begin(settings, plan) is None, "on CPU"
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    weights = {"w": jax.ShapeDtypeStruct((2**30,), jnp.bfloat16, sharding=here)}
    monkeypatch.setattr(kernel_timing, "weights_of", lambda *_: weights)
    monkeypatch.setattr(kernel_timing, "problems_of", lambda *_: {INT4.problem: 1})
    for gigabytes, found in ((9, []), (11, [INT4.problem])):
        device = SimpleNamespace(memory_stats=lambda limit=gigabytes << 30: {"bytes_limit": limit})
        plan = SimpleNamespace(mesh=SimpleNamespace(devices=np.asarray([device])), dtype=jnp.bfloat16)
        assert list(kernel_timing.problems_that_fit(settings, plan)) == found, "the weights take 2 GiB, the timing 8"


def test_a_bundle_keeps_the_choices_that_it_was_compiled_with(folders):
    key = ways.key(INT4.problem)
    mesh = make_mesh(1)
    tuning.use(CPU, Table(products={key: Product(False, ((1, "dot"),))}, decode={"problem": "cpu"}))
    made = environment.describe(jax.devices()[0], panels=False) | {KERNELS: tuning.choices(CPU)}
    made = json.loads(json.dumps(made))
    tuning.clear()
    assert tuning.product(CPU, key) is None
    prepared = Prepared(SimpleNamespace(path=folders[1], manifest=SimpleNamespace(environment=made)), None)
    made["panels"] = on_one_cpu(mesh) and cpu_panels.available()
    prepared.check_places(mesh)
    assert prepared.reasons == []
    assert tuning.everything(CPU).products == {key: Product(False, ((1, "dot"),))}
    assert tuning.everything(CPU).decode == {"problem": "cpu"}


def test_attention_of_decodes_follows_a_table(folders):
    device = Device("gpu", HOPPER, (9, 0))
    problem = AttentionCase("", "bfloat16", ((1, 9),)).problem
    from jaxserve.pallas_kernels.paged_attention import mosaic_gpu

    assert device_ops.choose_ops(device, problem).paged_attention is mosaic_gpu.paged_attention
    key = device_ops.attention_key(problem)
    write(folders[1], {"stages": 3}, tokens=1)
    path = folders[1] / tuning.file_name(HOPPER)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"decode": {key: {"backend": "xla"}}}))
    tuning.clear()
    chosen = device_ops.choose_ops(device, problem).paged_attention
    assert chosen.args == (mosaic_gpu.paged_attention, attention.paged_attention)
    assert device_ops.choose_ops(device, problem, backend="mosaic_gpu").paged_attention is mosaic_gpu.paged_attention
    prompts, decodes = (lambda *_, name=name, **__: name for name in ("prompts", "decodes"))
    assert device_ops._attend(prompts, decodes, None, None, decode_only=True) == "decodes"
    assert device_ops._attend(prompts, decodes, None, None, scale=1.0) == "prompts"


HOPPER_DEVICE = SimpleNamespace(platform="cuda", device_kind=HOPPER, compute_capability="9.0")


def test_codes_are_in_order_where_that_was_measured_to_be_faster(folders):
    device = Device("gpu", HOPPER, (9, 0))
    problem = MatmulCase("", "bfloat16", "int4", (1, 128), 4096, 4096, tokens=1).problem
    assert ways.is_shuffled(device, problem) is None
    tuning.use(HOPPER, Table(products={ways.key(problem): Product(False, ((1, "triton"), (64, "triton")))}))
    assert ways.is_shuffled(device, problem) is False
    tuning.use(HOPPER, Table(products={ways.key(problem): Product(True, ((1, "mosaic_gpu"), (64, "dot")))}))
    shuffled = replace(problem, shuffled=True)
    assert ways.is_shuffled(device, problem) is True
    assert ways.fastest(device, problem, 1) is None, "these weights were loaded in order"
    assert ways.fastest(device, shuffled, 1) == "mosaic_gpu"
    assert ways.fastest(device, shuffled, 64) is None, "a way that cannot read shuffled codes"
    assert ways.key(replace(problem, activations=Activations("int8"))) is None


def test_tune_writes_a_table_of_a_real_kernel(folders, monkeypatch, capsys):
    """The TPU's kernel, interpreted, with a clock that likes small tiles; afterwards its plan follows the table."""
    case = MatmulCase("", "float32", "int4", (1, 128), 256, 256, tokens=8)
    monkeypatch.setattr(tune, "cases", lambda *_: [case])
    race = products.Race(case.problem, "", [products.Entry("mosaic_tpu")], {8: {products.Entry("mosaic_tpu"): 1.0}})
    monkeypatch.setattr(products, "run", lambda *_, **__: [race])
    monkeypatch.setattr(products, "ROWS", (8,))
    monkeypatch.setattr(tune.Tuning, "bandwidth", 1e9)
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


def test_tune_says_where_there_is_nothing_to_do_and_what_failed(folders, fewer_rows, monkeypatch, capsys):
    assert main(["tune", "--sizes", "small", "--op", "prompts"]) == 0
    assert "nothing to tune on cpu" in capsys.readouterr().out
    assert main(["tune", "--sizes", "small", "--op", "matmul", "--minutes", "0"]) == 1
    assert "no time was left to compare" in capsys.readouterr().out
    assert not list(folders[1].iterdir())

    def broken(*_, **__):
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(ways, "product", broken)
    monkeypatch.setattr(products, "ROWS", (1,))
    assert main(["tune", "--sizes", "small", "--op", "matmul"]) == 1
    assert "failed: cpu, 1 rows: RuntimeError: no such instruction" in capsys.readouterr().out
    monkeypatch.setenv("JAXSERVE_TUNING", "")
    assert main(["tune", "--sizes", "small", "--op", "matmul"]) == 1
    assert "--out FILE" in capsys.readouterr().err


def test_block_sizes_are_searched_within_the_fastest_way():
    choice = Product(False, ((1, "mosaic_tpu"), (64, "dot"), (1024, "mosaic_tpu")))
    race = SimpleNamespace(name="w", choice=lambda: choice)
    on_tpu = Device("tpu", "TPU v5 lite")
    found = list(tune.searches_of({INT4.problem: race}, on_tpu))
    assert [(one.backend, one.case.tokens, one.module) for one in found] == [("mosaic_tpu", n, tpu) for n in (1, 1024)]
    assert (found[0].case.out, found[0].case.inputs, found[0].case.block) == (256, 512, (1, 32))
