"""The fused Triton kernels: interpreted against float64 NumPy, and compiled ahead of time. As in `test_triton`, the
interpreted tests run in a process of their own."""

import os
import subprocess
from dataclasses import replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("triton", reason="Triton is not installed")
pytest.importorskip("jax_triton", reason="jax-triton is not installed")

import test_triton
from devices import mesh_of
from jax.sharding import NamedSharding, PartitionSpec
from test_triton import INTERPRET, compiled, interpreted

from jaxserve.pallas_kernels import fused_triton, selfcheck_fused, triton_compat
from jaxserve.pallas_kernels.operands import Heads, Partials, Row
from jaxserve.pallas_kernels.ops import Ops
from jaxserve.pallas_kernels.quant_matmul import w8a8
from jaxserve.pallas_kernels.registry import AttentionProblem, Device
from jaxserve.pallas_kernels.types import Activations, KVPages, QuantArray, QuantRows

# Of the largest value: a rounding or two more than the one that the result itself needs.
TOLERANCE = {"float32": 1e-6, "float16": 2e-3, "bfloat16": 1.6e-2}
EPS = 1e-5


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


def numbers(rng, shape, dtype) -> jax.Array:
    return jnp.asarray(test_triton.rounded(rng, shape, dtype))


def parts_of(rng, parts: int, shape: tuple, dtype: str, bias: tuple | None = None) -> tuple[Partials, np.ndarray]:
    """Random parts (one is in `dtype` itself), and what they come to [tokens, …] in float64."""
    sums = numbers(rng, (parts, *shape), "float32" if parts > 1 else dtype)
    added = None if bias is None else numbers(rng, bias, dtype)
    gold = np.asarray(sums, np.float64).sum(0) + (0 if added is None else np.asarray(added, np.float64))
    return Partials(sums, added), gold


def row_of(rng, size: int, dtype: str) -> tuple[Row, np.ndarray]:
    """One of three rows, and its values in float64; the others are NaN."""
    value = numbers(rng, (size,), dtype)
    return Row(jnp.full((3, size), jnp.nan, dtype).at[1].set(value), jnp.int32(1)), np.asarray(value, np.float64)


def gold_norm(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * scale


def close(got: jax.Array, gold: np.ndarray, dtype: str) -> None:
    assert got.dtype == dtype
    assert got.shape == gold.shape
    np.testing.assert_allclose(np.asarray(got, np.float64), gold, rtol=0, atol=TOLERANCE[dtype] * np.abs(gold).max())


@interpreted
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("parts", "size", "bias"), [(0, 96, False), (1, 128, False), (7, 200, True)])
def test_add_norm(dtype, parts, size, bias):
    rng = np.random.default_rng(parts)
    x, (scale, factor) = numbers(rng, (5, size), dtype), row_of(rng, size, dtype)
    gold = np.asarray(x, np.float64)
    y = None
    if parts:
        y, added = parts_of(rng, parts, (5, size), dtype, (size,) if bias else None)
        gold = gold + added
    total, normed = fused_triton.add_norm(x, y, scale, EPS)
    close(total, gold, dtype)
    close(normed, gold_norm(gold, factor), dtype)
    if parts < 3:  # the order of a longer sum is XLA's
        np.testing.assert_array_equal(np.asarray(Ops().add_norm(x, y, scale, EPS)[0]), np.asarray(total))
    if parts:  # a row that is given by itself, and a bias that is one of several
        rows = None if y.bias is None else Row(jnp.stack([y.bias * jnp.nan, y.bias]), jnp.int32(1))
        again = fused_triton.add_norm(x, Partials(y.sums, rows), scale.value(), EPS)
        np.testing.assert_array_equal(np.asarray(again), np.asarray((total, normed)))


