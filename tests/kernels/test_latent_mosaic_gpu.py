"""The Mosaic GPU kernel for latent attention: interpreted against float64 NumPy, and compiled for H200."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from devices import mesh_of
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import NamedSharding, PartitionSpec
from latent_batches import Config, make_batch
from mosaic_resources import SHARED_MEMORY, assembled_kernels, traced_kernels
from test_tpu_attention import no_disk_cache

from jaxserve.pallas_kernels.hopper_rules import interpreter
from jaxserve.pallas_kernels.latent_attention import mosaic_gpu
from jaxserve.pallas_kernels.latent_attention.mosaic_gpu_kernel import LatentTile
from jaxserve.pallas_kernels.registry import Device, choose
from jaxserve.pallas_kernels.types import LatentPages

__all__ = ["no_disk_cache"]

HOPPER = Device("gpu", "NVIDIA H200", (9, 0))
DEEPSEEK = Config(rank=512, rope=64, heads=128, dtype="bfloat16", page_size=64)
SMALL = Config(rank=128, rope=64, heads=16, dtype="bfloat16", tokens=40, rows=5, max_pages=41)


@pytest.mark.parametrize(("device", "changes", "reason"), [
    (HOPPER, {}, None),
    (HOPPER, {"heads": 5, "page_size": 8}, None),
    (HOPPER, {"kv_dtype": np.dtype(np.int8), "has_scale": True}, "triton"),
    (HOPPER, {"q_dtype": np.dtype(np.float32)}, "float32"),
    (HOPPER, {"rank": 96}, "96"),
    (HOPPER, {"width": 600}, "600"),
    (HOPPER, {"width": 1024}, "shared memory"),
    (HOPPER, {"page_size": 24}, "24"),
    (Device("gpu", "NVIDIA A100", (8, 0)), {}, "9.0"),
])  # fmt: skip
def test_refusals_name_the_reason(device, changes, reason):
    answer = mosaic_gpu.why_not(device, replace(DEEPSEEK.problem, **changes))
    assert answer is None if reason is None else reason in answer


def test_what_hopper_is_given():
    pytest.importorskip("triton", reason="Triton is not installed")
    pytest.importorskip("jax_triton", reason="jax-triton is not installed")
    assert choose("latent", HOPPER, DEEPSEEK.problem) == "mosaic_gpu"
    codes = replace(DEEPSEEK.problem, kv_dtype=np.dtype(np.int8), has_scale=True)
    assert choose("latent", HOPPER, codes) == "triton"


def interpreted(config, rows, *, races=False, seed=0, **options) -> np.ndarray:
    """Entries of the tables that no row owns point nowhere; what no row owns is NaN."""
    if not hasattr(plgpu, "InterpretGPUParams"):
        pytest.skip("JAX's interpreter of Mosaic GPU kernels comes with JAX 0.11.2")
    batch = make_batch(config, rows, seed)
    for table, length in zip(batch.tables, [*batch.kv_len, *[0] * config.rows], strict=False):
        table[-(-length // config.page_size) :] = 1_000_000
    options |= {"scale": config.scale, "rank": config.rank, "first_page": jnp.int32(config.first_page)}
    with interpreter(detect_races=races) as interpret:
        out = mosaic_gpu.latent_attention(*batch.arguments(), interpret=interpret, **options)
    assert out.dtype == batch.q.dtype
    out = np.asarray(out).astype(np.float64)
    gold = batch.gold()
    assert np.isfinite(out[: len(gold)]).all()
    np.testing.assert_allclose(out[: len(gold)], gold, rtol=4e-3, atol=1e-2)
    if races:
        from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import get_races

        assert not get_races().races_found
    return out


SPLIT = [(1, 641), (1, 64), (1, 1)]  # 641 tokens are 11 blocks, in parts


def test_decode_without_races():
    interpreted(replace(SMALL, tokens=4, first_page=3), [(1, 300), (1, 65)], races=True, decode_only=True)


@pytest.mark.parametrize("config", [
    replace(SMALL, tokens=4, rows=4),
    replace(SMALL, tokens=4, rows=4, heads=72, max_pages=11, page_size=64, first_page=7),
    replace(SMALL, tokens=4, rows=4, heads=5, page_size=8, max_pages=81, width=256),
    replace(SMALL, tokens=4, rows=4, page_size=256, max_pages=3, dtype="float16"),
], ids=str)  # fmt: skip
def test_decode_in_parts(config):
    interpreted(config, SPLIT, decode_only=True)


@pytest.mark.parametrize("heads", [16, 5, 72])
def test_mixed_rows(heads):
    config = replace(SMALL, heads=heads, tokens=32)
    interpreted(config, [(1, 100), (1, 16), (9, 150), (0, 0), (17, 70)])


def test_prompts_without_races():
    interpreted(replace(SMALL, tokens=12), [(7, 140), (5, 5)], races=True)


def test_a_few_queries_at_the_end_of_the_batch():
    interpreted(replace(SMALL, heads=8, tokens=3, first_page=2), [(3, 70)])


# --- compiled ahead of time ---


@pytest.mark.usefixtures("no_disk_cache")
@pytest.mark.parametrize(("heads", "decode_only"), [(16, True), (128, True), (16, False), (128, False)])
def test_compiles_for_h200_and_does_not_copy_the_cache(heads, decode_only, monkeypatch, capfd):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    place = NamedSharding(mesh_of("h200x1"), PartitionSpec())
    # no other dimension is 7333
    tokens = 64
    rows = 64
    count = 7333

    def array(shape, dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=place)

    pages = LatentPages(array((count, 64, 576), jnp.bfloat16))
    q = array((tokens, heads, 576), jnp.bfloat16)
    numbers = [array(shape, np.int32) for shape in ((rows, 32), (rows + 1,), (rows,), (), ())]

    def attend(q, pages, *numbers):
        options = {"scale": 0.1, "rank": 512, "first_page": numbers[-1], "decode_only": decode_only}
        return mosaic_gpu.latent_attention(q, pages, *numbers[:-1], **options)

    mosaic_gpu.latent_attention.clear_cache()
    kernel = traced_kernels(attend, q, pages, *numbers)["latent_attention"]
    sizes = (512, 576, 64, jnp.dtype(jnp.bfloat16))
    tile = LatentTile(heads, min(heads, 64), *sizes, jnp.dtype(jnp.float32), 0.1, None)
    assert kernel.shared_memory <= min(tile.shared_memory(), SHARED_MEMORY - 1024)
    compiled = jax.jit(attend).lower(q, pages, *numbers).compile()
    text = compiled.as_text()
    assert not [line for line in text.splitlines() if " copy" in line and f"[{count}," in line]
    assert compiled.memory_analysis().temp_size_in_bytes < 512 << 20
    said = capfd.readouterr()
    assembled = assembled_kernels(said.out + said.err)["latent_attention"]
    assert assembled.spilled <= 96, assembled
