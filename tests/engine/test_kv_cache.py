"""The cache's arrays, of several layers each."""

import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines import generate, make_engine, request

from jaxserve.config import EngineConfig, default_page_size
from jaxserve.devices.kernel_report import describe
from jaxserve.devices.mesh import make_mesh
from jaxserve.execution.cache_kinds import KeysAndValues
from jaxserve.execution.kv_cache import COPIES, CacheLayout, copy_pages
from jaxserve.execution.layer_groups import LayerGroups
from jaxserve.pallas_kernels import cpu
from jaxserve.pallas_kernels.registry import Device
from jaxserve.scheduling.block_manager import NULL_PAGE


@pytest.mark.parametrize(
    ("layers", "arrays"), [(1, 1), (2, 1), (12, 2), (22, 11), (28, 4), (32, 4), (61, 61), (80, 10)]
)
def test_as_few_arrays_as_there_can_be(layers, arrays):
    layout = CacheLayout(LayerGroups.of([None] * layers, 80), 5, 16, KeysAndValues(2, 8, jnp.dtype("float32")))
    assert layout.num_arrays == arrays
    assert [x.data.shape for x in layout.abstract(make_mesh(1))] == [(layers // arrays * 5, 2, 2, 16, 8)] * arrays


@pytest.mark.skipif(not cpu.available(), reason="the CPU kernels cannot be built here")
def test_pages_that_were_never_used_take_no_memory():
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before = resident()
    layout = CacheLayout(
        LayerGroups.of([None] * 8, 2**18), 2**14, 16, KeysAndValues(2, 16, jnp.dtype("float32"))
    )  # 512 MiB
    cache = jax.block_until_ready(layout.create(make_mesh(1)))
    assert sum(x.nbytes for x in jax.tree.leaves(cache)) == 2**29
    assert resident() - before < 2**27


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_pages_are_copied_in_every_layer(dtype):
    layers = 22
    pages = 6  # two layers an array
    layout = CacheLayout(LayerGroups.of([None] * layers, 80), pages, 4, KeysAndValues(1, 8, jnp.dtype(dtype)))
    random = np.random.default_rng(0)
    cache = jax.tree.map(lambda x: jnp.asarray(random.integers(-9, 9, x.shape), x.dtype), layout.create(make_mesh(1)))
    pairs = np.full((2, COPIES), NULL_PAGE, np.int32)
    pairs[:, :3] = [[1, 2, 4], [3, 1, 5]]  # page 1 is read before it is written
    copied = copy_pages(cache, *pairs, depth=layers)
    for before, after in zip(jax.tree.leaves(cache), jax.tree.leaves(copied), strict=True):
        before, after = (np.asarray(x).reshape(2, pages, *x.shape[1:]) for x in (before, after))
        expected = before.copy()
        expected[:, [3, 1, 5]] = before[:, [1, 2, 4]]
        np.testing.assert_array_equal(after, expected)


@pytest.mark.slow
def test_pages_of_every_size_give_the_same_answers(model_folders):
    """Prompts of 140 tokens whose first 138 agree: the second finds as many whole pages of the first as there are."""
    assert [default_page_size(platform) for platform in ("cpu", "gpu", "tpu")] == [16, 16, 128]
    assert EngineConfig(model="x").page_size is None
    answers = []
    for asked, size, found in ((None, 16, 128), (8, 8, 136), (128, 128, 128), (256, 256, 0)):
        engine = make_engine(model_folders("llama3_gqa"), page_size=asked, max_model_len=180, kv_pages=60)
        assert engine.page_size == engine.blocks.page_size == engine.runner.layout.page_size == size
        start = [7 + i % 50 for i in range(138)]
        first = generate(engine, request("first", [*start, 3, 4], max_tokens=8))
        second = generate(engine, request("second", [*start, 5, 6], max_tokens=8))
        assert second[0].num_cached == found
        answers.append((first[0].token_ids, second[0].token_ids))
    assert all(answer == answers[0] for answer in answers)


def test_eight_bit_caches_run_on_tpus_with_the_default_pages():
    tpu = Device("tpu", "TPU v5 lite")
    assert [line for line in describe(tpu) if "cache" in line and "pages of 128 tokens" in line]
    refused = [line for line in describe(tpu) if "mosaic_tpu" in line and "can run" not in line and "used" not in line]
    assert not [line for line in refused if "it does not have this operation" not in line]
    small = [line for line in describe(tpu, page_size=16) if "mosaic_tpu" in line and "take --page-size 128" in line]
    assert len(small) == 2, "of int8 and of fp8"
