"""4-bit floats in plain XLA: each code with each scale against NumPy, and memory on devices that are compiled for."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from devices import mesh_of
from jax.sharding import NamedSharding, PartitionSpec

from jaxserve.devices.sharded_ops import quant_block, quant_specs
from jaxserve.devices.targets import target_memory
from jaxserve.execution import memory
from jaxserve.pallas_kernels.quant_matmul import reference
from jaxserve.pallas_kernels.registry import Device, MatmulProblem, choose
from jaxserve.pallas_kernels.types import QuantArray

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
VALUES = np.concatenate([E2M1, -E2M1])
CODES = np.tile(np.arange(16, dtype=np.uint8), 2).view(ml_dtypes.float4_e2m1fn)


@pytest.mark.parametrize("scales", ["float8_e8m0fnu", "float8_e4m3fn"])
def test_reference_is_exact(scales):
    """Values below the normal ones of float32, which XLA takes for zero on CPU, are left out."""
    known = np.arange(1 if scales == "float8_e8m0fnu" else 0, 253 if scales == "float8_e8m0fnu" else 127)
    scale = known.astype(np.uint8).view(scales)
    size = 32 if scales == "float8_e8m0fnu" else 16
    codes = np.tile(CODES, (len(scale), 1))
    blocks = np.repeat(scale[:, None], 32 // size, 1)
    gain = np.full((len(scale), 1), 0.75, np.float32) if size == 16 else None
    w = QuantArray(*map(jnp.asarray, (codes, blocks)), block=(1, size), gain=gain)
    want = np.tile(VALUES, 2) * scale[:, None].astype(np.float64) * (1 if gain is None else 0.75)
    found = np.asarray(jax.jit(reference.dequantize)(w), np.float64)
    normal = np.abs(want) >= 2.0**-126
    np.testing.assert_array_equal(found[normal], want[normal])
    np.testing.assert_array_equal(found, np.asarray(want, np.float32).astype(found.dtype) * (found != 0))
    x = np.eye(32, dtype=np.float32)
    product = np.asarray(reference.quant_matmul(jnp.asarray(x), w)).T
    np.testing.assert_array_equal(product[normal], want[normal])


def test_reference_of_experts_and_many_rows(monkeypatch):
    monkeypatch.setattr(reference, "BLOCK_BYTES", 4 * 96 * 8)
    rng = np.random.default_rng(2)
    codes = rng.integers(0, 16, (3, 20, 96), np.uint8)
    scale = rng.integers(40, 60, (3, 20, 6), np.uint8).view(ml_dtypes.float8_e4m3fn)
    gain = rng.uniform(0.5, 1, (3, 20, 1)).astype(np.float32)
    w = QuantArray(
        *map(jnp.asarray, (codes.view(ml_dtypes.float4_e2m1fn), scale)), block=(1, 16), gain=jnp.asarray(gain)
    )
    want = VALUES[codes] * np.repeat(scale.astype(np.float64), 16, -1) * gain
    x = rng.standard_normal((7, 96)).astype(np.float32)
    sizes = [2, 0, 4]
    found = np.asarray(reference.grouped_quant_matmul(jnp.asarray(x), w, jnp.asarray(sizes)))
    ends = np.cumsum(sizes)
    for expert, (size, end) in enumerate(zip(sizes, ends, strict=True)):
        np.testing.assert_allclose(found[end - size : end], x[end - size : end] @ want[expert].T, rtol=1e-4, atol=1e-4)
    assert not found[ends[-1] :].any()


def gpt_oss_120b(mesh):
    """Weights of gpt-oss 120B's shape as they would lie on the mesh: 36 layers of 128 experts, hidden and intermediate
    size 2,880, in MXFP4 with the experts' stack as rows; attention of 64 heads over 8, embeddings and head in bf16."""

    def plain(*shape):
        place = NamedSharding(mesh, PartitionSpec("tensor") if len(shape) > 1 else PartitionSpec())
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=place)

    def mx(out, inputs):
        place = PartitionSpec("tensor", None)
        shapes = (
            jax.ShapeDtypeStruct((out, inputs), jnp.float4_e2m1fn),
            jax.ShapeDtypeStruct((out, inputs // 32), jnp.float8_e8m0fnu),
        )
        w = QuantArray(*shapes, block=(1, 32))
        assert quant_block(w, place, mesh) == (1, 32)
        specs = quant_specs(w, place, mesh)
        return jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, s)), w, specs
        )

    experts = 128
    hidden = 2880
    width = 2880
    heads = 64
    kv_heads = 8
    dim = 64
    vocab = 201088
    layer = {
        "qkv": plain((heads + 2 * kv_heads) * dim, hidden),
        "out": plain(hidden, heads * dim),
        "router": plain(experts, hidden),
        "gate_up": mx(experts * 2 * width, hidden),
        "down": mx(experts * hidden, width),
    }
    return {f"layers_{i}": layer for i in range(36)} | {"embed": plain(vocab, hidden), "head": plain(vocab, hidden)}


@pytest.mark.parametrize("target", ["h200x1", "h200x8"])
def test_gpt_oss_120b_fits_an_h200(target):
    mesh = mesh_of(target)
    params = gpt_oss_120b(mesh)
    device = mesh.devices.flat[0]
    by_dtype = memory.bytes_by_dtype(params)
    codes = by_dtype["float4_e2m1fn"]
    weights = sum(by_dtype.values())
    assert (codes + by_dtype["float8_e8m0fnu"]) / codes == 4.25 / 4
    budget = memory.Budget(target_memory(device), 0.9, weights, 0, memory.RESERVE_BYTES, None, True)
    token = 36 * 2 * 8 * 64 * 2 // mesh.size  # bytes of keys and values in bf16
    tokens = budget.left(memory.Needs(temporaries=2**30, code=2**28)) // token
    assert 58 < weights * mesh.size / 2**30 < 63
    assert tokens > 750_000  # six requests of 131,072 tokens


@pytest.mark.parametrize("scale", ["float8_e8m0fnu", "float8_e4m3fn"])
@pytest.mark.parametrize(
    ("device", "backend"),
    [
        (Device("gpu", "NVIDIA H200", (9, 0)), "triton"),
        (Device("tpu", "TPU v6 lite"), "mosaic_tpu"),
        (Device("cpu", "cpu"), "xla"),
    ],
)
def test_what_runs(device, backend, scale):
    pytest.importorskip("jax_triton", reason="jax-triton is not installed")
    size = 32 if scale == "float8_e8m0fnu" else 16
    four = np.dtype(ml_dtypes.float4_e2m1fn)
    bf16 = np.dtype(jnp.bfloat16)
    problem = MatmulProblem(bf16, four, 5760, 2880, (1, size), scale_dtype=np.dtype(scale))
    assert choose("matmul", device, problem) == backend
