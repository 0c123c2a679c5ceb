"""Weights that are dequantized beforehand: interpreted against float64 NumPy, and compiled ahead of time. As in
`test_triton`, the interpreted tests run in a process of their own."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("triton", reason="Triton is not installed")
pytest.importorskip("jax_triton", reason="jax-triton is not installed")

import test_triton
from devices import mesh_of
from jax.sharding import NamedSharding, PartitionSpec
from test_triton import INTERPRET, compiled, interpreted, quantized_weight, rounded

from jaxserve.pallas_kernels import triton_compat, tuning
from jaxserve.pallas_kernels.device_ops import matmul_of
from jaxserve.pallas_kernels.quant_matmul import dequantized, fragments, mosaic_gpu, triton_gpu, ways
from jaxserve.pallas_kernels.registry import Device, MatmulProblem
from jaxserve.pallas_kernels.types import QuantArray


@compiled
def test_interpreted():
    """Runs this file's interpreted tests where Triton interprets."""
    test_triton.run_interpreted(__file__)


@pytest.fixture(autouse=True)
def interpreter(monkeypatch):
    if INTERPRET:
        test_triton.repair_interpreter(monkeypatch)
        monkeypatch.setattr(triton_compat, "call", test_triton.interpret)
        monkeypatch.setattr(triton_compat, "target", lambda: triton_compat.Target(90, 132))
        with jax.disable_jit(), np.errstate(over="ignore"):
            yield
    else:
        yield


FORMS = {
    "int8, per channel": {"codes": "int8", "block": (1, 200), "inputs": 200, "zero": True},
    "int8, groups of 96": {"codes": "int8", "block": (1, 96), "inputs": 480, "bias": True},
    "int4, groups of 32": {"codes": "int4", "block": (1, 32), "inputs": 320, "zero": True, "scale_dtype": "float16"},
    "int4, groups of 128": {"codes": "int4", "block": (1, 128), "inputs": 256, "bias": True, "zero": True},
    "int4, per channel": {"codes": "int4", "block": (1, 130), "inputs": 130},
    "int8, groups of 32": {"codes": "int8", "block": (1, 32), "inputs": 192, "zero": True},
    "int8, shuffled": {"codes": "int8", "block": (1, 320), "inputs": 320, "bias": True},
    "float8, blocks": {"codes": "float8_e4m3fn", "block": (128, 128), "inputs": 200, "outputs": 150},
    "float8, per tensor": {"codes": "float8_e4m3fn", "block": (70, 256), "inputs": 256},
    "float8, older": {"codes": "float8_e4m3fn", "block": (1, 64), "inputs": 320, "capability": 80},
}
SHUFFLED = ("int4, groups of 128", "int8, groups of 32", "int8, shuffled")


@interpreted
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", FORMS)
def test_values(name, dtype, monkeypatch):
    """Each weight is rounded to the dtype from what is exact but for two operations in float32."""
    form = {"outputs": 70, "capability": 90} | FORMS[name]
    place = triton_compat.Target(form.pop("capability"), 132)
    monkeypatch.setattr(triton_compat, "target", lambda: place)
    rng = np.random.default_rng(len(name))
    w, gold = quantized_weight(rng, **form)
    x = jnp.asarray(rounded(rng, (3, form["inputs"]), dtype))
    values = dequantized.dequantize(w, x)
    assert values.dtype == dtype
    largest = np.abs(gold).max()
    allowed = 0.51 * float(jnp.finfo(dtype).eps) * np.abs(gold) + 1e-6 * largest
    assert (np.abs(np.asarray(values, np.float64) - gold) <= allowed).all()
    if w.codes.dtype != jnp.float8_e4m3fn and fragments.why_not(form["inputs"], w.block[1], w.codes.dtype) is None:
        assert (dequantized.dequantize(fragments.shuffle(w), x) == values).all()
    else:
        assert name not in SHUFFLED
    y = dequantized.product(x, w, jnp.float32)
    exact = np.asarray(x, np.float64) @ np.asarray(values, np.float64).T
    np.testing.assert_allclose(y, exact, rtol=0, atol=1e-6 * np.abs(exact).max())


BF16, F16, F32 = (jnp.dtype(name) for name in ("bfloat16", "float16", "float32"))


def weight(shape, codes="int4", block=(1, 128), sharding=None) -> QuantArray:
    blocks = -(-shape[0] // block[0]), -(-shape[1] // block[1])
    like = jax.ShapeDtypeStruct
    return QuantArray(like(shape, codes, sharding=sharding), like(blocks, BF16, sharding=sharding), block=block)


def test_when_it_pays():
    shape = (14336, 4096)
    for codes, group, least in (("int4", 128, 414), ("int8", 4096, 497), ("float8_e4m3fn", 4096, 497)):
        w = weight(shape, codes, (1, group))
        assert [dequantized.pays(tokens, BF16, w) for tokens in (1, 64, least - 1, least, 8192)] == [False] * 3 + [
            True
        ] * 2
        assert dequantized.pays(least, F16, w)
        assert not dequantized.pays(8192, F32, w), "which the matrix unit would round"
        assert dequantized.pays(64, BF16, w, 2), "the table of measured sizes overrules"
        assert not dequantized.pays(8192, BF16, w, 1)
    assert not dequantized.pays(8192, BF16, weight((131072, 8192))), "the buffer would be too large"
    assert not dequantized.pays(8192, BF16, weight((64, 96), block=(1, 24))), "pieces must be whole"
    assert not dequantized.pays(8192, BF16, weight((64, 65), block=(1, 65))), "pairs must be whole"


@pytest.fixture(scope="module")
def mesh():
    return mesh_of("h200x1")


def compile_layers(mesh, function, tokens: int, forms: list[QuantArray]):
    """A chain of products with such weights, each [outputs, inputs] back to the inputs' width."""
    place = NamedSharding(mesh, PartitionSpec())
    abstract = lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place)  # noqa: E731

    def layers(x, weights):
        for w in weights:
            x = jnp.tanh(function(x, w)[:, : x.shape[1]])
        return x

    x = abstract(jax.ShapeDtypeStruct((tokens, forms[0].shape[1]), BF16))
    with jax.set_mesh(mesh):
        return jax.jit(layers).lower(x, jax.tree.map(abstract, forms)).compile()


