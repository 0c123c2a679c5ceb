"""4-bit numbers on the host, two in a byte as in files.

NumPy's int4 and float4_e2m1fn take a byte each. Unpacking to these, and packing again for the device, would take longer
than reading the file.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

INT4 = np.dtype(ml_dtypes.int4)
FLOAT4 = np.dtype(ml_dtypes.float4_e2m1fn)


@dataclass(frozen=True)
class PackedInt4:
    """int4 or float4_e2m1fn numbers [..., in] in bytes, uint8 [..., in / 2]; the even column is a byte's low half.

    NumPy's functions convert it to an array with a byte per number.
    """

    data: np.ndarray
    dtype: np.dtype = INT4

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.data.shape[:-1], 2 * self.data.shape[-1])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        values = halves(self.data).view(self.dtype)
        return values if dtype is None else values.astype(dtype, copy=False)

    def __getitem__(self, key: Any) -> Any:
        return np.asarray(self)[key]

    def astype(self, dtype: Any, copy: bool = True) -> PackedInt4 | np.ndarray:
        """For its own `dtype` packed numbers, copied if `copy`; for others an array."""
        if dtype != self.dtype:
            return np.asarray(self).astype(dtype, copy=False)
        return PackedInt4(self.data.copy(), self.dtype) if copy else self

    def with_rows(self, change: Callable[[np.ndarray], np.ndarray]) -> PackedInt4:
        """The numbers after `change` has rearranged the rows of bytes; it must not change the rows themselves."""
        return PackedInt4(change(self.data), self.dtype)


def halves(data: np.ndarray) -> np.ndarray:
    """Bytes [..., n] -> the low half of each, then its high half, uint8 [..., 2 n]."""
    pair = data.astype(np.uint16)
    pair |= pair << 4
    pair &= 0x0F0F
    return pair.view(np.uint8)


def signed_bytes(words: np.ndarray) -> PackedInt4:
    """int32 words [out, n] with codes from 0 to 15, lowest bits first -> the codes minus 8, int4 [out, 8 n]."""
    made = np.empty(words.shape, np.uint32)
    for at in range(0, words.shape[1], 16):  # whole cache lines at a time, if `words` is a transposed array
        made[:, at : at + 16] = words[:, at : at + 16].view(np.uint32)
    made ^= np.uint32(0x88888888)
    return PackedInt4(made.view(np.uint8))
