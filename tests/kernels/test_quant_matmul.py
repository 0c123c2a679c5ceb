"""Products with quantized weights, every backend that this machine runs, against float64 NumPy."""

from dataclasses import replace
from types import ModuleType

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxserve.pallas_kernels.quant_matmul import cpu, reference
from jaxserve.pallas_kernels.registry import BACKENDS, Device, MatmulProblem, load
from jaxserve.pallas_kernels.types import QuantArray

CODES = {"int4": jnp.int4, "int8": jnp.int8, "fp8": jnp.float8_e4m3fn}
# in a block: all inputs, all outputs
IN = 0
OUT = 0
BLOCKS = [(1, IN), (1, 32), (1, 64), (1, 128), (OUT, IN), (128, 128)]


def make_weight(rng, shape, codes="int8", block=(1, 128), *, scale=jnp.float32, zero=False, bias=False) -> QuantArray:
    """A random weight [..., out, in] whose blocks differ; every code of the dtype may occur."""
    *experts, out, inputs = shape
    block = (block[0] or out, block[1] or inputs)
    blocks = (*experts, -(-out // block[0]), -(-inputs // block[1]))
    if codes == "fp8":
        values = rng.integers(0, 127, shape).astype(np.uint8) | rng.choice([0, 128], shape).astype(np.uint8)
        values = values.view(ml_dtypes.float8_e4m3fn)  # 127 and 255 are NaN
    else:
        values = rng.integers(*{"int4": (-8, 8), "int8": (-128, 128)}[codes], shape).astype(np.int8)
    return QuantArray(
        jnp.asarray(values).astype(CODES[codes]),
        jnp.asarray(rng.uniform(0.2, 2.0, blocks), scale),
        jnp.asarray(rng.integers(-8, 8, blocks), jnp.int8) if zero else None,
        jnp.asarray(rng.normal(size=blocks) * 8, scale) if bias else None,
        block,
    )


def spread(values, w: QuantArray) -> np.ndarray:
    """One value per block [blocks, groups] -> one per weight, in float64."""
    values = np.repeat(np.repeat(np.asarray(values, np.float64), w.block[0], -2), w.block[1], -1)
    return values[..., : w.shape[-2], : w.shape[-1]]


def gold(x, w: QuantArray) -> tuple[np.ndarray, np.ndarray]:
    """The product in float64, and the sum of the sizes of all its terms."""
    x = np.asarray(x, np.float64)
    codes = np.asarray(w.codes, np.float64)
    scale = spread(w.scale, w)
    zero, bias = (0.0 if values is None else spread(values, w) for values in (w.zero, w.bias))
    sizes = (np.abs(codes) + np.abs(zero)) * np.abs(scale) + np.abs(bias)
    return x @ ((codes - zero) * scale + bias).swapaxes(-1, -2), np.abs(x) @ sizes.swapaxes(-1, -2)


def check(y, x, w: QuantArray, tolerance: float = 2e-6) -> None:
    want, sizes = gold(x, w)
    assert y.dtype == jnp.float32
    assert y.shape == want.shape
    error = np.abs(np.asarray(y, np.float64) - want)
    assert (error <= tolerance * sizes).all(), f"off by {(error / sizes).max():.1e} of the sum of the terms' sizes"


def problem_of(x, w: QuantArray) -> MatmulProblem:
    return MatmulProblem.of(x, w)


@pytest.fixture(params=BACKENDS)
def backend(request) -> ModuleType:
    try:
        return load("matmul", request.param)
    except ImportError as error:
        pytest.skip(f"not installed: {error}")


def run(backend: ModuleType, x, w: QuantArray, **options):
    """The product by a backend; the CPU's gets the same x in float32."""
    device = Device.of(jax.devices()[0])
    if backend is cpu:
        x = x.astype(jnp.float32)
    if reason := backend.why_not(device, problem_of(x, w)):
        pytest.skip(reason)
    return jax.jit(backend.quant_matmul)(x, w, **options)


def numbers(rng, shape, dtype):
    return jnp.asarray(rng.normal(size=shape), dtype)


@pytest.mark.parametrize("codes", CODES)
@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_blocks(backend, codes, block):
    rng = np.random.default_rng(0)
    x = numbers(rng, (5, 256), jnp.bfloat16)
    w = make_weight(rng, (256, 256), codes, block)
    check(run(backend, x, w), x, w)


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_zero_points_and_biases(backend, block):
    rng = np.random.default_rng(1)
    x = numbers(rng, (3, 256), jnp.bfloat16)
    w = make_weight(rng, (128, 256), "int4", block, zero=True, bias=True)
    check(run(backend, x, w), x, w)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
@pytest.mark.parametrize("scale", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_dtypes(backend, dtype, scale):
    rng = np.random.default_rng(2)
    x = numbers(rng, (4, 128), dtype)
    w = make_weight(rng, (64, 128), "int8", (1, 64), scale=scale, zero=True)
    check(run(backend, x, w), x, w)


@pytest.mark.parametrize("block", BLOCKS, ids=str)
@pytest.mark.parametrize("shape", [(200, 160), (136, 96), (3, 7), (130, 257)], ids=str)
@pytest.mark.parametrize("tokens", [1, 9])
def test_sizes_that_are_no_multiples(backend, block, shape, tokens):
    rng = np.random.default_rng(3)
    x = numbers(rng, (tokens, shape[1]), jnp.bfloat16)
    w = make_weight(rng, shape, "int8", block, bias=True)
    check(run(backend, x, w), x, w)


@pytest.mark.parametrize("codes", CODES)
@pytest.mark.parametrize("tokens", [2, 3, 4, 5, 13, 40])
def test_tokens(backend, codes, tokens):
    rng = np.random.default_rng(8)
    x = numbers(rng, (tokens, 202), jnp.bfloat16)
    w = make_weight(rng, (90, 202), codes, (1, 64), scale=jnp.float16)
    check(run(backend, x, w), x, w)


@pytest.mark.parametrize("count", [0, 1, 3, 7, 20, 1000])
def test_only_the_rows_that_matter(backend, count):
    rng = np.random.default_rng(9)
    x = numbers(rng, (20, 64), jnp.bfloat16)
    w = make_weight(rng, (48, 64), "int8", (1, IN))
    y = run(backend, x.at[count:].set(jnp.nan), w, count=jnp.int32(count))
    check(y[:count], x[:count], w)


def test_small_scales(backend):
    """float16's subnormal numbers, of both signs."""
    rng = np.random.default_rng(10)
    x = numbers(rng, (2, 128), jnp.bfloat16)
    w = make_weight(rng, (32, 128), "int8", (1, 32))
    scale = rng.integers(1, 1024, (32, 4)) * rng.choice([-1, 1], (32, 4)) * 2.0**-24
    w = replace(w, scale=jnp.asarray(scale, jnp.float16))
    assert (np.asarray(w.scale, np.float64) == scale).all()
    check(run(backend, x, w), x, w)


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_reference_in_blocks_of_rows(monkeypatch, block):
    """52 rows at a time, which neither the rows nor the blocks are multiples of."""
    monkeypatch.setattr(reference, "BLOCK_BYTES", 52 * 4 * 160)
    rng = np.random.default_rng(4)
    x = numbers(rng, (3, 160), jnp.bfloat16)
    w = make_weight(rng, (300, 160), "int8", block, zero=True)
    check(reference.quant_matmul(x, w), x, w)


@pytest.mark.parametrize("block", [(1, IN), (1, 128), (OUT, IN)], ids=str)
def test_reference_has_no_dequantized_copy(monkeypatch, block):
    monkeypatch.setattr(reference, "BLOCK_BYTES", 1 << 19)
    w = make_weight(np.random.default_rng(5), (2048, 1024), "int8", block)
    compiled = jax.jit(reference.quant_matmul).lower(jnp.ones((4, 1024), jnp.bfloat16), w).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < w.codes.nbytes  # a copy has at least twice that


def test_dequantize():
    w = make_weight(np.random.default_rng(6), (200, 160), "int4", (128, 128), zero=True, bias=True)
    want = (np.asarray(w.codes, np.float64) - spread(w.zero, w)) * spread(w.scale, w) + spread(w.bias, w)
    np.testing.assert_allclose(reference.dequantize(w), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("group_sizes", [(3, 0, 4, 1), (0, 0, 8, 0), (0, 0, 0, 0), (2, 3, 0, 5)], ids=str)
def test_grouped(group_sizes):
    rng = np.random.default_rng(7)
    x = numbers(rng, (10, 128), jnp.bfloat16)
    w = make_weight(rng, (4, 64, 128), "int4", (1, 32), zero=True)
    y = np.asarray(jax.jit(reference.grouped_quant_matmul)(x, w, jnp.array(group_sizes, jnp.int32)))
    start = 0
    for expert, size in enumerate(group_sizes):
        mine = slice(start, start + size)
        check(jnp.asarray(y[mine]), x[mine], jax.tree.map(lambda leaf, e=expert: leaf[e], w))
        start += size
    assert (y[start:] == 0).all()
