"""The CPU matmul and norm against float64 NumPy, for shapes on both sides of every tile."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import cpu
from pallas_kernels.ops import matmul_of
from pallas_kernels.registry import Device
from pallas_kernels.types import QuantArray

pytestmark = pytest.mark.skipif(not cpu.available(), reason="no C++ compiler")


def arrays(tokens: int, inputs: int, outputs: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(tokens + inputs)
    x, w = rng.standard_normal((tokens, inputs)), rng.standard_normal((outputs, inputs))
    return x.astype(np.float32), w.astype(np.float32)


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 7, 8, 10, 15, 16, 17, 32, 65])
@pytest.mark.parametrize(("inputs", "outputs"), [(1, 1), (7, 5), (8, 16), (13, 70), (64, 129), (768, 80)])
def test_matmul(tokens, inputs, outputs):
    x, w = arrays(tokens, inputs, outputs)
    out = jax.jit(cpu.matmul)(x, w)
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out, x.astype(np.float64) @ w.T.astype(np.float64), rtol=0, atol=1e-5 * inputs**0.5)


@pytest.mark.parametrize("count", [0, 1, 5, 31, 40, 1000])
def test_only_the_rows_that_matter(count):
    x, w = arrays(40, 64, 48)
    x[count:] = np.nan
    out = np.asarray(jax.jit(cpu.matmul)(x, w, jnp.int32(count)))[:count]
    np.testing.assert_allclose(out, x[:count].astype(np.float64) @ w.T.astype(np.float64), rtol=0, atol=1e-4)


@pytest.mark.parametrize("counts", [range(2, 16), range(16, 41)], ids=["tiles", "panels"])  # they add up otherwise
def test_a_row_s_result_does_not_depend_on_its_neighbours(counts):
    x, w = arrays(counts[-1], 768, 160)
    together = np.asarray(cpu.matmul(jnp.asarray(x), jnp.asarray(w)))
    for count in counts:
        np.testing.assert_array_equal(np.asarray(cpu.matmul(jnp.asarray(x[:count]), jnp.asarray(w))), together[:count])


def test_nor_with_quantized_weights():
    rng = np.random.default_rng(3)
    codes = jnp.asarray(rng.integers(-8, 8, (96, 256)), jnp.int4)
    w = QuantArray(codes, jnp.asarray(rng.uniform(0.1, 1, (96, 4)), jnp.float32), block=(1, 64))
    x = jnp.asarray(rng.normal(size=(20, 256)), jnp.float32)
    multiply = matmul_of(Device("cpu", "cpu"))
    assert "jaxserve_quant_matmul" in jax.jit(multiply).lower(x, w).as_text()
    for counts in (range(1, 5), range(5, 21)):  # codes in registers, dequantized panels
        together = np.asarray(multiply(x[: counts[-1]], w))
        for count in counts:
            np.testing.assert_array_equal(np.asarray(multiply(x[:count], w)), together[:count])


def test_it_is_the_kernel_that_runs():
    x, w = arrays(8, 64, 64)
    assert "jaxserve_matmul" in jax.jit(cpu.matmul).lower(x, w).compile().as_text()
    assert "jaxserve_matmul" not in jax.jit(cpu.matmul).lower(x.astype(jnp.bfloat16), w.astype(jnp.bfloat16)).as_text()


@pytest.mark.parametrize("shape", [(1, 7), (33, 64), (65, 2, 96), (3, 770)])
def test_rms_norm(shape):
    rng = np.random.default_rng(shape[-1])
    x, scale = rng.standard_normal(shape).astype(np.float32), rng.standard_normal(shape[-1]).astype(np.float32)
    out = jax.jit(cpu.rms_norm, static_argnums=2)(x, scale, 1e-3)
    wide = x.astype(np.float64)
    expected = wide / np.sqrt((wide**2).mean(axis=-1, keepdims=True) + 1e-3) * scale
    np.testing.assert_allclose(out, expected, rtol=0, atol=1e-5)
    assert "jaxserve_rms_norm" in jax.jit(cpu.rms_norm, static_argnums=2).lower(x, scale, 1e-3).as_text()
