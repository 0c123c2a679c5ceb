"""Quantized weights on the host: QuantArrays of NumPy arrays."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np

from jaxserve.checkpoints.int4 import FLOAT4
from jaxserve.checkpoints.int4 import INT4 as INT4
from jaxserve.pallas_kernels.types import QuantArray


@dataclass(frozen=True)
class StoredRows:
    """A quantized weight [out, in] as rows of the file's own bytes.

    parts: each a type of GGUF's and bytes [rows, bytes of a row].
    source: int64 [out], which row each is, counted through all parts; -1 is a row of zeros.
    inputs: numbers in a row.
    """

    parts: list[tuple[str, np.ndarray]]
    source: np.ndarray
    inputs: int

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.source), self.inputs


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
    if w.gain is not None:
        values *= np.asarray(w.gain)
    if w.order is None:
        return values
    ordered = np.empty_like(values)
    ordered[:, np.asarray(w.order)] = values
    return ordered


_DOUBLED = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)


def with_bytes(w: QuantArray) -> QuantArray:
    """4-bit floats as int8, twice as large, with half the scale; others as they are. Exact but for a gain, which the
    scales, in float32 then, are multiplied with."""
    if w.codes.dtype != FLOAT4:
        return w
    codes = _DOUBLED[np.asarray(w.codes).view(np.uint8)]
    scale = np.asarray(w.scale).astype(np.float32) * np.float32(0.5)
    if w.gain is not None:
        return replace(w, codes=codes, scale=scale * w.gain, gain=None)
    return replace(w, codes=codes, scale=scale.astype(ml_dtypes.bfloat16))


def refine(w: QuantArray, block: tuple[int, int]) -> QuantArray:
    """The same values with smaller blocks, which must divide the old ones (or the old ones hold a whole axis)."""
    new = min(block[0], w.shape[0]), min(block[1], w.shape[1])
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


def common_form(parts: list[QuantArray]) -> list[QuantArray] | None:
    """The same values in arrays that are alike, so that the rows of all can be one weight: blocks of one row, the
    smallest along the inputs, the widest of the integers, and zero points and biases everywhere or nowhere; of static
    scales of the inputs the largest, which saturates nowhere that its own does not. None where there is no such form.
    """
    first = parts[0]
    if any((a.order is None) != (first.order is None) or not np.array_equal(a.order, first.order) for a in parts):
        return None
    kinds = {a.codes.dtype for a in parts}
    if len(kinds) > 1 and not kinds <= {INT4, np.dtype(np.int8)}:
        return None
    inputs = first.shape[1]
    sizes = {min(a.block[1], inputs) for a in parts}
    block = (1, sizes.pop() if len(sizes) == 1 else math.gcd(*sizes))
    parts = [refine(a, block) for a in parts]
    codes = kinds.pop() if len(kinds) == 1 else np.dtype(np.int8)

    def unite(values: list[Any], like: list[Any]) -> list[Any]:
        """None becomes zeros where others are not None; dtypes become one that holds all."""
        given = {x.dtype for x in values if x is not None}
        if not given:
            return values
        dtype = given.pop() if len(given) == 1 else np.dtype(np.float32)
        pairs = zip(values, like, strict=True)
        return [np.zeros(y.shape, dtype) if x is None else x.astype(dtype, copy=False) for x, y in pairs]

    ways = {a.activations for a in parts}
    activations = ways.pop() if len(ways) == 1 else None  # otherwise nothing is rounded
    input_scale = np.max([a.input_scale for a in parts], 0) if activations and activations.static else None
    parts = [replace(a, activations=activations, input_scale=input_scale) for a in parts]
    scales = [a.scale for a in parts]
    columns = {name: unite([getattr(a, name) for a in parts], scales) for name in ("scale", "zero", "bias")}
    columns["gain"] = [a.gain for a in parts]
    if any(gain is not None for gain in columns["gain"]):
        columns["gain"] = [np.ones((a.shape[0], 1), np.float32) if a.gain is None else a.gain for a in parts]
    return [
        replace(a, codes=a.codes.astype(codes, copy=False), **{name: values[i] for name, values in columns.items()})
        for i, a in enumerate(parts)
    ]