@interpreted
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_scales_in_float32(dtype):
    """Gemma's 1 + w: the results are rounded once, as those of the plain operations are."""
    rng = np.random.default_rng(3)
    x, (scale, factor) = numbers(rng, (5, 200), dtype), row_of(rng, 200, "float32")
    y, added = parts_of(rng, 1, (5, 200), dtype)
    gold = np.asarray(x, np.float64) + added
    normed = fused_triton.add_norm(x, y, scale, EPS)[1]
    close(normed, gold_norm(gold, factor), dtype)
    plain = Ops().add_norm(x, y, scale, EPS)[1]
    assert normed.dtype == plain.dtype == dtype
    assert (np.asarray(normed) == np.asarray(plain)).mean() > 0.97

    heads, _ = heads_of(rng, 4, dim=32, group=3, kv_heads=2, dtype=dtype, parts=1)
    wide = [row_of(rng, 32, "float32")[0] for _ in range(2)]
    heads = heads._replace(q_norm=wide[0], k_norm=wide[1])
    cache = KVPages(jnp.zeros((3, 2, 2, 16, 32), dtype))
    slots = jnp.asarray([0, 16, 7, 35], jnp.int32)
    got = fused_triton.rotate_and_write(heads, EPS, jnp.dtype(dtype), cache, slots, 0)
    expected = Ops().rotate_and_write(heads, EPS, jnp.dtype(dtype), cache, slots, 0)
    for mine, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        mine, other = (np.asarray(a).astype(np.float64) for a in (mine, other))
        assert (mine == other).mean() > 0.97
        np.testing.assert_allclose(mine, other, rtol=0, atol=2 * TOLERANCE[dtype] * np.abs(other).max())


@interpreted
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("activation", fused_triton.ACTIVATIONS)
@pytest.mark.parametrize(("parts", "size", "bias"), [(1, 1100, False), (3, 33, True)])
def test_gate(dtype, activation, parts, size, bias):
    rng = np.random.default_rng(size)
    y, gold = parts_of(rng, parts, (4, 2 * size), dtype, (2 * size,) if bias else None)
    gate = gold[:, ::2]
    up = gold[:, 1::2]
    with jax.enable_x64(True):
        activated = {"silu": jax.nn.silu, "gelu_tanh": jax.nn.gelu}.get(activation, lambda x: jax.nn.gelu(x, False))
        gold = np.asarray(activated(jnp.asarray(gate)), np.float64) * up
    close(fused_triton.gate(y, activation, jnp.dtype(dtype)), gold, dtype)


ROUNDED = {
    "int8": Activations("int8"),
    "fp8": Activations("float8_e4m3fn"),
    "fp8 with a ceiling": Activations("float8_e4m3fn", ceiling=1.5),
    "fp8 of groups": Activations("float8_e4m3fn", group=32),
    "fp8 given": Activations("float8_e4m3fn", static=True),
}


def reader_of(name: str, size: int) -> QuantArray:
    wanted = ROUNDED[name]
    given = jnp.full((1, 1), 0.0061, jnp.float32) if wanted.static else None
    codes = jnp.zeros((4, size), wanted.dtype)
    scale = jnp.full((4, 1), jnp.nan, jnp.float32)
    return QuantArray(codes, scale, input_scale=given, block=(1, wanted.group or size), activations=wanted)


def check_rounded(got: QuantRows, x: jax.Array, reader: QuantArray) -> None:
    """The codes and scales that plain XLA makes of x, to the bit."""
    want = w8a8.quantize(x, reader)
    np.testing.assert_array_equal(np.asarray(got.scale), np.asarray(want.scale))
    assert (got.codes.dtype, got.dtype, got.shape) == (want.codes.dtype, x.dtype, x.shape)
    np.testing.assert_array_equal(np.asarray(got.codes, np.float32), np.asarray(want.codes, np.float32))


@interpreted
@pytest.mark.parametrize("name", ROUNDED)
@pytest.mark.parametrize(("dtype", "size"), [("bfloat16", 128), ("float32", 200)])
def test_rounding(name, dtype, size):
    """Each kernel makes the codes of the numbers that it gives without a reader."""
    rng = np.random.default_rng(size)
    reader = reader_of(name, size)
    x, (scale, _) = numbers(rng, (5, size), dtype), row_of(rng, size, dtype)
    x = x.at[1].set(0).at[2].multiply(100)
    check_rounded(fused_triton.quantize(x, reader), x, reader)
    y, _ = parts_of(rng, 2, (5, size), dtype)
    total, normed = fused_triton.add_norm(x, y, scale, EPS)
    again, rounded = fused_triton.add_norm(x, y, scale, EPS, reader)
    np.testing.assert_array_equal(np.asarray(again), np.asarray(total))
    check_rounded(rounded, normed, reader)
    gates, _ = parts_of(rng, 3, (5, 2 * size), dtype)
    gated = fused_triton.gate(gates, "silu", jnp.dtype(dtype))
    check_rounded(fused_triton.gate(gates, "silu", jnp.dtype(dtype), reader), gated, reader)


