"""Packs a model's matrices into panels, the layout that the CPU's kernels read. 16-bit floats stay 16 bits wide, and
quantized weights keep the width that they have in the file."""

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
SMALLEST_GROUP = 64  # for formats other than GGUF's: each group takes 8 bytes for scale and shift


def is_matrix(path: str) -> bool:
    """Whether a parameter is a matrix of a product, a stack of experts' matrices, or the table of embeddings. Its path
    tells, because biases may have as many axes."""
    return path.endswith(("/kernel", "embed/table", *STACKS))


@dataclass(frozen=True)
class Packing:
    """How the matrices of a model are packed on one CPU.

    Attributes:
      dtype: the dtype that float matrices are stored in; None: the file's own.
      floats: the arithmetic of products with float matrices, one of `cpu_panels.ARITHMETIC`.
      quantized: the arithmetic of products with quantized matrices; empty: they are not packed.
    """

    dtype: np.dtype | None = None
    floats: str = "float32"
    quantized: str = "int8"

    @classmethod
    def of(cls, config: EngineConfig, mesh: Mesh) -> Packing | None:
        """The packing for an engine's settings. None if there are no panels: on devices other than one CPU, or without
        a C++ compiler."""
        if not on_one_cpu(mesh) or not cpu_panels.available():
            return None
        dtype = np.dtype(config.dtype) if config.dtype in ("bfloat16", "float16") else None
        floats = "bfloat16" if config.dtype == "bfloat16" else "float32"
        return cls(dtype, floats, {"auto": "int8", "cpu": "float32"}.get(config.matmul_backend, ""))

    @property
    def types(self) -> frozenset[str]:
        """The GGUF types whose blocks become panels without being converted."""
        return frozenset(cpu_panels.GGUF_TYPES) if self.quantized else frozenset()

    def stored(
        self,
        abstract: Mapping[str, jax.ShapeDtypeStruct],
        pieces: Mapping[str, Pieces],
        tensors: Mapping[str, TensorInfo],
    ) -> dict[str, jax.ShapeDtypeStruct]:
        """The shapes of `abstract`, with each matrix in the dtype that panels will store."""

        def dtype_of(path: str) -> Any:
            dtypes = {tensors[piece.name].dtype for piece in pieces[path] if piece.name in tensors}
            own = dtypes.pop() if len(dtypes) == 1 else None
            return self.dtype or (own if own in SHORT else abstract[path].dtype)

        return {
            path: jax.ShapeDtypeStruct(a.shape, dtype_of(path), sharding=a.sharding) if is_matrix(path) else a
            for path, a in abstract.items()
        }

    def rounded(self, abstract: Mapping[str, Any]) -> dict[str, Any]:
        """The shapes of `abstract` after `pack_placed` has rounded float matrices to `dtype`."""

        def one(path: str, x: Any) -> Any:
            if self.dtype is None or isinstance(x, QuantArray) or not is_matrix(path):
                return x
            return jax.ShapeDtypeStruct(x.shape, self.dtype, sharding=x.sharding)

        return {path: one(path, x) for path, x in abstract.items()}

    def pack(self, host: np.ndarray | QuantArray | StoredRows, mesh: Mesh) -> PanelArray | None:
        """A matrix [out, in] as panels in a JAX array on the CPU; None if no type of panels holds it."""
        packed = self.packed(host)
        place = NamedSharding(mesh, PartitionSpec())
        return None if packed is None else jax.tree.map(lambda x: jax.device_put(x, place), packed)

    def pack_stack(self, path: str, members: Iterator[Any], count: int, mesh: Mesh) -> PanelArray:
        """A stack [count, out, in] of members, each of which `packed` packs, as panels on the CPU. Raises
        CheckpointError if members are quantized in different ways."""
        packed = cpu_panels.stack((self.packed(member) for member in members), count)
        if packed is None:
            raise CheckpointError(f"{path}: experts are quantized in several ways")
        place = NamedSharding(mesh, PartitionSpec())
        return jax.tree.map(lambda x: jax.device_put(x, place), packed)

    def fits(self, w: QuantArray) -> bool:
        """Whether a quantized weight, of arrays or of their shapes, is packed. 4-bit floats always are if quantized
        weights are packed at all, because no other CPU format keeps them in 4 bits."""
        kind = cpu_panels.type_of(w)
        if w.activations is not None or kind is None:
            return False
        if kind in (PanelType.MXFP4, PanelType.NVFP4):
            return bool(self.quantized)
        return self.quantized == "int8" and min(w.block[1], w.shape[-1]) >= SMALLEST_GROUP

    def packed(self, host: np.ndarray | QuantArray | StoredRows) -> PanelArray | None:
        """A matrix [out, in] as panels of NumPy arrays; None if no type of panels holds it."""
        if isinstance(host, StoredRows):
            parts = [cpu_panels.Rows(cpu_panels.GGUF_TYPES[kind], data) for kind, data in host.parts]
            return cpu_panels.pack(parts, host.source, host.shape[1], self.quantized)
        if isinstance(host, QuantArray):
            return cpu_panels.pack_quantized(host, self.quantized) if self.fits(host) else None
        return cpu_panels.pack_floats(host, self.floats) if host.dtype in cpu_panels.FLOATS else None

    def abstract(self, like: Any, mesh: Mesh) -> Any:
        """The shapes of the panels that `pack` would make of `like`, which has shapes, or rows of a file. Forms that no
        type of panels holds are returned as they are; for rows of a file the result is then None."""
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
        """Packs parameters, by path, that are on the CPU already. Floats become `dtype` first, unless it is None."""

        def one(path: str, x: Any) -> Any:
            host = jax.tree.map(np.asarray, x if isinstance(x, QuantArray) or dtype is None else x.astype(dtype))
            if path.endswith(STACKS):
                members = (jax.tree.map(itemgetter(number), host) for number in range(x.shape[0]))
                some = jax.tree.map(itemgetter(0), host)
                return x if self.packed(some) is None else self.pack_stack(path, members, x.shape[0], mesh)
            packed = self.pack(host, mesh)
            return x if packed is None else packed

        return {path: one(path, x) if is_matrix(path) else x for path, x in params.items()}
