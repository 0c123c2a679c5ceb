"""Products with inputs rounded to 8 bits: against float64, as emulated from floats, and compiled ahead of time. What is
interpreted by Triton runs in a process of its own, as in `test_triton`."""

import os
import re
import subprocess
import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from devices import mesh_of
from jax.sharding import NamedSharding, PartitionSpec

from jaxserve.pallas_kernels import selfcheck
from jaxserve.pallas_kernels.checked_ops import Trials, checked_matmul
from jaxserve.pallas_kernels.device_ops import matmul_of
from jaxserve.pallas_kernels.quant_matmul import fragments, reference, w8a8
from jaxserve.pallas_kernels.registry import Device, MatmulProblem
from jaxserve.pallas_kernels.types import Activations, QuantArray

FP8 = "float8_e4m3fn"
H200 = Device("gpu", "NVIDIA H200", (9, 0))
V5E = Device("tpu", "TPU v5 lite")
INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"
WANTED = {
    "int8": Activations("int8"),
    "fp8": Activations(FP8),
    "fp8 with a ceiling": Activations(FP8, ceiling=2.0),
    "fp8 given": Activations(FP8, static=True),
    "fp8 in blocks": Activations(FP8, group=128),
    "fp8 in wide blocks": Activations(FP8, group=256),
    "int8 in blocks": Activations("int8", group=64),
}


