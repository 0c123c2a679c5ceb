"""Attention within segments: each backend against NumPy in float64, and the check that a device's kernel must pass."""

import jax.numpy as jnp
import numpy as np
import pytest
from test_tpu_attention import interpreted

from jaxserve.pallas_kernels import cpu, cpu_build
from jaxserve.pallas_kernels.registry import SegmentProblem, load
from jaxserve.pallas_kernels.segment_attention.reference import segment_attention, spans
from jaxserve.pallas_kernels.selfcheck_segments import check_segments

PROBLEM = SegmentProblem(np.dtype(np.float32), 2, 24)


def wrong(attend=None, repeats=1):
    found = list(check_segments(attend, PROBLEM, repeats=repeats))
    assert [finding.what for finding in found] == ["attention within pictures", "attention within windows"]
    return [finding.what for finding in found if not finding.right]


def test_plain_xla():
    assert wrong(segment_attention) == []


def test_in_cpp():
    if not cpu.available(cpu_build.ATTENTION):
        pytest.skip("there is no C++ compiler")
    attend = load("segment_attention", "cpu").segment_attention
    assert wrong(attend) == []
    rng = np.random.default_rng(0)
    for sizes, heads, dim in (([129, 63, 7], 3, 72), ([64, 64, 5, 61], 1, 16), ([300], 2, 88), ([3], 5, 80)):
        rows = sum(sizes)
        q, k, v = (jnp.asarray(rng.standard_normal((rows + 2, heads, dim), np.float32)) for _ in range(3))
        segment = np.append(np.repeat(np.arange(len(sizes), dtype=np.int32), sizes), np.int32([-1, -1]))
        x = (q, k.at[rows:].set(np.nan), v.at[rows:].set(np.inf), segment, 0.2)
        np.testing.assert_allclose(attend(*x)[:rows], segment_attention(*x)[:rows], rtol=2e-5, atol=2e-6)


@pytest.mark.slow
def test_interpreted_on_tpus():
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal((256, 2, 24), np.float32)) for _ in range(3))
    segment = np.repeat(np.int32([0, 1, 2, -1]), [131, 1, 60, 64])
    attend = load("segment_attention", "mosaic_tpu").segment_attention
    found = interpreted(attend, q, k.at[192:].set(np.nan), v.at[192:].set(np.nan), segment, 0.2)
    expected = segment_attention(q, k, v, segment, 0.2)
    np.testing.assert_allclose(found[:192], expected[:192], rtol=1e-4, atol=1e-5)


def sees_neighbours(q, k, v, segment, scale):
    return segment_attention(q, k, v, jnp.where(segment < 0, segment, segment // 2), scale)


def sees_padding(q, k, v, segment, scale):
    return segment_attention(q, k, v, jnp.maximum(segment, 0), scale)


def scores_are_too_small(q, k, v, segment, scale):
    return segment_attention(q, k, v, segment, 0.98 * scale)


@pytest.mark.parametrize("attend", [sees_neighbours, sees_padding, scores_are_too_small])
def test_wrong_ones_are_found(attend):
    assert wrong(attend)


@pytest.mark.parametrize("seed", range(20))
def test_spans_have_all_rows_of_a_segment(seed):
    rng = np.random.default_rng(seed)
    segment = np.sort(rng.integers(0, 9, 64)).astype(np.int32)
    segment[64 - int(rng.integers(0, 40)) :] = -1
    begin, end = map(np.asarray, spans(jnp.asarray(segment), 8, 4))
    for block, (first, last) in enumerate(zip(begin, end, strict=True)):
        own = set(segment[8 * block :][:8].tolist()) - {-1}
        meets = [j for j in range(16) if own & set(segment[4 * j :][:4].tolist())]
        assert (first, last) == ((meets[0], meets[-1] + 1) if meets else (last, last))
