"""Quantized weights on the host: QuantArrays of NumPy arrays."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np

from pallas_kernels.types import QuantArray

INT4 = np.dtype(ml_dtypes.int4)


def on_host(codes: Any, scale: Any, zero: Any = None, *, block: tuple[int, int], order: Any = None) -> QuantArray:
    """A QuantArray of NumPy arrays, which its own declaration does not know."""
    return QuantArray(codes, scale, zero, block=block, order=order)


def expand(values: np.ndarray, block: tuple[int, int], shape: tuple[int, ...]) -> np.ndarray:
    """One value per block [ceil(out / rows), ceil(in / inputs)] -> one per weight [out, in], in the same dtype."""
    for axis in (0, 1):
        if values.shape[axis] != shape[axis]:
            values = np.repeat(values, block[axis], axis)
    return values[: shape[0], : shape[1]]


def dequantize(w: QuantArray) -> np.ndarray:
    """The weight [out, in] in float32, its columns in their own order."""
    values = np.asarray(w.codes).astype(np.float32)
    if w.zero is not None:
        values -= expand(np.asarray(w.zero).astype(np.float32), w.block, w.shape)
    values *= expand(np.asarray(w.scale).astype(np.float32), w.block, w.shape)
    if w.bias is not None:
        values += expand(np.asarray(w.bias).astype(np.float32), w.block, w.shape)
    if w.order is None:
        return values
    ordered = np.empty_like(values)
    ordered[:, np.asarray(w.order)] = values
    return ordered


def refine(w: QuantArray, block: tuple[int, int]) -> QuantArray:
    """The same values with smaller blocks, which must divide the old ones (or the old ones hold a whole axis)."""
    new = (min(block[0], w.shape[0]), min(block[1], w.shape[1]))
    if new == w.block:
        return w
    counts = tuple(-(-size // b) for size, b in zip(w.shape, new, strict=True))

    def spread(values):
        if values is None:
            return None
        for axis in (0, 1):
            if values.shape[axis] != counts[axis]:
                assert values.shape[axis] == 1 or w.block[axis] % new[axis] == 0, (w.block, new)
                values = np.repeat(values, -(-w.block[axis] // new[axis]), axis)
                values = np.take(values, np.arange(counts[axis]), axis)
        return values

    return replace(w, scale=spread(w.scale), zero=spread(w.zero), bias=spread(w.bias), block=new)


def quant_bytes(w: QuantArray) -> int:
    """Of its arrays on a device, where two int4 codes share a byte."""
    arrays = [x for x in (w.codes, w.scale, w.zero, w.bias, w.order) if x is not None]
    return sum(math.ceil(x.size / 2) if x.dtype == INT4 else x.nbytes for x in arrays)
