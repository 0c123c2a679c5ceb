"""The TPU kernels for latent attention: interpreted on CPU against float64, where races fail, and compiled for TPUs.

What no row owns is NaN; uninitialised memory is, too."""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from devices import mesh_of
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from latent_batches import DTYPES, TOLERANCE, Config, make_batch
from test_tpu_attention import interpreted, no_disk_cache

from jaxserve.pallas_kernels import kv_write_tpu
from jaxserve.pallas_kernels.latent_attention import reference, tpu, tpu_plan
from jaxserve.pallas_kernels.registry import Device
from jaxserve.pallas_kernels.types import LatentPages

__all__ = ["no_disk_cache"]

V5E = Device("tpu", "TPU v5 lite")
SMALL = Config(rank=128, rope=32, width=256, heads=8, tokens=24, rows=6, max_pages=20)
MIXED = [(1, 37), (1, 16), (5, 20), (0, 0), (9, 47), (1, 17)]
LONG = [(1, 300), (3, 140), (0, 0), (2, 2), (17, 310)]
CASES = {
    "mixed": (SMALL, MIXED, False),
    "decodes": (replace(SMALL, tokens=6), [(1, 1), (1, 300), (1, 256), (1, 257), (0, 0)], True),
    "prompts alone": (replace(SMALL, first_page=3), [(20, 300), (4, 4)], False),
    "odd heads": (replace(SMALL, heads=5), LONG, False),
    "many heads": (replace(SMALL, heads=136), MIXED, False),
    "long tables": (replace(SMALL, max_pages=140), [(1, 2100), (1, 130), (9, 2200)], False),
    "bfloat16": (replace(SMALL, dtype="bfloat16", heads=16, first_page=2), LONG, False),
    "int8": (replace(SMALL, kv_dtype="int8", page_size=128, max_pages=4, first_page=1), LONG, False),
    "float8, bfloat16": (
        replace(SMALL, dtype="bfloat16", kv_dtype="float8_e4m3fn", page_size=128, max_pages=4), LONG, False,
    ),
    "DeepSeek's sizes": (
        replace(SMALL, rank=512, rope=64, width=640, heads=16, dtype="bfloat16"), [(1, 100), (4, 30)], False,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_attention_equals_float64(name, monkeypatch):
    config, rows, decode_only = CASES[name]
    for size, value in {"TILE": 64, "BLOCK": 256, "UNIT": 16}.items():  # several tiles, units and blocks
        monkeypatch.setattr(tpu_plan, size, value)
    tpu.latent_attention.clear_cache()
    batch = make_batch(config, rows, len(name))
    options = {"scale": config.scale, "rank": config.rank, "decode_only": decode_only}
    options["first_page"] = jnp.int32(config.first_page)
    out = interpreted(tpu.latent_attention, *batch.arguments(), **options)
    assert out.dtype == batch.q.dtype
    out = np.asarray(out, np.float64)
    gold = batch.gold()
    assert np.isfinite(out).all()
    tolerance = TOLERANCE["bfloat16" if config.kv_dtype else config.dtype]  # codes are multiplied as bfloat16
    np.testing.assert_allclose(out[: len(gold)], gold, rtol=0, atol=tolerance * max(1, np.abs(gold).max()))


@pytest.mark.parametrize("chunk", [8, 128])
@pytest.mark.parametrize(
    ("kv_dtype", "size"), [("float32", 16), ("bfloat16", 16), ("int8", 128), ("float8_e4m3fn", 128)]
)
def test_write_changes_the_slots_and_nothing_else(kv_dtype, size, chunk, monkeypatch):
    for name, value in {"CHUNK": chunk, "RING": 3, "AHEAD": 2}.items():
        monkeypatch.setattr(kv_write_tpu, name, value)
    tpu.write_latent.clear_cache()
    rng = np.random.default_rng(size)
    rank = 128
    rope = 24
    width = 256
    slots = [4 * size - 3 + i for i in range(7)] + [-1, 7 * size + 1, 2 * size, -1, 6 * size - 1, 7 * size, -1]
    slots = np.array([*slots, *(5 * size + i for i in range(size)), -1], np.int32)
    data = rng.standard_normal((10, size, width)).astype(DTYPES[kv_dtype])
    scale = rng.uniform(1, 2, (10, 2, size)).astype(np.float32) if kv_dtype in ("int8", "float8_e4m3fn") else None
    rows = rng.standard_normal((len(slots), rank + rope)).astype(np.float32)
    rows[2] = 0
    pages = LatentPages(jnp.asarray(data), None if scale is None else jnp.asarray(scale))
    found = interpreted(tpu.write_latent, pages, rows, slots, np.int32(1), rank=rank)
    real = slots >= 0
    expected = reference.write_latent(pages, jnp.asarray(rows[real]), jnp.asarray(slots[real]), 1, rank=rank)
    for mine, plain in zip(found, expected, strict=True):
        if plain is not None:
            np.testing.assert_array_equal(np.asarray(mine, np.float32), np.asarray(plain, np.float32))


PROBLEM = Config(rank=512, rope=64, width=640, heads=128, dtype="bfloat16").problem
REFUSED = [
    (Device("gpu", "NVIDIA H200", (9, 0)), {}, "TPU"),
    (V5E, {"q_dtype": np.dtype(np.float16)}, "float16"),
    (V5E, {"kv_dtype": np.dtype(np.int8)}, "without scales"),
    (V5E, {"width": 576}, "576"),
    (V5E, {"page_size": 24}, "24"),
    (V5E, {"kv_dtype": np.dtype(np.int8), "has_scale": True}, "from 128"),
    (Device("tpu", "TPU v4"), {}, "VMEM"),
]


@pytest.mark.parametrize(("device", "change", "reason"), REFUSED)
def test_refusals_name_the_reason(device, change, reason):
    for kind in ("TPU v5 lite", "TPU v6 lite", "TPU v5", "TPU7x"):
        assert tpu.why_not(Device("tpu", kind), PROBLEM) is None
    assert re.search(reason, tpu.why_not(device, replace(PROBLEM, **change)))


COMPILED = [
    ("v5e-1", "bfloat16", None, 16, 16, True),
    ("v6e-1", "bfloat16", None, 128, 64, False),
    ("v5e-1", "bfloat16", None, 128, 128, False),
    ("v5e-8", "bfloat16", "int8", 16, 128, False),
    ("v6e-1", "bfloat16", "float8_e4m3fn", 16, 128, False),
    ("v6e-1", "float32", None, 40, 16, False),
    ("v5p-1", "bfloat16", "int8", 16, 128, False),
    ("tpu7x-1", "bfloat16", None, 128, 128, False),
]


@pytest.mark.usefixtures("no_disk_cache")
@pytest.mark.parametrize(("target", "dtype", "kv_dtype", "heads", "size", "decode_only"), COMPILED)
def test_compiles_ahead_of_time_with_the_cache_in_place(target, dtype, kv_dtype, heads, size, decode_only):
    """Heads split over the devices of a machine that is not here, latents on each of them."""
    # no other dimension is 4001
    mesh = mesh_of(target)
    count = 4001
    tokens = 32
    rows = 32

    def array(shape, dtype, *axes):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*axes)))

    pages = LatentPages(
        array((count, size, 640), DTYPES[kv_dtype or dtype]),
        array((count, 2, size), np.float32) if kv_dtype else None,
    )
    q = array((tokens, heads * mesh.size, 576), DTYPES[dtype], None, "tensor")
    new = array((tokens, 576), DTYPES[dtype])
    integers = [array(shape, np.int32) for shape in ((tokens,), (), (rows, 16), (rows + 1,), (rows,), ())]

    def layer(pages, q, new, slots, first_page, *rest):
        pages = tpu.write_latent(pages, new, slots, first_page, rank=512)
        options = {"scale": 0.1, "rank": 512, "first_page": first_page, "decode_only": decode_only}
        return tpu.latent_attention(q, pages, *rest, **options), pages

    heads_spec = P(None, "tensor")
    inputs = (P(), heads_spec, *(P(),) * 7)
    split = jax.shard_map(layer, mesh=mesh, in_specs=inputs, out_specs=(heads_spec, P()), check_vma=False)
    with jax.set_mesh(mesh):
        compiled = jax.jit(split, donate_argnums=0).lower(pages, q, new, *integers).compile()
    stats = compiled.memory_analysis()
    text = compiled.as_text()
    cache_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(pages))
    assert stats.alias_size_in_bytes >= cache_bytes
    assert stats.temp_size_in_bytes < cache_bytes / 20
    assert text.count('custom_call_target="tpu_custom_call"') == (1 if decode_only else 2) + (2 if kv_dtype else 1)
    assert not re.search(rf"\[{count},[^ ]* (copy|copy-start|transpose|fusion)\(", text)
