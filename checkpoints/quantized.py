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
    """A quantized weight [out, in] as the bytes of its rows in the file.

    parts: (GGUF type, bytes [rows, bytes of a row]) of each tensor.
    source: int64 [out], the index of each output's row in the concatenated parts; -1 is a row of zeros.
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
    """The weight [out, in] in float32, with its columns in the model's order."""
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
    """Converts 4-bit floats to int8: doubled codes, halved scales. Other weights are returned unchanged.

    Exact, except that a gain is multiplied into the scales, which are float32 then.
    """
    if w.codes.dtype != FLOAT4:
        return w
    codes = _DOUBLED[np.asarray(w.codes).view(np.uint8)]
    scale = np.asarray(w.scale).astype(np.float32) * np.float32(0.5)
    if w.gain is not None:
        return replace(w, codes=codes, scale=scale * w.gain, gain=None)
    return replace(w, codes=codes, scale=scale.astype(ml_dtypes.bfloat16))


def refine(w: QuantArray, block: tuple[int, int]) -> QuantArray:
    """The same weight with smaller blocks, which must divide the old ones (unless these span a whole axis)."""
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
    """The weights with equal blocks and dtypes, so that their rows can be concatenated; None if that is impossible.

    Blocks have one row and the greatest common divisor of the inputs. Integers take the widest dtype. Zero points and
    biases exist in all or none. Static scales of inputs become the largest one, so that none saturates earlier.
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
        """Replaces None by zeros if others are not None, and converts all to a common dtype."""
        given = {x.dtype for x in values if x is not None}
        if not given:
            return values
        dtype = given.pop() if len(given) == 1 else np.dtype(np.float32)
        pairs = zip(values, like, strict=True)
        return [np.zeros(y.shape, dtype) if x is None else x.astype(dtype, copy=False) for x, y in pairs]

    ways = {a.activations for a in parts}
    activations = ways.pop() if len(ways) == 1 else None  # inputs are not rounded if the parts differ
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
