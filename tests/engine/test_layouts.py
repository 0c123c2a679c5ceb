"""Large weights in a fixed order of their axes in memory, as on TPUs: placed, compiled for, and read as before."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from devices import mesh_of
from engines import generate, make_engine, request
from flax.traverse_util import flatten_dict
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.devices import layouts
from jaxserve.models.quantized import arranged
from jaxserve.pallas_kernels.types import QuantArray

pytestmark = pytest.mark.compiles

CASE = "mixtral_experts"


def answers(folder, **options):
    engine = make_engine(folder, **options)
    results = generate(engine, *(request(str(i), list(range(5 + i, 25 + 3 * i)), max_tokens=8) for i in range(3)))
    return engine, [results[i].token_ids for i in range(3)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("devices", "scheme"),
    [(2, "int4"), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((2, "auto"), (8, "int8")))],
)
def test_order_in_memory_changes_no_token(devices, scheme, model_folders, monkeypatch):
    """On CPU devices, with an order that is not the usual one."""
    options = {"tensor_parallel_size": devices, "quantization": scheme}
    if scheme != "auto":
        options |= {"load_format": "dummy", "matmul_backend": "xla"}
    _, wanted = answers(model_folders(CASE), **options)
    monkeypatch.setattr(layouts, "PLATFORMS", ("cpu",))
    monkeypatch.setattr(layouts, "LARGE", 0)
    monkeypatch.setattr(layouts, "by_rows", lambda rank: tuple(reversed(range(rank))))
    engine, found = answers(model_folders(CASE), **options)
    stacks = [w for path, w in flatten_dict(engine.runner.params, sep="/").items() if "experts_" in path]
    arrays = [w.codes if isinstance(w, QuantArray) else w for w in stacks if len(w.shape) == 3]
    assert {x.format.layout.major_to_minor for x in arrays} == {(2, 1, 0)}
    assert found == wanted


def test_which_weights_are_ordered():
    """Large ones on TPUs: codes and floats by rows, scales by groups unless these fill whole lanes."""
    mesh = mesh_of("v6e-8")

    def like(shape, dtype, *spec):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*spec)))

    codes = like((128, 4096, 1536), jnp.int4, None, None, "tensor")
    scale = like((128, 4096, 24), jnp.bfloat16, None, None, "tensor")
    many = like((128, 4096, 1024), jnp.bfloat16, None, None, "tensor")
    params = {
        "stack": QuantArray(codes, scale, block=(1, 64)),
        "many groups": QuantArray(codes, many, block=(1, 64)),
        "blocks": QuantArray(codes, scale, block=(64, 64)),
        "table": like((201088, 2880), jnp.bfloat16, "tensor", None),
        "norm": like((1 << 21,), jnp.bfloat16),
        "small": like((256, 128), jnp.bfloat16),
    }
    found = arranged(params, mesh, jnp.bfloat16, "auto")

    def order(x):
        return x.format.layout and x.format.layout.major_to_minor

    assert jax.tree.map(order, found, is_leaf=lambda x: isinstance(x, jax.ShapeDtypeStruct)) == {
        "stack": QuantArray((0, 1, 2), (0, 2, 1), block=(1, 64)),
        "many groups": QuantArray((0, 1, 2), (0, 1, 2), block=(1, 64)),
        "blocks": QuantArray((0, 1, 2), None, block=(64, 64)),
        "table": (0, 1),
        "norm": None,
        "small": None,
    }
    assert layouts.device_bytes(codes) == 128 * 4096 * 192 // 2
    assert layouts.device_bytes(found["stack"].codes) == 128 * 4096 * 256 // 2
    assert layouts.device_bytes(found["stack"].scale) == 128 * 4096 * 4 * 2
    assert layouts.device_bytes(found["table"]) == 25136 * 2944 * 2
    assert layouts.place_of(found["table"]) == Format(Layout((0, 1)), params["table"].sharding)
    assert layouts.place_of(params["table"]) == params["table"].sharding


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "int4", "float8_e4m3fn", "float4_e2m1fn"])
@pytest.mark.parametrize("size", [720, 2880])
def test_placed_arrays_are_what_programs_expect(dtype, size):
    """A program's parameter has the layout, tiles included, that placing an array in this order gives it."""
    jax.config.update("jax_enable_compilation_cache", False)
    mesh = mesh_of("v6e-8")
    plain = jax.ShapeDtypeStruct((16, size, 360), dtype, sharding=NamedSharding(mesh, PartitionSpec()))
    ordered = layouts.in_order_of_kernels(plain)
    placed = jax.jit(lambda x: x, out_shardings=layouts.place_of(ordered)).lower(plain).compile()
    used = jax.jit(lambda x: x.astype(jnp.float32).sum(1)).lower(ordered).compile()
    assert placed.output_formats.layout == used.input_formats[0][0].layout


def test_other_devices_keep_their_order():
    mesh = Mesh(np.array(jax.devices()[:2]), ("tensor",))
    w = jax.device_put(np.ones((512, 2048), np.float32), NamedSharding(mesh, PartitionSpec("tensor", None)))
    w = dataclasses.replace(QuantArray(w, w[:, :1]), block=(1, 2048))
    assert layouts.in_order_of_kernels(w) is not None
    assert layouts.in_order_of_kernels({"w": w.codes})["w"] is w.codes
    assert layouts.place_of(w.codes) == w.codes.sharding
    assert layouts.device_bytes(w.codes) == 256 * 2048 * 4