@interpreted
@pytest.mark.parametrize("name", ["int8", "fp8", "fp8 of groups"])
def test_rounding_what_is_no_number(name):
    """The scale says so, and no other token's does."""
    reader = reader_of(name, 64)
    x = jnp.ones((4, 64), jnp.float32).at[1, 3].set(jnp.nan).at[2, 40].set(-jnp.inf)
    for rows in (fused_triton.quantize(x, reader), w8a8.quantize(x, reader)):
        assert np.isinf(np.asarray(rows.scale)).any(1).tolist() == [False, True, True, False]
        assert np.isfinite(np.asarray(w8a8.dequantize(rows))[[0, 3]]).all()


@interpreted
def test_gate_of_a_wide_token(monkeypatch):
    """It is not rounded in the same launch."""
    monkeypatch.setattr(fused_triton, "WHOLE_GATE", 64)
    gates, _ = parts_of(np.random.default_rng(0), 1, (2, 256), "float32")
    gated = fused_triton.gate(gates, "silu", jnp.dtype("float32"), reader_of("int8", 128))
    assert isinstance(gated, jax.Array)


CASES = {
    "8B": test_triton.case(dim=128, group=4, kv_heads=2, dtype="bfloat16", parts=4),
    "norms, bias": test_triton.case(dim=64, group=2, kv_heads=3, dtype="bfloat16", parts=1, norms=True, bias=True),
    "odd sizes": test_triton.case(dim=80, group=7, kv_heads=1, dtype="float16", parts=2, bias=True),
    "int8": test_triton.case(dim=64, group=1, kv_heads=2, dtype="bfloat16", parts=2, kv="int8"),
    "fp8": test_triton.case(dim=128, group=3, kv_heads=2, dtype="bfloat16", parts=1, norms=True, kv="float8_e4m3fn"),
    "float32": test_triton.case(dim=96, group=2, kv_heads=2, dtype="float32", parts=1, norms=True, page=8),
}


