"""Mosaic GPU kernels that are lowered once a process, for an H200."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from devices import mesh_of
from jax.sharding import NamedSharding, PartitionSpec

from jaxserve.pallas_kernels import lowered_kernels
from jaxserve.pallas_kernels.paged_attention.mosaic_gpu import paged_attention
from jaxserve.pallas_kernels.quant_matmul import mosaic_gpu
from jaxserve.pallas_kernels.types import KVPages, QuantArray


@pytest.fixture
def serialized(monkeypatch):
    """Keeps kernels during a test, and lists the modules that are serialized meanwhile."""
    if lowered_kernels.JAX != "0.11":
        pytest.skip("kernels are kept with JAX 0.11")
    from jax._src.interpreters import mlir
    from jax._src.pallas import mpmd
    from jax.experimental.mosaic.gpu import core

    jax.clear_caches()  # other tests may have lowered the same kernels
    done = []
    serialize = core._run_serde_pass
    monkeypatch.setitem(mlir._lowerings, mpmd.mpmd_map_p, mlir._lowerings[mpmd.mpmd_map_p])
    monkeypatch.setattr(
        core, "_run_serde_pass", lambda module, **options: done.append(1) or serialize(module, **options)
    )
    lowered_kernels.keep()
    return done


def lowered(function, out: int = 256):
    mesh = mesh_of("h200x1")
    place = NamedSharding(mesh, PartitionSpec())

    def like(shape, dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=place)

    w = QuantArray(like((out, 512), "int8"), like((out, 4), "float32"), block=(1, 128))
    with jax.set_mesh(mesh):
        return jax.jit(function).lower(like((16, 512), "bfloat16"), w)


def kernel(program) -> str:
    """The hash of a program's only kernel."""
    (found,) = re.findall(r'kernel_hash = "([^"]*)"', program.as_text())
    return found


def test_programs_share_kernels(serialized):
    """The second program gets the kept call, and XLA compiles it. Kernels of other shapes are their own."""
    first = lowered(mosaic_gpu.quant_matmul)
    assert len(serialized) == 1
    second = lowered(lambda x, w: mosaic_gpu.quant_matmul(x * jnp.bfloat16(2), w) + 1)
    assert len(serialized) == 1
    assert kernel(second) == kernel(first)
    assert "mosaic_gpu_v2" in second.compile().as_text()
    assert kernel(lowered(mosaic_gpu.quant_matmul, 512)) != kernel(first)
    assert len(serialized) == 2


def test_bytes_do_not_depend_on_what_was_lowered_before(serialized):
    """JAX numbers kernels. With other bytes, a program is not found in the compilation cache."""
    first = kernel(lowered(mosaic_gpu.quant_matmul))
    jax.clear_caches()
    lowered(mosaic_gpu.quant_matmul, 768)
    again = kernel(lowered(lambda x, w: mosaic_gpu.quant_matmul(x * jnp.bfloat16(3), w)))
    assert len(serialized) == 3
    assert again == first


def attention(tokens: int):
    """Decode attention of 16 rows, whose queries are the first of so many tokens."""
    mesh = mesh_of("h200x1")
    place = NamedSharding(mesh, PartitionSpec())
    shapes = [((tokens, 2, 4, 128), "bfloat16"), ((64, 2, 2, 16, 128), "bfloat16"), ((16, 32), "int32")]
    shapes += [((17,), "int32"), ((16,), "int32"), ((), "int32")]
    q, pages, *rest = (jax.ShapeDtypeStruct(*shape, sharding=place) for shape in shapes)
    attend = partial(paged_attention, scale=1.0, decode_only=tokens == 16)
    with jax.set_mesh(mesh):
        return jax.jit(attend).lower(q, KVPages(pages, None), *rest)


def test_programs_of_other_sizes_share_the_decode_kernel(serialized):
    """It reads the queries of rows in place, which are the first of all tokens."""
    first = kernel(attention(16))
    assert len(serialized) == 1
    mixed = attention(64)
    larger = attention(128)
    assert len(serialized) == 3  # each has a kernel for prompts
    for program, tokens in ((mixed, 64), (larger, 128)):
        assert first in re.findall(r'kernel_hash = "([^"]*)"', program.as_text())
        text = program.compile().as_text()
        calls = [line for line in text.splitlines() if "mosaic_gpu_v2" in line and "custom-call(" in line]
        assert len(calls) == 2
        assert any(f"bf16[{tokens * 8},128]" in call for call in calls), "the queries are copied"
        assert not any(call.lstrip().startswith("ROOT") for call in calls), "a slice is fused with the call"
