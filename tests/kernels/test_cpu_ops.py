"""The CPU kernels against float64 NumPy, for shapes on both sides of every tile."""

from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.pallas_kernels import cpu
from jaxserve.pallas_kernels.device_ops import matmul_of
from jaxserve.pallas_kernels.operands import Heads, Partials
from jaxserve.pallas_kernels.ops import Ops, gate
from jaxserve.pallas_kernels.paged_attention import cpu as attention
from jaxserve.pallas_kernels.registry import Device
from jaxserve.pallas_kernels.types import KVPages, QuantArray

OPS = cpu.CpuOps(matmul=cpu.matmul, write_kv=attention.write_kv)
pytestmark = pytest.mark.skipif(not cpu.available(), reason="no C++ compiler")


def arrays(tokens: int, inputs: int, outputs: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(tokens + inputs)
    x = rng.standard_normal((tokens, inputs))
    w = rng.standard_normal((outputs, inputs))
    return x.astype(np.float32), w.astype(np.float32)


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 7, 8, 10, 15, 16, 17, 32, 39, 40, 65])
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


COUNTED = {  # calls on 32 tokens
    "jaxserve_rms_norm": lambda x, count: cpu.rms_norm(x, jnp.ones(2), 1e-5, count),
    "jaxserve_rope": lambda x, count: cpu.rope(x, jnp.ones((32, 1)), jnp.ones((32, 1)), count),
    "jaxserve_silu_gate": lambda x, count: cpu.gate(x, "silu", count),
}


@pytest.mark.parametrize("count", [0, 1, 5, 31, 32, 1000])
@pytest.mark.parametrize("name", COUNTED)
def test_nor_do_other_kernels_need_more_rows(name, count):
    x = np.random.default_rng(count).standard_normal((32, 64, 2)).astype(np.float32)
    lowered = jax.jit(COUNTED[name]).lower(x, jnp.int32(count))
    assert name in lowered.as_text()
    expected = np.asarray(jax.jit(COUNTED[name])(x, jnp.int32(32)))[:count]
    x[count:] = np.nan
    np.testing.assert_array_equal(np.asarray(jax.jit(COUNTED[name])(x, jnp.int32(count)))[:count], expected)
    assert np.isfinite(expected).all()


@pytest.mark.parametrize("counts", [range(2, 40), range(40, 65)], ids=["tiles", "panels"])  # they add up otherwise
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
    for counts in (range(1, 9), range(9, 21)):  # codes in registers, dequantized panels
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
    x = rng.standard_normal(shape).astype(np.float32)
    scale = rng.standard_normal(shape[-1]).astype(np.float32)
    out = jax.jit(cpu.rms_norm, static_argnums=2)(x, scale, 1e-3)
    wide = x.astype(np.float64)
    expected = wide / np.sqrt((wide**2).mean(axis=-1, keepdims=True) + 1e-3) * scale
    np.testing.assert_allclose(out, expected, rtol=0, atol=1e-5)
    assert "jaxserve_rms_norm" in jax.jit(cpu.rms_norm, static_argnums=2).lower(x, scale, 1e-3).as_text()