def heads_of(rng, tokens, dim, group, kv_heads, dtype, parts, norms=False, bias=False) -> tuple[Heads, np.ndarray]:
    """New heads, and in float64 what the plain operations make of them [tokens, kv_heads, group + 2, head_dim]."""
    shape = (kv_heads, group + 2, dim)
    qkv, gold = parts_of(rng, parts, (tokens, *shape), dtype, shape if bias else None)
    angles = rng.uniform(0, 6, (tokens, dim // 2)).astype(np.float32)
    cos = np.cos(angles)
    sin = np.sin(angles)
    scales: tuple = (None, None)
    if norms:
        (q_norm, of_q), (k_norm, of_k) = row_of(rng, dim, dtype), row_of(rng, dim, dtype)
        scales = q_norm, k_norm
        gold[:, :, :-2] = gold_norm(gold[:, :, :-2], of_q)
        gold[:, :, -2] = gold_norm(gold[:, :, -2], of_k)
    left, right = np.split(gold[:, :, :-1].copy(), 2, -1)
    c = cos[:, None, None]
    s = sin[:, None, None]
    gold[:, :, :-1] = np.concatenate([left * c - right * s, right * c + left * s], -1)
    return Heads(qkv, jnp.asarray(cos), jnp.asarray(sin), *scales), gold


@interpreted
@pytest.mark.parametrize("name", CASES)
def test_rotate_and_write(name):
    case = {"kv": None, "page": 16} | CASES[name]
    kv = case.pop("kv") or case["dtype"]
    page = case.pop("page")
    rng = np.random.default_rng(len(name))
    tokens = 6
    pages = 5
    first = 3
    heads, gold = heads_of(rng, tokens, **case)
    kv_heads = case["kv_heads"]
    dim = case["dim"]
    dtype = case["dtype"]
    # Pages before `first_page` belong to other layers. What nobody writes is NaN, or a code that is no result.
    quantized = kv in ("int8", "float8_e4m3fn")
    shape = (first + pages, 2, kv_heads, page)
    before = np.full((*shape, dim), -128 if kv == "int8" else np.nan, kv)
    scales = np.full(shape, np.nan, np.float32) if quantized else None
    slots = np.array([0, 3 * page + 5, -1, page - 1, 2 * page, -1], np.int32)
    cache = KVPages(jnp.asarray(before), None if scales is None else jnp.asarray(scales))
    q, new = fused_triton.rotate_and_write(heads, EPS, jnp.dtype(dtype), cache, jnp.asarray(slots), jnp.int32(first))
    close(q, gold[:, :, :-2], dtype)

    data = np.asarray(new.data).astype(np.float64)
    written = np.zeros(shape, bool)
    unit = 1.0 if new.scale is None else np.asarray(new.scale, np.float64)[..., None]
    for token, slot in enumerate(slots):
        if slot < 0:
            continue
        at = (first + slot // page, slice(None), slice(None), slot % page)
        written[at] = True
        want = gold[token, :, -2:].swapaxes(0, 1)  # [key and value, kv_heads, head_dim]
        got = (data * unit)[at]
        error = TOLERANCE[dtype] + {"int8": 0.5 / 127, "float8_e4m3fn": 2.0**-4}.get(kv, 0)
        np.testing.assert_allclose(got, want, rtol=0, atol=error * np.abs(want).max())
        if quantized:
            largest = np.abs(want).max(-1) / {"int8": 127, "float8_e4m3fn": 448}[kv]
            np.testing.assert_allclose(np.asarray(new.scale)[at], largest, rtol=2 * TOLERANCE[dtype])
    np.testing.assert_array_equal(data[~written], before[~written].astype(np.float64))
    if scales is not None:
        np.testing.assert_array_equal(np.asarray(new.scale)[~written], scales[~written])


@interpreted
@pytest.mark.parametrize("name", CASES)
def test_rotate_and_write_as_the_plain_operations(name):
    """Where both round at the same places, they differ in a last bit at most."""
    case = {"kv": None, "page": 16} | CASES[name]
    kv = case.pop("kv") or case["dtype"]
    page = case.pop("page")
    rng = np.random.default_rng(1)
    heads, _ = heads_of(rng, 4, **case)
    shape = (3, 2, case["kv_heads"], page)
    scale = jnp.ones(shape, jnp.float32) if kv in ("int8", "float8_e4m3fn") else None
    cache = KVPages(jnp.zeros((*shape, case["dim"]), kv), scale)
    slots = jnp.asarray([1, page, 7, 2 * page + 3], jnp.int32)
    dtype = jnp.dtype(case["dtype"])
    got = fused_triton.rotate_and_write(heads, EPS, dtype, cache, slots, 0)
    plain = Ops().rotate_and_write(heads, EPS, dtype, cache, slots, 0)
    for mine, other in zip(jax.tree.leaves(got), jax.tree.leaves(plain), strict=True):
        assert mine.dtype == other.dtype
        step = {"int8": 1.0, "float8_e4m3fn": 2.0**-3}.get(mine.dtype.name, 2.0**-7)
        same, (mine, other) = mine.dtype != np.float32, (np.asarray(a).astype(np.float64) for a in (mine, other))
        assert (np.abs(mine - other) <= np.maximum(step * np.abs(other), step)).all()
        if same:
            assert (mine == other).mean() > 0.97


class Spoilt:
    """The kernels, with a mistake in one of them."""

    def __init__(self, name: str, spoil):
        self.name = name
        self.spoil = spoil

    def __getattr__(self, name: str):
        right = getattr(fused_triton, name)
        return (lambda *args: self.spoil(right(*args))) if name == self.name else right


def _spoil(made, change=lambda x: x, codes=False):
    """Floats that are changed, or codes one of which is off by two."""
    if not isinstance(made, QuantRows):
        return change(made)
    return replace(made, codes=made.codes.at[3, 7].add(2)) if codes else made


@interpreted
@pytest.mark.parametrize("kv", ["bfloat16", "int8", "float8_e4m3fn"])
def test_check_on_a_device(kv):
    """What a device must pass before it may use them: the kernels do, and mistakes do not."""
    bf16 = np.dtype("bfloat16")
    problem = AttentionProblem(bf16, np.dtype(kv), 2, 3, 64, 16, has_scale=kv != "bfloat16")
    found = list(selfcheck_fused.check_fused(fused_triton, problem))
    assert len(found) == (14 if kv != "bfloat16" else 13)
    assert all(finding.right for finding in found), found
    if kv != "bfloat16":
        return
    mistakes = {
        "queries": Spoilt("rotate_and_write", lambda out: (out[0].at[5, 1, 2].multiply(1.05), out[1])),
        "keys and values": Spoilt("rotate_and_write", lambda out: (out[0], KVPages(out[1].data.at[2, 1, 0].set(0)))),
        "pages that nobody wrote": Spoilt("rotate_and_write", lambda out: (out[0], KVPages(out[1].data.at[0].set(0)))),
        "sum and norm of 2880": Spoilt(
            "add_norm", lambda out: (out[0], _spoil(out[1], lambda x: x.at[36, -1].add(0.2)))
        ),
        "norm of 2880 in int8": Spoilt("add_norm", lambda out: (out[0], _spoil(out[1], codes=True))),
        "gate of 4096": Spoilt("gate", lambda out: _spoil(out, lambda x: x.at[0, 4095].set(jnp.nan))),
    }
    for what, spoilt in mistakes.items():
        assert what in [f.what for f in selfcheck_fused.check_fused(spoilt, problem) if not f.right]


def test_product():
    """The dense product's parts add up to it, and few tokens are split."""
    rng = np.random.default_rng(0)
    monkey = pytest.MonkeyPatch()
    with monkey.context() as patch:
        patch.setattr(triton_compat, "target", lambda: triton_compat.Target(90, 132))
        x = numbers(rng, (3, 1024), "float32")
        w = numbers(rng, (256, 1024), "float32")
        got = fused_triton.product(x, w)
        assert got.shape == (8, 3, 256)
        assert got.dtype == jnp.float32
        gold = np.asarray(x, np.float64) @ np.asarray(w, np.float64).T
        np.testing.assert_allclose(np.asarray(got.sum(0)), gold, rtol=0, atol=1e-5 * np.abs(gold).max())
        whole = fused_triton.product(jnp.zeros((2048, 1024), jnp.bfloat16), jnp.zeros((4096, 1024), jnp.bfloat16))
        assert whole.shape == (1, 2048, 4096)
        assert whole.dtype == ml_dtypes.bfloat16


def test_why_not():
    assert fused_triton.why_not(Device("gpu", "NVIDIA H200", (9, 0)), "bfloat16") is None
    assert "8.0 or newer" in fused_triton.why_not(Device("gpu", "T4", (7, 5)), "float16")
    assert "NVIDIA" in fused_triton.why_not(Device("cpu", "cpu"), "float32")
    assert "float64" in fused_triton.why_not(Device("gpu", "NVIDIA H200", (9, 0)), "float64")


# --- compiled ahead of time ---


@compiled
@pytest.mark.parametrize("kv", ["bfloat16", "int8", "float8_e4m3fn"])
def test_compiles(kv, monkeypatch, tmp_path):
    """In one program, with the cache in place; Triton's own assembler takes each kernel, without spills."""
    monkeypatch.setattr("jax_triton.triton_lib._JAX_TRITON_DUMP_DIR", str(tmp_path))
    mesh = mesh_of("h200x1")
    place = NamedSharding(mesh, PartitionSpec())

    def like(shape, dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=place)

    tokens = 64
    hidden = 4096
    kv_heads = 8
    group = 4
    dim = 128
    shape = (733, 2, kv_heads, 16)
    pages = KVPages(like((*shape, dim), kv), None if kv == "bfloat16" else like(shape, "float32"))
    qkv = like((4, tokens, kv_heads, group + 2, dim), "float32"), like((kv_heads, group + 2, dim), "bfloat16")
    angle = like((tokens, dim // 2), "float32")
    norms = Row(like((9, dim), "bfloat16"), like((), "int32"))
    heads = Heads(Partials(*qkv), angle, angle, norms, norms)
    y = Partials(like((8, tokens, hidden), "float32"))
    scale = Row(like((9, hidden), "bfloat16"), like((), "int32"))
    gate_up = Partials(like((1, tokens, 2 * 14336), "bfloat16"))

    def step(pages, heads, slots, first_page, x, y, scale, gate_up):
        q, pages = fused_triton.rotate_and_write(heads, EPS, jnp.bfloat16, pages, slots, first_page)
        total, normed = fused_triton.add_norm(x, y, scale, EPS)
        return pages, q, total, normed, [fused_triton.gate(gate_up, a, jnp.bfloat16) for a in fused_triton.ACTIVATIONS]

    arguments = pages, heads, like((tokens,), "int32"), like((), "int32"), like((tokens, hidden), "bfloat16")
    with jax.set_mesh(mesh):
        program = jax.jit(step, donate_argnums=0).lower(*arguments, y, scale, gate_up).compile()
    text = program.as_text()
    memory = program.memory_analysis()
    assert text.count(" custom-call(") == 5
    assert " fusion(" not in text.partition("\nENTRY")[2]
    assert memory.alias_size_in_bytes == sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(pages))
    assert memory.temp_size_in_bytes < 4096
    kernels = list(tmp_path.rglob("*.ptx"))
    assert kernels  # those that no other test has compiled yet
    for kernel in kernels:
        assembler = [os.environ["TRITON_PTXAS_BLACKWELL_PATH"], "-v", "-arch=sm_90a", kernel, "-o", os.devnull]
        said = subprocess.run(assembler, check=True, capture_output=True, text=True).stderr
        assert "0 bytes spill stores" in said


@compiled
def test_batches_of_all_sizes_share_kernels(monkeypatch):
    """The number of tokens is an argument of the kernels, so that a process compiles each once for all its programs. In
    jax-triton 0.3, which takes it for a constant, it does not."""
    library = pytest.importorskip("jax_triton.triton_lib", reason="jax-triton is not installed")
    if not hasattr(library, "TritonFunction"):
        pytest.skip("jax-triton 0.3 makes numbers constants, so that each has a kernel of its own")
    mesh = mesh_of("h200x1")
    compiled = []
    compile_kernel = library.TritonFunction._compile_kernel

    def counted(self, *arguments):
        compiled.append(self.name)
        return compile_kernel(self, *arguments)

    monkeypatch.setattr(library.TritonFunction, "_compile_kernel", counted)

    def like(shape, dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec()))

    # as in no other test
    kv_heads = 2
    group = 4
    dim = 64
    hidden = 4 * 64
    size = 384
    pages = KVPages(like((37, 2, kv_heads, 16, dim), "bfloat16"), None)

    def step(pages, heads, slots, x, y, scale, gate_up):
        q, pages = fused_triton.rotate_and_write(heads, EPS, jnp.bfloat16, pages, slots, 0)
        total, normed = fused_triton.add_norm(x, y, scale, EPS)
        return pages, q, total, normed, fused_triton.gate(gate_up, "silu", jnp.bfloat16)

    for tokens in (8, 24, 520):
        angle = like((tokens, dim // 2), "float32")
        sums = like((2, tokens, kv_heads, group + 2, dim), "float32")
        heads = Heads(Partials(sums), angle, angle)
        x = like((tokens, hidden), "bfloat16")
        y, gate_up = (Partials(like((2, tokens, n), "float32")) for n in (hidden, 2 * size))
        with jax.set_mesh(mesh):
            jax.jit(step).lower(pages, heads, like((tokens,), "int32"), x, y, like((hidden,), "bfloat16"), gate_up)
    assert sorted(compiled) == ["_add_norm", "_gate", "_rotate_and_write"]
