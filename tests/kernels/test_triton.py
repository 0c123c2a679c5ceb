"""The Triton kernels: interpreted against float64 NumPy, and compiled ahead of time.

Triton decides on import whether it interprets its kernels, and interpreted kernels do not pass through jax-triton.
The interpreted tests therefore run in a process of their own (`test_interpreted`), where a stand-in for
`triton_compat.call` hands the kernels pointers to NumPy arrays. What no row owns is poisoned with NaN.
"""

import os
import re
import subprocess
import sys
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("triton", reason="Triton is not installed")
pytest.importorskip("jax_triton", reason="jax-triton is not installed")

from devices import mesh_of
from jax.sharding import NamedSharding, PartitionSpec

from jaxserve.pallas_kernels import triton_compat, work_lists
from jaxserve.pallas_kernels.experts import as_codes
from jaxserve.pallas_kernels.paged_attention import spans_triton
from jaxserve.pallas_kernels.paged_attention import triton_gpu as attention
from jaxserve.pallas_kernels.quant_matmul import blocks, reference, triton_blocks
from jaxserve.pallas_kernels.quant_matmul import triton_gpu as matmul
from jaxserve.pallas_kernels.quant_matmul.triton_fp4 import fp4_ptx
from jaxserve.pallas_kernels.registry import AttentionProblem, Device, MatmulProblem
from jaxserve.pallas_kernels.types import BLOCK_KINDS, BlockArray, KVPages, QuantArray

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRET, reason="runs in a process of its own, by test_interpreted")
compiled = pytest.mark.skipif(INTERPRET, reason="kernels are interpreted in this process")

TRITON_TYPES = {
    "bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "int32": "i32", "int16": "i16", "int8": "i8",
    "uint8": "u8", "uint32": "u32", "float8_e4m3fn": "fp8e4nv",
}  # fmt: skip
FLOAT4 = "float4_e2m1fn"
TOLERANCE = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 2.5e-2}


