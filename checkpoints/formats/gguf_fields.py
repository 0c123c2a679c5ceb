"""Rows of a GGUF file as BlockArrays, which hold each field of the blocks in a separate array.

The layouts are those of ggml (ggml-common.h); `jaxserve.pallas_kernels.types.BlockArray` describes the fields.
"""

from __future__ import annotations

import numpy as np

from jaxserve.checkpoints.formats.gguf_blocks import six_bits
from jaxserve.checkpoints.quantized import StoredRows
from jaxserve.pallas_kernels.types import BLOCK_KINDS, BlockArray

# For each kind, the bytes of a block with factors, integer scales, high bits and low bits.
_FIELDS: dict[str, tuple[slice, slice, slice, slice]] = {
    "Q4_1": (slice(0, 4), slice(0), slice(0), slice(4, 20)),
    "Q5_0": (slice(0, 2), slice(0), slice(2, 6), slice(6, 22)),
    "Q5_1": (slice(0, 4), slice(0), slice(4, 8), slice(8, 24)),
    "Q2_K": (slice(80, 84), slice(0, 16), slice(0), slice(16, 80)),
    "Q3_K": (slice(108, 110), slice(96, 108), slice(0, 32), slice(32, 96)),
    "Q4_K": (slice(0, 4), slice(4, 16), slice(0), slice(16, 144)),
    "Q5_K": (slice(0, 4), slice(4, 16), slice(16, 48), slice(48, 176)),
    "Q6_K": (slice(208, 210), slice(192, 208), slice(128, 192), slice(0, 128)),
}


def block_array(rows: StoredRows) -> BlockArray | None:
    """The fields of a weight's rows; None if the rows have several kinds, or one that is not in BLOCK_KINDS.

    Rows of zeros have factors of 0.
    """
    names = {name for name, _ in rows.parts}
    if len(names) != 1 or not names <= BLOCK_KINDS.keys():
        return None
    name = names.pop()
    kind = BLOCK_KINDS[name]
    stored = [data.reshape(len(data), rows.inputs // kind.block, -1) for _, data in rows.parts]
    factors, scales, high, low = _FIELDS[name]

    def field(where: slice) -> np.ndarray:
        """The bytes `where` of all blocks, [out, blocks, bytes]."""
        made = np.zeros((len(rows.source), stored[0].shape[1], where.stop - (where.start or 0)), np.uint8)
        first = 0
        for data in stored:
            mine = (rows.source >= first) & (rows.source < first + len(data))
            made[mine] = data[rows.source[mine] - first, :, where]
            first += len(data)
        return made

    def in_rows(values: np.ndarray, dtype: type = np.uint8) -> np.ndarray:
        return np.ascontiguousarray(values).reshape(len(values), -1).view(dtype)

    integers = None
    if kind.words:
        integers = field(scales)
        if name in ("Q4_K", "Q5_K"):
            shape = integers.shape[:2]
            integers = np.concatenate(six_bits(integers.reshape(-1, 12)), axis=1).reshape(*shape, 16)
        integers = in_rows(integers, np.int32)
    return BlockArray(
        low=in_rows(field(low)),
        high=in_rows(field(high), np.int32 if kind.block == 32 else np.uint8) if kind.high else None,
        scales=integers,
        factors=in_rows(field(factors), np.float16),
        kind=name,
    )
