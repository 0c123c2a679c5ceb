"""A tensor of a GGUF file as floats or in quantized form, with its rows and columns in Hugging Face's order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import numpy as np

from jaxserve.checkpoints.formats.gguf_blocks import decode
from jaxserve.checkpoints.gguf import TYPES, BlockType, StoredTensor
from jaxserve.checkpoints.int4 import PackedInt4
from jaxserve.checkpoints.mistral_native import halves_of_pairs
from jaxserve.checkpoints.quantized import dequantize
from jaxserve.checkpoints.safetensors import TensorInfo
from jaxserve.pallas_kernels.types import QuantArray

FLOAT32 = TYPES[0]


@dataclass(frozen=True)
class GGUFTensor(TensorInfo):
    """A tensor that `read` and `read_rows` return as plain floats, in float32 if it is quantized.

    For Llama's queries and keys, llama.cpp stores the rows of each head in pairs (0, half, 1, half + 1, ...). With
    `head_dim`, such rows are read in Hugging Face's order. `offset` is added to floats.

    Other orders: row i of the tensor is row `order[i]` of the file, and column i of the file is column `columns[i]` of
    the tensor. None: they are the same.
    """

    type: BlockType
    head_dim: int = 0
    offset: float = 0.0
    order: np.ndarray | None = field(default=None, compare=False)
    columns: np.ndarray | None = field(default=None, compare=False)

    @property
    def rows_at_once(self) -> int:
        return self.shape[0] if self.order is not None else self.head_dim or 1

    def entry(self, index: int, name: str) -> Self:
        """As in TensorInfo. The bytes in the file are counted, since `nbytes` is the size as floats here."""
        whole = StoredTensor(self.name, self.path, self.type, self.shape, self.start)
        return replace(
            self, name=name, shape=self.shape[1:], start=self.start + index * (whole.nbytes // self.shape[0])
        )

    def read_blocks(self) -> QuantArray | np.ndarray:
        """The whole tensor; quantized if its type is one that `decode` keeps quantized."""
        return self._decode(0, self.shape)

    def read_bytes(self) -> np.ndarray:
        """The bytes of the whole tensor, uint8 [rows, bytes of a row], with the rows in Hugging Face's order. A tensor
        whose columns have another order has no such bytes."""
        rows = self._bytes(0, self.shape).reshape(self.shape[0], -1)
        return np.ascontiguousarray(self._arranged(rows))

    def _read(self, first: int, count: int) -> np.ndarray:
        value = self._decode(first, (count // self.shape[-1], self.shape[-1]) if len(self.shape) > 1 else (count,))
        return (dequantize(value) if isinstance(value, QuantArray) else value).reshape(-1)

    def _bytes(self, first: int, shape: tuple[int, ...]) -> np.ndarray:
        stored = StoredTensor(self.name, self.path, self.type, shape, self.start)
        return self._numbers(np.dtype(np.uint8), stored.nbytes, first // self.type.size * self.type.nbytes)

    def _decode(self, first: int, shape: tuple[int, ...]) -> QuantArray | np.ndarray:
        value = decode(self._bytes(first, shape), self.type, shape)
        if self.offset:
            assert isinstance(value, np.ndarray), f"{self.name} is quantized"
            value = (value + np.float32(self.offset)).astype(self.dtype)
        if isinstance(value, QuantArray):
            codes, scale, zero, bias = map(self._arranged, (value.codes, value.scale, value.zero, value.bias))
            return replace(value, codes=codes, scale=scale, zero=zero, bias=bias, order=self.columns)
        value = self._arranged(value)
        return value if self.columns is None else value[:, np.argsort(self.columns)]

    def _arranged(self, rows: Any) -> Any:
        """Rows of the file, of which an array has some numbers for each, in Hugging Face's order."""
        if rows is None:
            return None
        if isinstance(rows, PackedInt4):
            return rows.with_rows(self._arranged)
        if self.order is not None:
            return rows[self.order]
        return halves_of_pairs(rows, self.head_dim) if self.head_dim else rows


@dataclass(frozen=True)
class ComputedTensor(GGUFTensor):
    """A tensor that is computed, whole and in float32, from tensors of the file."""

    parts: tuple[GGUFTensor, ...] = ()
    compute: Callable[..., np.ndarray] = np.concatenate

    @classmethod
    def of(
        cls,
        name: str,
        shape: tuple[int, ...],
        parts: tuple[GGUFTensor, ...],
        compute: Callable[..., np.ndarray],
        path: Path | None = None,
    ) -> ComputedTensor:
        """`compute` gets the parts as float32 arrays and returns one of `shape`. `path`, for messages, is by default
        that of the first part."""
        where = path or parts[0].path
        return cls(name, where, np.dtype(np.float32), shape, 0, FLOAT32, parts=parts, compute=compute)

    @property
    def rows_at_once(self) -> int:
        return self.shape[0]

    def _decode(self, first: int, shape: tuple[int, ...]) -> np.ndarray:
        return self.compute(*(part.read().astype(np.float32) for part in self.parts))