def run_interpreted(file: str, group: str = "not slow") -> None:
    """Runs a file's interpreted tests where Triton interprets; those of the `group` of pytest's -m."""
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", "-m", group, file]
    done = subprocess.run(
        command, env={**os.environ, "TRITON_INTERPRET": "1", "JAX_PLATFORMS": "cpu"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "passed" in done.stdout


@compiled
def test_interpreted():
    """Runs this file's interpreted tests where Triton interprets."""
    run_interpreted(__file__)


# --- interpreted ---


class Pointer:
    """A NumPy array as the interpreter wants its arguments."""

    def __init__(self, array: np.ndarray):
        self.array = array
        self.dtype = TRITON_TYPES[array.dtype.name]

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def untyped_storage(self):
        return self

    def cpu(self):
        return self

    def copy_(self, other): ...

    def new_empty(self, *sizes, device):
        return self

    def set_(self, *of): ...

    def storage_offset(self) -> int:
        return 0

    def size(self) -> tuple[int, ...]:
        return self.array.shape

    def stride(self) -> tuple[int, ...]:
        return self.array.strides


def interpret(kernel, *arrays, out, grid, num_warps=4, num_stages=2, aliases=None, **constants):
    """As `triton_compat.call`; what the kernel does not write is NaN (or the lowest integer)."""
    inputs = [np.array(array) for array in arrays]
    outputs = []
    for like in out:
        integer = np.issubdtype(like.dtype, np.integer)
        outputs.append(np.full(like.shape, np.iinfo(like.dtype).min if integer else np.nan, like.dtype))
    for i, output in (aliases or {}).items():
        outputs[output] = inputs[i]
    kernel[grid](*map(Pointer, inputs), *map(Pointer, outputs), **constants)
    return tuple(map(jnp.asarray, outputs))


def repair_interpreter(monkeypatch):
    """Triton's interpreter holds bfloat16 as integers, and forgets it when it multiplies or converts from integers; it
    cuts float32 off to bfloat16 instead of rounding; when it rounds to float8, carries out of the mantissa are lost."""
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    dot = builder.create_dot
    cast = builder.cast_impl
    convert = builder.create_fp_to_fp
    bf16 = interpreter.tl.bfloat16
    f32 = interpreter.tl.float32
    fp8 = interpreter.tl.float8e4nv

    def wide(self, a):
        return cast(self, a, f32) if a.dtype.scalar == bf16 else a

    def cast_impl(self, source, to):
        if to.scalar == bf16 and source.dtype.scalar != f32:
            source = cast(self, source, f32)
        if to.scalar == bf16 and source.dtype.scalar == f32:
            return interpreter.TensorHandle(source.data.astype(ml_dtypes.bfloat16).view(np.uint16), bf16)
        return cast(self, source, to)

    def fp_to_fp(self, source, to, rounding):
        if to.scalar == fp8 and source.dtype.scalar == f32:
            return interpreter.TensorHandle(source.data.astype(ml_dtypes.float8_e4m3fn).view(np.uint8), fp8)
        if to.scalar == bf16 and source.dtype.scalar == f32:
            return interpreter.TensorHandle(source.data.astype(ml_dtypes.bfloat16).view(np.uint16), bf16)
        return convert(self, source, to, rounding)

    monkeypatch.setattr(builder, "create_fp_to_fp", fp_to_fp)
    monkeypatch.setattr(builder, "create_dot", lambda self, a, b, *rest: dot(self, wide(self, a), wide(self, b), *rest))
    monkeypatch.setattr(builder, "cast_impl", cast_impl)


@pytest.fixture(autouse=True)
def interpreter(monkeypatch):
    if INTERPRET:
        repair_interpreter(monkeypatch)
        monkeypatch.setattr(triton_compat, "call", interpret)
        monkeypatch.setattr(matmul, "PTX", False)  # see test_ptx_of_int4
        monkeypatch.setattr(triton_blocks, "PTX", False)  # see test_ptx_of_blocks
        monkeypatch.setattr(triton_compat, "target", lambda: triton_compat.Target(90, 1))
        with jax.disable_jit(), np.errstate(over="ignore"):
            yield
    else:
        yield


def rounded(rng, shape, dtype) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32).astype(dtype)


def gold_attention(q, kv, lengths, q_lens, scale, window=None, softcap=None, sinks=None) -> np.ndarray:
    """float64; kv: per row [2, kv_heads, positions, head_dim]."""
    out = np.zeros(q.shape)
    token = 0
    for row, (length, count) in enumerate(zip(lengths, q_lens, strict=True)):
        for i in range(count):
            last = length - count + i
            first = max(0, last - window + 1) if window else 0
            k, v = kv[row][:, :, first : last + 1]
            scores = np.einsum("hgd,hsd->hgs", q[token].astype(np.float64), k) * scale
            if softcap:
                scores = softcap * np.tanh(scores / softcap)
            total = np.exp(scores).sum(-1)
            if sinks is not None:
                total = total + np.exp(sinks)
            out[token] = np.einsum("hgs,hsd->hgd", np.exp(scores) / total[..., None], v)
            token += 1
    return out


def batch(rng, *, q_lens, lengths, heads, group, dim, page, dtype, kv_dtype, tokens, window=None, first_page=0):
    """Arguments of `paged_attention`, and what `gold_attention` wants. Pages that no row may read hold NaN (scales of
    integers do), and table entries beyond a row's pages, or behind its window, point to them. So do the pages before
    `first_page`, from which the table counts, and as many of the next layer."""
    rows = len(q_lens)
    width = max(-(-max(lengths) // page), 1) + 2
    count = rows * width + 1
    poison = count - 1
    quantized = kv_dtype in ("int8", "float8_e4m3fn")
    data = np.full((count, 2, heads, page, dim), 100 if kv_dtype == "int8" else np.nan, kv_dtype)
    scale = np.full((count, 2, heads, page), np.nan, np.float32) if quantized else None
    table = np.full((rows, width), poison, np.int32)
    free = list(rng.permutation(count - 1))
    kv = []
    for row, length in enumerate(lengths):
        value = rounded(rng, (2, heads, length, dim), np.float32)
        scales = rng.uniform(0.01, 0.02, (2, heads, length)).astype(np.float32)
        codes = np.round(value * 50).astype(kv_dtype) if quantized else value.astype(kv_dtype)
        first = max(0, length - q_lens[row] - window + 1) if window else 0
        for position in range(first, length):
            if table[row, position // page] == poison:
                table[row, position // page] = free.pop()
            at = table[row, position // page], slice(None), slice(None), position % page
            data[at] = codes[:, :, position]
            if quantized:
                scale[at] = scales[:, :, position]
        kv.append(codes.astype(np.float64) * (scales[..., None] if quantized else 1))
    starts = np.concatenate([[0], np.cumsum(q_lens)]).astype(np.int32)
    q = np.full((tokens, heads, group, dim), np.nan, dtype)
    q[: starts[-1]] = rounded(rng, (starts[-1], heads, group, dim), dtype)
    decodes = next((i for i, n in enumerate(q_lens) if n != 1), rows)
    of_others = np.repeat(data[poison:], first_page, axis=0)
    data = np.concatenate([of_others, data, of_others])
    if scale is not None:
        scale = np.pad(scale, ((first_page, first_page), (0, 0), (0, 0), (0, 0)), constant_values=np.nan)
    pages = KVPages(jnp.asarray(data), None if scale is None else jnp.asarray(scale))
    arguments = jnp.asarray(q), pages, table, starts, np.array(lengths, np.int32), np.int32(decodes)
    return arguments, q, kv


def case(**options):
    return options


CASES = {
    "decode": case(q_lens=[1, 1, 1], lengths=[1, 16, 33], group=4, decode_only=True),
    "decode, padding": case(q_lens=[1, 1, 0, 0], lengths=[65, 48, 0, 0], group=7, dim=80, tokens=6, decode_only=True),
    "decode, split": case(
        q_lens=[1, 1, 0], lengths=[700, 3, 0], heads=1, page=256, dim=16, cores=4, decode_only=True, first_page=1
    ),
    "decode, split, sinks": case(
        q_lens=[1, 1], lengths=[520, 70], heads=1, group=2, dim=16, cores=4, sinks=True, window=300, decode_only=True
    ),
    "prompt": case(q_lens=[40, 0, 23], lengths=[40, 0, 64], group=4, tokens=70),
    "mixed": case(
        q_lens=[1, 1, 5, 9], lengths=[17, 100, 5, 80], group=7, dim=96, page=32, tokens=18, sinks=True, first_page=7
    ),
    "mixed, page 64": case(q_lens=[1, 0, 70], lengths=[64, 0, 200], page=64, heads=1, group=1, tokens=80),
    "mixed, window": case(q_lens=[1, 1, 20], lengths=[90, 4, 150], window=18, softcap=5.0, group=1, tokens=22),
    "mixed, window, page 128": case(q_lens=[1, 9, 20], lengths=[190, 200, 300], window=70, page=128, heads=1),
    "page 48": case(q_lens=[1, 3], lengths=[49, 97], page=48, heads=1),
    "bfloat16": case(q_lens=[1, 30], lengths=[70, 130], dtype="bfloat16", softcap=20.0),
    "float16, int8": case(
        q_lens=[1, 30], lengths=[70, 130], dtype="float16", kv_dtype="int8", sinks=True, first_page=3
    ),
    "bfloat16, int8": case(q_lens=[1, 30], lengths=[70, 80], dtype="bfloat16", kv_dtype="int8", window=33),
    "bfloat16, float8": case(q_lens=[1, 30], lengths=[70, 130], dtype="bfloat16", kv_dtype="float8_e4m3fn", page=64),
    "head_dim 96, split, padding": case(
        q_lens=[1, 1, 0, 0], lengths=[700, 70, 0, 0], dim=96, dtype="bfloat16", cores=8, tokens=4, decode_only=True
    ),
    "head_dim 80, int8": case(
        q_lens=[1, 1, 12], lengths=[300, 33, 90], dim=80, dtype="bfloat16", kv_dtype="int8", window=100, softcap=3.0
    ),
    "head_dim 112, float8": case(
        q_lens=[1, 1], lengths=[64, 9], dim=112, dtype="float16", kv_dtype="float8_e4m3fn", sinks=True, decode_only=True
    ),
    "head_dim 120": case(q_lens=[1, 9], lengths=[40, 50], group=1, dim=120, dtype="bfloat16"),
    "head_dim 256": case(q_lens=[1, 9], lengths=[40, 50], heads=1, group=1, dim=256, dtype="float16"),
    "head_dim 512": case(q_lens=[1, 9], lengths=[40, 50], heads=1, group=8, dim=512, dtype="bfloat16"),
}


@interpreted
@pytest.mark.parametrize("name", CASES)
def test_attention(name, monkeypatch):
    case = {"heads": 2, "group": 2, "dim": 32, "page": 16, "dtype": "float32", "window": None} | CASES[name]
    options = {key: case.pop(key, None) for key in ("softcap", "cores", "sinks", "decode_only")}
    if options["cores"]:
        monkeypatch.setattr(triton_compat, "target", lambda: triton_compat.Target(90, options["cores"]))
    rng = np.random.default_rng(len(name))
    case.setdefault("kv_dtype", case["dtype"])
    case.setdefault("tokens", sum(case["q_lens"]))
    arguments, q, kv = batch(rng, **case)
    sinks = rng.standard_normal((case["heads"], case["group"])) if options["sinks"] else None
    first_page = case.get("first_page", 0)
    extra = {"scale": case["dim"] ** -0.5, "window": case["window"], "softcap": options["softcap"]}
    out = attention.paged_attention(
        *arguments,
        sinks=None if sinks is None else jnp.asarray(sinks),
        decode_only=bool(options["decode_only"]),
        first_page=jnp.int32(first_page),
        **extra,
    )
    assert out.dtype == q.dtype
    out = np.asarray(out, np.float64)
    real = sum(case["q_lens"])
    assert np.isfinite(out).all()
    gold = gold_attention(q, kv, case["lengths"], case["q_lens"], sinks=sinks, **extra)
    np.testing.assert_allclose(out[:real], gold[:real], rtol=0, atol=TOLERANCE[case["dtype"]])


@interpreted
@pytest.mark.parametrize(("lengths", "window", "most"), [
    ([6400, 1, 0, 64, 65, 3000, 0, 128, 1100], None, 16), ([6400, 1, 0, 64, 65, 3000, 0, 128, 1100], 100, 16),
    ([0], None, 16), ([0, 1, 0], 700, 1), ([128_000, *[1] * 63], None, 16), ([33_000] * 70, None, 1),
])  # fmt: skip
def test_spans_of_decode(lengths, window, most):
    """Those of XLA's lists, and the counters behind them."""
    length = jnp.asarray(lengths, jnp.int32)
    for heads, programs in ((8, 264), (3, 7)):
        programs = min(programs, len(lengths) * most * heads)
        found = spans_triton.spans_and_counters(length, heads, programs, block=64, window=window, most=most)
        expected = np.asarray(work_lists.equal_spans(length, work_lists.cut(length, 64, window, most), heads, programs))
        spans, counters = np.split(np.asarray(found), [5 * (programs + 1)])
        spans = spans.reshape(-1, 5)
        np.testing.assert_array_equal(spans[:-1], expected[:-1])
        assert spans[-1, 0] == expected[-1, 0], "the number of all items, which alone has a meaning"
        assert counters.tolist() == [0] * len(lengths) * heads


@interpreted
@pytest.mark.parametrize(("dtype", "heads", "dim"), [("float32", 2, 16), ("bfloat16", 3, 80)])
@pytest.mark.parametrize("kv_dtype", ["same", "int8", "float8_e4m3fn"])
def test_write_kv(dtype, kv_dtype, heads, dim):
    rng = np.random.default_rng(dim)
    page = 16
    pages = 5
    kv_dtype = dtype if kv_dtype == "same" else kv_dtype
    quantized = kv_dtype in attention.QUANTIZED
    data = rounded(rng, (pages, 2, heads, page, dim), kv_dtype)
    scale = rounded(rng, (pages, 2, heads, page), np.float32) if quantized else None
    new = rounded(rng, (2, 6, heads, dim), dtype)
    new[0, 1, 0] = 0
    slots = np.array([16, 63, 31, 32, -1, -1], np.int32)  # page borders, padding; in the pages from 1 on
    out = attention.write_kv(
        KVPages(jnp.asarray(data), None if scale is None else jnp.asarray(scale)), *map(jnp.asarray, new), slots, 1
    )
    assert out.data.dtype == kv_dtype
    got = np.array(out.data, np.float32)
    expected = data.astype(np.float32)
    got_scale = np.array(out.scale) if quantized else None
    for token, slot in enumerate(slots[:4]):
        at = 1 + slot // page, slice(None), slice(None), slot % page
        value = new[:, token].astype(np.float32)
        if quantized:
            amax = np.abs(value).max(-1)
            wanted = np.where(amax > 0, amax / attention.QUANTIZED[kv_dtype], 1).astype(np.float32)
            np.testing.assert_allclose(got_scale[at], wanted, rtol=1e-6)
            value = value / got_scale[at][..., None]
            value = np.round(value) if kv_dtype == "int8" else value
        expected[at] = value.astype(kv_dtype).astype(np.float32)
    np.testing.assert_array_equal(got, expected)
    if quantized:
        touched = np.zeros(pages * page, bool)
        touched[page + slots[:4]] = True
        untouched = np.broadcast_to(~touched.reshape(pages, 1, 1, page), scale.shape)
        np.testing.assert_array_equal(got_scale[untouched], scale[untouched])


def quantized_weight(rng, outputs, inputs, codes, block, zero=False, bias=False, scale_dtype="float32"):
    """A random QuantArray, and its values in float64."""
    if codes == "float8_e4m3fn":
        values = rounded(rng, (outputs, inputs), codes)
        values[0, 0] = 2.0**-9  # the smallest, below the normal ones
    elif codes == FLOAT4:
        values = rng.integers(0, 16, (outputs, inputs), np.uint8).view(codes)
    else:
        low, high = (-8, 8) if codes == "int4" else (-128, 128)
        values = rng.integers(low, high, (outputs, inputs)).astype(np.int8)
    shape = -(-outputs // block[0]), -(-inputs // block[1])
    scale = rng.uniform(0.5, 1, shape).astype(scale_dtype)
    if scale_dtype == "float8_e8m0fnu":
        scale = rng.integers(117, 131, shape, np.uint8).view(scale_dtype)
    gain = rng.uniform(0.5, 1, (outputs, 1)).astype(np.float32) if scale_dtype == "float8_e4m3fn" else None
    zeros = rng.integers(-8, 8, shape).astype(np.int8) if zero else None
    biases = rng.standard_normal(shape).astype(scale_dtype) if bias else None

    def spread(parameter):
        return np.kron(parameter.astype(np.float64), np.ones(block))[:outputs, :inputs]

    gold = values.astype(np.float64)
    gold = (gold - (spread(zeros) if zero else 0)) * spread(scale) + (spread(biases) if bias else 0)
    gold = gold if gain is None else gold * gain
    array = jnp.asarray(values).astype(jnp.int4) if codes == "int4" else jnp.asarray(values)
    optional = [None if parameter is None else jnp.asarray(parameter) for parameter in (zeros, biases, gain)]
    return QuantArray(array, jnp.asarray(scale), *optional[:2], block=block, gain=optional[2]), gold


MATMULS = {
    "int8, per channel": case(codes="int8", block=(1, 200), inputs=200, outputs=70),
    "int8, per channel, zero, bias": case(codes="int8", block=(1, 256), inputs=256, zero=True, bias=True),
    "int8, groups": case(codes="int8", block=(1, 128), inputs=320, outputs=100, zero=True),
    "int4, groups of 32": case(codes="int4", block=(1, 32), inputs=96),
    "int4, groups of 64": case(codes="int4", block=(1, 64), inputs=200, outputs=33, zero=True, scale_dtype="float16"),
    "int4, groups of 128": case(codes="int4", block=(1, 128), inputs=256, bias=True, zero=True, tokens=17),
    "int4, per channel": case(codes="int4", block=(1, 130), inputs=130, bias=True),
    "int4, splits": case(codes="int4", block=(1, 32), inputs=2048, outputs=16, tokens=1, cores=4, zero=True),
    "float8, per tensor": case(codes="float8_e4m3fn", block=(64, 128), inputs=128),
    "float8, per channel": case(codes="float8_e4m3fn", block=(1, 128), inputs=128, capability=80),
    "float8, blocks": case(codes="float8_e4m3fn", block=(128, 128), inputs=200, outputs=130, tokens=3),
    "MXFP4": case(codes=FLOAT4, block=(1, 32), inputs=416, outputs=70, scale_dtype="float8_e8m0fnu"),
    "MXFP4, splits": case(
        codes=FLOAT4, block=(1, 32), inputs=2112, outputs=16, tokens=1, cores=4, scale_dtype="float8_e8m0fnu"
    ),
    "MXFP4, cut by devices": case(codes=FLOAT4, block=(1, 8), inputs=360, scale_dtype="float8_e8m0fnu"),
    "MXFP4, one group": case(codes=FLOAT4, block=(1, 32), inputs=32, scale_dtype="float8_e8m0fnu"),
    "NVFP4": case(codes=FLOAT4, block=(1, 16), inputs=208, outputs=33, tokens=20, scale_dtype="float8_e4m3fn"),
    "prompt, MXFP4": case(
        codes=FLOAT4, block=(1, 32), inputs=96, outputs=130, tokens=130, count=129, scale_dtype="float8_e8m0fnu"
    ),
    "prompt, int4": case(codes="int4", block=(1, 128), inputs=128, outputs=130, tokens=130, zero=True, count=129),
    "prompt, int8": case(codes="int8", block=(1, 64), inputs=64, outputs=100, tokens=260, count=100, capability=89),
    "prompt, float8, blocks": case(codes="float8_e4m3fn", block=(128, 128), inputs=256, tokens=70),
}


@interpreted
@pytest.mark.parametrize(("dtype", "name"), [
    *[("bfloat16" if i % 2 or "MXFP4" in name else "float16", name) for i, name in enumerate(MATMULS)],
    ("float32", "NVFP4"), ("float32", "MXFP4"), ("bfloat16", "NVFP4"),
    ("float32", "int8, groups"), ("float32", "int4, groups of 128"), ("bfloat16", "int4, groups of 64"),
    ("bfloat16", "float8, per channel"),
])  # fmt: skip
def test_quant_matmul(name, dtype, monkeypatch):
    case = {"outputs": 64, "tokens": 5, "cores": 1, "capability": 90, "count": None} | MATMULS[name]
    tokens = case.pop("tokens")
    count = case.pop("count")
    place = triton_compat.Target(case.pop("capability"), case.pop("cores"))
    monkeypatch.setattr(triton_compat, "target", lambda: place)
    rng = np.random.default_rng(len(name))
    w, gold = quantized_weight(rng, **case)
    x = rounded(rng, (tokens, case["inputs"]), dtype)
    out = matmul.quant_matmul(jnp.asarray(x), w, count=None if count is None else jnp.int32(count))
    assert out.dtype == jnp.float32
    assert out.shape == (tokens, case["outputs"])
    assert np.isfinite(out).all()
    gold = x.astype(np.float64) @ gold.T
    np.testing.assert_allclose(
        out[:count], gold[:count], rtol=0, atol=2e-6 * np.abs(gold).max() * case["inputs"] ** 0.5
    )
    if case["inputs"] == 2048:
        assert matmul.tiles(dtype, "int4", tokens, 16, 2048, 32, place).splits > 1


GROUPS = {
    "int4, tiles of one expert, tokens of nobody": case(
        codes="int4", block=(1, 32), inputs=96, outputs=70, zero=True, sizes=[3, 0, 40, 1], tokens=50
    ),
    "float8, blocks": case(codes="float8_e4m3fn", block=(128, 128), inputs=200, outputs=130, sizes=[5, 6], tokens=11),
    "int8, per channel": case(codes="int8", block=(1, 128), inputs=128, outputs=33, sizes=[0, 0], bias=True, tokens=4),
    "int4, splits": case(
        codes="int4", block=(1, 32), inputs=2048, outputs=16, sizes=[0, 1, 0], tokens=1, cores=4, zero=True
    ),
    "MXFP4": case(
        codes=FLOAT4, block=(1, 32), inputs=288, outputs=72, sizes=[3, 0, 20], tokens=25, scale_dtype="float8_e8m0fnu"
    ),
    "NVFP4": case(
        codes=FLOAT4, block=(1, 16), inputs=144, outputs=40, sizes=[3, 1], tokens=4, scale_dtype="float8_e4m3fn"
    ),
}


@interpreted
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", GROUPS)
def test_grouped_quant_matmul(name, dtype, monkeypatch):
    case = dict(GROUPS[name])
    sizes = case.pop("sizes")
    tokens = case.pop("tokens")
    place = triton_compat.Target(90, case.pop("cores", 1))
    monkeypatch.setattr(triton_compat, "target", lambda: place)
    rng = np.random.default_rng(len(name))
    weights, golds = zip(*(quantized_weight(rng, **case) for _ in sizes), strict=True)
    x = rounded(rng, (tokens, case["inputs"]), dtype)
    x[sum(sizes) :] = np.nan
    w = jax.tree.map(lambda *leaves: jnp.stack(leaves), *weights)
    out = matmul.grouped_quant_matmul(jnp.asarray(x), w, jnp.asarray(sizes, jnp.int32))
    assert out.dtype == jnp.float32
    out = np.asarray(out)
    start = 0
    for size, gold in zip(sizes, golds, strict=True):
        expected = x[start : start + size].astype(np.float64) @ gold.T
        tolerance = 2e-6 * np.abs(expected).max(initial=0) * case["inputs"] ** 0.5
        np.testing.assert_allclose(out[start : start + size], expected, rtol=0, atol=tolerance)
        start += size
    assert not out[start:].any()


@interpreted
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_grouped_matmul(dtype, monkeypatch):
    """Weights of experts in the dtype of x."""
    monkeypatch.setattr(triton_compat, "target", lambda: triton_compat.Target(90, 4))
    rng = np.random.default_rng(5)
    sizes = [3, 0, 20, 1]
    x = rounded(rng, (27, 144), dtype)
    w = rounded(rng, (4 * 40, 144), dtype).reshape(4, 40, 144)
    out = np.asarray(
        matmul.grouped_quant_matmul(jnp.asarray(x), as_codes(jnp.asarray(w)), jnp.asarray(sizes, jnp.int32))
    )
    start = 0
    for size, own in zip(sizes, w.astype(np.float64), strict=True):
        expected = x[start : start + size].astype(np.float64) @ own.T
        np.testing.assert_allclose(
            out[start : start + size], expected, rtol=0, atol=2e-5 * np.abs(expected).max(initial=1)
        )
        start += size
    assert not out[start:].any()


def block_weight(rng, kind, outputs, inputs):
    """A random BlockArray of NumPy arrays; its values, which tests/kernels/test_blocks.py compares with the gguf
    package's, come from plain XLA."""
    form = BLOCK_KINDS[kind]
    blocks = inputs // BLOCK_KINDS[kind].block

    def words(count):
        return rng.integers(-(2**31), 2**31, (outputs, blocks * count), np.int64).astype(np.int32)

    high = words(1) if form.block == 32 else rng.integers(0, 256, (outputs, blocks * form.high), np.uint8)
    w = BlockArray(
        rng.integers(0, 256, (outputs, blocks * form.low), np.uint8),
        high if form.high else None,
        words(form.words) if form.words else None,
        rounded(rng, (outputs, blocks * form.factors), np.float16),
        kind,
    )
    return jax.tree.map(jnp.asarray, w)


@interpreted
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("kind", BLOCK_KINDS)
def test_blocks(kind, dtype, monkeypatch):
    shapes = {"Q4_K": (70, 512, 20), "Q6_K": (33, 256, 3), "Q2_K": (16, 2048, 1), "Q5_1": (20, 96, 5)}
    outputs, inputs, tokens = shapes.get(kind, (40, 512, 4))
    monkeypatch.setattr(triton_compat, "target", lambda: triton_compat.Target(90, 4 if tokens == 1 else 1))
    rng = np.random.default_rng(len(kind) + tokens)
    w = block_weight(rng, kind, outputs, inputs)
    x = rounded(rng, (tokens, inputs), dtype)
    out = matmul.quant_matmul(jnp.asarray(x), w)
    assert (out.dtype, out.shape) == (jnp.float32, (tokens, outputs))
    assert np.isfinite(out).all()
    gold = x.astype(np.float64) @ np.asarray(reference.dequantize(w), np.float64).T
    np.testing.assert_allclose(out, gold, rtol=0, atol=2e-6 * np.abs(gold).max() * inputs**0.5)


@interpreted
@pytest.mark.parametrize(("kind", "dtype", "outputs", "inputs", "sizes", "tokens"), [
    ("Q4_K", "bfloat16", 70, 512, [3, 0, 40, 1], 50),
    ("Q4_K", "float32", 130, 256, [0, 70, 20], 96),
    ("Q4_K", "bfloat16", 16, 2048, [0, 1, 0], 1),
    ("Q6_K", "bfloat16", 33, 256, [5, 6], 11),
    ("Q5_K", "float16", 20, 256, [0, 0], 4),
    ("Q2_K", "bfloat16", 20, 256, [2, 1], 4),
    ("Q3_K", "bfloat16", 20, 256, [2, 1], 4),
    ("Q5_0", "bfloat16", 40, 96, [0, 3, 1], 5),
    ("Q5_1", "float32", 40, 96, [17, 0, 1], 18),
    ("Q4_1", "bfloat16", 40, 96, [1, 0, 1], 2),
])  # fmt: skip
def test_blocks_by_expert(kind, dtype, outputs, inputs, sizes, tokens, monkeypatch):
    """Experts of many tokens, one and none; several tiles of an expert; split inputs; NaN in tokens of nobody."""
    monkeypatch.setattr(triton_compat, "target", lambda: triton_compat.Target(90, 4 if tokens == 1 else 1))
    rng = np.random.default_rng(len(kind) + tokens)
    members = [block_weight(rng, kind, outputs, inputs) for _ in sizes]
    w = jax.tree.map(lambda *fields: jnp.stack(fields), *members)
    x = rounded(rng, (tokens, inputs), dtype)
    x[sum(sizes) :] = np.nan
    out = np.asarray(matmul.grouped_quant_matmul(jnp.asarray(x), w, jnp.asarray(sizes, jnp.int32)))
    assert (out.dtype, out.shape) == (np.float32, (tokens, outputs))
    start = 0
    for size, member in zip(sizes, members, strict=True):
        gold = x[start : start + size].astype(np.float64) @ np.asarray(reference.dequantize(member), np.float64).T
        tolerance = 2e-6 * np.abs(gold).max(initial=0) * inputs**0.5
        np.testing.assert_allclose(out[start : start + size], gold, rtol=0, atol=tolerance)
        start += size
    assert not out[start:].any()


# --- PTX ---


def run_ptx(text: str, *registers: int) -> list[float]:
    """What our inline PTX returns for input registers: an interpreter of the few instructions in it."""
    count = text.count("f16x2 $")
    values = {f"${count + i}": register for i, register in enumerate(registers)}
    dtype = ml_dtypes.bfloat16 if "bf16" in text else np.float16

    def value(name):
        return values[name] if name in values else int(name, 0)

    def halves(name):
        return np.array([value(name)], np.uint32).view(dtype).astype(np.float32)

    for line in text.strip("{ }").split(";"):
        operation, _, rest = line.strip().partition(" ")
        to, *of = [operand.strip() for operand in rest.split(",")]
        if operation == "mov.b32":
            values[to] = value(of[0])
        elif operation == "shr.u32":
            values[to] = value(of[0]) >> value(of[1])
        elif operation == "shl.b32":
            values[to] = value(of[0]) << value(of[1]) & 0xFFFFFFFF
        elif operation == "and.b32":
            values[to] = value(of[0]) & value(of[1])
        elif operation == "lop3.b32":
            both = value(of[0]) & value(of[1])
            values[to] = {"0x6A": both ^ value(of[2]), "0xEA": both | value(of[2])}[of[3]]
        elif operation == "prmt.b32":
            source = (value(of[1]) << 32 | value(of[0])).to_bytes(8, "little")
            values[to] = int.from_bytes([source[value(of[2]) >> 4 * i & 7] for i in range(4)], "little")
        elif operation in ("fma.rn.bf16x2", "fma.rn.f16x2", "sub.f16x2"):
            result = halves(of[0]) * halves(of[1]) + halves(of[2]) if len(of) == 3 else halves(of[0]) - halves(of[1])
            values[to] = int(result.astype(dtype).view(np.uint32)[0])
        else:
            assert operation in (".reg", ""), operation
    return [float(half) for i in range(count) for half in halves(f"${i}")]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("per", [4, 2])
def test_ptx_of_int4(dtype, per):
    """The kernels' inline PTX, which the interpreted tests leave out."""
    import triton.language as tl

    for register in (0x00000000, 0x76543210, 0xFEDCBA98, 0x89ABCDEF, 0xF08080F7):
        codes = [(register >> 4 * i & 15 ^ 8) - 8 for i in range(8)]
        for nibble in range(per):
            text = matmul.nibble_ptx(nibble, per, getattr(tl, dtype))
            assert run_ptx(str(getattr(text, "value", text)), register) == codes[nibble::per]


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


@pytest.mark.parametrize(("dtype", "scales"), [
    ("bfloat16", "float8_e8m0fnu"), ("bfloat16", "float8_e4m3fn"), ("float16", "float8_e4m3fn"),
])  # fmt: skip
def test_ptx_of_fp4(dtype, scales):
    """All codes times all scales that files may have, to the bit."""
    import triton.language as tl

    known = np.arange(253 if scales == "float8_e8m0fnu" else 127, dtype=np.uint8).view(scales).astype(dtype)
    texts = [fp4_ptx(nibble, getattr(tl, dtype)) for nibble in range(4)]
    texts = [str(getattr(text, "value", text)) for text in texts]
    for scale in known:
        pair = int(np.array([scale, scale]).view(np.uint32)[0])
        for first in range(16):
            register = (first | 0x0350) << 16 | (first ^ 15) << 12 | 0x0100 | first
            for nibble, text in enumerate(texts):
                codes = [register >> 4 * nibble & 15, register >> 4 * nibble + 16 & 15]
                want = [np.copysign(E2M1[code & 7], -1 if code & 8 else 1) * float(scale) for code in codes]
                found = run_ptx(text, register, pair)
                assert found == want, (hex(register), nibble, scale)
                assert np.signbit(found).tolist() == np.signbit(want).tolist()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kind", BLOCK_KINDS)
def test_ptx_of_blocks(kind, dtype):
    """Against the words' own meaning, as told in `quant_matmul.blocks`."""
    import triton.language as tl

    form = BLOCK_KINDS[kind]
    rng = np.random.default_rng(5)
    for g in range(form.block // form.group):
        text = triton_blocks.block_ptx(triton_blocks.NAMES.index(kind), g, getattr(tl, dtype))
        for low, high in rng.integers(0, 2**32, (4, 2)):
            if form.block == 32:
                high &= 0x01010101  # a byte for each code
            lows, highs = (np.array([word], np.uint32).view(np.uint8).astype(int) for word in (low, high))
            codes = lows >> blocks.GROUPS[kind][g].low_shift & blocks.LOW_MASK[kind]
            if form.high:
                shift = 0 if form.block == 32 else blocks.GROUPS[kind][g].high_shift
                codes |= (highs >> shift & blocks.HIGH_MASK[kind]) << blocks.HIGH_UP[kind]
            assert run_ptx(str(getattr(text, "value", text)), int(low), int(high)) == (codes - form.offset).tolist()


# --- what is refused ---


def test_why_not():
    gpu = Device("gpu", "NVIDIA H200", (9, 0))
    old = Device("gpu", "NVIDIA A100", (8, 0))
    bf16, f32, int8, fp8 = (np.dtype(t) for t in ("bfloat16", "float32", "int8", "float8_e4m3fn"))
    asked = {"q_dtype": bf16, "kv_dtype": bf16, "kv_heads": 8, "group": 7, "head_dim": 80, "page_size": 16}
    assert attention.why_not(gpu, AttentionProblem(**asked)) is None
    assert "cpu" in attention.why_not(Device("cpu", "cpu"), AttentionProblem(**asked))
    assert "8.0 or newer" in attention.why_not(Device("gpu", "T4", (7, 5)), AttentionProblem(**asked))
    assert "float32" in attention.why_not(gpu, AttentionProblem(**asked | {"kv_dtype": f32}))
    assert "scales" in attention.why_not(gpu, AttentionProblem(**asked | {"kv_dtype": int8}))
    assert attention.why_not(gpu, AttentionProblem(**asked | {"head_dim": 512})) is None
    assert "1024" in attention.why_not(gpu, AttentionProblem(**asked | {"head_dim": 1024}))
    assert "group of up to 16" in attention.why_not(gpu, AttentionProblem(**asked | {"head_dim": 512, "group": 32}))
    wide = {"q_dtype": f32, "kv_dtype": f32, "head_dim": 256}
    assert "16 bits" in attention.why_not(gpu, AttentionProblem(**asked | wide | {"head_dim": 512}))
    assert attention.why_not(gpu, AttentionProblem(**asked | wide | {"group": 32})) is None
    assert "up to 32" in attention.why_not(gpu, AttentionProblem(**asked | wide | {"group": 33}))
    quantized = AttentionProblem(**asked | {"kv_dtype": fp8, "has_scale": True})
    assert attention.why_not(gpu, quantized) is None
    assert "8.9" in attention.why_not(old, quantized)

    asked = {"x_dtype": bf16, "codes_dtype": np.dtype("int4"), "rows": 100, "inputs": 96, "block": (1, 32)}
    assert matmul.why_not(old, MatmulProblem(**asked)) is None
    assert "tpu" in matmul.why_not(Device("tpu", "v5e"), MatmulProblem(**asked))
    assert "multiples of 32" in matmul.why_not(gpu, MatmulProblem(**asked | {"block": (1, 16)}))
    shared = asked | {"x_dtype": f32, "block": (1, 96)}
    assert matmul.why_not(gpu, MatmulProblem(**shared)) is None
    assert "Triton 3.9" in matmul.why_not(gpu, MatmulProblem(**shared, has_zero=True))
    assert "even" in matmul.why_not(gpu, MatmulProblem(**asked | {"inputs": 31}))
    assert "int32" in matmul.why_not(gpu, MatmulProblem(**asked | {"codes_dtype": np.dtype("int32")}))
    e8m0 = np.dtype("float8_e8m0fnu")
    e4m3 = np.dtype("float8_e4m3fn")
    asked |= {"codes_dtype": np.dtype(FLOAT4), "scale_dtype": e8m0}
    assert matmul.why_not(old, MatmulProblem(**asked)) is None
    assert matmul.why_not(gpu, MatmulProblem(**asked | {"block": (1, 16), "scale_dtype": e4m3})) is None
    assert "float16" in matmul.why_not(gpu, MatmulProblem(**asked | {"x_dtype": np.dtype("float16")}))
    assert "float32" in matmul.why_not(gpu, MatmulProblem(**asked | {"scale_dtype": f32}))
    assert "multiple of 4" in matmul.why_not(gpu, MatmulProblem(**asked | {"inputs": 98}))


# --- compiled ahead of time ---


@pytest.fixture(scope="module")
def mesh():
    return mesh_of("h200x1")


@pytest.fixture
def compile_for(mesh, monkeypatch, tmp_path):
    """Compiles a function for an H200, has Triton's own assembler assemble each kernel (XLA's does so only with
    jax-triton 0.4 and newer), and returns the compiled program."""
    monkeypatch.setattr("jax_triton.triton_lib._JAX_TRITON_DUMP_DIR", str(tmp_path))
    assembler = os.environ["TRITON_PTXAS_BLACKWELL_PATH"]

    def compile(function, *arguments, donate=()):
        place = NamedSharding(mesh, PartitionSpec())
        arguments = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place), arguments)
        with jax.set_mesh(mesh):
            program = jax.jit(function, donate_argnums=donate).lower(*arguments).compile()
        kernels = list(tmp_path.rglob("*.ptx"))
        assert kernels
        for kernel in kernels:
            subprocess.run([assembler, "-arch=sm_90a", kernel, "-o", os.devnull], check=True)
            shared = int(kernel.with_suffix(".compile_info").read_text().split(":")[-1])
            assert shared <= 232448
        return program

    return compile


@pytest.mark.slow
@compiled
@pytest.mark.parametrize(("dtype", "group", "dim"), [("float32", 32, 256), ("bfloat16", 16, 512)])
def test_the_largest_attention_fits_small_gpus(dtype, group, dim, monkeypatch):
    """99 KiB of shared memory, of which a kernel is refused more when it is loaded."""
    library = pytest.importorskip("jax_triton.triton_lib")
    found = []
    result = library.CompilationResult
    monkeypatch.setattr(library, "CompilationResult", lambda **made: found.append(made) or result(**made))
    monkeypatch.setattr(triton_compat, "target", lambda: triton_compat.Target(120, 188))
    mesh = mesh_of("h200x1")

    def like(shape, dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec()))

    pages = KVPages(like((64, 2, 2, 8, dim), dtype), None)
    tables = like((4, 256), "int32")
    rows = like((5,), "int32"), like((4,), "int32"), like((), "int32")
    with jax.set_mesh(mesh):
        jax.jit(partial(attention.paged_attention, scale=0.1)).lower(
            like((64, 2, group, dim), dtype), pages, tables, *rows
        )
    assert {made["name"] for made in found} >= {"_decode", "_prompt"}
    assert max(made["shared_mem_bytes"] for made in found) <= 99 << 10


@compiled
@pytest.mark.parametrize(
    ("q_dtype", "kv_dtype", "group", "dim", "page", "decode_only"),
    [
        ("bfloat16", "bfloat16", 8, 128, 64, True),
        ("float16", "int8", 7, 80, 16, False),
        ("bfloat16", "bfloat16", 1, 96, 16, True),
        ("bfloat16", "float8_e4m3fn", 1, 256, 256, False),
        ("bfloat16", "bfloat16", 8, 512, 16, False),
    ],
)
def test_attention_compiles(compile_for, q_dtype, kv_dtype, group, dim, page, decode_only):
    like = jax.ShapeDtypeStruct
    heads = 2
    tokens = 32
    rows = 32
    count = 733
    data = like((count, 2, heads, page, dim), kv_dtype)
    pages = KVPages(data, like(data.shape[:-1], np.float32) if kv_dtype != q_dtype else None)
    q = like((tokens, heads, group, dim), q_dtype)
    new = like((tokens, heads, dim), q_dtype)
    numbers = [like(shape, np.int32) for shape in ((rows, 16), (rows + 1,), (rows,), ())]
    options = {"scale": dim**-0.5, "window": None if decode_only else 77, "decode_only": decode_only}

    def step(pages, q, k, v, slots, first_page, *numbers):
        pages = attention.write_kv(pages, k, v, slots, first_page)
        return pages, attention.paged_attention(q, pages, *numbers, first_page=first_page, **options)

    one = like((), np.int32)
    program = compile_for(step, pages, q, new, new, like((tokens,), np.int32), one, *numbers, donate=0)
    memory = program.memory_analysis()
    text = program.as_text()
    cache_bytes = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(pages))
    assert memory.alias_size_in_bytes == cache_bytes
    assert not [line for line in text.splitlines() if " copy" in line and f"[{count}," in line]
    made = re.findall(rf"= s32\[{rows},16\]\S* (?!parameter|bitcast|get-tuple)[\w-]+\(", text)
    assert not made, "the tables are copied for the layer"
    assert memory.temp_size_in_bytes < cache_bytes / 4
    assert text.count(" custom-call(") >= 2


@compiled
@pytest.mark.parametrize(
    ("dtype", "codes", "block", "tokens", "zero"),
    [
        ("bfloat16", FLOAT4, (1, 32), 16, False),
        ("bfloat16", FLOAT4, (1, 32), 1024, False),
        ("float16", FLOAT4, (1, 16), 64, False),
        ("bfloat16", FLOAT4, (1, 8), 16, False),
        ("bfloat16", "int4", (1, 128), 16, True),
        ("float16", "int4", (1, 32), 256, False),
        ("bfloat16", "int8", (1, 1024), 256, False),
        ("bfloat16", "float8_e4m3fn", (128, 128), 64, False),
    ],
)
def test_quant_matmul_compiles(compile_for, dtype, codes, block, tokens, zero):
    like = jax.ShapeDtypeStruct
    outputs = 4096
    inputs = 2880 if codes == FLOAT4 else 1024
    scales = -(-outputs // block[0]), -(-inputs // block[1])
    w = QuantArray(
        like((outputs, inputs), codes),
        like(scales, ("float8_e4m3fn" if block[1] == 16 else "float8_e8m0fnu") if codes == FLOAT4 else dtype),
        like(scales, np.int8) if zero else None,
        block=block,
        gain=like((outputs, 1), np.float32) if block[1] == 16 else None,
    )
    program = compile_for(lambda x, w: matmul.quant_matmul(jnp.tanh(x), w), like((tokens, inputs), dtype), w)
    # No copy of the weights: one operation computes x, reordered, one adds up the splits.
    entry = program.as_text().partition("\nENTRY")[2]
    assert entry.count(" fusion(") <= 2
    assert " copy(" not in entry
    assert entry.count(" custom-call(") == 1
    assert program.memory_analysis().temp_size_in_bytes <= 4 * tokens * (4 * outputs + inputs) + 1024


def block_shapes(kind, *shape) -> BlockArray:
    """The shapes of a weight [..., outputs, inputs] in blocks."""
    *rows, inputs = shape
    form = BLOCK_KINDS[kind]
    blocks_ = inputs // BLOCK_KINDS[kind].block
    like = jax.ShapeDtypeStruct
    high = like((*rows, blocks_), np.int32) if form.block == 32 else like((*rows, blocks_ * form.high), np.uint8)
    return BlockArray(
        like((*rows, blocks_ * form.low), np.uint8),
        high if form.high else None,
        like((*rows, blocks_ * form.words), np.int32) if form.words else None,
        like((*rows, blocks_ * form.factors), np.float16),
        kind,
    )


@compiled
@pytest.mark.parametrize("tokens", [16, 512])
@pytest.mark.parametrize("kind", BLOCK_KINDS)
def test_blocks_compile(compile_for, kind, tokens):
    outputs = 4096
    inputs = 2560
    like = jax.ShapeDtypeStruct
    w = block_shapes(kind, outputs, inputs)
    program = compile_for(lambda x, w: matmul.quant_matmul(jnp.tanh(x), w), like((tokens, inputs), "bfloat16"), w)
    entry = program.as_text().partition("\nENTRY")[2]
    assert entry.count(" custom-call(") == 1
    assert " copy(" not in entry
    assert program.memory_analysis().temp_size_in_bytes <= 4 * tokens * (4 * outputs + 2 * inputs) + 1024


@compiled
@pytest.mark.parametrize(
    ("codes", "block", "tokens"),
    [("int4", (1, 128), 16), ("float8_e4m3fn", (128, 128), 2048), (FLOAT4, (1, 32), 64), (FLOAT4, (1, 32), 2048)],
)
def test_grouped_quant_matmul_compiles(compile_for, codes, block, tokens):
    like = jax.ShapeDtypeStruct
    experts = 8
    outputs = 2048
    inputs = 1024
    scales = experts, outputs // block[0], inputs // block[1]
    scale = "float8_e8m0fnu" if codes == FLOAT4 else "bfloat16"
    w = QuantArray(like((experts, outputs, inputs), codes), like(scales, scale), block=block)
    arguments = like((tokens, inputs), "bfloat16"), w, like((experts,), np.int32)
    program = compile_for(lambda x, w, sizes: matmul.grouped_quant_matmul(jnp.tanh(x), w, sizes), *arguments)
    entry = program.as_text().partition("\nENTRY")[2]
    assert entry.count(" custom-call(") == 1
    assert program.memory_analysis().temp_size_in_bytes <= 4 * tokens * (4 * outputs + inputs) + 4096


@compiled
@pytest.mark.parametrize("tokens", [16, 2048])
@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K", "Q5_1"])
def test_blocks_by_expert_compile(compile_for, kind, tokens):
    like = jax.ShapeDtypeStruct
    experts = 8
    outputs = 2048
    inputs = 768
    arguments = like((tokens, inputs), "bfloat16"), block_shapes(kind, experts, outputs, inputs), like((experts,), "i4")
    program = compile_for(lambda x, w, sizes: matmul.grouped_quant_matmul(jnp.tanh(x), w, sizes), *arguments)
    entry = program.as_text().partition("\nENTRY")[2]
    assert entry.count(" custom-call(") == 1
    assert program.memory_analysis().temp_size_in_bytes <= 4 * tokens * (4 * outputs + 2 * inputs) + 4096


@compiled
@pytest.mark.parametrize("tokens", [16, 64, 4096])
def test_grouped_matmul_compiles(compile_for, tokens):
    like = jax.ShapeDtypeStruct
    experts = 16
    arguments = like((tokens, 2048), "bfloat16"), like((experts, 1536, 2048), "bfloat16"), like((experts,), np.int32)
    program = compile_for(lambda x, w, sizes: matmul.grouped_quant_matmul(jnp.tanh(x), as_codes(w), sizes), *arguments)
    entry = program.as_text().partition("\nENTRY")[2]
    assert entry.count(" custom-call(") == 1
    assert program.memory_analysis().temp_size_in_bytes <= 4 * tokens * (4 * 1536 + 2048) + 8192