@compiled
@pytest.mark.parametrize("module", [mosaic_gpu, triton_gpu], ids=["mosaic_gpu", "triton"])
@pytest.mark.parametrize(
    ("codes", "block"), [("int4", (1, 128)), ("int8", (1, 2048)), ("float8_e4m3fn", (128, 128))], ids=str
)
def test_one_buffer_serves_all_layers(mesh, module, codes, block):
    """Temporaries are one weight's copy, of the largest, and activations; a product is XLA's own."""
    tokens = 1024
    shapes = [(4096, 2048), (8192, 2048), (4096, 2048), (8192, 2048)]
    forms = [weight(shape, codes, block) for shape in shapes]
    program = compile_layers(mesh, lambda x, w: module.quant_matmul_parts(x, w)[0], tokens, forms)
    text = program.as_text()
    entry = text.partition("\nENTRY")[2]
    assert entry.count("triton_kernel_call") >= len(shapes)
    assert "quant_matmul" not in other_calls(entry)
    activations = 3 * tokens * 8192 * 2
    assert 8192 * 2048 * 2 <= program.memory_analysis().temp_size_in_bytes <= 8192 * 2048 * 2 + activations


def other_calls(entry: str) -> str:
    """The lines of kernels that convert in registers: custom calls that are no dequantization."""
    return "\n".join(line for line in entry.splitlines() if "custom-call(" in line and "triton_kernel_call" not in line)


@compiled
def test_few_tokens_are_multiplied_in_registers(mesh):
    program = compile_layers(mesh, lambda x, w: mosaic_gpu.quant_matmul_parts(x, w)[0], 256, [weight((4096, 2048))])
    assert program.memory_analysis().temp_size_in_bytes < 4096 * 2048 * 2
    assert "quant_matmul" in program.as_text()


@compiled
def test_tables_decide(mesh):
    w = [weight((4096, 2048))]
    for backend, module in (("mosaic_gpu", mosaic_gpu), ("triton", triton_gpu)):
        for choice, tokens in ((1, 1024), (2, 64)):
            jax.clear_caches()
            with tuning.trial("matmul", backend, {"dequantize": choice}) as asked:
                program = compile_layers(mesh, lambda x, w, m=module: m.quant_matmul(x, w), tokens, w)
            assert asked
            copied = "bf16[4096,2048]" in program.as_text()
            assert copied == (choice == 2), (backend, choice)
    jax.clear_caches()


@compiled
@pytest.mark.parametrize(("rows", "shuffled"), [(32, True), (32, False), (600, True)])
def test_each_way_is_what_its_name_says(mesh, rows, shuffled):
    """And `auto` takes what was measured to be the fastest, which the estimate would not."""
    device = Device("gpu", "NVIDIA H200", (9, 0))
    w = replace(weight((1024, 512)), shuffled=shuffled)
    problem = MatmulProblem.of(jax.ShapeDtypeStruct((rows, 512), BF16), w)
    calls = {"mosaic_gpu": "mosaic_gpu", "triton": "triton_kernel_call", "dequantize": "triton_kernel_call", "dot": ""}
    possible = [way for way, moved in ways.candidates(device, replace(problem, shuffled=False)) if moved is shuffled]
    assert possible == (["mosaic_gpu", "dequantize"] if shuffled else ["triton", "dequantize", "dot"])
    multiply = matmul_of(device)
    for way in possible:
        tuning.use(device.kind, tuning.Table(products={ways.key(problem): tuning.Product(shuffled, ((32, way),))}))
        try:
            if rows > 2 * 32 and way != "dequantize":
                assert ways.fastest(device, problem, rows) == "dequantize", "far beyond what was measured"
                continue
            text = compile_layers(mesh, lambda x, w: multiply(x, w, partials=True)[0], rows, [w]).as_text()
        finally:
            tuning.use(device.kind, tuning.Table())
        assert [name for name in ("mosaic_gpu", "triton_kernel_call") if name in text] == [*filter(None, [calls[way]])]
        if way != "dot":  # XLA decides
            assert ("bf16[1024,512]" in text) == (way == "dequantize"), "a weight in 16 bits in memory"


@compiled
def test_without_triton_the_kernel_does_it(mesh, monkeypatch):
    monkeypatch.setattr(mosaic_gpu, "dequantized", None)
    w = replace(weight((4096, 2048)), block=(1, 128))
    program = compile_layers(mesh, lambda x, w: mosaic_gpu.quant_matmul_parts(x, w)[0], 1024, [w])
    assert "bf16[4096,2048]" not in program.as_text()
