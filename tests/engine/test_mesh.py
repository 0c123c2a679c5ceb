"""Products and look-ups of weights that are split over devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.devices.mesh import make_mesh, sharding
from jaxserve.devices.sharded_ops import embed_sharded, matmul_sharded, quant_matmul_sharded
from jaxserve.pallas_kernels.ops import embed, matmul, quant_matmul
from jaxserve.pallas_kernels.types import QuantArray

DEVICES = 8
TOKENS = 5
OUT = 24
INPUTS = 256
RNG = np.random.default_rng(3)


def weight(kind: str) -> jax.Array | QuantArray:
    """[OUT, INPUTS] in bfloat16, or int8 with a scale for each row."""
    if kind == "plain":
        return jnp.asarray(RNG.normal(size=(OUT, INPUTS)), jnp.bfloat16)
    codes = jnp.asarray(RNG.integers(-127, 128, (OUT, INPUTS)), jnp.int8)
    scale = jnp.asarray(RNG.uniform(0.001, 0.02, (OUT, 1)), jnp.float32)
    return QuantArray(codes, scale, None, None, (1, INPUTS), None)


def dense(w: jax.Array | QuantArray) -> np.ndarray:
    return np.asarray(w.codes, np.float64) * w.scale if isinstance(w, QuantArray) else np.asarray(w, np.float64)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("kind", ["plain", "int8"])
def test_parts_of_a_product_are_added_in_the_dtype_of_the_activation(kind, dtype):
    """Each device's part is exact to float32 before it is rounded; then they are added up in the order of a reduction
    that is not ours to choose."""
    mesh = make_mesh(DEVICES)
    w = weight(kind)
    x = jnp.asarray(RNG.normal(size=(TOKENS, INPUTS)), dtype)
    axes = ("embed", "mlp")
    function = (
        matmul_sharded if kind == "plain" else lambda mesh, *rest: quant_matmul_sharded(mesh, quant_matmul, *rest)
    )
    jitted = jax.jit(lambda x, w: function(mesh, x, w, axes))
    found = jitted(x, w)
    assert found.dtype == x.dtype
    reductions = [line for line in jitted.lower(x, w).as_text().splitlines() if "stablehlo.all_reduce" in line]
    assert len(reductions) == 1

    by_device = [np.reshape(np.asarray(y, np.float64), (-1, DEVICES, INPUTS // DEVICES)) for y in (x, dense(w))]
    parts = np.einsum("tdk,odk->dto", *by_device)
    rounded = np.asarray(jnp.asarray(parts, dtype), np.float64)
    eps = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(np.asarray(found, np.float64), rounded.sum(0), atol=2 * eps * np.abs(parts).sum(0).max())


def test_outputs_that_are_split_stay_float32():
    mesh = make_mesh(DEVICES)
    w = weight("plain")
    x = jnp.asarray(RNG.normal(size=(TOKENS, INPUTS)), jnp.bfloat16)
    w = jax.device_put(w, sharding(mesh, "vocab", "embed"))
    found = jax.jit(lambda x, w: matmul_sharded(mesh, x, w, ("vocab", "embed")))(x, w)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, matmul(x, np.asarray(w)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["plain", "int8"])
def test_embeddings_are_the_rows_of_one_device(kind):
    """Whatever the dtype in which they are added, since all but one are 0."""
    mesh = make_mesh(DEVICES)
    table = weight(kind)
    ids = jnp.asarray([0, OUT - 1, 7, 7, 3])
    found = jax.jit(lambda table, ids: embed_sharded(mesh, jnp.bfloat16, table, ids))(table, ids)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_array_equal(found, embed(table, ids).astype(jnp.bfloat16))
