"""How a model's matrices lie in the memory of a CPU: in panels, floats in 16 bits where the file has so many, quantized
ones in the file's own width."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import ml_dtypes
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.checkpoints.load import Piece
from jaxserve.checkpoints.quantized import StoredRows
from jaxserve.checkpoints.safetensors import TensorInfo
from jaxserve.config import EngineConfig
from jaxserve.devices.mesh import on_one_cpu
from jaxserve.pallas_kernels import cpu_panels
from jaxserve.pallas_kernels.cpu_panels import PanelType
from jaxserve.pallas_kernels.types import MixedArray, PanelArray, QuantArray

SHORT = (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))
SMALLEST_GROUP = 64  # of other formats than GGUF's: a group has 8 bytes of scale and shift


def is_matrix(path: str) -> bool:
    """Whether a parameter is a weight of a product, or the embeddings'; biases may have two axes as well."""
    return path.endswith(("/kernel", "embed/table"))


@dataclass(frozen=True)
class Packing:
    """What becomes of the matrices of a model on one CPU.

    Attributes:
      dtype: of those that are floats in the file; None: its own.
      floats: the arithmetic of products with them, of `cpu_panels.ARITHMETIC`.
      quantized: the same for quantized ones.
    """

    dtype: np.dtype | None = None
    floats: str = "float32"
    quantized: str = "int8"

    @classmethod
    def of(cls, config: EngineConfig, mesh: Mesh) -> Packing | None:
        """None where there are no panels: on other devices, on several, and without a C++ compiler."""
        if not on_one_cpu(mesh) or not cpu_panels.available():
            return None
        dtype = np.dtype(config.dtype) if config.dtype in ("bfloat16", "float16") else None
        floats = "bfloat16" if config.dtype == "bfloat16" else "float32"
        return cls(dtype, floats, {"auto": "int8", "cpu": "float32"}.get(config.matmul_backend, ""))

    @property
    def types(self) -> frozenset[str]:
        """GGUF's types that become panels as they stand in the file."""
        return frozenset(cpu_panels.GGUF_TYPES) if self.quantized else frozenset()

    def stored(
        self,
        abstract: Mapping[str, jax.ShapeDtypeStruct],
        pieces: Mapping[str, list[Piece]],
        tensors: Mapping[str, TensorInfo],
    ) -> dict[str, jax.ShapeDtypeStruct]:
        """The same with each matrix in the dtype that it is to be kept in."""

        def dtype_of(path: str) -> Any:
            dtypes = {tensors[piece.name].dtype for piece in pieces[path] if piece.name in tensors}
            own = dtypes.pop() if len(dtypes) == 1 else None
            return self.dtype or (own if own in SHORT else abstract[path].dtype)

        return {
            path: jax.ShapeDtypeStruct(a.shape, dtype_of(path), sharding=a.sharding) if is_matrix(path) else a
            for path, a in abstract.items()
        }

    def pack(self, host: np.ndarray | QuantArray | StoredRows, mesh: Mesh) -> PanelArray | None:
        """A matrix of the host in panels on the CPU; None: there is no type of panels for it."""
        packed, place = self._packed(host), NamedSharding(mesh, PartitionSpec())
        return None if packed is None else jax.tree.map(lambda x: jax.device_put(x, place), packed)

    def fits(self, w: QuantArray) -> bool:
        """Whether a quantized weight, of arrays or of their shapes, goes into panels. 4-bit floats do wherever there
        are any, as nothing else on a CPU keeps them in 4 bits."""
        kind = cpu_panels.type_of(w)
        if w.activations is not None or kind is None:
            return False
        if kind in (PanelType.MXFP4, PanelType.NVFP4):
            return bool(self.quantized)
        return self.quantized == "int8" and min(w.block[1], w.shape[1]) >= SMALLEST_GROUP

    def _packed(self, host: np.ndarray | QuantArray | StoredRows) -> PanelArray | None:
        if isinstance(host, StoredRows):
            parts = [cpu_panels.Rows(cpu_panels.GGUF_TYPES[kind], data) for kind, data in host.parts]
            return cpu_panels.pack(parts, host.source, host.shape[1], self.quantized)
        if isinstance(host, QuantArray):
            return cpu_panels.pack_quantized(host, self.quantized) if self.fits(host) else None
        return cpu_panels.pack_floats(host, self.floats) if host.dtype in cpu_panels.FLOATS else None

    def abstract(self, like: Any, mesh: Mesh) -> Any:
        """The shapes of what `pack` makes of a matrix of this form: of shapes, or rows of a file, of which None has
        several types in a panel. Forms that there is no type of panels for stay."""
        if isinstance(like, MixedArray):
            return replace(like, parts=tuple(self.abstract(part, mesh) for part in like.parts))
        if isinstance(like, StoredRows):
            made = self._packed(like)
        elif isinstance(like, QuantArray):
            if not self.fits(like):
                return like
            kind = cpu_panels.type_of(like)
            assert kind is not None
            made = cpu_panels.abstract(like.shape, kind, self.quantized, like.block[1])
        else:
            made = cpu_panels.abstract(like.shape, cpu_panels.FLOATS[np.dtype(like.dtype)], self.floats)
        place = NamedSharding(mesh, PartitionSpec())
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), made)

    def pack_placed(self, params: Mapping[str, Any], mesh: Mesh, dtype: np.dtype | None = None) -> dict[str, Any]:
        """Parameters by their paths that lie on the CPU already, in panels; floats as `dtype`, or as they are."""

        def one(x: Any) -> Any:
            if isinstance(x, QuantArray):
                packed = self.pack(jax.tree.map(np.asarray, x), mesh)
            else:
                packed = self.pack(np.asarray(x if dtype is None else x.astype(dtype)), mesh)
            return x if packed is None else packed

        return {path: one(x) if is_matrix(path) else x for path, x in params.items()}
