"""EXL2 checkpoints: 2 to 8 bits, a number for each group of inputs, with act-order.

Defined by ExLlamaV2 (github.com/turboderp-org/exllamav2, `reconstruct_kernel` of exllamav2_ext/cuda/q_matrix.cu):
value = (q - 2^(bits - 1)) * scale; scale = (q_scale + 1)^2 * (q_scale_max / 256), in float16. q_groups has each group's
bits and first row in q_weight, where codes of neighbouring inputs are packed from a word's lowest bits on. The inputs
are sorted; q_invperm is the position of each. Outputs are padded to a multiple of 32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxserve.checkpoints.errors import CheckpointError
from jaxserve.checkpoints.formats.packing import Tensors, fetch, find, method, part_names, quant_config, signed, unpack
from jaxserve.checkpoints.quantized import INT4
from jaxserve.pallas_kernels.types import QuantArray

METHODS = ("exl2",)
WIDTHS = (2, 3, 4, 5, 6, 8)
PARTS = (".q_weight", ".q_scale", ".q_scale_max", ".q_groups", ".q_invperm")
STEP = 32  # the inputs of groups, and the padded outputs, are multiples of this number


def open_format(config: Mapping[str, Any], tensors: Tensors) -> EXL2 | None:
    by_names = not quant_config(config) and any(name.endswith(".q_groups") for name in tensors)  # early files
    if method(config) not in METHODS and not by_names:
        return None
    bits = f"{quant_config(config).get('bits', '2 to 8')!s:.10}"
    return EXL2(tensors, f"EXL2 with {bits} bits, as int4 where no group of a weight has more, else as int8")


@dataclass
class EXL2:
    tensors: Tensors
    description: str
    name: str = "exl2"

    def parts(self, weight: str) -> tuple[str, ...]:
        return part_names(self.tensors, weight, PARTS)

    def read(self, weight: str, shape: tuple[int, int]) -> QuantArray:
        out, inputs = shape
        q_weight, q_scale, q_scale_max, q_groups, q_invperm = self.parts(weight)
        rows = (*find(self.tensors, q_weight).shape, 0)[0]
        count = (*find(self.tensors, q_scale).shape, 0)[0]
        padded = -(-out // STEP) * STEP
        bits, ends, sizes = self._groups(q_groups, count, rows, inputs)
        packed = np.ascontiguousarray(fetch(self.tensors, q_weight, ("int32",), (rows, padded)).T[:out])
        dtype = INT4 if bits.max() <= 4 else np.dtype(np.int8)
        codes = np.empty(shape, dtype)
        row = 0
        column = 0
        for i in (*(np.flatnonzero(np.diff(bits))), count - 1):  # the last group of each run with equal bits
            width = int(bits[i])
            made = signed(unpack(packed[:, row : ends[i]], width), width, dtype)
            codes[:, column : column + made.shape[1]] = made
            row = ends[i]
            column = column + made.shape[1]
        common = int(np.gcd.reduce(sizes))
        scale = np.repeat(self._scales(q_scale, q_scale_max, count, padded)[:out], sizes // common, axis=1)
        return QuantArray(codes, scale, order=self._order(q_invperm, inputs), block=(1, common))

    def _groups(self, name: str, count: int, rows: int, inputs: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """int64 [groups] each: bits, end in the rows of q_weight, and number of inputs."""
        both = fetch(self.tensors, name, ("int16",), (2 * count,)).view(np.uint16).astype(np.int64).reshape(-1, 2)
        bits = both[:, 0]
        ends = np.append(both[1:, 1], rows)
        if not count or both[0, 1] != 0 or not np.isin(bits, WIDTHS).all():
            raise CheckpointError(f"tensor {name!r} has bits other than {WIDTHS}, or does not begin at row 0")
        sizes = np.diff(ends, prepend=0) * 32 // bits
        if (sizes <= 0).any() or (sizes % STEP).any() or sizes.sum() != inputs:
            raise CheckpointError(f"tensor {name!r} does not divide {inputs} inputs into groups of whole {STEP}")
        return bits, ends, sizes

    def _scales(self, q_scale: str, q_scale_max: str, count: int, padded: int) -> np.ndarray:
        """The scales, float16 [padded out, groups]."""
        root = unpack(fetch(self.tensors, q_scale, ("int32",), (count, padded // 8)), 4).astype(np.float16) + 1
        largest = fetch(self.tensors, q_scale_max, ("float16",), (count,))
        return np.ascontiguousarray((root * root * (largest / np.float16(256))[:, None]).T)

    def _order(self, name: str, inputs: int) -> np.ndarray | None:
        places = fetch(self.tensors, name, ("int32", "int16"), (inputs,))
        places = places.view(np.uint16) if places.dtype == np.int16 else places
        order = np.argsort(places).astype(np.int32)
        if (places[order] != np.arange(inputs)).any():
            raise CheckpointError(f"tensor {name!r} is no permutation of {inputs} inputs")
        return None if (order == np.arange(inputs)).all() else order
