"""AWQ checkpoints: int4 with zero points, in the "gemm" layout.

Defined by AutoAWQ (github.com/casper-hansen/AutoAWQ, awq/utils/packing_utils.py, `dequantize_gemm`): value =
(q - z) * scale. Along the outputs eight codes share a word, in the order 0 2 4 6 1 3 5 7 from its lowest bits on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from checkpoints.errors import CheckpointError
from checkpoints.formats.packing import FLOATS, Tensors, fetch, group_size, groups, method, quant_config, signed, words
from pallas_kernels.types import QuantArray

METHODS = ("awq",)
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def open_format(config: Mapping[str, Any], tensors: Tensors) -> AWQ | None:
    if method(config) not in METHODS:
        return None
    settings = quant_config(config)
    bits, layout = settings.get("bits", 4), str(settings.get("version", "gemm")).lower()
    if bits != 4 or layout != "gemm":
        raise CheckpointError(f"AWQ is read with 4 bits in the gemm layout, not {bits!r} bits in {layout!r:.100}")
    return AWQ(tensors, group_size(settings, 128))


@dataclass
class AWQ:
    tensors: Tensors
    group: int | None
    name: str = "awq"

    @property
    def description(self) -> str:
        return f"AWQ int4 in groups of {self.group or 'all inputs'}"

    def parts(self, weight: str) -> tuple[str, ...]:
        module = weight.removesuffix(".weight")
        names = tuple(f"{module}.{part}" for part in ("qweight", "qzeros", "scales"))
        return names if any(name in self.tensors for name in names) else ()

    def read(self, weight: str, shape: tuple[int, int]) -> QuantArray:
        (out, inputs), (qweight, qzeros, scales) = shape, self.parts(weight)
        count, size = groups(self.group, weight, inputs)
        columns = words(out, 4, qweight)
        codes = fetch(self.tensors, qweight, ("int32",), (inputs, columns))
        zeros = fetch(self.tensors, qzeros, ("int32",), (count, columns))
        scale = fetch(self.tensors, scales, FLOATS, (count, out))
        return QuantArray(
            signed(_rows(codes), 4),
            np.ascontiguousarray(scale.T),
            signed(_rows(zeros), 4, np.dtype(np.int8)),
            block=(1, size),
        )


def _rows(packed: np.ndarray) -> np.ndarray:
    """Words [n, out / 8] -> codes from 0, uint8 [out, n]."""
    n, columns = packed.shape
    raw = np.ascontiguousarray(packed.T).view(np.uint8).reshape(columns, n, 4)
    codes = np.empty((columns, 8, n), np.uint8)
    for byte in range(4):
        codes[:, ORDER[2 * byte]] = raw[:, :, byte] & 15
        codes[:, ORDER[2 * byte + 1]] = raw[:, :, byte] >> 4
    return codes.reshape(-1, n)
