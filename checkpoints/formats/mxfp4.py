"""MXFP4 checkpoints, as gpt-oss has them: E2M1 numbers, 32 of which share a power of two.

Defined by the OCP Microscaling Formats specification 1.0; the layout by transformers (`convert_moe_packed_tensors` of
integrations/mxfp4.py): blocks uint8 [..., out, in / 32, 16], the lower half of a byte first, and scales uint8
[..., out, in / 32], exponents of two (e8m0).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxserve.checkpoints.errors import CheckpointError
from jaxserve.checkpoints.formats.packing import EXPONENTS, Tensors, exponents_of, fetch, find, method, part_names
from jaxserve.checkpoints.int4 import FLOAT4, PackedInt4
from jaxserve.pallas_kernels.types import QuantArray

METHODS = ("mxfp4",)
GROUP = 32


def open_format(config: Mapping[str, Any], tensors: Tensors) -> MXFP4 | None:
    return MXFP4(tensors) if method(config) in METHODS else None


def decode(packed: np.ndarray, exponents: np.ndarray, name: str) -> QuantArray:
    """uint8 codes [out, in / 2] and uint8 exponents [out, in / 32], of the tensor `name` -> the weight [out, in]."""
    return QuantArray(PackedInt4(packed, FLOAT4), exponents_of(exponents, name), block=(1, GROUP))


@dataclass
class MXFP4:
    """Reads a stack of experts' weights as one weight, whose outputs are those of all experts."""

    tensors: Tensors
    name: str = "mxfp4"
    description: str = "MXFP4 in groups of 32"

    def parts(self, weight: str) -> tuple[str, ...]:
        return part_names(self.tensors, weight, ("_blocks", "_scales"))

    def read(self, weight: str, shape: tuple[int, int]) -> QuantArray:
        (out, inputs), (blocks, scales) = shape, self.parts(weight)
        stored = find(self.tensors, scales).shape
        if inputs % GROUP or stored[-1:] != (inputs // GROUP,) or math.prod(stored[:-1]) != out:
            raise CheckpointError(f"tensor {scales!r} has shape {list(stored)}, but the weight is {list(shape)}")
        packed = fetch(self.tensors, blocks, ("uint8",), (*stored, GROUP // 2))
        exponents = fetch(self.tensors, scales, EXPONENTS, stored)
        return decode(packed.reshape(out, inputs // 2), exponents.reshape(out, -1), scales)
