"""GGUF's blocks at the width of the file: values in plain XLA against the gguf package, products interpreted."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.checkpoints.formats.gguf_fields import block_array
from jaxserve.checkpoints.quantized import StoredRows
from jaxserve.pallas_kernels import ops
from jaxserve.pallas_kernels.quant_matmul import reference
from jaxserve.pallas_kernels.types import BLOCK_KINDS

gguf = pytest.importorskip("gguf", reason="gguf is not installed")
gguf_files = pytest.importorskip("gguf_files", reason="needs gguf", exc_type=ImportError)
Kind = gguf.GGMLQuantizationType


def made(name, out=12, inputs=768):
    """A random weight and its values by the package, in float32."""
    data = gguf_files.random_blocks(Kind[name], out, inputs)
    w = block_array(StoredRows([(name, data)], np.arange(out), inputs))
    return jax.tree.map(jnp.asarray, w), gguf.quants.dequantize(data, Kind[name])


@pytest.mark.parametrize("name", BLOCK_KINDS)
def test_values(name):
    w, want = made(name)
    assert w.shape == (12, 768)
    size, nbytes = gguf.GGML_QUANT_SIZES[Kind[name]]
    stored = 8 * sum(field.nbytes for field in jax.tree.leaves(w)) / want.size
    assert stored == BLOCK_KINDS[name].bits
    assert 1 <= stored / (8 * nbytes / size) < 1.03
    with jax.disable_jit():  # compiled, products and sums may be rounded once
        np.testing.assert_array_equal(reference.dequantize(w), want)
    largest = np.abs(want).max()
    np.testing.assert_allclose(jax.jit(reference.dequantize)(w), want, rtol=0, atol=1e-6 * largest)
    ids = jnp.array([3, 0, 11])
    np.testing.assert_allclose(ops.embed(w, ids), want[ids], rtol=0, atol=1e-6 * largest)


@pytest.mark.parametrize("name", ["Q4_K", "Q5_0"])
def test_products(name, monkeypatch):
    monkeypatch.setattr(reference, "BLOCK_BYTES", 4 * 768 * 5)
    w, want = made(name)
    x = np.random.default_rng(1).standard_normal((3, 768)).astype(np.float32)
    gold = x.astype(np.float64) @ want.astype(np.float64).T
    found = ops.Ops().linear(jnp.asarray(x), w, (None, None))
    np.testing.assert_allclose(found, gold, rtol=0, atol=1e-5 * np.abs(gold).max())


@pytest.mark.parametrize("name", ["Q4_K", "Q6_K", "Q5_1"])
@pytest.mark.parametrize("sizes", [[3, 0, 4], [0, 0, 5], [7, 2, 1]])
def test_products_by_expert(name, sizes, monkeypatch):
    """A stack of experts' weights; tokens behind the last expert's get zeros."""
    monkeypatch.setattr(reference, "BLOCK_BYTES", 4 * 512 * 5)
    data = [gguf_files.random_blocks(Kind[name], 12, 512, seed) for seed in range(3)]
    stacked = [block_array(StoredRows([(name, some)], np.arange(12), 512)) for some in data]
    w = jax.tree.map(lambda *fields: jnp.stack(fields), *stacked)
    assert w.shape == (3, 12, 512)
    x = np.random.default_rng(1).standard_normal((11, 512)).astype(np.float32)
    want = np.zeros((11, 12))
    for expert, end in enumerate(np.cumsum(sizes)):
        mine = slice(end - sizes[expert], end)
        want[mine] = x[mine].astype(np.float64) @ gguf.quants.dequantize(data[expert], Kind[name]).astype(np.float64).T
    found = jax.jit(reference.grouped_quant_matmul)(jnp.asarray(x), w, jnp.array(sizes, jnp.int32))
    np.testing.assert_allclose(found, want, rtol=0, atol=1e-5 * np.abs(want).max())


def test_rows_of_several_parts():
    """In any order, and rows of zeros; parts of different kinds have no form in common."""
    first, second = (gguf_files.random_blocks(Kind.Q6_K, 4, 256, seed) for seed in (1, 2))
    source = np.array([5, 0, -1, 7])
    w = block_array(StoredRows([("Q6_K", first), ("Q6_K", second)], source, 256))
    want = np.concatenate([gguf.quants.dequantize(part, Kind.Q6_K) for part in (first, second)])[source]
    want[2] = 0
    np.testing.assert_allclose(reference.dequantize(jax.tree.map(jnp.asarray, w)), want, rtol=1e-6)
    other = gguf_files.random_blocks(Kind.Q4_K, 4, 256)
    assert block_array(StoredRows([("Q6_K", first), ("Q4_K", other)], source, 256)) is None
    assert block_array(StoredRows([("Q8_0", gguf_files.random_blocks(Kind.Q8_0, 4, 256))], source[1:2], 256)) is None
