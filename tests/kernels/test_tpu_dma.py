"""The rules for copies on TPU: known offsets are refused while tracing, others while interpreted."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxserve.pallas_kernels.tpu_dma import CopyError, aligned, block, checking, copy, smem_bytes, word_rows


def copy_rows(x, start, *, size=8, multiple=8):
    """Rows [start, start + size) of x [rows, 128], by a kernel with one copy."""

    def kernel(start, x, out, semaphore):
        moved = copy(x.at[pl.ds(aligned(start[0], multiple), size)], out, semaphore)
        moved.start()
        moved.wait()

    call = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((size, x.shape[1]), x.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(1,),
            in_specs=[pl.BlockSpec(memory_space=pltpu.HBM)],
            out_specs=pl.BlockSpec(memory_space=pltpu.HBM),
            scratch_shapes=[pltpu.SemaphoreType.DMA],
        ),
        interpret=pltpu.InterpretParams(),
    )
    return np.asarray(call(jnp.array([start], jnp.int32), x))


X = jnp.arange(64 * 128, dtype=jnp.float32).reshape(64, 128)


def test_an_aligned_copy_passes():
    with checking():
        np.testing.assert_array_equal(copy_rows(X, 16), X[16:24])


def test_an_offset_that_only_the_device_knows_is_checked_while_interpreted():
    """Interpreted, the copy is right; a device would move other rows than meant."""
    np.testing.assert_array_equal(copy_rows(X, 13), X[13:21])
    with pytest.raises(CopyError, match="begins at 13, which is no multiple of 8"), checking():
        copy_rows(X, 13)


def test_known_offsets_and_sizes_are_checked_while_tracing():
    assert aligned(24, 8) == 24
    with pytest.raises(CopyError, match="begins at 13"):
        aligned(13, 8)
    with pytest.raises(CopyError, match=r"takes 3 of 64 along axis -2: no multiple of 2"):
        copy_rows(X.astype(jnp.bfloat16), 0, size=3)

    def kernel(x, out, semaphore):
        copy(x.at[:, pl.ds(0, 64)], out, semaphore)

    shape = jax.ShapeDtypeStruct((8, 128), jnp.float32)
    call = pl.pallas_call(kernel, out_shape=shape, scratch_shapes=[pltpu.SemaphoreType.DMA])
    with pytest.raises(CopyError, match=r"a copy of float32\(8, 64\) to float32\(8, 128\)"):
        call(X[:8])


def test_a_part_of_a_tile_is_addressed_within_32_bits():
    """Whole tiles are not: their addresses are counted in tiles."""

    def kernel(part, x, out, semaphore):
        copy(part(x), out, semaphore).start()

    def trace(part):
        shape = jax.ShapeDtypeStruct((2, 128), jnp.bfloat16)
        hbm = pl.BlockSpec(memory_space=pltpu.HBM)
        call = pl.pallas_call(
            partial(kernel, part), shape, in_specs=[hbm], out_specs=hbm, scratch_shapes=[pltpu.SemaphoreType.DMA]
        )
        jax.eval_shape(call, jax.ShapeDtypeStruct(((1 << 21) + 1, 16, 128), jnp.bfloat16))

    with pytest.raises(CopyError, match=r"part of a tile from or to \(2097153, 16, 128\), which has more than 2\^32"):
        trace(lambda x: x.at[5, pl.ds(2, 2)])
    trace(lambda x: x.at[5].at[pl.ds(2, 2)])


def test_blocks_are_whole_tiles_or_whole_axes():
    array = jax.ShapeDtypeStruct((3, 20, 384), jnp.int8)
    for shape in ((None, 20, 384), (1, 8, 256), (None, 16, 128)):
        assert block(array, shape, lambda *_: (0, 0, 0)).block_shape == shape
    with pytest.raises(CopyError, match="takes 12 of 20 along axis -2: no multiple of 8"):
        block(array, (None, 12, 128), lambda *_: (0, 0, 0))
    with pytest.raises(CopyError, match="takes 192 of 384 along axis -1: no multiple of 128"):
        block(array, (None, 8, 192), lambda *_: (0, 0, 0))


def test_rows_of_a_word_and_sizes_in_smem():
    assert [word_rows(dtype) for dtype in (jnp.float32, jnp.bfloat16, jnp.int8, jnp.float8_e4m3fn)] == [1, 2, 4, 4]
    assert smem_bytes(1) == smem_bytes(128) == 512
    assert smem_bytes(129, 1) == 1536
