"""Weights whose parts are stored in several forms: which rows go where, and when they are joined instead."""

from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest

from jaxserve.checkpoints.int4 import PackedInt4
from jaxserve.checkpoints.mixed import by_type, mixed_array, widens
from jaxserve.checkpoints.quantized import StoredRows, common_form, dequantize
from jaxserve.pallas_kernels.types import MixedArray, QuantArray

INPUTS = 64


def integers(rows: int, bits: int, group: int = 32, seed: int = 0) -> QuantArray:
    rng = np.random.default_rng([seed, bits])
    scale = rng.uniform(0.5, 2, (rows, INPUTS // group)).astype(np.float16)
    if bits == 4:
        return QuantArray(PackedInt4(rng.integers(0, 256, (rows, INPUTS // 2), np.uint8)), scale, block=(1, group))
    return QuantArray(rng.integers(-128, 128, (rows, INPUTS)).astype(np.int8), scale, block=(1, group))


def values_of(part) -> np.ndarray:
    return dequantize(part) if isinstance(part, QuantArray) else np.asarray(part)


def whole(w: MixedArray) -> np.ndarray:
    """The values [out, in], rows in turn."""
    rows = [values_of(part).reshape(-1, width, INPUTS) for part, width in zip(w.parts, w.widths, strict=True)]
    return np.concatenate(rows, axis=1).reshape(-1, INPUTS)


def heads(count: int, *widths: int) -> np.ndarray:
    """Rows of tensors with `count` heads of so many rows each, a head of each tensor in turn."""
    firsts = np.cumsum([0, *(count * width for width in widths)])
    parts = [np.arange(a, b).reshape(count, -1) for a, b in pairwise(firsts)]
    return np.concatenate(parts, axis=1).reshape(-1)


CASES = {
    "queries and keys alike": ([integers(32, 4), integers(8, 4, seed=1), integers(8, 8)], (5, 1)),
    "queries and values alike": ([integers(32, 4), integers(8, 8), integers(8, 4, seed=1)], (4, 1, 1)),
    "three forms": ([integers(32, 4), integers(8, 8), np.ones((8, INPUTS), np.float32)], (4, 1, 1)),
    "floats first": ([np.ones((32, INPUTS), np.float32), integers(8, 8), integers(8, 8, seed=1)], (4, 2)),
}


@pytest.mark.parametrize("case", CASES)
def test_rows_in_turn(case):
    parts, widths = CASES[case]
    source = heads(8, 4, 1, 1)
    w = mixed_array(parts, source)
    assert w is not None
    assert (w.widths, w.shape) == (widths, (48, INPUTS))
    np.testing.assert_array_equal(whole(w), np.concatenate([values_of(part) for part in parts])[source])


def test_rows_that_repeat():
    """Keys that two devices share are there twice."""
    keys = integers(4, 4)
    values = integers(4, 8)
    source = heads(2, 2, 2)[[0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 7, 4, 5, 6, 7]]
    w = mixed_array([keys, values], source)
    np.testing.assert_array_equal(whole(w), np.concatenate([dequantize(keys), dequantize(values)])[source])
    assert w.widths == (2, 2)


def test_a_row_that_nothing_goes_to():
    assert mixed_array([integers(2, 4), integers(2, 8)], np.array([0, -1, 2, 3])) is None


def test_rows_of_a_file():
    """Those of one type are together, also when another tensor of it lies between; one type alone stays whole."""
    data = [np.arange(n * 34, dtype=np.uint8).reshape(n, 34) for n in (4, 2, 2)]
    source = heads(2, 2, 1, 1)
    rows = StoredRows([("Q4_0", data[0]), ("Q8_0", data[1]), ("Q4_0", data[2])], source, 32)
    w = by_type(rows)
    assert w is not None
    assert w.widths == (2, 1, 1)
    everything = np.concatenate(data)
    for part, places in zip(w.parts, (source.reshape(2, 4)[:, :2], source[2::4], source[3::4]), strict=True):
        found = np.concatenate([bytes_ for _, bytes_ in part.parts])[part.source]
        np.testing.assert_array_equal(found, everything[places.reshape(-1)])
    assert by_type(StoredRows([("Q4_0", data[0]), ("Q4_0", data[2])], np.arange(6), 32)) is None


def test_what_is_joined_instead():
    """Forms of one width, and a zero point for all where some have one, cost nothing; 4 bits beside 8 do."""
    codes = np.zeros((8, INPUTS), np.int8)
    ones = np.ones((8, 1), np.float32)
    zeros = QuantArray(codes, ones, ones.astype(np.int8), block=(1, 64))
    plain = QuantArray(codes, ones, block=(1, 64))
    blocks = QuantArray(np.zeros((8, INPUTS), ml_dtypes.float8_e4m3fn), np.ones((1, 1), np.float32), block=(128, 128))
    for pair, wider in (([zeros, plain], False), ([blocks, blocks], False), ([integers(8, 4), integers(8, 8)], True)):
        form = common_form(pair)
        assert form is not None
        assert widens(pair, form) == wider