def weight(name: str, out: int, inputs: int, rows: int = 1, seed: int = 0) -> QuantArray:
    """Random codes; `rows` of the weight share a scale."""
    rng = np.random.default_rng(seed)
    wanted = WANTED[name]
    group = wanted.group or inputs
    codes = (
        rng.integers(-127, 128, (out, inputs)) if wanted.dtype == "int8" else rng.standard_normal((out, inputs)) * 40
    )
    scale = rng.uniform(0.001, 0.01, (-(-out // rows), -(-inputs // group)))
    given = jnp.full((1, 1), 0.007, jnp.float32) if wanted.static else None
    arrays = jnp.asarray(codes, jnp.float32).astype(wanted.dtype), jnp.asarray(scale, jnp.float32)
    return QuantArray(*arrays, block=(rows, group), input_scale=given, activations=wanted)


def inputs_of(tokens: int, inputs: int, dtype: str = "bfloat16") -> jax.Array:
    """Tokens of very different size, one of them zeros."""
    x = np.random.default_rng(1).standard_normal((tokens, inputs)) * np.geomspace(0.01, 30, tokens)[:, None]
    x[tokens // 2] = 0
    return jnp.asarray(x, jnp.float32).astype(dtype)


def gold_of(x: jax.Array, w: QuantArray) -> np.ndarray:
    """By the definition, in float64 but for the scales: quantize each token, multiply, rescale."""
    wanted = w.activations
    values = np.asarray(x, np.float64)
    top = {"int8": 127.0, FP8: 448.0}[wanted.dtype]
    inputs = x.shape[1]
    group = wanted.group or inputs
    exact = np.asarray(reference.dequantize(w8a8.ignored(w)), np.float64)
    gold = np.zeros((len(x), w.shape[0]))
    for first in range(0, inputs, group):
        part = values[:, first : first + group]
        scale = np.abs(part).max(1).clip(max=wanted.ceiling).astype(np.float32) * np.float32(1 / top)
        scale = np.full(len(x), 0.007, np.float32) if wanted.static else np.where(scale > 0, scale, np.float32(1))
        over = np.clip(part.astype(np.float32) / scale[:, None], -top, top)
        codes = np.rint(over) if wanted.dtype == "int8" else np.asarray(jnp.asarray(over).astype(FP8), np.float32)
        gold += (codes.astype(np.float64) * scale[:, None].astype(np.float64)) @ exact[:, first : first + group].T
    return gold


def close(got: jax.Array, gold: np.ndarray, allowed: float) -> None:
    """Of each token's largest number."""
    error = np.abs(np.asarray(got, np.float64) - gold).max(1)
    assert (error <= allowed * np.abs(gold).max(1)).all(), (error / np.abs(gold).max(1)).max()


@pytest.mark.skipif(INTERPRET, reason="compiles")
@pytest.mark.parametrize("name", WANTED)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_plain(name, dtype):
    x = inputs_of(7, 384, dtype)
    w = weight(name, 96, 384)
    rows = w8a8.quantize(x, w)
    gold = gold_of(x, w)
    if w.activations.group is None:
        close(w8a8.quant_matmul(rows, w), gold, 2e-6)
    close(w8a8.emulated(rows, w, reference.quant_matmul), gold, 2e-6)
    assert not np.asarray(w8a8.dequantize(rows))[3].any()
    if not w.activations.static and w.activations.ceiling is None:  # what rounding costs
        plain = np.asarray(x, np.float64) @ np.asarray(reference.dequantize(w8a8.ignored(w)), np.float64).T
        close(gold, plain, {"int8": 0.02, FP8: 0.05}[w.activations.dtype])


@pytest.mark.skipif(INTERPRET, reason="compiles")
def test_integers_are_exact():
    """Sums beyond what float32 holds exactly."""
    codes = np.random.default_rng(0).integers(100, 128, (8, 8192))
    w = QuantArray(jnp.asarray(codes, jnp.int8), jnp.ones((8, 1)), block=(1, 8192), activations=WANTED["int8"])
    x = jnp.asarray(np.random.default_rng(1).integers(100, 128, (3, 8192)), jnp.float32).at[:, 0].set(127)
    exact = np.asarray(x, np.int64) @ codes.T
    got = w8a8.quant_matmul(w8a8.quantize(x, w), w)
    np.testing.assert_array_equal(
        np.asarray(got), (exact.astype(np.float32) * np.float32(1 * w8a8.scales(x, w.activations)[0, 0]))
    )


@pytest.mark.skipif(INTERPRET, reason="compiles")
@pytest.mark.parametrize("name", ["int8", "fp8", "fp8 in blocks"])
def test_rows_do_not_depend_on_others(name):
    x = inputs_of(9, 256)
    w = weight(name, 64, 256)
    rows = w8a8.quantize(x, w)
    alone = w8a8.quantize(x[4:5], w)
    np.testing.assert_array_equal(np.asarray(rows.codes[4:5], np.float32), np.asarray(alone.codes, np.float32))
    np.testing.assert_array_equal(np.asarray(rows.scale[4:5]), np.asarray(alone.scale))


@pytest.mark.skipif(INTERPRET, reason="compiles")
@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_what_is_no_number_shows(name):
    x = inputs_of(5, 128, "float32").at[1, 3].set(jnp.nan).at[4, 0].set(jnp.inf)
    w = weight(name, 32, 128)
    y = np.asarray(w8a8.quant_matmul(w8a8.quantize(x, w), w))
    assert np.isfinite(y).all(1).tolist() == [True, False, True, True, False]
    assert not np.isfinite(y[[1, 4]]).any()


@pytest.mark.skipif(INTERPRET, reason="compiles")
def test_devices(monkeypatch):
    """What is done where, and why not."""
    monkeypatch.setattr(w8a8.importlib.util, "find_spec", lambda name: name)  # jax_triton counts as installed

    def reason(device: Device, name: str, **changes) -> str | None:
        return w8a8.native(device, jnp.dtype("bfloat16"), replace(weight(name, 64, 512), **changes))

    for name in WANTED:
        assert reason(H200, name) is None
        assert "on CPUs" in reason(Device("cpu", "cpu"), name)
    assert reason(V5E, "int8") is None
    assert "no float8" in reason(V5E, "fp8")
    assert "no kernel for blocks" in reason(V5E, "int8 in blocks")
    a100 = Device("gpu", "NVIDIA A100", (8, 0))
    assert reason(a100, "int8") is None
    assert "8.9" in reason(a100, "fp8")
    assert "128 inputs, weights over 512" in reason(H200, "fp8 in blocks", block=(1, 512))
    assert "weights are int8" in reason(H200, "int8", activations=WANTED["fp8"])
    assert "zero points" in reason(H200, "int8", zero=jnp.zeros((64, 1), jnp.int8))
    assert "groups" in w8a8.why_not(
        H200, MatmulProblem.of(inputs_of(1, 64), replace(weight("fp8", 8, 64), activations=Activations(FP8, group=48)))
    )


@pytest.mark.skipif(INTERPRET, reason="compiles")
def test_choice():
    """auto multiplies 8-bit numbers where the device can; a backend by name computes with rounded inputs as floats."""
    x = inputs_of(4, 256, "float32")
    w = weight("int8", 64, 256)
    for device, backend, wanted in ((V5E, "auto", "i32"), (V5E, "xla", "f32"), (Device("cpu", "cpu"), "xla", "f32")):
        text = jax.jit(matmul_of(device, backend)).lower(x, w).as_text()
        assert re.search(rf"dot_general.*tensor<4x64x{wanted}>", text), (device, backend)
    close(matmul_of(Device("cpu", "cpu"), "xla")(x, w), gold_of(x, w), 2e-6)


@pytest.mark.skipif(INTERPRET, reason="compiles")
def test_hopper_keeps_the_codes_of_rounded_products():
    """Where inputs are rounded too, codes are not put into the order of the kernel for weights alone, nor dequantized
    beforehand for many tokens; where they are not, the weight is like any other."""
    x = inputs_of(1024, 512)
    w = weight("int8", 256, 512)
    assert not fragments.suits(H200, MatmulProblem.of(x, w), "auto")
    assert fragments.suits(H200, MatmulProblem.of(x, w8a8.ignored(w)), "auto")
    text = jax.jit(matmul_of(H200)).lower(x, w).as_text()
    assert re.search(r"dot_general.*tensor<1024x512xi8>.*tensor<1024x256xi32>", text)
    assert "custom_call" not in text


@pytest.mark.skipif(INTERPRET, reason="compiles")
def test_what_is_tried(monkeypatch):
    """At start: the product of 8-bit numbers where the device has it, and otherwise the kernel for weights alone."""
    tried = []
    monkeypatch.setattr(selfcheck, "check_matmul", lambda multiply, problem, **_: tried.append(problem) or [])
    problems = {
        name: MatmulProblem.of(inputs_of(1, 256), weight(name, 128, 256)) for name in ("int8", "fp8", "fp8 given")
    }
    assert checked_matmul(Trials(), V5E, problems.values(), "auto") == "auto"
    assert set(tried) == {problems["int8"], replace(problems["fp8"], activations=None)}
    assert len(tried) == 2


# --- sums of the matrix unit ---


def hopper_sums(x: np.ndarray, w: np.ndarray, longest: int | None = None) -> np.ndarray:
    """Codes x [rows, in] times w [out, in], float64, as Hopper's matrix unit adds products of float8: 32 exact products
    and the sum so far are shifted to the largest exponent among them, and of each the first 14 bits are kept
    (DeepSeek-V3, arXiv:2412.19437, sections 3.3.2 and 3.5.2). After `longest` inputs the sum is added in float32, and
    the next one begins at zero; None: all inputs are one sum."""
    total = np.zeros((len(x), len(w)), np.float32)
    sums = np.zeros((len(x), len(w)))
    for at in range(0, x.shape[1], 32):
        inputs = slice(at, at + 32)
        terms = np.concatenate([x[:, None, inputs] * w[None, :, inputs], sums[..., None]], axis=-1)
        unit = np.exp2(np.frexp(np.abs(terms).max(-1, keepdims=True))[1] - 14.0)
        sums = (np.trunc(terms / unit) * unit).sum(-1)
        if longest is not None and (at + 32) % longest == 0:
            total = total + sums.astype(np.float32)
            sums = np.zeros_like(sums)
    return total + sums.astype(np.float32)


def row_error(found: np.ndarray, exact: np.ndarray) -> float:
    """As `selfcheck` measures it: of the worst row, relative to the row's numbers."""
    return float((np.linalg.norm(found - exact, axis=1) / np.linalg.norm(exact, axis=1)).max())


@pytest.mark.slow
@pytest.mark.skipif(INTERPRET, reason="compiles")
def test_sums_are_those_of_an_h200():
    """Two findings of an H200 with `selfcheck`'s own weight and inputs, at the worst row: 0.031366 for XLA's product,
    0.031002 for the kernel. XLA had removed the rounding of the inputs from the plain product they were compared with,
    so they contain the error of rounding; by what they contain of the sums, XLA's product did not promote, the kernel
    did."""
    shape = (4096, 14336)
    row = 432
    pattern = 257
    problem = MatmulProblem(np.dtype("bfloat16"), np.dtype(FP8), *shape, (1, 14336), activations=Activations(FP8))
    w = selfcheck.make_weight(problem)
    x = jnp.asarray(selfcheck.activations(problem, 520))[row : row + 1]
    rows = w8a8.quantize(x, w)
    codes = np.asarray(w.codes[:pattern], np.float64)

    def scaled(sums: np.ndarray) -> np.ndarray:
        return sums[:, np.arange(shape[0]) % pattern] * np.asarray(w.scale, np.float64).T

    def product(longest: int | None) -> np.ndarray:
        return scaled(hopper_sums(np.asarray(rows.codes, np.float64), codes, longest)) * np.asarray(rows.scale)

    not_rounded = scaled(np.asarray(x, np.float64) @ codes.T)
    assert row_error(product(None), not_rounded) == pytest.approx(0.031366, abs=3e-6)
    assert row_error(product(128), not_rounded) == pytest.approx(0.031002, abs=3e-6)


@pytest.mark.skipif(INTERPRET, reason="compiles")
@pytest.mark.parametrize("inputs", [14336, 53248])
def test_long_sums(inputs):
    """Numbers of one sign, as some activation functions give them: their sum grows until most of each further product
    is cut off. Sums of 128 inputs are as exact as the check at start demands."""
    allowed = selfcheck.tolerance("bfloat16", selfcheck.MATMUL_TOLERANCE)
    rng = np.random.default_rng(0)

    def codes(rows: int) -> np.ndarray:
        numbers = np.abs(rng.standard_normal((rows, inputs)))
        return (numbers / numbers.max(1, keepdims=True) * 448).astype(FP8).astype(np.float64)

    x = codes(2)
    w = codes(32)
    assert row_error(hopper_sums(x, w), x @ w.T) > 30 * allowed
    assert row_error(hopper_sums(x, w, 128), x @ w.T) < allowed / 8


@pytest.mark.skipif(INTERPRET, reason="compiles")
@pytest.mark.parametrize(("longest", "seen"), [(None, ["17 rows of one sign"]), (128, [])])
def test_sums_that_are_not_promoted_are_seen(longest, seen):
    """The check at start tells kernels apart that promote their sums and those that do not. Normally distributed
    numbers would not: their sums stay small."""
    problem = MatmulProblem(np.dtype("bfloat16"), np.dtype(FP8), 40, 14336, (1, 14336), activations=Activations(FP8))

    def on_hopper(x, w, count):
        rows = w8a8.quantize(x, w)
        sums = hopper_sums(np.asarray(rows.codes, np.float64), np.asarray(w.codes, np.float64), longest)
        return jnp.asarray(sums * np.asarray(rows.scale) * np.asarray(w.scale).T)

    with jax.disable_jit():  # the emulation is NumPy's
        found = selfcheck.check_matmul(on_hopper, problem, rows=(17,), repeats=0)
    assert [finding.what for finding in found] == ["17 rows", "17 rows of one sign"]
    assert [finding.what for finding in found if not finding.right] == seen


# --- interpreted by Triton ---


@pytest.mark.skipif(INTERPRET, reason="runs the others")
def test_interpreted():
    pytest.importorskip("jax_triton", reason="jax-triton is not installed")
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", __file__]
    done = subprocess.run(
        command, env={**os.environ, "TRITON_INTERPRET": "1", "JAX_PLATFORMS": "cpu"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "passed" in done.stdout


@pytest.mark.skipif(not INTERPRET, reason="runs in a process of its own, by test_interpreted")
@pytest.mark.parametrize("parts", [False, True])
@pytest.mark.parametrize(
    ("name", "tokens", "out", "inputs", "rows"),
    [
        ("fp8 in blocks", 3, 256, 1024, 128),
        ("fp8 in blocks", 17, 100, 320, 1),
        ("fp8 in blocks", 130, 136, 256, 128),
        ("fp8 in wide blocks", 5, 96, 600, 1),
        ("int8 in blocks", 5, 96, 512, 1),
        ("int8", 9, 100, 1100, 1),
        ("fp8", 3, 64, 2048, 64),
        ("fp8", 140, 100, 200, 1),
        ("fp8 given", 4, 96, 640, 1),
    ],
)
def test_kernel(monkeypatch, name, tokens, out, inputs, rows, parts):
    import test_triton

    from jaxserve.pallas_kernels import triton_compat
    from jaxserve.pallas_kernels.quant_matmul import w8a8_triton

    test_triton.repair_interpreter(monkeypatch)
    monkeypatch.setattr(triton_compat, "call", test_triton.interpret)
    monkeypatch.setattr(triton_compat, "target", lambda: triton_compat.Target(90, 132))
    x = inputs_of(tokens, inputs)
    w = weight(name, out, inputs, rows)
    with jax.disable_jit():
        rounded = w8a8.quantize(x, w)
        if parts:
            got = w8a8_triton.quant_matmul_parts(rounded, w)
            assert got.dtype == (jnp.float32 if len(got) > 1 else jnp.bfloat16)
            close(got.astype(jnp.float32).sum(0), gold_of(x, w), 1e-6 if len(got) > 1 else 2**-8)
        else:
            close(w8a8_triton.quant_matmul(rounded, w), gold_of(x, w), 1e-6)


# --- compiled ahead of time ---


def on(mesh, arrays):
    """The shapes of a tree of arrays, as arguments on a mesh's devices."""
    place = NamedSharding(mesh, PartitionSpec())
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place), arrays)


def compiled_product(target: str, name: str, tokens: int, out: int, inputs: int, rows: int = 1) -> str:
    mesh = mesh_of(target)
    w = on(mesh, jax.eval_shape(lambda: weight_shape(name, out, inputs, rows)))
    x = on(mesh, jax.ShapeDtypeStruct((tokens, inputs), jnp.bfloat16))
    device = Device.of(mesh.devices.flat[0])
    with jax.set_mesh(mesh):
        return jax.jit(matmul_of(device)).lower(x, w).compile().as_text()


def weight_shape(name: str, out: int, inputs: int, rows: int) -> QuantArray:
    wanted = WANTED[name]
    group = wanted.group or inputs
    scale = jnp.ones((-(-out // rows), -(-inputs // group)), jnp.float32)
    given = jnp.ones((1, 1), jnp.float32) if wanted.static else None
    codes = jnp.zeros((out, inputs), wanted.dtype)
    return QuantArray(codes, scale, block=(rows, group), input_scale=given, activations=wanted)


@pytest.mark.skipif(INTERPRET, reason="compiles")
@pytest.mark.parametrize("tokens", [16, 64, 1152])
@pytest.mark.parametrize(("name", "kind"), [("int8", "s8"), ("fp8", "f8e4m3fn"), ("fp8 given", "f8e4m3fn")])
def test_gpu_reads_eight_bits(name, kind, tokens):
    """One gemm of the codes as they are: nothing of the weight's size is made in another type."""
    text = compiled_product("h200x1", name, tokens, 4096, 2048)
    assert re.search(r" dot\(|__cublas", text)
    assert not re.search(
        r"= (?:bf16|f16|f32|s32)\[(?:4096,2048|2048,4096)\]\S* (?:fusion|convert|copy|custom-call)\(", text
    )
    assert re.search(rf"{kind}\[", text)
    assert "__triton_nested_gemm_fusion" in text or "__cublas" in text


@pytest.mark.skipif(INTERPRET, reason="compiles")
@pytest.mark.parametrize(("name", "tokens"), [("fp8", 1), ("fp8", 17), ("fp8 given", 64)])
def test_gpu_promotes_sums(name, tokens):
    """cuBLASLt without fast accumulation. XLA's Triton gemm would sum all inputs in the matrix unit."""
    text = compiled_product("h200x1", name, tokens, 4096, 2048)
    assert "gemm_fusion" not in text
    called = [line for line in text.splitlines() if "__cublas$lt$matmul$f8" in line]
    assert len(called) == (tokens > 1)
    assert all('"algorithm":"ALG_DOT_ANY_F8_ANY_F8_F32"' in line for line in called)


@pytest.mark.skipif(INTERPRET, reason="compiles")
def test_gpu_rounds_what_becomes_floats_again():
    """XLA:GPU removes conversions to float8 and back."""
    mesh = mesh_of("h200x1")
    x, w = on(mesh, (inputs_of(17, 256), jax.eval_shape(lambda: weight_shape("fp8", 64, 256, 1))))

    def emulated(x, w):
        return w8a8.emulated(w8a8.quantize(x, w), w, reference.quant_matmul)

    for function in (emulated, lambda x, w: w8a8.dequantize(w8a8.quantize(x, w))):
        with jax.set_mesh(mesh):
            assert "f8e4m3fn[17,256]" in jax.jit(function).lower(x, w).compile().as_text()


@pytest.mark.skipif(INTERPRET, reason="compiles")
@pytest.mark.parametrize("capability", [90, 89])
@pytest.mark.parametrize(
    ("name", "tokens"),
    [("fp8", 16), ("fp8", 520), ("fp8 in blocks", 64), ("fp8 in wide blocks", 64), ("fp8 given", 64)],
)
def test_kernel_promotes_sums(monkeypatch, tmp_path, name, tokens, capability):
    """At most 128 inputs are added in the matrix unit, also where Triton would go on by default."""
    library = pytest.importorskip("jax_triton.triton_lib", reason="jax-triton is not installed")

    from jaxserve.pallas_kernels import triton_compat

    mesh = mesh_of("h200x1")
    monkeypatch.setattr(library, "_JAX_TRITON_DUMP_DIR", str(tmp_path))
    monkeypatch.setattr(triton_compat, "target", lambda: triton_compat.Target(capability, 132))
    inputs = 3072 + capability * 256  # which no other test compiles: dumped is only what is compiled
    w = jax.eval_shape(lambda: weight_shape(name, 192, inputs, 1))
    rows = jax.eval_shape(w8a8.quantize, jax.ShapeDtypeStruct((tokens, inputs), jnp.bfloat16), w)
    with jax.set_mesh(mesh):
        jax.jit(lambda *a: w8a8.quant_matmul_parts(*a)).lower(*on(mesh, (rows, w)))
    (kernel,) = tmp_path.rglob("*.ptx")
    assert longest_sum(kernel.read_text()) == 128


def longest_sum(ptx: str) -> float:
    """Inputs that the matrix unit adds to one sum, by the instructions for 32 inputs each and the additions outside."""
    numbers = sum(int(n) // 2 for n in re.findall(r"(?:wgmma\.mma_async|mma\.sync)\S*n(\d+)k32", ptx))  # of a thread
    added = len(re.findall(r"\b(?:add|fma)(?:\.rn)?\.f32\b", ptx))
    return 32 * numbers / added if added else float("inf")


@pytest.mark.skipif(INTERPRET, reason="compiles")
@pytest.mark.parametrize("tokens", [16, 1152])
def test_gpu_blocks_compile(tokens):
    pytest.importorskip("jax_triton", reason="jax-triton is not installed")
    text = compiled_product("h200x1", "fp8 in blocks", tokens, 4096, 2048, 128)
    assert "triton_kernel_call" in text
    assert not re.search(r"= (?:bf16|f16|f32)\[4096,2048\]", text)


@pytest.mark.skipif(INTERPRET, reason="compiles")
@pytest.mark.parametrize("target", ["v5e-4", "v6e-4"])
@pytest.mark.parametrize("tokens", [16, 1152])
def test_tpu_multiplies_integers(target, tokens):
    text = compiled_product(target, "int8", tokens, 4096, 2048)
    assert re.search(r"s32\[\d+,4096\]\S* convolution\(", text)
    assert not re.search(r"= (?:bf16|f32|s32)\[4096,2048\]", text)
