"""How a model's matrices lie in the memory of a CPU: in panels, floats in 16 bits where the file has so many, quantized
ones in the file's own width."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any

import jax
import ml_dtypes
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.checkpoints.errors import CheckpointError
from jaxserve.checkpoints.load import Pieces
from jaxserve.checkpoints.quantized import StoredRows
from jaxserve.checkpoints.safetensors import TensorInfo
from jaxserve.config import EngineConfig
from jaxserve.devices.mesh import on_one_cpu
from jaxserve.models.quantized import STACKS
from jaxserve.pallas_kernels import cpu_panels
from jaxserve.pallas_kernels.cpu_panels import PanelType
from jaxserve.pallas_kernels.types import MixedArray, PanelArray, QuantArray

SHORT = (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))
SMALLEST_GROUP = 64  # of other formats than GGUF's: a group has 8 bytes of scale and shift


def is_matrix(path: str) -> bool:
    """Whether a parameter is a weight of a product, one of each expert, or the embeddings'; biases may have as many
    axes."""
    return path.endswith(("/kernel", "embed/table", *STACKS))


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
        pieces: Mapping[str, Pieces],
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
        packed, place = self.packed(host), NamedSharding(mesh, PartitionSpec())
        return None if packed is None else jax.tree.map(lambda x: jax.device_put(x, place), packed)

    def pack_stack(self, path: str, members: Iterator[Any], count: int, mesh: Mesh) -> PanelArray:
        """A stack [count, out, in] in panels on the CPU, of members that `packed` packs. Raises CheckpointError where
        they differ in form."""
        packed = cpu_panels.stack((self.packed(member) for member in members), count)
        if packed is None:
            raise CheckpointError(f"{path}: experts are quantized in several ways")
        place = NamedSharding(mesh, PartitionSpec())
        return jax.tree.map(lambda x: jax.device_put(x, place), packed)

    def fits(self, w: QuantArray) -> bool:
        """Whether a quantized weight, of arrays or of their shapes, goes into panels. 4-bit floats do wherever there
        are any, as nothing else on a CPU keeps them in 4 bits."""
        kind = cpu_panels.type_of(w)
        if w.activations is not None or kind is None:
            return False
        if kind in (PanelType.MXFP4, PanelType.NVFP4):
            return bool(self.quantized)
        return self.quantized == "int8" and min(w.block[1], w.shape[1]) >= SMALLEST_GROUP

    def packed(self, host: np.ndarray | QuantArray | StoredRows) -> PanelArray | None:
        """A matrix in panels of NumPy arrays; None: there is no type of panels for it."""
        if isinstance(host, StoredRows):
            parts = [cpu_panels.Rows(cpu_panels.GGUF_TYPES[kind], data) for kind, data in host.parts]
            return cpu_panels.pack(parts, host.source, host.shape[1], self.quantized)
        if isinstance(host, QuantArray):
            return cpu_panels.pack_quantized(host, self.quantized) if self.fits(host) else None
        return cpu_panels.pack_floats(host, self.floats) if host.dtype in cpu_panels.FLOATS else None

    def abstract(self, like: Any, mesh: Mesh) -> Any:
        """The shapes of what `pack` makes of a matrix of this form: of shapes, or rows of a file, of which None has
        several types in a panel. Forms that there is no type of panels for stay."""
        if isinstance(like, PanelArray):  # a stack
            return like
        if isinstance(like, MixedArray):
            return replace(like, parts=tuple(self.abstract(part, mesh) for part in like.parts))
        if isinstance(like, StoredRows):
            made = self.packed(like)
        elif isinstance(like, QuantArray):
            if not self.fits(like):
                return like
            kind = cpu_panels.type_of(like)
            assert kind is not None
            made = cpu_panels.abstract(like.shape[-2:], kind, self.quantized, like.block[1])
        else:
            made = cpu_panels.abstract(like.shape[-2:], cpu_panels.FLOATS[np.dtype(like.dtype)], self.floats)
        if made is not None and len(like.shape) == 3:
            made = cpu_panels.abstract_stack(made, like.shape[0])
        place = NamedSharding(mesh, PartitionSpec())
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), made)

    def pack_placed(self, params: Mapping[str, Any], mesh: Mesh, dtype: np.dtype | None = None) -> dict[str, Any]:
        """Parameters by their paths that lie on the CPU already, in panels; floats as `dtype`, or as they are."""

        def one(path: str, x: Any) -> Any:
            host = jax.tree.map(np.asarray, x if isinstance(x, QuantArray) or dtype is None else x.astype(dtype))
            if path.endswith(STACKS):
                members = (jax.tree.map(itemgetter(number), host) for number in range(x.shape[0]))
                some = jax.tree.map(itemgetter(0), host)
                return x if self.packed(some) is None else self.pack_stack(path, members, x.shape[0], mesh)
            packed = self.pack(host, mesh)
            return x if packed is None else packed

        return {path: one(path, x) if is_matrix(path) else x for path, x in params.items()}
