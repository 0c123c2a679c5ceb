"""Stacks of experts' weights on the devices: brought there in parts, split by expert and by width."""

import tracemalloc

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from safetensors.numpy import save_file

from jaxserve.checkpoints.errors import CheckpointError
from jaxserve.checkpoints.int4 import PackedInt4
from jaxserve.checkpoints.load import Piece, Stack, load_weights
from jaxserve.checkpoints.quantize import Scheme, rtn
from jaxserve.checkpoints.quantized import dequantize
from jaxserve.checkpoints.safetensors import read_header
from jaxserve.checkpoints.stacks import unstacked
from jaxserve.devices.mesh import AXES, spec
from jaxserve.devices.sharded_ops import experts_sharded
from jaxserve.models import expert_stacks
from jaxserve.pallas_kernels.experts import ExpertStacks, ExpertWeights, mixture
from jaxserve.pallas_kernels.lora.stacks import AdapterStack
from jaxserve.pallas_kernels.ops import Ops
from jaxserve.pallas_kernels.quant_matmul import reference
from jaxserve.pallas_kernels.types import QuantArray

pytestmark = pytest.mark.compiles

EXPERTS = 8
OUT = 16
INPUTS = 64
rng = np.random.default_rng(8)


def mesh_of(experts: int, tensor: int) -> Mesh:
    return Mesh(np.array(jax.devices()[: experts * tensor]).reshape(1, 1, 1, experts, tensor, 1), AXES)


def target_of(mesh: Mesh, *axes: str) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((EXPERTS, OUT, INPUTS), jnp.float32, sharding=NamedSharding(mesh, spec(*axes)))


