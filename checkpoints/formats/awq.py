"""AWQ checkpoints: int4 with zero points, in the layouts "gemm" and "gemv".

Defined by AutoAWQ (github.com/casper-hansen/AutoAWQ, awq/utils/packing_utils.py, `dequantize_gemm`, and
awq/modules/linear/gemv.py): value = (q - z) * scale. gemm: a word holds eight codes of
neighbouring outputs, in the order 0 2 4 6 1 3 5 7 from its lowest bits on. gemv: a word holds eight codes of
neighbouring inputs, or eight zero points of neighbouring groups, in order. Zero points and scales are padded to whole
words, and to two or four words for groups of 64 or 32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxserve.checkpoints.errors import CheckpointError
from jaxserve.checkpoints.formats.packing import (
    FLOATS,
    Tensors,
    fetch,
    group_size,
    groups,
    method,
    part_names,
    quant_config,
    signed,
    unpack,
    words,
)
from jaxserve.checkpoints.int4 import PackedInt4, signed_bytes
from jaxserve.pallas_kernels.types import QuantArray

METHODS = ("awq",)
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # which of eight neighbouring outputs each nibble of a word holds, lowest first


def open_format(config: Mapping[str, Any], tensors: Tensors) -> AWQ | None:
    if method(config) not in METHODS:
        return None
    settings = quant_config(config)
    bits = settings.get("bits", 4)
    layout = str(settings.get("version", "gemm")).lower()
    if bits != 4 or layout not in ("gemm", "gemv"):
        raise CheckpointError(
            f"AWQ is read with 4 bits in the layouts gemm and gemv, not {bits!r} bits in {layout!r:.100}"
        )
    return AWQ(tensors, group_size(settings, 128), layout)


@dataclass
class AWQ:
    tensors: Tensors
    group: int | None
    layout: str
    name: str = "awq"

    @property
    def description(self) -> str:
        return f"AWQ int4 in groups of {self.group or 'all inputs'}"

    def parts(self, weight: str) -> tuple[str, ...]:
        return part_names(self.tensors, weight, (".qweight", ".qzeros", ".scales"))

    def read(self, weight: str, shape: tuple[int, int]) -> QuantArray:
        (out, inputs), (qweight, qzeros, scales) = shape, self.parts(weight)
        count, size = groups(self.group, weight, inputs)
        if self.layout == "gemv":
            return self._read_gemv(weight, shape, count, size)
        columns = words(out, 4, qweight)
        codes = fetch(self.tensors, qweight, ("int32",), (inputs, columns))
        zeros = fetch(self.tensors, qzeros, ("int32",), (count, columns))
        scale = fetch(self.tensors, scales, FLOATS, (count, out))
        return QuantArray(
            _int4_rows(codes),
            np.ascontiguousarray(scale.T),
            signed(_rows(zeros), 4, np.dtype(np.int8)),
            block=(1, size),
        )

    def _read_gemv(self, weight: str, shape: tuple[int, int], count: int, size: int) -> QuantArray:
        (out, inputs), (qweight, qzeros, scales) = shape, self.parts(weight)
        step = {64: 2, 32: 4}.get(size, 1)
        width = -(-count // (8 * step)) * step  # words of a row's zero points
        codes = fetch(self.tensors, qweight, ("int32",), (out, words(inputs, 4, qweight)))
        zeros = unpack(fetch(self.tensors, qzeros, ("int32",), (out, width)), 4)
        scale = fetch(self.tensors, scales, FLOATS, (out, 8 * width))
        zero = signed(np.ascontiguousarray(zeros[:, :count]), 4, np.dtype(np.int8))
        return QuantArray(signed_bytes(codes), np.ascontiguousarray(scale[:, :count]), zero, block=(1, size))


def _int4_rows(packed: np.ndarray) -> PackedInt4 | np.ndarray:
    """Words [n, out / 8] -> codes minus 8, int4 [out, n], packed if n is even."""
    n, columns = packed.shape
    if n % 2:
        return signed(_rows(packed), 4)
    both = np.empty((columns, 8, n // 2), np.uint8)
    words = packed.view(np.uint32)
    first = words[::2]
    second = words[1::2]
    low = np.uint32(0x0F0F0F0F)
    for half in (0, 1):
        pair = (first >> 4 & low) | (second & ~low) if half else (first & low) | (second & low) << 4
        pair ^= np.uint32(0x88888888)
        raw = np.ascontiguousarray(pair.T).view(np.uint8).reshape(columns, n // 2, 4)
        for byte in range(4):
            both[:, ORDER[2 * byte + half]] = raw[:, :, byte]
    return PackedInt4(both.reshape(-1, n // 2))


def _rows(packed: np.ndarray) -> np.ndarray:
    """Words [n, out / 8] -> unsigned codes, uint8 [out, n]."""
    n, columns = packed.shape
    raw = np.ascontiguousarray(packed.T).view(np.uint8).reshape(columns, n, 4)
    codes = np.empty((columns, 8, n), np.uint8)
    for byte in range(4):
        codes[:, ORDER[2 * byte]] = raw[:, :, byte] & 15
        codes[:, ORDER[2 * byte + 1]] = raw[:, :, byte] >> 4
    return codes.reshape(-1, n)