@pytest.mark.parametrize("shape", [(1, 2), (33, 3, 64), (5, 2, 3, 10), (130, 4, 3, 80)])
def test_rope(shape):
    rng = np.random.default_rng(shape[-1])
    x = rng.standard_normal(shape).astype(np.float32)
    angle = rng.uniform(0, 7, (shape[0], shape[-1] // 2))
    out = jax.jit(cpu.rope)(x, np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32))
    pairs = (x[..., : shape[-1] // 2] + 1j * x[..., shape[-1] // 2 :]).astype(np.complex128)
    turned = pairs * np.exp(1j * angle).reshape(shape[0], *(1,) * (len(shape) - 2), -1)
    np.testing.assert_allclose(out, np.concatenate([turned.real, turned.imag], axis=-1), rtol=0, atol=1e-6)


@pytest.mark.parametrize("shape", [(1, 1), (3, 8), (33, 13), (130, 2048)])
def test_gate(shape):
    x = np.random.default_rng(shape[1]).normal(0, 8, (*shape, 2)).astype(np.float32)
    x.flat[: min(4, x.size)] = [-200, 1, 200, 1][: x.size]
    out = jax.jit(cpu.gate, static_argnums=1)(x, "silu")
    a = x[..., 0].astype(np.float64)
    b = x[..., 1]
    np.testing.assert_allclose(out, a / (1 + np.exp(-a)) * b, rtol=1e-6, atol=1e-30)


def test_other_activations_take_the_plain_gate():
    x = np.random.default_rng(0).normal(0, 2, (3, 16, 2)).astype(np.float32)
    for activation in ("gelu", "gelu_tanh"):
        np.testing.assert_array_equal(cpu.gate(x, activation), gate(x, activation))


def test_zeros_take_no_memory_until_they_are_written():
    """Memory that was used before comes as zeros; of sizes that are no whole pages, too."""
    make = jax.jit(lambda: [cpu.zeros((size,), jnp.int8) for size in (1, 4095, 12_345, 40_000_000)])
    for _ in range(3):
        arrays = make()
        assert all(not np.asarray(x).any() for x in arrays)
        dirty = [jax.jit(lambda x: x + 1, donate_argnums=0)(x) for x in arrays]
        assert all((np.asarray(x) == 1).all() for x in dirty)
        del arrays, dirty
    assert "jaxserve_zeros" in make.lower().as_text()


@pytest.mark.parametrize("large_pages", [False, True])
def test_untouched_memory_holds_what_is_written(large_pages):
    """Of sizes that are no whole pages; large ones begin and end within others' memory."""
    sizes = (1, 4095, (5 << 20) + 3, (2 << 20) - 1)
    arrays = jax.jit(lambda: [cpu.untouched((size,), jnp.int8, large_pages) for size in sizes])()
    for i, x in enumerate(arrays):
        arrays[i] = jax.jit(lambda x, i: x.at[:].set(i), donate_argnums=0)(x, i + 1)
    for i, (size, x) in enumerate(zip(sizes, arrays, strict=True)):
        np.testing.assert_array_equal(x, np.full(size, i + 1))


@pytest.mark.parametrize("shape", [(1, 7), (33, 64), (5, 770)])
@pytest.mark.parametrize("bias", [False, True])
def test_add_norm(shape, bias):
    rng = np.random.default_rng(shape[-1])
    x, y, scale, b = (rng.standard_normal(s).astype(np.float32) for s in (shape, shape, shape[-1:], shape[-1:]))
    parts = Partials(jnp.asarray(y)[None], jnp.asarray(b) if bias else None)
    total, normed = jax.jit(lambda *a: OPS.add_norm(*a, 1e-3))(x, parts, scale)
    np.testing.assert_array_equal(total, x + (y + b if bias else y))
    wide = np.asarray(total, np.float64)
    expected = wide / np.sqrt((wide**2).mean(axis=-1, keepdims=True) + 1e-3) * scale
    np.testing.assert_allclose(normed, expected, rtol=0, atol=1e-5)
    assert "jaxserve_add_norm" in jax.jit(lambda *a: OPS.add_norm(*a, 1e-3)).lower(x, parts, scale).as_text()


@pytest.mark.parametrize("kv_dtype", [np.float32, jnp.bfloat16, np.float16, np.int8, jnp.float8_e4m3fn])
@pytest.mark.parametrize(("heads", "group", "dim"), [(2, 1, 64), (3, 4, 10), (1, 7, 80)])
@pytest.mark.parametrize("extras", [False, True], ids=["plain", "bias and norms"])
def test_rotate_and_write(kv_dtype, heads, group, dim, extras):
    """One call does what the operations one by one do, for the tokens that matter, in the layer's own pages."""
    rng = np.random.default_rng(dim)
    tokens = 37
    count = 34
    page = 4
    angle = rng.uniform(0, 7, (tokens, dim // 2))
    qkv = jnp.asarray(rng.standard_normal((1, tokens, heads, group + 2, dim)), jnp.float32)
    bias = jnp.asarray(rng.standard_normal((heads, group + 2, dim)), jnp.float32) if extras else None
    norms = [jnp.asarray(rng.uniform(0.5, 2, dim), jnp.float32) if extras else None for _ in range(2)]
    cos, sin = (jnp.asarray(f(angle), jnp.float32) for f in (np.cos, np.sin))
    given = Heads(Partials(qkv, bias), cos, sin, *norms)
    data = jnp.zeros((24, 2, heads, page, dim), kv_dtype)
    coded = np.dtype(kv_dtype).itemsize == 1
    pages = KVPages(data, jnp.zeros(data.shape[:-1], jnp.float32) if coded else None)
    slots = rng.permutation(12 * page)[:tokens].astype(np.int32)
    slots[[3, *range(count, tokens)]] = -1

    def run(ops, heads):
        return ops.rotate_and_write(heads, 1e-5, jnp.float32, pages, jnp.asarray(slots), jnp.int32(12))

    counted = OPS.counting(jnp.int32(count))
    assert "jaxserve_rotate_and_write" in jax.jit(lambda h: run(counted, h)).lower(given).as_text()
    q, ours = jax.jit(lambda h: run(counted, h))(given)
    want, theirs = jax.jit(lambda h: run(Ops(write_kv=attention.write_kv), h))(given)
    np.testing.assert_allclose(q[:count], want[:count], rtol=0, atol=1e-5)
    # Where the two differ in the last bit, a number may be rounded to the next one.
    step = {"float32": 1e-5, "bfloat16": 2**-7, "float16": 2**-10, "int8": 0, "float8_e4m3fn": 2**-3}
    atol = 0.12 if kv_dtype == np.int8 else 1e-5
    np.testing.assert_allclose(read(ours), read(theirs), rtol=1.01 * step[np.dtype(kv_dtype).name], atol=atol)
    assert not read(ours)[:12].any()


def read(pages: KVPages) -> np.ndarray:
    values = np.asarray(pages.data.astype(jnp.float32))
    return values if pages.scale is None else values * np.asarray(pages.scale)[..., None]


@pytest.mark.parametrize("size", [1, 7, 1024, 5000])
def test_arg_max(size):
    """The first of the largest; of the rows that matter."""
    x = np.random.default_rng(size).integers(-40, 40, (9, size)).astype(np.float32)
    x[2] = -np.inf
    np.testing.assert_array_equal(jax.jit(cpu.arg_max)(x), x.argmax(axis=1))
    some = np.asarray(jax.jit(cpu.arg_max)(x, jnp.int32(4)))
    np.testing.assert_array_equal(some[:4], x.argmax(axis=1)[:4])


def test_loops_at_the_same_time():
    """The threads run one loop at a time; whoever finds them busy does his own work alone."""
    x, w = arrays(33, 300, 700)
    multiply = jax.jit(cpu.matmul)
    want = np.asarray(multiply(x, w))
    with ThreadPoolExecutor(4) as pool:
        for got in pool.map(lambda _: np.asarray(multiply(x, w)), range(200)):
            np.testing.assert_array_equal(got, want)