def weights(kind: str) -> list[np.ndarray | QuantArray]:
    values = rng.standard_normal((EXPERTS, OUT, INPUTS)).astype(np.float32)
    if kind == "float32":
        return list(values)
    if kind == "mxfp4":
        codes = rng.integers(0, 256, (EXPERTS, OUT, INPUTS // 2), np.uint8)
        scale = rng.integers(120, 130, (EXPERTS, OUT, INPUTS // 32), np.uint8).view(ml_dtypes.float8_e8m0fnu)
        float4 = np.dtype(ml_dtypes.float4_e2m1fn)
        return [QuantArray(PackedInt4(c, float4), s, block=(1, 32)) for c, s in zip(codes, scale, strict=True)]
    return [rtn(value, Scheme(kind, 32 if kind == "int4" else None)) for value in values]


@pytest.mark.parametrize("kind", ["float32", "int8", "int4", "fp8", "mxfp4"])
@pytest.mark.parametrize("axes", [("expert", "expert_mlp", "embed"), ("expert", "embed", "expert_mlp")])
@pytest.mark.parametrize("mesh", [(1, 2), (2, 1), (2, 2), (4, 2)])
def test_parts_of_a_stack(kind, axes, mesh, monkeypatch):
    """All members are where they belong, whatever is brought at once."""
    members = weights(kind)
    wanted = np.stack([dequantize(m) if isinstance(m, QuantArray) else m for m in members])
    monkeypatch.setattr(expert_stacks, "CHUNK_BYTES", 1)
    mesh = mesh_of(*mesh)
    stack = expert_stacks.place_stack("w", iter(members), target_of(mesh, *axes), None)
    if isinstance(stack, QuantArray):
        assert stack.codes.sharding.is_equivalent_to(NamedSharding(mesh, spec(*axes)), 3)
        stack = reference.dequantize(jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), stack))
    np.testing.assert_allclose(np.asarray(stack), wanted, rtol=1e-6)


def test_members_that_differ():
    members = [*weights("int8")[:3], *weights("int4")[3:]]
    with pytest.raises(CheckpointError, match="expert 3 is quantized in another way"):
        expert_stacks.place_stack("w", iter(members), target_of(mesh_of(1, 1), "expert", "expert_mlp", "embed"), None)


def test_some_have_zero_points(monkeypatch):
    """An expert without zero points beside others that have some."""
    monkeypatch.setattr(expert_stacks, "CHUNK_BYTES", 1)
    members = weights("int8")
    members[5] = QuantArray(members[5].codes, members[5].scale, np.full((OUT, 1), 3, np.int8), block=members[5].block)
    wanted = np.stack([dequantize(member) for member in members])
    target = target_of(mesh_of(1, 1), "expert", "expert_mlp", "embed")
    stack = expert_stacks.place_stack("w", iter(members), target, None)
    np.testing.assert_allclose(np.asarray(reference.dequantize(stack)), wanted, rtol=1e-6)


@pytest.mark.slow
def test_host_memory(tmp_path, monkeypatch):
    """A stack of 96 MiB in one tensor of a file takes a small part of that on the host while it is loaded."""
    experts = 48
    out = 512
    inputs = 1024
    values = rng.integers(-9, 9, (experts, out, inputs)).astype(np.float32)
    save_file({"layers.0.experts.up": values}, tmp_path / "model.safetensors")
    tensors = unstacked(read_header(tmp_path / "model.safetensors"), ["layers.{i}.experts.{e}.up"])
    assert len(tensors) == experts
    pieces = [[Piece(f"layers.0.experts.{e}.up", (out, inputs), lambda t: t)] for e in range(experts)]
    sharding = NamedSharding(mesh_of(1, 2), spec("expert", "expert_mlp", "embed"))
    abstract = {"w": jax.ShapeDtypeStruct(values.shape, jnp.float32, sharding=sharding)}
    monkeypatch.setattr(expert_stacks, "CHUNK_BYTES", 4 << 20)

    def place(path, members, target):
        return expert_stacks.place_stack(path, members, target, None)

    tracemalloc.start()
    loaded = load_weights(tensors, abstract, {"w": Stack(tuple(pieces))}, progress=False, place_stack=place)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    np.testing.assert_array_equal(np.asarray(loaded["w"]), values)
    assert values.nbytes == 96 << 20
    assert peak < 24 << 20


@pytest.mark.parametrize("mesh", [(1, 2), (2, 1), (2, 2), (4, 2)])
@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("adapted", [False, True])
def test_experts_over_devices(mesh, quantized, adapted):
    """Experts and their width split over devices make the same of each token, padding and adapters included."""
    size = 64
    tokens = 11
    mesh = mesh_of(*mesh)
    x = jnp.asarray(rng.standard_normal((tokens, INPUTS)).astype(np.float32))
    chosen = jnp.asarray(np.stack([rng.permutation(EXPERTS)[:3] for _ in range(tokens)]).astype(np.int32))
    shares = jnp.asarray(rng.uniform(0.1, 1, (tokens, 3)).astype(np.float32))

    def made(out, inputs):
        plain = rng.standard_normal((EXPERTS, out, inputs)).astype(np.float32) / 8
        if not quantized:
            return jnp.asarray(plain)
        some = [rtn(value, Scheme("int4", 32)) for value in plain]
        return jax.tree.map(lambda *a: jnp.asarray(np.stack([np.asarray(x) for x in a])), *some)

    w = ExpertWeights(made(2 * size, INPUTS), made(INPUTS, size), jnp.asarray(rng.standard_normal((EXPERTS, 2 * size))))
    options = {"gate": Ops().gate_of("silu", 2.0), "count": jnp.int32(9)}
    if adapted:
        places = 2
        rank = 3
        ranks = jnp.full((places, 2), rank, jnp.int32)

        def stack(inputs, out, widths):
            a = (places, EXPERTS, len(widths) * rank, inputs)
            b = (places, EXPERTS, rank, out)
            matrices = (jnp.asarray(rng.standard_normal(shape).astype(np.float32) / 8) for shape in (a, b))
            return AdapterStack(*matrices, ranks, widths)

        options["stacks"] = ExpertStacks(stack(INPUTS, 2 * size, (1, 1)), stack(size, INPUTS, (INPUTS,)))
        options["places"] = jnp.asarray(np.arange(tokens, dtype=np.int32) % 3 - 1)
    alone = mixture(x, chosen, shares, w, **options)
    split = experts_sharded(mesh, mixture, x, chosen, shares, w, **options)
    np.testing.assert_allclose(np.asarray(split), np.asarray(alone), rtol=2e-5, atol=2e-5)
    assert PartitionSpec() == split.sharding.spec or split.sharding.is_fully_replicated
