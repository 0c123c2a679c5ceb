"""GPTQ checkpoints: 2, 3, 4 and 8 bits, symmetric or not, with act-order, in the layouts "gptq" (v1) and "gptq_v2".

Defined by GPTQModel (github.com/ModelCloud/GPTQModel, `dequantize_weight` of gptqmodel/nn_modules/qlinear): value =
(q - z) * scale, with z and scale of the input's group; g_idx is each input's group. Words are packed from their lowest
bits on, with codes of neighbouring inputs and zero points of neighbouring outputs. v1 stores zero points minus 1. For
2, 4 and 8 bits that is subtracted from whole words, so that a zero point of 0 borrows from its neighbour, and reading
adds it to whole words too.
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
    find,
    group_order,
    group_size,
    groups,
    method,
    part_names,
    quant_config,
    signed,
    unpack,
    words,
)
from jaxserve.checkpoints.int4 import signed_bytes
from jaxserve.pallas_kernels.types import QuantArray

METHODS = ("gptq",)
ONES = {2: 0x55555555, 4: 0x11111111, 8: 0x01010101}


def open_format(config: Mapping[str, Any], tensors: Tensors) -> GPTQ | None:
    if method(config) not in METHODS:
        return None
    settings = quant_config(config)
    layout = settings.get("checkpoint_format") or settings.get("format") or "gptq"
    if layout not in ("gptq", "gptq_v2"):
        raise CheckpointError(f"GPTQ is read in the layouts gptq and gptq_v2, not {layout!r:.100}")
    return GPTQ(
        tensors,
        settings.get("bits"),
        group_size(settings),
        bool(settings.get("sym", False)),
        layout == "gptq_v2",
        bool(settings.get("dynamic")),
    )


@dataclass
class GPTQ:
    """With `dynamic`, bits and group sizes may differ between modules; the tensors' shapes tell which."""

    tensors: Tensors
    bits: object
    group: int | None
    symmetric: bool
    v2: bool
    dynamic: bool
    name: str = "gptq"

    @property
    def description(self) -> str:
        return f"GPTQ int{self.bits} in groups of {self.group or 'all inputs'}"

    def parts(self, weight: str) -> tuple[str, ...]:
        names = part_names(self.tensors, weight, (".qweight", ".qzeros", ".scales"))
        g_idx = f"{weight.removesuffix('.weight')}.g_idx"
        return (*names, g_idx) if names and g_idx in self.tensors else names

    def read(self, weight: str, shape: tuple[int, int]) -> QuantArray:
        (out, inputs), (qweight, qzeros, scales, *g_idx) = shape, self.parts(weight)
        bits = self._bits(qweight, inputs)
        count, size = self._groups(weight, scales, inputs)
        packed = fetch(self.tensors, qweight, ("int32",), (words(inputs, bits, qweight), out))
        zero = self._zeros(fetch(self.tensors, qzeros, ("int32",), (count, words(out, bits, qzeros))), bits)
        scale = fetch(self.tensors, scales, FLOATS, (count, out))
        codes: Any = signed_bytes(packed.T) if bits == 4 else signed(unpack(packed.T, bits), bits)
        order = None
        for name in g_idx:
            group = fetch(self.tensors, name, ("int32", "int64"), (inputs,))
            # Some tools write zeros where there is no act-order.
            order = group_order(group, name, count, size) if group.any() else None
        if order is not None:
            codes = np.take(np.asarray(codes), order, axis=1)
        known_zero = self.symmetric and not zero.any()
        return QuantArray(
            codes, np.ascontiguousarray(scale.T), None if known_zero else zero, order=order, block=(1, size)
        )

    def _bits(self, qweight: str, inputs: int) -> int:
        tensor = find(self.tensors, qweight)
        for bits in (2, 3, 4, 8):
            if len(tensor.shape) == 2 and tensor.shape[0] * 32 == inputs * bits and (self.dynamic or bits == self.bits):
                return bits
        raise CheckpointError(
            f"{tensor.path.name}: tensor {qweight!r} has shape {list(tensor.shape)}, which for {inputs} inputs is not "
            f"{'2, 3, 4 or 8' if self.dynamic else repr(self.bits)} bits"
        )

    def _groups(self, weight: str, scales: str, inputs: int) -> tuple[int, int]:
        rows = (find(self.tensors, scales).shape or (0,))[0]
        if self.dynamic and rows and -(-inputs // (self.group or inputs)) != rows:
            return groups(max(1, inputs // rows), weight, inputs)
        return groups(self.group, weight, inputs, partial=True)

    def _zeros(self, packed: np.ndarray, bits: int) -> np.ndarray:
        """Words [groups, out * bits / 32] -> int8 [out, groups], in the units of the codes."""
        if not self.v2 and bits in ONES:
            packed = packed.view(np.uint32) + np.uint32(ONES[bits])
        zeros = unpack(packed, bits)
        if not self.v2 and bits not in ONES:
            zeros = (zeros + 1) & (2**bits - 1)
        return np.ascontiguousarray(signed(zeros, bits, np.dtype(np.int8)).T)
