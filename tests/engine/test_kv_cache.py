"""The cache's arrays, of several layers each."""

import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.block_manager import NULL_PAGE
from jaxserve.kv_cache import COPIES, CacheLayout, copy_pages
from jaxserve.mesh import make_mesh
from pallas_kernels import cpu


@pytest.mark.parametrize(
    ("layers", "arrays"), [(1, 1), (2, 1), (12, 2), (22, 11), (28, 4), (32, 4), (61, 61), (80, 10)]
)
def test_as_few_arrays_as_there_can_be(layers, arrays):
    layout = CacheLayout(layers, 5, 16, 2, 8, jnp.dtype("float32"))
    assert layout.num_arrays == arrays
    assert [x.data.shape for x in layout.abstract(make_mesh(1))] == [(layers // arrays * 5, 2, 2, 16, 8)] * arrays


@pytest.mark.skipif(not cpu.available(), reason="the CPU kernels cannot be built here")
def test_pages_that_were_never_used_take_no_memory():
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before = resident()
    layout = CacheLayout(8, 2**14, 16, 2, 16, jnp.dtype("float32"))  # 512 MiB
    cache = jax.block_until_ready(layout.create(make_mesh(1)))
    assert sum(x.nbytes for x in jax.tree.leaves(cache)) == 2**29
    assert resident() - before < 2**27


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_pages_are_copied_in_every_layer(dtype):
    layers, pages = 22, 6  # two layers an array
    layout = CacheLayout(layers, pages, 4, 1, 8, jnp.dtype(dtype))
    random = np.random.default_rng(0)
    cache = jax.tree.map(lambda x: jnp.asarray(random.integers(-9, 9, x.shape), x.dtype), layout.create(make_mesh(1)))
    pairs = np.full((2, COPIES), NULL_PAGE, np.int32)
    pairs[:, :3] = [[1, 2, 4], [3, 1, 5]]  # page 1 is read before it is written
    copied = copy_pages(cache, *pairs, layers=layers)
    for before, after in zip(jax.tree.leaves(cache), jax.tree.leaves(copied), strict=True):
        before, after = (np.asarray(x).reshape(2, pages, *x.shape[1:]) for x in (before, after))
        expected = before.copy()
        expected[:, [3, 1, 5]] = before[:, [1, 2, 4]]
        np.testing.assert_array_equal(after, expected)
